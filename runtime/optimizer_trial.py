"""What an optimizer that nobody knows does with pieces: found by letting it step, on small tensors of its own.

    whole:   an optimizer of the class, with its options, on A and B
    pieces:  two of them, one on a part of A and of B, the other on the rest    (along each dim; a part may be empty)

Where both come to the same, steps on a rank's pieces are those of one process. Otherwise something looks at a whole
tensor, or at several together: a norm, a mean, a product, the blocks of a quantized state. What is tried is the same on
every rank, and so is what is found.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

Found = Literal["elements", "tensors", "unclear"]
_SHAPES = {1: (300,), 2: (96, 80), 3: (24, 20, 12), 4: (16, 12, 5, 3)}
"""By the number of dims; with more elements than quantized states of other libraries begin with (4,096)."""
_SCALES = (1.0, 1e-3, 30.0)
"""Of the gradients of one step and the next: so norms that are clipped, and those that are not, are seen."""
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Of the largest update."""
_HALF_TOLERANCE = 5e-2


def tried(optimizer: Optimizer) -> Found:
    """Whether an update treats each element by itself (`elements`), or not (`tensors`); `unclear` where it does not
    step on plain tensors without a closure, or changes nothing.
    """
    shapes = [_shapes(group["params"]) for group in optimizer.param_groups]
    devices = [p.device for group in optimizer.param_groups for p in group["params"]]
    generator = torch.Generator(devices[0]).manual_seed(0)  # the script's own draws stay as they were

    def drawn(shape: Sequence[int]) -> Tensor:
        return torch.randn(tuple(shape), device=devices[0], generator=generator)

    with torch.no_grad():
        starts = [[drawn(shape) * 0.1 for shape in own] for own in shapes]
        gradients = [[[drawn(x.shape) * scale for x in own] for own in starts] for scale in _SCALES]
    try:
        wanted = _stepped(optimizer, starts, gradients)
    except Exception:  # whatever a stranger's code does
        return "unclear"
    if wanted is None:
        return "tensors"
    pairs = [pair for own, to in zip(starts, wanted, strict=True) for pair in zip(own, to, strict=True)]
    if not all(0 < float((after - before).abs().max()) < math.inf for before, after in pairs):
        return "unclear"
    for dim in range(max(len(shape) for own in shapes for shape in own)):
        for first in (0, 1):  # of three parts the first, or none
            try:
                found = _in_parts(optimizer, starts, gradients, dim, first)
            except Exception:
                return "tensors"
            if found is None or not _equal(starts, wanted, found):
                return "tensors"
    return "elements"


def _shapes(parameters: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Of parameters that stand for these: one of each number of dims, and another of the largest."""
    dims = sorted({min(4, p.ndim) for p in parameters if p.ndim}) or [1] * bool(parameters)
    return [_SHAPES[n] for n in dims] + [(_SHAPES[n][0] + 4, *_SHAPES[n][1:]) for n in dims[-1:]]


def _in_parts(
    optimizer: Optimizer, starts: list[list[Tensor]], gradients: list[list[list[Tensor]]], dim: int, first: int
) -> list[list[Tensor]] | None:
    """The parameters after steps of two optimizers, each on its parts along a dim, put together."""

    def halves(x: Tensor, last: bool) -> Tensor:
        along = min(dim, x.ndim - 1)
        cut = first * (x.shape[along] // 3)
        return x.narrow(along, cut, x.shape[along] - cut) if last else x.narrow(along, 0, cut)

    def of(tensors: list[list[Tensor]], last: bool) -> list[list[Tensor]]:
        return [[halves(x, last).clone() for x in own] for own in tensors]

    parts = [_stepped(optimizer, of(starts, last), [of(each, last) for each in gradients]) for last in (False, True)]
    one, other = parts
    if one is None or other is None:
        return None
    return [
        [torch.cat(pair, min(dim, pair[0].ndim - 1)) for pair in zip(*own, strict=True)]
        for own in zip(one, other, strict=True)
    ]


def _stepped(
    optimizer: Optimizer, starts: Sequence[Sequence[Tensor]], gradients: Sequence[Sequence[Sequence[Tensor]]]
) -> list[list[Tensor]] | None:
    """The parameters after a step for each of the gradients. None: a state is neither like its parameter nor a number,
    so that no piece of it belongs to a piece.
    """
    double: Any = object.__new__(type(optimizer))
    kept = {name: value for name, value in vars(optimizer).items() if name not in ("param_groups", "state")}
    vars(double).update({name: _copied(value) for name, value in kept.items()})
    double.state = cast("Any", defaultdict(dict))
    double.param_groups = []
    for group, own in zip(optimizer.param_groups, starts, strict=True):
        dtype = group["params"][0].dtype if group["params"] else torch.float32
        options = {name: _copied(value) for name, value in group.items() if name != "params"}
        if "lr" in options and isinstance(options["lr"], float | int) and not options["lr"]:
            options["lr"] = 1e-2  # a schedule that begins with nothing
        parameters = [torch.nn.Parameter(x.detach().to(dtype, copy=True)) for x in own]
        double.param_groups.append({**options, "params": parameters})
        begun = [(x, _begun(optimizer, group, x)) for x in parameters]
        double.state.update({x: state for x, state in begun if state})
    step = type(optimizer).step
    raw: Any = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    with torch.random.fork_rng(devices=[]):
        for each in gradients:
            for group, own in zip(double.param_groups, each, strict=True):
                for parameter, gradient in zip(group["params"], own, strict=True):
                    parameter.grad = gradient.to(parameter.dtype, copy=True)
            raw(double)
    for parameter, state in double.state.items():
        for value in state.values():
            if isinstance(value, Tensor) and value.ndim and value.shape != parameter.shape:
                return None
    return [[p.detach() for p in group["params"]] for group in double.param_groups]


def _begun(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """A state for a parameter of another shape, of an optimizer whose constructor makes states (torch 2.11's Adagrad):
    each holds one number everywhere. Nothing of others, which begin with their first step.
    """
    made: dict[str, Any] = next((optimizer.state[x] for x in group["params"] if x in optimizer.state), {})
    found: dict[str, Any] = {}
    for name, value in made.items():
        if not isinstance(value, Tensor) or not value.ndim:
            found[name] = _copied(value)
            continue
        own = value.to_local() if isinstance(value, DTensor) else value
        if not own.numel() or bool((own != own.flatten()[0]).any()):
            return {}
        found[name] = torch.full_like(parameter, own.flatten()[0].item(), dtype=own.dtype, requires_grad=False)
    return found


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # hooks and what else holds a process
        return value


def _equal(starts: list[list[Tensor]], wanted: list[list[Tensor]], found: list[list[Tensor]]) -> bool:
    for own, one, other in zip(starts, wanted, found, strict=True):
        for start, x, y in zip(own, one, other, strict=True):
            largest = float((x - start.to(x.dtype)).abs().max())
            if not float((x - y).abs().max()) <= _TOLERANCE.get(x.dtype, _HALF_TOLERANCE) * largest:
                return False
    return True
