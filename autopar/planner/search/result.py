"""What a search gives back: plans, best first, and all that was estimated."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from rich.console import Console
from rich.table import Table

from autopar.base.text import new_table
from autopar.planner.plan.record import PlanRecord
from autopar.planner.search.candidate import Candidate, Point
from autopar.planner.search.cluster import Cluster

MOST_ROWS = 12
"""Of the frontier, printed."""

P = TypeVar("P", bound=PlanRecord, covariant=True)


@dataclass(frozen=True, slots=True)
class Found(Sequence[P]):
    """Plans, fastest first. planned: with the estimates that they began as; candidates: everything that was estimated.

    tokens: of a step. wall_s, cpu_s: of the search.
    """

    cluster: Cluster
    planned: tuple[tuple[Candidate, P], ...]
    candidates: tuple[Candidate, ...]
    memory_limit_bytes: float
    tokens: int
    wall_s: float
    cpu_s: float

    @property
    def frontier(self) -> list[Candidate]:
        """The estimates that nothing beats in both time and memory, fastest first."""
        found: list[Candidate] = []
        for each in sorted(self.candidates, key=lambda each: (each.step_s, each.peak_bytes)):
            if not found or each.peak_bytes < found[-1].peak_bytes:
                found.append(each)
        return found

    @property
    def off_by(self) -> float:
        """The largest relative difference between an estimate and its plan: how far the order may be off."""
        return max((abs(c.step_s / plan.cost.step_time_s - 1) for c, plan in self.planned), default=0.0)

    @property
    def num_within(self) -> int:
        """How many estimates were not planned though they lie within `off_by` of the best plan."""
        if not self.planned:
            return 0
        most = self.planned[0][1].cost.step_time_s * (1 + self.off_by)
        done = {candidate.point for candidate, _ in self.planned}
        return sum(each.fits and each.step_s < most and each.point not in done for each in self.candidates)

    @overload
    def __getitem__(self, index: int) -> P: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[P]: ...

    def __getitem__(self, index: int | slice) -> P | Sequence[P]:
        return [plan for _, plan in self.planned][index]

    def __len__(self) -> int:
        return len(self.planned)

    def __iter__(self) -> Iterator[P]:
        return (plan for _, plan in self.planned)

    def to_data(self) -> dict[str, Any]:
        """For machines: the plans, the frontier, and how sure the order is."""

        def row(each: Candidate) -> dict[str, Any]:
            point = each.point
            return {
                "mesh": point.axes, "strategy": point.strategy, "microbatches": point.microbatches,
                "rematerialize": point.rematerialize, "step_s": each.step_s, "peak_bytes": each.peak_bytes,
                "fits": each.fits,
            }  # fmt: skip

        return {
            "cluster": str(self.cluster),
            "plans": [
                {**row(each), "planned_step_s": plan.cost.step_time_s,
                 "planned_peak_bytes": plan.cost.peak_memory_bytes,
                 "tokens_per_s_per_device": self.tokens_per_s(plan.cost.step_time_s), "gap": plan.gap}
                for each, plan in self.planned
            ],
            "frontier": [row(each) for each in self.frontier],
            "estimated": len(self.candidates),
            "estimates_off_by": self.off_by,
            "not_planned_within_that": self.num_within,
            "wall_s": self.wall_s,
            "cpu_s": self.cpu_s,
        }  # fmt: skip

    def tokens_per_s(self, step_s: float) -> float:
        """Of one device."""
        return self.tokens / step_s / self.cluster.num_devices

    def __str__(self) -> str:
        out = io.StringIO()
        console = Console(file=out, width=160)
        console.print(self._plans())
        console.print(self._frontier())
        console.print(
            f"{len(self.candidates)} points estimated on {self.cluster}, {sum(c.fits for c in self.candidates)} of "
            f"them within {self.memory_limit_bytes / 2**30:.4g} GiB a rank; of the plans, estimates were off by "
            f"{self.off_by:.1%} at most, and {self.num_within} more points lie within that; {self.wall_s:.1f} s"
        )
        return out.getvalue().rstrip()

    def _plans(self) -> Table:
        table = _table("planned, fastest first", "step", "tokens/s/device", "memory GiB", "estimated")
        for each, plan in self.planned:
            step_s = plan.cost.step_time_s
            table.add_row(
                *_words(each.point), f"{step_s:.4g} s", f"{self.tokens_per_s(step_s):.4g}",
                f"{plan.cost.peak_memory_bytes / 2**30:.3g}", f"{each.step_s:.4g} s",
            )  # fmt: skip
        return table

    def _frontier(self) -> Table:
        """Of what fits, or of all where nothing does."""
        fitting = [each for each in self.frontier if each.fits]
        title = "frontier of the estimates" + ("" if fitting else ", none of which fits")
        table = _table(title, "step", "memory GiB")
        for each in (fitting or self.frontier[::-1])[:MOST_ROWS]:
            table.add_row(*_words(each.point), f"{each.step_s:.4g} s", f"{each.peak_bytes / 2**30:.3g}")
        return table


def _table(title: str, *numbers: str) -> Table:
    return new_table(title, "mesh", "strategy", "microbatches", "recompute", *(f">{name}" for name in numbers))


def _words(point: Point) -> tuple[str, str, str, str]:
    return str(point), " ".join(point.strategy.values()), str(point.microbatches), point.rematerialize
