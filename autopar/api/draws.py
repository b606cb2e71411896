"""The random draws of a program, handed to the eager model, so that both can be compared where dropout is active.

A program's numbers are functions of seed, call and place (`autopar/operators`). Under `handed` the model runs as it is,
with torch's own operators; where one draws from torch's generator, it gets the numbers that the program draws there.
Draws come in the same order on both sides. One that the program does not make, as nobody reads it, stays torch's: its
number is missing among those of its region's draws, of which the region knows how many there were. What a checkpoint
runs again draws again, from the state that torch's generator had the first time: each draw is kept by that state, and
moves the generator on.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar import operators
from autopar.base.torch_compat.distributed import TorchDispatchMode
from autopar.ir.program import Program
from autopar.runtime.microbatches import join_rows, take_rows

_aten = torch.ops.aten
_FUNCTIONAL: Mapping[Any, Any] = {
    _aten.bernoulli_.float: _aten.bernoulli.p,
    _aten.uniform_.default: _aten.uniform.default,
    _aten.normal_.default: _aten.normal_functional.default,
    _aten.exponential_.default: _aten.exponential.default,
    _aten.log_normal_.default: _aten.log_normal.default,
    _aten.cauchy_.default: _aten.cauchy.default,
    _aten.geometric_.default: _aten.geometric.default,
}
"""What fills a tensor in place, as what makes a new one."""
_FROM_GENERATOR: Mapping[Any, Any] = {
    _aten.rand.generator: _aten.rand.default,
    _aten.randn.generator: _aten.randn.default,
    _aten.randint.generator: _aten.randint.default,
    _aten.randint.low_generator: _aten.randint.low,
    _aten.randperm.generator: _aten.randperm.default,
}
"""What a model calls that hands in torch's default generator, as programs have it."""
_WITH_NOISE = (_aten.rrelu_with_noise.default, _aten.rrelu_with_noise_.default)


@dataclass(frozen=True, slots=True)
class Draw:
    """One draw of a program: its seed and salt, and of what shape; p: of a dropout, else None."""

    seed: int
    salt: int
    shape: tuple[int, ...]
    p: float | None


def draws_of(program: Program, seed: int) -> list[Draw | None]:
    """The draws of a step with this seed, in the order of the model's forward; None for one that it does not make."""
    found: list[Draw | None] = []
    for number, call in enumerate(program.calls):
        region = program.region(call.region)
        own: dict[int, Draw] = {}
        for node in region.graph.nodes:
            draw = _draw(node, seed + number) if node.name in region.forward_nodes else None
            if draw is not None:
                own.setdefault(draw.salt, draw)
        found += [own.get(salt) for salt in range(max(region.draws, max(own, default=-1) + 1))]
    return found


def _draw(node: Any, seed: int) -> Draw | None:
    def shape(value: Any) -> tuple[int, ...]:
        return tuple(value.meta["val"].shape)

    if node.target is torch.ops.autopar.random.default:
        return Draw(seed, node.args[3], shape(node), None)
    if node.target is torch.ops.autopar.dropout.default:
        return Draw(seed, node.args[3], shape(node), node.args[1])
    if node.target is torch.ops.autopar.attention.default and node.kwargs.get("dropout_p"):
        query, key = shape(node.args[0]), shape(node.args[1])
        return Draw(seed, node.kwargs.get("salt", 0), (*query[:3], key[2]), node.kwargs["dropout_p"])
    return None


@dataclass(frozen=True, slots=True)
class Joined:
    """One draw of each microbatch of a step, of which the model makes one: their rows stand in so many groups."""

    draws: tuple[Draw, ...]
    groups: int

    def dim_in(self, shape: Sequence[int]) -> int | None:
        """The dim of the whole draw along which those of microbatches lie; None where it is not made of them."""
        num, part = len(self.draws), self.draws[0].shape
        if math.prod(shape) != num * math.prod(part):
            return None
        if len(part) == len(shape):
            differing = [dim for dim, (whole, own) in enumerate(zip(shape, part, strict=True)) if whole != own]
            return differing[0] if len(differing) == 1 else None
        before = {math.prod(part[:dim]) for dim in range(len(part) + 1)}
        behind = {math.prod(part[dim:]) for dim in range(len(part) + 1)}
        fits = (
            shape[dim] % num == 0 and math.prod(shape[:dim]) in before and math.prod(shape[dim + 1 :]) in behind
            for dim in range(len(shape))
        )
        return next((dim for dim, each in enumerate(fits) if each), None)


def joined(draws: Sequence[Sequence[Draw | None]], groups: int) -> list[Joined | None]:
    """draws: of each microbatch."""
    of_all = zip(*draws, strict=True)
    return [None if None in each else Joined(tuple(x for x in each if x is not None), groups) for each in of_all]


class Steady(TorchDispatchMode):
    """Inside, a draw gives every element the same: a dropout keeps all.

    is_steady: false once something was drawn in a way that is not known here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_steady = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return found
        known = func in _FUNCTIONAL or func in _FROM_GENERATOR or func in operators.RANDOM
        if not known or not isinstance(found, Tensor) or not (found.is_floating_point() or found.dtype == torch.bool):
            self.is_steady = False
            return found
        return found.fill_(1 if "bernoulli" in func.__name__ else 0.5)


class handed(TorchDispatchMode):
    """Inside, what draws from torch's generator gets these draws, in order."""

    def __init__(self, draws: Iterable[Draw | Joined | None]) -> None:
        super().__init__()
        self.draws = deque(draws)
        self._made: dict[bytes, Draw | Joined | None] = {}
        self._sorted: tuple[Tensor, Tensor] | None = None
        self._packed: _Packed | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _WITH_NOISE and (kwargs.get("training") or True in args[4:5]):
            return self._with_noise(func, args)
        given = self._given(func, args, kwargs)
        if given is None:
            found = func(*args, **kwargs)
            self._note_packed(func, args, found)
            return found
        return args[0].copy_(given) if func in _FUNCTIONAL else given

    def _with_noise(self, func: Any, args: Sequence[Any]) -> Tensor:
        """What `rrelu` gives: x where it is positive, else a slope drawn between two bounds times it."""
        x, noise, *bounds = args[:4]
        slope = self._given(_aten.uniform_.default, (x, *bounds), {})
        noise.copy_(torch.where(x > 0, 1, torch.empty_like(x).uniform_(*bounds) if slope is None else slope))
        return x.mul_(noise) if func is _aten.rrelu_with_noise_.default else x * noise

    def _note_packed(self, func: Any, args: Sequence[Any], found: Any) -> None:
        """Which steps of which rows packed sequences have, so that what is drawn for them is that of their places."""
        if func in (_aten.sort.default, _aten.sort.stable):
            self._sorted = found
        elif func is _aten._pack_padded_sequence.default:
            lengths, ordered = args[1], self._sorted
            by_length = ordered is not None and torch.equal(ordered[0], lengths)
            self._packed = _Packed(lengths, ordered[1] if by_length and ordered else torch.arange(len(lengths)))

    def _given(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
        """The numbers for this call; None where it draws none, or none that the program draws."""
        func = _FROM_GENERATOR.get(func, func)
        functional = _FUNCTIONAL.get(func, func if func in operators.RANDOM else None)
        if functional is None:
            return None
        state = torch.get_rng_state().numpy().tobytes()
        is_again = state in self._made
        if not is_again and not self.draws:
            return None
        draw = self._made[state] if is_again else self.draws[0]
        found = None if draw is None else _numbers(functional, args, kwargs, draw, self._packed)
        if draw is not None and found is None:
            return None
        if not is_again:
            self._made[state] = self.draws.popleft()
        if found is not None:
            torch.rand(())  # the next draw has another state; where torch draws itself, it moves on by itself
        return found


@dataclass(frozen=True, slots=True)
class _Packed:
    """How sequences are packed: lengths, from the longest on, and which rows of the batch have them."""

    lengths: Tensor
    order: Tensor

    def of(self, x: Tensor) -> Tensor:
        """The steps of x[T, B, …] that are packed."""
        return torch.ops.aten._pack_padded_sequence(x[:, self.order.to(x.device)], self.lengths, False)[0]


def _joined(functional: Any, args: Sequence[Any], kwargs: Mapping[str, Any], draw: Joined) -> Tensor | None:
    """What a call for the whole batch gives with the numbers of all microbatches."""
    shape = next((tuple(x.shape) if isinstance(x, Tensor) else tuple(x) for x in args if _is_shaped(x)), ())
    if (dim := draw.dim_in(shape)) is None:
        return None
    num, parts = len(draw.draws), list[Tensor]()
    for i, own in enumerate(draw.draws):

        def part(value: Any, i: int = i) -> Any:
            if isinstance(value, Tensor) and value.shape == shape:
                return take_rows(value, dim, i, num, draw.groups)
            if isinstance(value, list | tuple) and tuple(value) == shape:
                return [size // num if place == dim else size for place, size in enumerate(shape)]
            return value

        found = _numbers(functional, list(map(part, args)), {name: part(x) for name, x in kwargs.items()}, own, None)
        if found is None:
            return None
        parts.append(found)
    return join_rows(parts, dim, draw.groups)


def _is_shaped(value: Any) -> bool:
    return isinstance(value, Tensor | list | tuple)


def _numbers(
    functional: Any, args: Sequence[Any], kwargs: Mapping[str, Any], draw: Draw | Joined, packed: _Packed | None
) -> Tensor | None:
    """What a call gives with the program's numbers; None where it is another draw."""
    if isinstance(draw, Joined):
        return _joined(functional, args, kwargs, draw)
    kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
    if draw.p is None:
        return _made(operators.RANDOM[functional], args, kwargs, draw)
    kept = args[1] if len(args) > 1 else kwargs.get("p", 0.5)  # torch leaves a default out
    fits = functional is _aten.bernoulli.p and math.isclose(kept, 1 - draw.p, abs_tol=1e-12)
    if not fits or math.prod(args[0].shape) == math.prod(draw.shape):
        return _kept(args[0].shape, args[0].dtype, draw) if fits else None
    if packed is None or draw.shape[1:2] != packed.lengths.shape:
        return None
    steps = packed.of(_kept(draw.shape, args[0].dtype, draw))
    return steps if steps.shape == args[0].shape else None


def _made(function: Callable[..., Tensor], args: Sequence[Any], kwargs: dict[str, Any], draw: Draw) -> Tensor | None:
    """What the program makes of its numbers; None where these are of another shape, so that it is another draw."""
    with operators.tracing_seed(torch.tensor(draw.seed), first=draw.salt) as shapes:
        found = function(*args, **kwargs)
    return found if [math.prod(draw.shape)] == [math.prod(shape) for shape in shapes] else None


def _kept(shape: Sequence[int], dtype: torch.dtype, draw: Draw) -> Tensor:
    """1 where a dropout keeps an element, else 0."""
    assert draw.p is not None
    ones = torch.ones(draw.shape, dtype=torch.float32)
    kept = operators.dropout(ones, draw.p, torch.tensor(draw.seed), draw.salt, [], list(draw.shape)) != 0
    return kept.to(dtype).view(shape)
