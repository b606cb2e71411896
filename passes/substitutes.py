"""What some functions and layers of torch.nn are while a model is traced: the same, of operators that can be.

Torch's own look at values (`cov`, `quantile`, an adaptive softmax), change a statistic where no trace sees it (instance
norm), draw numbers in a kernel of their own (`rrelu`). `FUNCTIONS` are called in their place by `ChecksPass`, `layers`
gives a copy of a model their forwards.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.base.errors import AutoparError
from autopar.base.torch_compat import tracing as compat
from autopar.operators import registration  # noqa: F401 (defines torch.ops.autopar)
from autopar.passes import recurrent, sparse, spectra, taken_gradients


def _gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """As torch's, which checks that no variance is negative where a mode that traces it has been left, and clamps
    variances in place and without a gradient.
    """
    var = var if isinstance(var, Tensor) else var * torch.ones_like(input)
    if var.shape == input.shape[:-1] and var.shape != input.shape:
        var = var.unsqueeze(-1)
    var = var + (var.clamp(min=eps) - var).detach()
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    loss = loss + 0.5 * math.log(2 * math.pi) if full else loss
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" else loss.sum()


# -------------------------------------------------------------------------------------------------------- statistics


def _cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """Of variables in rows and observations in columns; torch's looks whether the weights' values are allowed."""
    x = input.reshape(1, -1) if input.dim() < 2 else input
    weights = aweights if fweights is None else fweights if aweights is None else fweights * aweights
    if weights is None:
        total, left = x.shape[1], max(0, x.shape[1] - correction)
        centred = x - x.sum(1, keepdim=True) / total
        found = centred @ centred.mH / left
        return found.squeeze() if input.dim() < 2 else found
    of = weights.to(x.dtype)
    sums = of.sum()
    centred = x - (x * of).sum(1, keepdim=True) / sums
    lost = correction if aweights is None else correction * (of * aweights).sum() / sums
    found = (centred * of) @ centred.mH / (sums - lost).clamp(min=0)
    return found.squeeze() if input.dim() < 2 else found


def _corrcoef(input: Tensor) -> Tensor:
    found = _cov(input)
    if found.dim() == 0:
        return found / found
    deviations = found.diagonal().real.sqrt()
    found = found / deviations[:, None] / deviations[None]
    return found if found.is_complex() else found.clamp(-1, 1)


def _quantile(
    input: Tensor, q: float | Tensor, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear",
    out: Tensor | None = None, ignoring_nan: bool = False,
) -> Tensor:  # fmt: skip
    """As torch's, which before 2.13 looks whether all of q lie between 0 and 1."""
    numbers = compat.known_value(q) if isinstance(q, Tensor) else q
    wrong = [each for each in _flat(numbers) if not 0 <= each <= 1]
    original = torch.nanquantile if ignoring_nan else torch.quantile
    if out is not None or wrong or interpolation not in _ROUNDED or not input.numel() or not input.is_floating_point():
        return original(input, q, dim, keepdim, interpolation=interpolation, out=out)
    at = q if isinstance(q, Tensor) else torch.scalar_tensor(q, dtype=input.dtype, device=input.device)
    rows = (input.flatten() if dim is None else input.movedim(dim, -1)).sort(dim=-1)[0]
    is_nan = rows.isnan()
    if ignoring_nan:
        ranks = (at.reshape(-1) * ((~is_nan).sum(-1, keepdim=True) - 1)).clamp(min=0)
    else:
        ranks = torch.where(is_nan.any(-1, keepdim=True), rows.shape[-1] - 1, at.reshape(-1) * (rows.shape[-1] - 1))
    ranks = _ROUNDED[interpolation](ranks)
    below = ranks.to(torch.int64)
    found = rows.gather(-1, below)
    if interpolation in ("linear", "midpoint"):
        weights = torch.full_like(ranks, 0.5) if interpolation == "midpoint" else ranks - below
        found = found.lerp(rows.gather(-1, ranks.ceil().to(torch.int64)), weights)
    if keepdim:
        # [..., 1 for dim, Q], the dims that were as they were
        found = found.reshape(*(1,) * input.dim(), -1) if dim is None else found.unsqueeze(-1).transpose(-1, -2)
        found = found if dim is None else found.movedim(-2, dim % max(input.dim(), 1))
    return found.movedim(-1, 0) if at.dim() else found.squeeze(-1)


_ROUNDED: Mapping[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda ranks: ranks, "midpoint": lambda ranks: ranks, "lower": torch.floor, "higher": torch.ceil,
    "nearest": torch.round,
}  # fmt: skip


def _flat(numbers: Any) -> list[float]:
    """The numbers of nested lists; none of what is not known."""
    if isinstance(numbers, list):
        return [each for part in numbers for each in _flat(part)]
    return [numbers] if isinstance(numbers, (int, float)) else []


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Running statistics move towards the mean of those of all instances."""
    if not use_input_stats or running_mean is None or running_var is None:
        return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    with torch.no_grad():
        rows = input.flatten(2).to(running_mean.dtype)
        means, variances = rows.mean(2).mean(0), rows.var(2).mean(0)
        running_mean.copy_(running_mean * (1 - momentum) + means * momentum)
        running_var.copy_(running_var * (1 - momentum) + variances * momentum)
    return F.instance_norm(input, None, None, weight, bias, True, momentum, eps)


# ------------------------------------------------------------------------------------------------------------ others


def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Bags of one size, a row each, are looked up and reduced row by row."""
    if input.dim() != 2 or max_norm is not None or scale_grad_by_freq:
        return F.embedding_bag(
            input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights,
            include_last_offset, padding_idx,
        )  # fmt: skip
    found = F.embedding(input, weight, padding_idx)
    if per_sample_weights is not None:
        found = found * per_sample_weights[..., None]
    if padding_idx is None:
        return found.sum(1) if mode == "sum" else found.mean(1) if mode == "mean" else found.max(1)[0]
    counts = (input != padding_idx % weight.shape[0])[..., None]
    if mode == "max":
        return found.masked_fill(~counts, -math.inf).max(1)[0].masked_fill(~counts.any(1), 0)
    total = found.masked_fill(~counts, 0).sum(1)
    return total if mode == "sum" else total / counts.sum(1).clamp(min=1)


def _rrelu(
    input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
) -> Tensor:
    """The slope of what is not positive is drawn in training, the mean of the bounds otherwise."""
    if not training:
        return F.leaky_relu(input, (lower + upper) / 2, inplace)
    slope = torch.empty_like(input).uniform_(lower, upper)
    found = torch.where(input > 0, input, input * slope)
    return input.copy_(found) if inplace else found


def _masked_select(input: Tensor, mask: Tensor, *, out: Tensor | None = None) -> Tensor:
    """As torch's; of what, and where, is noted for a function that knows rows from one another (`_ctc_loss`)."""
    found = torch.masked_select(input, mask) if out is None else torch.masked_select(input, mask, out=out)
    if input.dim() == 2 and input.shape == mask.shape:
        _SELECTED[found] = (input, mask)
    return found


_SELECTED: MutableMapping[Tensor, tuple[Tensor, Tensor]] = WeakTensorKeyDictionary()
"""What was selected from, and where, while a model is traced."""


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """As torch's, whose table of states has a size that lengths say: an operator that keeps it to itself."""
    alone = log_probs.dim() == 2
    rows = log_probs.unsqueeze(1) if alone else log_probs
    lengths = [_lengths(each, log_probs.device) for each in (input_lengths, target_lengths)]
    padded = targets.reshape(1, -1) if alone else targets if targets.dim() == 2 else _by_rows(targets, target_lengths)
    losses: Tensor = torch.ops.autopar.ctc_loss(rows, padded, *lengths, blank, zero_infinity)
    if reduction == "mean":
        return (losses / lengths[1].clamp(min=1).to(losses.dtype)).mean()
    return losses.sum() if reduction == "sum" else losses.squeeze(0) if alone else losses


def _lengths(given: Tensor | Sequence[int], device: torch.device) -> Tensor:
    found = given if isinstance(given, Tensor) else torch.tensor(given, device=device)
    return found.reshape(-1).to(torch.int64)


def _by_rows(targets: Tensor, lengths: Tensor | Sequence[int]) -> Tensor:
    """Targets of all rows, one after the other, as one row each: how they were before they were put together."""
    if not isinstance(lengths, Tensor):
        return pad_sequence(list(targets.split([int(each) for each in lengths])), batch_first=True)
    source, mask = _SELECTED.get(targets, (targets, targets))
    if source is targets or not compat.is_count_of(lengths, mask):
        raise AutoparError(
            "ctc_loss of targets that lie one after the other cannot be traced: which are a row's, lengths alone say",
            remedy="hand in targets of shape [N, S], padded, or make them by masked_select and lengths by mask.sum(-1)",
        )
    order = torch.argsort((~mask).to(torch.int32), dim=1, stable=True)
    return torch.where(mask, source, 0).gather(1, order)


def _allclose(input: Tensor, other: Tensor, *args: Any, **kwargs: Any) -> Any:
    if _is_known(input) and _is_known(other):
        return torch.allclose(input, other, *args, **kwargs)
    return torch.isclose(input, other, *args, **kwargs).all()


def _equal(input: Tensor, other: Tensor) -> Any:
    if input.shape != other.shape:
        return False
    if _is_known(input) and _is_known(other):
        return torch.equal(input, other)
    return (input == other).all()


def _is_known(x: Tensor) -> bool:
    return compat.node_of(x) is None


FUNCTIONS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    F.gaussian_nll_loss: _gaussian_nll_loss,
    F.instance_norm: _instance_norm,
    F.embedding_bag: _embedding_bag,
    F.rrelu: _rrelu,
    F.ctc_loss: _ctc_loss,
    torch.masked_select: _masked_select,
    torch.Tensor.masked_select: _masked_select,
    torch.quantile: _quantile,
    torch.Tensor.quantile: _quantile,
    torch.nanquantile: functools.partial(_quantile, ignoring_nan=True),
    torch.Tensor.nanquantile: functools.partial(_quantile, ignoring_nan=True),
    torch.cov: _cov,
    torch.Tensor.cov: _cov,
    torch.corrcoef: _corrcoef,
    torch.Tensor.corrcoef: _corrcoef,
    torch.allclose: _allclose,
    torch.Tensor.allclose: _allclose,
    torch.equal: _equal,
    torch.Tensor.equal: _equal,
    **recurrent.FUNCTIONS,
    **sparse.FUNCTIONS,
    **spectra.FUNCTIONS,
    **taken_gradients.FUNCTIONS,
}


# ------------------------------------------------------------------------------------------------------------ layers


def layers(model: nn.Module) -> nn.Module:
    """The model, changed in place, with forwards that can be traced, and casts that a forward makes of modules."""
    for module in model.modules():
        vars(module).update({name: functools.partial(_cast, module, name) for name in _CASTS})
        for kind, forward in _FORWARDS.items():
            if getattr(type(module), "forward", None) is kind.forward:  # one that is scripted says none
                module.forward = types.MethodType(forward, module)
    return model


_CASTS = ("to", "type", "float", "double", "half", "bfloat16", "cpu")


def _cast(module: nn.Module, name: str, *args: Any, **kwargs: Any) -> nn.Module:
    """What `module.to(dtype)` is in a forward: the module, where its tensors are so. Torch would put others, or the
    same, in their places for good.
    """
    for path, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name in ("to", "type", "cpu") or tensor.is_floating_point():
            wanted = getattr(tensor, name)(*args, **kwargs)
            kept = name == "to" and not (tensor.is_floating_point() or tensor.is_complex())  # no dtype of numbers
            if wanted.device != tensor.device or (wanted.dtype != tensor.dtype and not kept):
                before, after = (str(each.dtype).removeprefix("torch.") for each in (tensor, wanted))
                raise AutoparError(
                    f"forward() casts a module for good: {type(module).__name__}.{name}() makes {path}, {before}, "
                    f"{after}",
                    remedy=f"cast that module before you compile, to {after}, and name no precision that casts it back",
                )
    return module


def _refused_cross_map_norm(self: nn.CrossMapLRN2d, input: Tensor) -> Tensor:
    raise AutoparError(
        "torch's CrossMapLRN2d gives gradients that are not those of its result, so there is nothing to agree with",
        remedy=f"use nn.LocalResponseNorm({self.size}, {self.alpha}, {self.beta}, {self.k})",
    )


def _adaptive_softmax(self: nn.AdaptiveLogSoftmaxWithLoss, input: Tensor, target: Tensor) -> Any:
    """Every row through every cluster of labels, of which its own counts: torch asks which rows have which."""
    rows, labels = (input, target) if target.dim() else (input[None], target[None])
    head = F.log_softmax(self.head(rows), dim=1)
    shortlist = int(self.cutoffs[0])
    found = head.gather(1, labels.clamp(max=shortlist - 1)[:, None])[:, 0]
    for number, cluster in enumerate(self.tail):
        low, high = int(self.cutoffs[number]), int(self.cutoffs[number + 1])
        inside = F.log_softmax(cluster(rows), dim=1).gather(1, (labels - low).clamp(0, high - low - 1)[:, None])[:, 0]
        found = torch.where((labels >= low) & (labels < high), head[:, shortlist + number] + inside, found)
    result: Any = type(self).forward.__globals__["_ASMoutput"]
    return result(found if target.dim() else found[0], -found.mean())


_FORWARDS: Mapping[type[nn.Module], Callable[..., Any]] = {
    nn.CrossMapLRN2d: _refused_cross_map_norm,
    nn.AdaptiveLogSoftmaxWithLoss: _adaptive_softmax,
}
