"""DTensors that plain code sees whole: a program's outputs that lie in pieces, and what `state_dict()` gives.

    F.cross_entropy(logits.view(-1, V), labels.view(-1))      gathered at the first use, once; plain from there on
    logits[:, -1].argmax(-1)                                  the best of each piece (`chosen_among.py`)
    keys.index_select(0, rows)                                rows of each piece (`along.py`)
    logits.to_local(), logits.placements, logits * dtensor    a DTensor, as for whoever deals in pieces

A function of torch that is given one gets the whole tensor in its place, the same on every rank, and the gradient that
comes back for it is cut again: nothing in the user's script has to know. What the price is, is said once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import local_tensor, plain_functions, tree_leaves, tree_map
from autopar.runtime import along, arrays, chosen_among, lost_writes, written
from autopar.runtime.communicator import Communicator
from autopar.runtime.expert_layers import LAYER, at_home, from_slots, layer_of, to_slots

KEPT = frozenset({
    "__format__", "__hash__", "__len__", "__repr__", "__set__", "dim", "element_size", "get_device",
    "is_complex", "is_contiguous", "is_floating_point", "is_signed", "ndimension", "nelement", "numel",
    "register_hook", "requires_grad_", "retain_grad", "size", "stride", "storage_offset",
})  # fmt: skip
"""Functions that look at a tensor's outside, or at its place in the graph: they are run on the DTensor."""
WITHIN = frozenset({"H", "T", "imag", "mH", "mT", "real"})
"""Attributes that are tensors made of the values."""
PIECEWISE = frozenset({
    "__deepcopy__", "bfloat16", "clone", "contiguous", "cpu", "cuda", "detach", "double", "float", "half", "to",
})  # fmt: skip
"""What is done in pieces where no gradient goes through it; what comes out is seen whole, too."""

OF_GRAPH = frozenset({"backward", "grad"})
"""Functions that walk the graph: parameters that they are given are leaves of it, of which no whole copy is."""
OF_MEMORY = arrays.ARRAYS | arrays.SHARED | arrays.ADDRESSES
T = TypeVar("T", bound=DTensor)
HOOKS = frozenset({"register_hook", "retain_grad"})


class Coming(NamedTuple):
    """Of an output that one stage of a pipeline made: how this rank's piece comes to be that of the rank that made it
    (collective), and whether it is this one. Elsewhere there are zeros, without memory.
    """

    bring: Callable[[Tensor], Tensor]
    is_here: bool


class SeenWhole(DTensor):
    """See above.

    _gather_first: what every rank does before a gather; may raise. _choose_first: the same before the largest of all
    pieces is found (`chosen_among.py`). _hooked: called where the script looks at the
    gradient that comes for it. _coming: of what one stage of a pipeline made, until somebody looks.
    _is_kept: whether what was gathered is the tensor from then on (an output), or the pieces are, which somebody else
    may write to (a parameter's). _memory: of those, a copy of the whole whose address somebody has.
    """

    _gather_first: Callable[[], None] | None = None
    _choose_first: Callable[[], Communicator] | None = None
    _hooked: Callable[[], None] | None = None
    _coming: Coming | None = None
    _is_kept: bool = True
    _whole: Tensor | None = None
    _memory: Any = None

    def to_local(self, *args: Any, **kwargs: Any) -> Tensor:
        """As of any DTensor.

        Raises:
            AutoparError: it is a parameter's, or a state's, whose experts are placed: whoever deals in pieces takes its
                rows for those of the model.
        """
        if (layer := layer_of(self)) is not None:
            raise AutoparError(
                f"a piece of a state of {layer.name} is wanted by itself, and its experts are placed by load",
                remedy="Call compiled.experts_home() before torch.distributed.checkpoint; compiled.save needs none",
            )
        if self._coming is not None and not self._coming.is_here:
            raise AutoparError(
                "a piece of an output is wanted by itself on a rank whose stage does not make it",
                values=f"{tuple(self.shape)}, made on the ranks of another stage of the pipeline",
                remedy="Look at it as at any tensor, on every rank (full_tensor() is the whole)",
            )
        return super().to_local(*args, **kwargs)

    def full_tensor(self, *args: Any, **kwargs: Any) -> Tensor:
        """As of any DTensor; of an output of one stage of a pipeline on every rank."""
        arrived(self)
        return super().full_tensor(*args, **kwargs)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        if self._coming is not None and not self._coming.is_here:
            return f"SeenWhole(shape={tuple(self.shape)}, dtype={self.dtype}, made on the ranks of another stage)"
        return super().__repr__(**kwargs)

    def __getitem__(self, index: Any) -> Any:
        """As of any tensor; of an output that every rank has whole the short way, as each token's logits are asked."""
        is_short = self._is_kept and self._whole is None and not self.requires_grad and self._coming is None
        if is_short and chosen_among.is_plain_index(index):
            held = local_tensor(self)
            if not held.is_meta and all(type(each) is Replicate for each in self.placements):
                return held[index].clone()
        return super().__getitem__(index)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Whole tensors in the place of these, but for what concerns the pieces."""
        kwargs = kwargs or {}
        name = func.__name__
        if name == "__get__":
            name = func.__self__.__name__
        first = args[0] if args else None
        if name in HOOKS and isinstance(first, SeenWhole) and first._hooked is not None:
            first._hooked()
        if name in KEPT or (func.__name__ == "__get__" and name not in WITHIN):
            with plain_functions():
                return func(*args, **kwargs)
        if name in OF_GRAPH:
            args, kwargs = tree_map(_as_seen, (args, kwargs))
            return func(*args, **kwargs)
        if name in OF_MEMORY and isinstance(first, SeenWhole) and not first._is_kept and not first.requires_grad:
            return _of_memory(func, first, args[1:], kwargs)
        # What else is being copied comes along with a copy, and is half made.
        read = args[:1] if name == "__deepcopy__" else args
        if any(isinstance(each, SeenWhole) and each._coming is not None for each in _tensors(read, kwargs)):
            found = _part_to_come(name, first, args)
            if found is not None:
                return found
            for each in _tensors(read, kwargs):
                arrived(each)
        is_elsewhere = name in along.BY_NAME and isinstance(first, SeenWhole) and local_tensor(first).is_meta
        if isinstance(first, SeenWhole) and first._is_kept and (first._whole is None or is_elsewhere):
            with plain_functions():
                found = _of_pieces(name, first, args, kwargs)
            if found is not None:
                return found
        if isinstance(first, SeenWhole) and name in PIECEWISE and not first.requires_grad and first._whole is None:
            return _piecewise(func, first, args[1:], kwargs)
        if name == "__deepcopy__" and isinstance(first, SeenWhole):
            return func(whole(first), *args[1:])
        if any(isinstance(each, DTensor) and not isinstance(each, SeenWhole) for each in _tensors(args, kwargs)):
            args, kwargs = tree_map(_as_dtensor, (args, kwargs))
            return func(*args, **kwargs)
        in_pieces = written.by_element(name, args, kwargs, _held)
        if in_pieces is not None:
            with torch.no_grad(), plain_functions():
                found = func(*in_pieces[0], **in_pieces[1])
            return first if found is not None else None
        taken = written.Taken(whole, lambda x: isinstance(x, SeenWhole) and not x._is_kept)
        args, kwargs = tree_map(taken, (args, kwargs))
        found = func(*args, **kwargs)
        for x, value in taken.written(name, args, kwargs):
            with torch.no_grad():
                local_tensor(x).copy_(_cut(to_slots(value, x), x.device_mesh, x.placements))
        taken.watch(found)
        return tree_map(taken.back, found)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What is written, or sent, is the whole tensor."""
        return whole(self).detach().clone().__reduce_ex__(protocol)


class Term(Tensor):
    """A scalar output, such as the loss: a plain number to which DTensors may be added (`loss + l2 of parameters`)."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Whole, plain tensors in the place of DTensors and of these."""
        kwargs = kwargs or {}
        if func.__name__ in KEPT or func.__name__ == "__get__":
            with plain_functions():
                return func(*args, **kwargs)
        # Not with plain functions: `backward` runs the user's hooks.
        args, kwargs = tree_map(_as_seen if func.__name__ in OF_GRAPH else _as_plain, (args, kwargs))
        return func(*args, **kwargs)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return repr(_as_plain(self))

    def __format__(self, spec: str) -> str:
        """`f"{loss:.4f}"`, which torch does for plain tensors alone."""
        return format(_as_plain(self), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What is written is a plain tensor."""
        return _as_plain(self).__reduce_ex__(protocol)


def _as_plain(x: Any) -> Any:
    seen = _as_seen(x)
    return seen.full_tensor() if isinstance(seen, DTensor) else seen


def _as_seen(x: Any) -> Any:
    """What a script takes an output for; anything else, a parameter too, as it is."""
    if isinstance(x, Term):
        with plain_functions():
            return x.as_subclass(Tensor)
    return whole(x)


def seen_whole(
    dtensor: Tensor,
    gather_first: Callable[[], None] | None = None,
    *,
    choose_first: Callable[[], Communicator] | None = None,
    is_kept: bool = True,
) -> SeenWhole:
    """`dtensor` for plain code, differentiable, with the same pieces. gather_first: called before it is gathered, on
    all ranks; choose_first: before ranks tell each other the largest of their pieces.
    """
    assert isinstance(dtensor, DTensor)
    found = _Seen.apply(dtensor) if dtensor.requires_grad else _in_pieces(dtensor, local_tensor(dtensor), SeenWhole)
    assert isinstance(found, SeenWhole)
    found._gather_first, found._choose_first, found._is_kept = gather_first, choose_first, is_kept
    if (layer := vars(dtensor).get(LAYER)) is not None:
        setattr(found, LAYER, layer)
    return found


def whole(x: Any) -> Any:
    """The whole tensor of a `SeenWhole`; anything else as it is. Collective.

    Of an output it is the same object whenever it is asked for: what is changed in place stays changed.
    """
    arrived(x)
    if not isinstance(x, SeenWhole):
        return x
    if x._whole is not None:
        return x._whole
    is_split = any(not isinstance(placement, Replicate) for placement in x.placements)
    if is_split and x._gather_first is not None:
        x._gather_first()
    if is_split or x.requires_grad:
        with torch.set_grad_enabled(x.requires_grad):
            found = _Gathered.apply(x)
    elif not x._is_kept and layer_of(x) is None:
        return local_tensor(x).detach()
    else:
        found = local_tensor(x).clone()
    assert isinstance(found, Tensor)
    found = from_slots(found, x)
    if x._is_kept:
        x._whole = found
    if x._memory is not None:
        lost_writes.refilled(x._memory, found)
        return x._memory.local.view_as(found)
    return found


def arrived(x: Any) -> None:
    """What one stage of a pipeline made is on all from now on; of anything else nothing. Collective."""
    if isinstance(x, SeenWhole) and x._coming is not None:
        coming, x._coming = x._coming, None
        x._local_tensor = coming.bring(local_tensor(x).detach())


def _part_to_come(name: str, x: Any, args: Any) -> SeenWhole | None:
    """A part of what has not arrived, or all of it, which comes by itself; None where pieces cannot say it."""
    if not isinstance(x, SeenWhole) or x._coming is None:
        return None
    is_part = name == "__getitem__" and not x.requires_grad and chosen_among.is_plain_index(args[1])
    if not is_part and name != "detach":
        return None
    with plain_functions():
        held: DTensor = _in_pieces(x, local_tensor(x), DTensor)
        part = chosen_among.part(held, args[1]) if is_part else held
    if part is None:
        return None
    found = seen_whole(part, x._gather_first, choose_first=x._choose_first)
    found._coming = x._coming
    return found


def as_changed(x: Tensor) -> Tensor:
    """What a model is given: of an output that somebody looked at the whole, which may have been changed in place."""
    arrived(x)
    is_whole = isinstance(x, SeenWhole) and x._is_kept and x._whole is not None and not local_tensor(x).is_meta
    return whole(x) if is_whole else x


def in_pieces_as(x: Tensor, like: Tensor) -> Tensor:
    """A whole tensor as a DTensor placed as `like` is; nothing is sent."""
    assert isinstance(like, DTensor)
    arrived(x)
    if isinstance(x, SeenWhole) and layer_of(like) is not None:
        x = whole(x)
    elif isinstance(x, SeenWhole) and x.placements == like.placements:
        x = x if x._whole is None else x._whole
    if isinstance(x, DTensor):
        return _in_pieces(like, local_tensor(x.redistribute(placements=like.placements)), DTensor)
    return _in_pieces(like, _cut(to_slots(x, like), like.device_mesh, like.placements).to(like.dtype), DTensor)


def cut(x: Tensor, like: Tensor) -> DTensor:
    """A plain tensor that every rank has whole, in pieces that lie as those of `like`; memory of its own."""
    assert isinstance(like, DTensor)
    return _in_pieces(like, _cut(to_slots(x, like), like.device_mesh, like.placements).clone(), DTensor)


def _held(x: Any) -> tuple[Tensor, Any] | None:
    """This rank's piece of what somebody else may write to, and how it lies; None of anything else, and of experts that
    are placed by load.
    """
    if not isinstance(x, SeenWhole) or x._is_kept or x.requires_grad or layer_of(x) is not None:
        return None
    return local_tensor(x), (x.device_mesh, x.placements, x.shape)


def _of_memory(func: Any, x: SeenWhole, args: Any, kwargs: Any) -> Any:
    """What a function says of the memory of what somebody else may write to: `arrays.py`. Collective."""
    name = func.__name__
    memory = arrays.own_memory(x)
    if memory is None and name in arrays.SHARED:
        raise arrays.refused()
    if memory is None and name in arrays.ARRAYS:
        return arrays.array_of(func, whole(x), args, kwargs)
    if memory is None and x._memory is None:
        x._memory = lost_writes.watch_memory(x, whole(x))
        memory = x._memory.local
    elif memory is None:
        memory = whole(x)
    with torch.no_grad():
        return func(memory, *args, **kwargs)


def _tensors(args: Any, kwargs: Any) -> Iterator[Any]:
    return (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))


def _as_dtensor(x: Any) -> Any:
    return _Plain.apply(x) if isinstance(x, SeenWhole) else x


def _piecewise(func: Any, x: SeenWhole, others: Any, kwargs: Any) -> SeenWhole:
    layer, is_alias = vars(x).get(LAYER), func.__name__ == "detach"
    if layer is None and func.__name__ == "to":
        with plain_functions():
            found = func(local := local_tensor(x), *others, **kwargs)
        if (found.dtype, found.device, found.stride()) == (local.dtype, local.device, local.stride()):
            alike = _in_pieces(x, found, SeenWhole)
            alike._gather_first, alike._choose_first, alike._is_kept = x._gather_first, x._choose_first, x._is_kept
            return alike
    plain = _in_pieces(x, local_tensor(x), DTensor)
    if layer is not None and is_alias:
        setattr(plain, LAYER, layer)
    elif layer is not None and not layer.is_home:
        if x._gather_first is not None:
            x._gather_first()
        plain = at_home(plain, layer)
    copied = plain.clone() if func.__name__ == "__deepcopy__" else func(plain, *others, **kwargs)
    return seen_whole(copied, x._gather_first, choose_first=x._choose_first, is_kept=x._is_kept)


def _of_pieces(name: str, x: SeenWhole, args: Any, kwargs: Any) -> Any:
    """What can be said of pieces without the whole; None of the rest."""
    if name == "__getitem__" and not x.requires_grad:
        if chosen_among.is_plain_index(args[1]) and all(type(each) is Replicate for each in x.placements):
            return local_tensor(x)[args[1]].clone()
        found = chosen_among.part(_in_pieces(x, local_tensor(x), DTensor), args[1])
        return None if found is None else seen_whole(found, x._gather_first, choose_first=x._choose_first)
    if name in along.BY_NAME and not x.requires_grad:
        found = chosen_among.called(along.BY_NAME[name], x, args, kwargs)
        seen = None if found is None else seen_whole(found, x._gather_first, choose_first=x._choose_first)
        if seen is not None and local_tensor(x).is_meta:  # as the output that it was: a shape alone
            seen._whole = torch.empty(seen.shape, dtype=seen.dtype, device="meta")
        return seen
    if name not in chosen_among.BY_NAME:
        return None
    among = None if x._choose_first is None else x._choose_first()
    return chosen_among.called(chosen_among.BY_NAME[name], x, args, kwargs, among=among)


def _in_pieces(x: DTensor, local: Tensor, kind: type[T]) -> T:
    return kind(local.detach(), x._spec, requires_grad=False)  # pyright: ignore


def _cut(x: Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> Tensor:
    """This rank's piece of a tensor that every rank has; nothing is sent."""
    held = DTensor.from_local(x.contiguous(), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return local_tensor(held.redistribute(placements=placements))


class _Seen(torch.autograd.Function):
    """A DTensor as one that is seen whole."""

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> DTensor:
        ctx.mesh, ctx.placements = x.device_mesh, x.placements
        return _in_pieces(x, local_tensor(x), SeenWhole)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        if isinstance(grad, DTensor):
            return _stripped(grad)
        # torch's hooks of a model's backward make zeros, plain ones, of a gradient that never came.
        if grad is None or not bool(grad.any()):
            return None
        same = [Replicate()] * ctx.mesh.ndim
        return DTensor.from_local(grad.contiguous(), ctx.mesh, same, run_check=False).redistribute(
            placements=ctx.placements
        )


class _Plain(torch.autograd.Function):
    """The way back."""

    @staticmethod
    def forward(ctx: Any, x: SeenWhole) -> DTensor:
        return _in_pieces(x, local_tensor(x), DTensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _stripped(grads[0])


class _Gathered(torch.autograd.Function):
    """The whole tensor; its gradient, which every rank has whole, is cut as the tensor was."""

    @staticmethod
    def forward(ctx: Any, x: SeenWhole) -> Tensor:
        ctx.mesh, ctx.placements = x.device_mesh, x.placements
        mesh, held = x.device_mesh, local_tensor(x)
        # A copy may lie elsewhere than what the mesh's processes send.
        plain = _in_pieces(x, held.to(mesh.device_type), DTensor)
        found = local_tensor(plain.redistribute(placements=[Replicate()] * mesh.ndim)).to(held.device)
        return found.clone() if all(isinstance(placement, Replicate) for placement in x.placements) else found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if isinstance(grads[0], DTensor):  # of a term on parameters, to which the output was added
            return _stripped(grads[0]).redistribute(placements=ctx.placements)
        same = [Replicate()] * ctx.mesh.ndim
        held = DTensor.from_local(grads[0].contiguous(), ctx.mesh, same, run_check=False)
        return held.redistribute(placements=ctx.placements)


def _stripped(grad: Any) -> Any:
    return _in_pieces(grad, local_tensor(grad), DTensor) if isinstance(grad, SeenWhole) else grad
