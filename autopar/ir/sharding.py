"""Placements, shardings, and the steps that turn one sharding into another.

A *sharding* holds one placement per mesh axis, in mesh order:

    placement ::= R                      every rank of the axis holds the whole tensor
                | S(dim) | S(dim, outer) the axis splits `dim`
                | S(dim, outer, zigzag)  the same, with every second stripe dealt backwards
                | P(op)                  every rank holds a term; `op` over the axis gives the tensor

`outer` names the split of a *middle* factor: the dim is seen as (outer, rest) and `rest` is cut into contiguous pieces,
one a rank, so a rank holds `outer` stripes. GPT-2's fused qkv, (3 h d) split by heads, is S(dim, outer=3). It is what
`torch.distributed.tensor` writes as `_StridedShard(dim, split_factor=outer)`.

Zigzag: rank i of n holds piece i of the stripes of even number and piece n-1-i of those of odd number. Under a causal
mask, where later queries see more keys, ranks then have equal work: with two stripes rank i holds chunks i and 2n-1-i.

Several axes may split one dim. The splits apply in mesh order, each to the local dim that the earlier ones left, and
`outer` counts stripes of that local dim. Where an earlier axis has stripes and a later one of n ranks, which divides
their number, is contiguous, a rank of the later holds 1/n of the stripes, whole: the two commute. So cp=S(1, outer=2),
tp=S(1) on two ranks each is what cp=S(1) makes of the part that tp=S(1) leaves: heads of those that tensor parallelism
has dealt out, whichever axis comes first in the mesh.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from autopar.base.errors import AutoparError
from autopar.ir.redistribution import (
    MAX_STEPS_PER_AXIS,
    REPLICATED,
    TERMS,
    StepKind,
    becomes_terms,
    next_steps,
    split_code,
    stripes_left,
)


class _Placement(type):
    """Placements that are equal are one object: a plan looks up millions of them, and so by identity."""

    def __init__(cls, name: str, bases: tuple[type, ...], names: dict[str, Any]) -> None:
        super().__init__(name, bases, names)
        cls.made: dict[object, Any] = {}

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        given = (args, *kwargs.items())
        found = cls.made.get(given)
        if found is None:
            made = super().__call__(*args, **kwargs)
            found = cls.made[given] = cls.made.setdefault((made.values,), made)
        return found


class _One(metaclass=_Placement):
    __slots__ = ()

    @property
    def values(self) -> tuple[Any, ...]:
        """What makes the same placement again."""
        return tuple(getattr(self, each.name) for each in fields(self))  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.values


@dataclass(frozen=True, slots=True, order=True)
class Replicate(_One):
    """Every rank of the axis holds the same whole tensor."""

    __hash__ = object.__hash__

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True, order=True)
class Shard(_One):
    """The axis splits `dim`, seen as (outer, rest), along `rest`.

    zigzag: stripes of odd number are dealt to the ranks in reverse order.

    Raises:
        AutoparError: zigzag with an odd number of stripes.
    """

    dim: int
    outer: int = 1
    zigzag: bool = False
    __hash__ = object.__hash__

    def __post_init__(self) -> None:
        if self.zigzag and self.outer % 2:
            raise AutoparError(
                f"dim {self.dim} cannot be split zigzag in {self.outer} stripes",
                remedy="give an even number of stripes: Shard(dim, outer=2, zigzag=True)",
            )

    def __str__(self) -> str:
        mark = ", zigzag" if self.zigzag else ""
        return f"S({self.dim})" if self.outer == 1 else f"S({self.dim}, outer={self.outer}{mark})"


@dataclass(frozen=True, slots=True, order=True)
class Partial(_One):
    """Every rank of the axis holds a term; `op` ("sum" or "max") over the axis gives the tensor."""

    op: str = "sum"
    __hash__ = object.__hash__

    def __str__(self) -> str:
        return "P" if self.op == "sum" else f"P({self.op})"


Placement = Replicate | Shard | Partial
Sharding = tuple[Placement, ...]

REPLICATE: Replicate = Replicate()
PARTIAL: Partial = Partial()


@dataclass(frozen=True, slots=True)
class Step:
    """One move of a redistribution over one mesh axis.

    - `slice`: keep this rank's piece of `dim` (no communication).
    - `all_gather`: the inverse of `slice`.
    - `all_reduce`: combine terms with `op`.
    - `reduce_scatter`: combine terms with `op`, keep this rank's piece of `dim`.
    - `all_to_all`: from pieces of `from_dim` (stripes `from_outer`) to pieces of `dim` (stripes `outer`).

    Stripes are those of the local dim. zigzag, from_zigzag: how the stripes of `dim` and `from_dim` are dealt
    (`Shard`). parts: in how many contiguous parts later axes have cut `dim`, each with `outer` of all its stripes.
    size: of the whole dim, where it is cut into uneven pieces; 0 where the axis divides it.
    """

    kind: StepKind
    axis: int
    dim: int = 0
    outer: int = 1
    from_dim: int = 0
    from_outer: int = 1
    op: str = "sum"
    zigzag: bool = False
    from_zigzag: bool = False
    parts: int = 1
    size: int = 0

    @property
    def placement(self) -> Placement:
        """What the axis does to the tensor after this step."""
        is_whole = self.kind in ("all_gather", "all_reduce")
        return REPLICATE if is_whole else Shard(self.dim, self.outer * self.parts, self.zigzag)


def replicated(num_axes: int) -> Sharding:
    """The sharding that splits nothing."""
    return (REPLICATE,) * num_axes


def splits_of(sharding: Sharding, dim: int) -> tuple[tuple[int, int, bool], ...]:
    """The splits of one dim, as (axis, outer, zigzag) in the order in which they apply."""
    return tuple((axis, p.outer, p.zigzag) for axis, p in enumerate(sharding) if isinstance(p, Shard) and p.dim == dim)


def num_pieces(sharding: Sharding, sizes: Sequence[int]) -> int:
    """How many ranks share the elements of one tensor (1 when replicated or partial everywhere)."""
    pieces = 1
    for placement, size in zip(sharding, sizes, strict=True):
        if isinstance(placement, Shard):
            pieces *= size
    return pieces


def is_valid(global_shape: Sequence[int], sharding: Sharding, sizes: Sequence[int]) -> bool:
    """Whether every split divides evenly."""
    local = list(global_shape)
    for placement, size in zip(sharding, sizes, strict=True):
        if isinstance(placement, Shard):
            if placement.dim >= len(local) or local[placement.dim] % (placement.outer * size):
                return False
            local[placement.dim] //= size
    return True


def local_shape(global_shape: Sequence[int], sharding: Sharding, sizes: Sequence[int]) -> tuple[int, ...]:
    """The shape one rank holds.

    Raises:
        AutoparError: a split that does not divide.
    """
    local = list(global_shape)
    for placement, size in zip(sharding, sizes, strict=True):
        if isinstance(placement, Shard):
            if local[placement.dim] % (placement.outer * size):
                raise AutoparError(
                    f"dim {placement.dim} of {tuple(global_shape)} cannot be split over {size} ranks",
                    values=f"{local[placement.dim]} elements in {placement.outer} stripes",
                    remedy="choose an axis size that divides it",
                )
            local[placement.dim] //= size
    return tuple(local)


def code(placement: Placement) -> int:
    """The number that stands for a placement in `redistribution`."""
    if isinstance(placement, Shard):
        return split_code(placement.dim, placement.outer, placement.zigzag)
    return TERMS[placement.op] if isinstance(placement, Partial) else REPLICATED


@lru_cache(maxsize=1 << 18)
def redistribution_steps(source: Sharding, target: Sharding, sizes: tuple[int, ...]) -> tuple[Step, ...] | None:
    """The moves that turn `source` into `target` on axes of these sizes, or None where there is no way (nothing becomes
    Partial). Which comes next, and why, is for `redistribution.next_steps` to say.
    """
    want = [code(placement) for placement in target]
    if any(becomes_terms(code(have), wanted) for have, wanted in zip(source, want, strict=True)):
        return None
    current = source
    steps: list[Step] = []
    while current != target:
        have = [code(placement) for placement in current]
        found = next((rule for rule in next_steps(have, want, sizes) if rule[2]), None)
        assert found is not None, f"no step from {current} to {target} on {sizes}"
        step = _step(found[0], found[1], current, target, sizes)
        steps.append(step)
        current = (*current[: step.axis], step.placement, *current[step.axis + 1 :])
        assert len(steps) <= MAX_STEPS_PER_AXIS * len(sizes), f"{source} never becomes {target} on {sizes}: {steps}"
    return tuple(steps)


def _step(kind: StepKind, axis: int, current: Sharding, target: Sharding, sizes: tuple[int, ...]) -> Step:
    """The next step, with what it does to the stripes of the local dim."""
    own, wanted, now = current[axis], target[axis], [code(placement) for placement in current]
    if isinstance(own, Partial) and kind == "all_reduce":
        return Step(kind, axis, op=own.op)
    from_outer = stripes_left(code(own), axis, now, sizes)
    if isinstance(own, Shard) and kind == "all_gather":
        return Step(kind, axis, own.dim, from_outer, zigzag=own.zigzag)
    assert isinstance(wanted, Shard), f"{kind} over axis {axis} from {current} to {target}"
    outer = stripes_left(code(wanted), axis, now, sizes)
    step = Step(kind, axis, wanted.dim, outer, zigzag=wanted.zigzag, parts=wanted.outer // outer)
    if isinstance(own, Partial):
        return replace(step, op=own.op)
    if isinstance(own, Shard):
        return replace(step, from_dim=own.dim, from_outer=from_outer, from_zigzag=own.zigzag)
    return step


def format_shape(dtype: str, global_shape: Sequence[int], sharding: Sharding, axes: Sequence[str]) -> str:
    """`f32[8/dp, 16, 64/tp] +tp`: global dims with the axes that split them, partial sums at the end.

    In stripes `64/3:tp`, zigzag `64/2~tp`.
    """
    dims = [str(size) for size in global_shape]
    partial = ""
    for axis, placement in zip(axes, sharding, strict=True):
        if isinstance(placement, Shard):
            stripes = "" if placement.outer == 1 else f"{placement.outer}{'~' if placement.zigzag else ':'}"
            dims[placement.dim] += f"/{stripes}{axis}"
        elif isinstance(placement, Partial):
            partial += f" +{axis}" if placement.op == "sum" else f" {placement.op}:{axis}"
    return f"{dtype}[{', '.join(dims)}]{partial}"


def format_sharding(sharding: Sharding, axes: Sequence[str]) -> str:
    """`dp=S(0), tp=R`; parsed back by `parse_sharding`."""
    return ", ".join(f"{axis}={placement}" for axis, placement in zip(axes, sharding, strict=True))


_PLACEMENT = re.compile(r"(R|S\((\d+)(?:, outer=(\d+)(, zigzag)?)?\)|P(?:\((\w+)\))?)$")


def parse_placement(text: str) -> Placement:
    """The inverse of `str(placement)`.

    Raises:
        AutoparError: text that is no placement; zigzag with an odd number of stripes.
    """
    match = _PLACEMENT.match(text.strip())
    if match is None:
        raise AutoparError(
            f"{text!r} is not a placement",
            remedy='write "R", "S(dim)", "S(dim, outer=n)", "S(dim, outer=n, zigzag)" or "P"',
        )
    if match[1] == "R":
        return REPLICATE
    if match[2] is not None:
        return Shard(int(match[2]), int(match[3] or 1), match[4] is not None)
    return Partial(match[5] or "sum")


def parse_sharding(text: str, axes: Sequence[str]) -> Sharding:
    """The inverse of `format_sharding`; axes that are not named are replicated."""
    named: dict[str, Placement] = {}
    for item in re.findall(r"(\w+)=([RP](?:\(\w+\))?|S\([^)]*\))", text):
        named[item[0]] = parse_placement(item[1])
    if unknown := set(named) - set(axes):
        raise AutoparError(f"sharding {text!r} names unknown axes {sorted(unknown)}", values=f"axes: {', '.join(axes)}")
    return tuple(named.get(axis, REPLICATE) for axis in axes)
