"""The estimates of a search's points: mesh by mesh, and of each only what may be among the best or on the frontier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autopar.ir.program import MODES
from autopar.planner.search.candidate import Candidate, Point
from autopar.planner.search.estimates import Estimator
from autopar.planner.search.formulas import compiled
from autopar.planner.search.space import Shape, Space, all_rows, meshes, points
from autopar.planner.search.stages import Computing, Stages
from autopar.planner.search.worth import Worth, least_bytes, least_seconds

WORTH_ROWS = 0.99
"""Twice the rows are tried where the last doubling took less than this part of the seconds of each row."""
ALWAYS_ROWS = 2
"""Rows up to which that is not asked."""


@dataclass
class Comparison:
    """The points of one model on one cluster. worth: what is worked out; None: everything."""

    estimator: Estimator
    space: Space
    shape: Shape
    limit_bytes: float
    worth: Worth | None
    candidates: list[Candidate] = field(default_factory=list)

    def run(self) -> list[Candidate]:
        """Every point that is worked out, with what it takes."""
        for sizes in meshes(self.estimator.cluster, self.space):
            full: set[object] = set()
            for rows in all_rows(self.shape.rows):
                if rows > self.estimator.rows:
                    break
                found = points(self.estimator.cluster, self.space, self.shape, sizes, rows)
                self._of_rows([point for point in found if _series(point) not in full], full)
        return self.candidates

    def _of_rows(self, found: Sequence[Point], full: set[object]) -> None:
        """Those of a mesh and a number of rows, with as little recomputed as fits: recomputing only takes longer.

        full: those that fit nowhere, to which the next larger number of rows does no good; they are added.
        """
        waiting = [point for point in found if (point.context, point.tensor) in self.estimator.ways(point)]
        waiting = [point for point in waiting if self._gains(point)]
        for mode in MODES:
            waiting = [replace(point, rematerialize=mode) for point in waiting]
            done, larger = self._evaluated(waiting)
            self.candidates += done
            waiting = [*larger, *(each.point for each in done if not each.fits)]
            if self.worth is not None:
                self.worth.add(done)
        full.update(map(_series, waiting))

    def _gains(self, point: Point) -> bool:
        """Whether so many rows are worth trying: fewer already gained by being more, or what is gathered for each use
        is then gathered less often.
        """
        if point.rows <= ALWAYS_ROWS or (point.pp == 1 and point.innermost in ("zero3", "zero3+expert", "hsdp")):
            return True
        known = [self.estimator.computing(replace(point, rows=point.rows // by)) for by in (2, 4)]
        if known[0] is None or known[1] is None:
            return True
        return known[0].total_s <= WORTH_ROWS * 2 * known[1].total_s

    def _evaluated(self, found: Sequence[Point]) -> tuple[list[Candidate], list[Point]]:
        """Estimates, and points without one that may have one where more is recomputed."""
        done: list[Candidate] = []
        larger: list[Point] = []
        staged: dict[str, list[tuple[Point, Stages]]] = {}
        for point in found:
            own = self.estimator.computing(point)
            if own is None:
                continue
            verdict = self._verdict(point, own)
            if verdict == "larger":
                larger.append(point)
            elif verdict == "worth" and (stages := self.estimator.stages(point)) is not None:
                if point.schedule:
                    staged.setdefault(point.schedule, []).append((point, stages))
                elif (seconds := self.estimator.alone_seconds(point)) is not None:
                    size = self.estimator.alone_bytes(point, stages)
                    done.append(Candidate(point, seconds, size, size <= self.limit_bytes))
        for schedule, rows in staged.items():
            done += self._of_schedule(schedule, rows)
        return done, larger

    def _verdict(self, point: Point, own: Computing) -> Literal["worth", "larger", "no"]:
        """Whether a point is worked out; `larger`: no, but it may be where more is recomputed."""
        if self.worth is None:
            return "worth"
        seconds = least_seconds(point, own)
        if self.worth.is_too_slow(seconds):
            return "no"
        for moves in (False, True):
            size = least_bytes(point, own, self.estimator.moving(point) if moves else None)
            if self.worth.is_too_large(size):
                return "larger"
            if self.worth.is_beaten(seconds, size):
                return "larger" if size > self.limit_bytes else "no"
        return "worth"

    def _of_schedule(self, schedule: str, rows: Sequence[tuple[Point, Stages]]) -> Iterator[Candidate]:
        """The formulas of a schedule over many points at once."""
        seconds_of, bytes_of = compiled(schedule)
        sends = (self.estimator.send_seconds(point, stages.sent_bytes) for point, stages in rows)
        steps = seconds_of(*np.array([_timing(*each, send) for each, send in zip(rows, sends, strict=True)]).T)
        sizes = bytes_of(*np.concatenate([_holding(*each) for each in rows]).T)
        ranks = np.cumsum([0, *(point.pp for point, _ in rows[:-1])])
        peaks = np.maximum.reduceat(sizes, ranks)
        for (point, _), step, size in zip(rows, steps, peaks, strict=True):
            yield Candidate(point, float(step), float(size), bool(size <= self.limit_bytes))


def _series(point: Point) -> tuple[object, ...]:
    """What points have in common that differ in rows, microbatches and what is recomputed."""
    return (*point.kind[:-1], point.schedule, point.stages_per_rank)


def _timing(point: Point, stages: Stages, send_s: float) -> tuple[float, ...]:
    """The symbols of a schedule's seconds."""
    slowest = int((stages.forward_s + stages.backward_s).argmax())
    return (
        float(point.pp), float(point.stages_per_rank), float(point.microbatches), stages.forward_s[slowest],
        stages.backward_s[slowest], stages.input_s[slowest], stages.weight_s[slowest],
        float((stages.forward_s + stages.backward_s).sum()), send_s, stages.filling_s, stages.stall_s,
        stages.once_s, stages.optimizer_s,
    )  # fmt: skip


def _holding(point: Point, stages: Stages) -> NDArray[np.float64]:
    """The symbols of a schedule's bytes, a row for each rank."""
    shared = (float(point.pp), float(point.stages_per_rank), float(point.microbatches))
    own = (
        np.arange(point.pp, dtype=np.float64),
        stages.static_bytes,
        stages.saved_bytes,
        stages.halved_bytes,
        stages.working_bytes,
        stages.halving_bytes,
    )
    return np.stack([*(np.full(point.pp, each) for each in shared), *own], axis=1)
