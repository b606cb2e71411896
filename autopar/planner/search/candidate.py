"""What a search compares: a point of its space, and what it is estimated to take."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.ir.program import Mode
from autopar.strategies.pipelining.asked import refusal
from autopar.strategies.pipelining.spec import PipelineSpec


@dataclass(frozen=True, slots=True)
class Point:
    """A mesh, its strategies, and how a step is cut. node, across: a second data axis between nodes, and what it does;
    1 and "" where there is none. ep, exchange: likewise one inside of dp over which tokens go to their experts. rows:
    of the batch that one rank computes at once.
    """

    pp: int
    node: int
    dp: int
    cp: int
    tp: int
    across: str
    data: str
    context: str
    tensor: str
    schedule: str
    stages_per_rank: int
    microbatches: int
    rows: int
    rematerialize: Mode
    ep: int = 1
    exchange: str = ""

    @property
    def axes(self) -> dict[str, int]:
        """Of the mesh, slowest link first; axes of one rank are left out, but for the last one that is left."""
        sizes = {"pp": self.pp, "node": self.node, "dp": self.dp, "ep": self.ep, "cp": self.cp, "tp": self.tp}
        return {axis: size for axis, size in sizes.items() if size > 1} or {"dp": 1}

    @property
    def strategy(self) -> dict[str, str]:
        """By axis, as `autopar.plan` takes it."""
        named: dict[str, str] = {
            "node": self.across, "dp": self.data, "ep": self.exchange, "cp": self.context, "tp": self.tensor
        }  # fmt: skip
        named["pp"] = f"pipeline({self.schedule}, {self.stages_per_rank})" if self.schedule else ""
        return {axis: named[axis] for axis in self.axes}

    @property
    def kind(self) -> tuple[object, ...]:
        """What tells it from points that differ in nothing but schedule and microbatches."""
        sizes = (self.pp, self.node, self.dp, self.ep, self.cp, self.tp)
        return (*sizes, self.across, self.data, self.exchange, self.context, self.tensor, self.rematerialize)

    @property
    def innermost(self) -> str:
        """What the innermost data axis does."""
        return self.exchange or self.data

    @property
    def may_pair(self) -> bool:
        """Whether two microbatches may go through the program together: tokens travel, and a schedule takes half as
        many.
        """
        if self.microbatches % 2 or "expert" not in self.innermost:
            return False
        spec = PipelineSpec(self.schedule, self.stages_per_rank)
        return not self.schedule or refusal(spec, self.pp, self.microbatches // 2) is None

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.axes.items())


@dataclass(frozen=True, slots=True)
class Candidate:
    """A point with the estimated seconds of a step and bytes of the fullest rank."""

    point: Point
    step_s: float
    peak_bytes: float
    fits: bool


def factorizations(num: int, limits: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """All ways to write a number of devices as a product of axes, each no larger than its limit."""
    names = list(limits)

    def split(left: int, place: int) -> Iterator[dict[str, int]]:
        if place == len(names):
            if left == 1:
                yield {}
            return
        for size in divisors(left):
            if size <= limits[names[place]]:
                for rest in split(left // size, place + 1):
                    yield {names[place]: size, **rest}

    return split(num, 0)


def divisors(number: int) -> list[int]:
    """Ascending."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return small + [number // each for each in reversed(small) if each * each != number]
