"""Whether a batch may be padded to one of a few lengths, shown by running the model without the padding and with it.

    12 positions, lengths=[8, 16]:  input_ids ‖ copies of the last,  attention_mask ‖ 0,  labels ‖ -100   →  16

What comes back must not depend on what was added: outputs cut back to the positions given, the loss and the gradients
of all of it, and buffers, are those of the batch as it is, whatever stands in added positions (they are as they will be
once, and drawn once); so they are for a batch whose positions are all alike. The model runs in float64 with random
weights: itself where it is small, else one of the same architecture (`autopar/api/small_model.py`). Which inputs say
what counts is not known by their names: fills are tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from autopar.api.promote import only
from autopar.api.small_model import small_model
from autopar.base.errors import AutoparError
from autopar.base.huggingface import huggingface
from autopar.base.torch_compat import tracing
from autopar.base.torch_compat.distributed import TorchDispatchMode
from autopar.runtime.added import Added, Grown

MOST_TRIED = 48
RTOL, ATOL = 1e-8, 1e-11
_aten = torch.ops.aten

Sizes = Mapping[int, int]
"""Sizes of a batch that grow, and to what."""


@dataclass(frozen=True, slots=True)
class Padding:
    """What a batch gets. leaves: for each tensor of the model's output, in order, the dims that grow with it, and how
    long they are without.
    """

    inputs: Mapping[str, tuple[Grown, ...]]
    leaves: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def fills(self) -> tuple[int | None, ...]:
        """What stands in added positions of each input."""
        return tuple(grown[0].fill for grown in self.inputs.values())

    def added(self, leaves: Sequence[int | str | None], num_outputs: int) -> Added:
        """The same for a program. leaves: which of its outputs the model's output has, in order (others stay)."""
        found: list[tuple[tuple[int, int], ...]] = [()] * num_outputs
        for place, dims in zip([leaf for leaf in leaves if isinstance(leaf, int)], self.leaves, strict=True):
            found[place] = dims
        return Added(self.inputs, tuple(found))


def checked(lengths: Sequence[int] | None) -> tuple[int, ...]:
    """The lengths that batches may have, shortest first; none where none are asked for.

    Raises:
        AutoparError: no positive whole numbers.
    """
    if lengths is None:
        return ()
    given = [lengths] if isinstance(lengths, int) else list(lengths)
    if not given or any(type(length) is not int or length < 1 for length in given):
        raise AutoparError(
            "lengths are no positive whole numbers",
            values=f"lengths={lengths!r}"[:200],
            remedy="name those that batches are padded to: lengths=[512, 1024, 2048]",
        )
    return tuple(sorted(set(given)))


def growing(inputs: Mapping[str, Any], lengths: Sequence[int]) -> Sizes:
    """The sizes of a batch that are lengths of sequences, and the next of `lengths` for each; others are left out.

    A length is the second dim of whole numbers or marks of two dims (tokens, masks, labels), where there are none of
    numbers of three (features). A second length (of a decoder's labels) grows by itself.
    """
    tensors = [x for _, x in tracing.tree_leaves_with_path(dict(inputs)) if isinstance(x, Tensor)]
    rows = [x for x in tensors if x.dim() == 2 and not x.is_floating_point()]
    rows = rows or [x for x in tensors if x.dim() == 3 and x.is_floating_point()]
    sizes = dict.fromkeys(x.shape[1] for x in rows if x.shape[1] > 1)
    wanted = {size: next((length for length in lengths if length >= size), size) for size in sizes}
    return {size: length for size, length in wanted.items() if length != size}


def grown_inputs(inputs: Mapping[str, Any], sizes: Sizes) -> dict[str, tuple[Grown, ...]]:
    """The dims of each input that are of these sizes, but for rows: of features the first alone."""
    found = {}
    for name, x in tracing.tree_leaves_with_path(dict(inputs)):
        if not isinstance(x, Tensor) or not x.dim():
            continue
        first = 0 if x.dim() == 1 else 1
        dims = [dim for dim in range(first, x.dim()) if x.shape[dim] in sizes]
        dims = dims[:1] if x.is_floating_point() and x.dim() == 3 else dims
        if dims:
            found[name] = tuple(Grown(dim, x.shape[dim], sizes[x.shape[dim]]) for dim in dims)
    return found


def padding(
    model: nn.Module, inputs: Mapping[str, Any], sizes: Sizes, *, training: bool, known: Sequence[Any]
) -> Padding:
    """What a batch gets for its sizes to grow, shown to leave no trace.

    Args:
        model: small enough to run (`small_model.twin_of`). known: fills that did for other sizes.

    Raises:
        AutoparError: nothing does; says what would be another.
    """
    with torch.random.fork_rng(devices=()):  # one rank alone does this: what scripts draw next stays alike on all
        return _padding(model, inputs, sizes, training, known)


def _padding(
    model: nn.Module, inputs: Mapping[str, Any], sizes: Sizes, training: bool, known: Sequence[Any]
) -> Padding:
    clone, batch = _small(model, inputs)
    grown = grown_inputs(batch, sizes)
    proofs = [_Proof(clone, each, training) for each in (batch, _even(batch, grown))]
    problem = ""
    for fills in _fills(batch, grown, known, _pad_id(model)):
        wanted = {
            name: tuple(Grown(each.dim, each.given, each.padded, fill) for each in dims)
            for (name, dims), fill in zip(grown.items(), fills, strict=True)
        }
        tried = (proof.tried(wanted) for proof in proofs)
        found = next((each for each in tried if isinstance(each, str)), None)
        if found is None:
            return Padding(wanted, proofs[0].longer)
        problem = problem or found
    raise AutoparError(problem or "nothing in the batch is of that length")


def _small(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """The model that runs, and a batch of at most four rows for it."""
    leaves, spec = tracing.tree_flatten(dict(inputs))
    sizes = [x.shape[0] for x in leaves if isinstance(x, Tensor) and x.dim() > 1]
    rows = max(set(sizes), key=sizes.count, default=0)
    own = [_plain(x[:4] if isinstance(x, Tensor) and x.dim() and x.shape[0] == rows else x) for x in leaves]
    clone, batch = small_model(model, tracing.tree_unflatten(own, spec), torch.float64, 0)
    leaves, spec = tracing.tree_flatten(batch)
    high = huggingface.max_token(model) if huggingface.is_hf(model) else None
    kept = [_in_range(x, high) for x in leaves]
    found: dict[str, Any] = tracing.tree_unflatten(kept, spec)
    return clone, found


def _plain(x: Any) -> Any:
    """An input with its values; on meta where they are in pieces."""
    if not isinstance(x, Tensor):
        return x
    return torch.empty(x.shape, dtype=x.dtype, device="meta") if type(x) is not Tensor else x.detach()


def _in_range(x: Any, high: int | None) -> Any:
    is_whole = isinstance(x, Tensor) and not x.is_floating_point() and x.dtype != torch.bool
    return torch.where(x >= high, x % high, x) if is_whole and high is not None else x


def _pad_id(model: nn.Module) -> int | None:
    found = getattr(getattr(model, "config", None), "pad_token_id", None)
    return found if isinstance(found, int) else None


def _fills(
    batch: Mapping[str, Any], grown: Mapping[str, Any], known: Sequence[Any], pad_id: int | None
) -> Iterator[tuple[int | None, ...]]:
    """What may stand in added positions of each input (None: a copy of the last), the likeliest first."""
    options: list[list[int | None]] = []
    leaves = dict(tracing.tree_leaves_with_path(dict(batch)))
    for name in grown:
        is_number = leaves[name].is_floating_point() or leaves[name].dtype == torch.bool
        every: list[int | None] = [None, 0] if is_number else [None, -100, -1, 0, pad_id]
        guess = 0 if "mask" in name else -100 if any(word in name for word in ("label", "target")) else None
        options.append(list(dict.fromkeys([guess, *every] if guess in every else every)))
    usual = sorted(
        product(*options), key=lambda fills: sum(fill != own[0] for fill, own in zip(fills, options, strict=True))
    )
    yield from list(dict.fromkeys([*(fills for fills in known if len(fills) == len(options)), *usual]))[:MOST_TRIED]


class _Proof:
    """The model and a batch as it is; whether padding leaves what comes of them."""

    def __init__(self, model: nn.Module, batch: Mapping[str, Any], training: bool) -> None:
        self.model, self.batch, self.training = model, batch, training
        self.longer: tuple[tuple[tuple[int, int], ...], ...] = ()
        try:
            self.wanted = self._ran(batch, None)
        except Exception as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise AutoparError(f"the model does not run in float64 on the CPU: {said}") from error
        if not all(bool(torch.isfinite(x).all()) for x in self.wanted.values() if x.is_floating_point()):
            raise AutoparError("what comes of random weights is not finite")

    def tried(self, inputs: Mapping[str, tuple[Grown, ...]]) -> str | None:
        """What the padding of these inputs would change; None where it leaves no trace. Notes which outputs grew."""
        added = Added(inputs, ())
        as_it_will_be = added.pad_tree(self.batch)
        outputs: list[tuple[tuple[int, int], ...]] = []
        for batch in (as_it_will_be, _drawn(as_it_will_be, inputs)):
            try:
                found = self._ran(batch, outputs)
            except Exception as error:  # of the model's code: a label that is no token, a table that ends
                return (str(error).strip().splitlines() or [type(error).__name__])[0]
            if found.keys() != self.wanted.keys():
                return "the model returns something else"
            for name, value in found.items():
                if not _same(value, self.wanted[name]):
                    return f"{name} would be another"
        self.longer = tuple(outputs)
        return None

    def _ran(self, batch: Mapping[str, Any], cut: list[tuple[tuple[int, int], ...]] | None) -> dict[str, Tensor]:
        """Outputs, gradients and buffers, by name. cut: takes the dims of outputs that are longer than wanted."""
        kept = {name: x.clone() for name, x in self.model.named_buffers()}
        with huggingface.training_capture(self.model), only(torch.float64), _NothingDropped():
            torch.default_generator.manual_seed(0)  # that of the CPU, where it runs (`padding` puts it back)
            with torch.set_grad_enabled(self.training):
                output = self.model(**batch)
                tracing.see_into(output)
                leaves = [x for x in tracing.tree_flatten(output)[0] if isinstance(x, Tensor)]
                if cut is not None:
                    cut[:] = [_longer(x, self.wanted.get(f"output {i}")) for i, x in enumerate(leaves)]
                    leaves = [_cut(x, dims) for x, dims in zip(leaves, cut, strict=True)]
                gradients = self._gradients(leaves) if self.training else {}
        found = {f"output {i}": x.detach() for i, x in enumerate(leaves)}
        after = {f"buffer {name}": x.clone() for name, x in self.model.named_buffers()}
        with torch.no_grad():
            for name, x in self.model.named_buffers():
                if x.shape == kept[name].shape:
                    x.copy_(kept[name])
        return {**found, **gradients, **after}

    def _gradients(self, leaves: Sequence[Tensor]) -> dict[str, Tensor]:
        """Of a sum of all that comes back, each element with a weight of its own."""
        generator = torch.Generator().manual_seed(1)
        weighed = []
        for x in leaves:
            weights = torch.rand(x.shape, generator=generator, dtype=torch.float64) + 0.5
            if x.requires_grad and x.is_floating_point():
                weighed.append((x * weights).sum())
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if not weighed or not named:
            return {}
        total = torch.stack(weighed).sum()
        found = torch.autograd.grad(total, list(named.values()), allow_unused=True)
        return {
            f"the gradient of {name}": torch.zeros_like(p) if grad is None else grad
            for (name, p), grad in zip(named.items(), found, strict=True)
        }


class _NothingDropped(TorchDispatchMode):
    """Dropout drops nothing: it draws by place, and places are others where positions are added."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten.bernoulli_.float:
            return args[0].fill_(1)
        if func is _aten.bernoulli.p:
            return torch.ones_like(args[0])
        if func is _aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        return func(*args, **(kwargs or {}))


def _even(batch: Mapping[str, Any], inputs: Mapping[str, tuple[Grown, ...]]) -> dict[str, Any]:
    """A batch in which all positions of a row are alike, so that any other that is added to them is seen: not every
    token would change the largest of many.
    """
    leaves, spec = tracing.tree_flatten(dict(batch))
    paths = [path for path, _ in tracing.tree_leaves_with_path(dict(batch))]
    dims = [tuple(each.dim for each in inputs.get(path, ())) for path in paths]
    found = [x.amax(own, keepdim=True).expand_as(x).clone() if own else x for x, own in zip(leaves, dims, strict=True)]
    even: dict[str, Any] = tracing.tree_unflatten(found, spec)
    return even


def _drawn(batch: Mapping[str, Any], inputs: Mapping[str, tuple[Grown, ...]]) -> dict[str, Any]:
    """The batch with other values where copies stand in it: values that occur in it."""
    generator = torch.Generator().manual_seed(2)
    leaves, spec = tracing.tree_flatten(dict(batch))
    paths = [path for path, _ in tracing.tree_leaves_with_path(dict(batch))]
    found = []
    for path, x in zip(paths, leaves, strict=True):
        for each in inputs.get(path, ()):
            if each.fill is None:
                at = torch.randint(0, x.numel(), x.shape, generator=generator)
                own = torch.arange(x.shape[each.dim]).view(-1, *[1] * (x.dim() - each.dim - 1)) < each.given
                x = torch.where(own, x, x.flatten()[at])
        found.append(x)
    drawn: dict[str, Any] = tracing.tree_unflatten(found, spec)
    return drawn


def _longer(x: Tensor, wanted: Tensor | None) -> tuple[tuple[int, int], ...]:
    if wanted is None or wanted.dim() != x.dim():
        return ()
    return tuple((dim, size) for dim, size in enumerate(wanted.shape) if x.shape[dim] > size)


def _cut(x: Tensor, dims: Sequence[tuple[int, int]]) -> Tensor:
    for dim, size in dims:
        x = x.narrow(dim, 0, size)
    return x


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    scale = float(other.abs().max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=RTOL, atol=ATOL * max(scale, 1.0))
