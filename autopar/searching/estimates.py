"""What the points of a search take: one trace, a placement for each family of strategies, the rest by substitution.

A model is traced once, for the rows of one microbatch, and a rank's rows follow from the size of the data axis that is
put in: 4 traced rows over dp=2 are what 128 rows over dp=64 are, to every operator. What is moved of parameters does
not depend on rows, and is read off the same placement with the data axis as large as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from autopar.hardware import Link
from autopar.mesh import Mesh
from autopar.passes.overlap import overlap
from autopar.searching.candidate import Point
from autopar.searching.cluster import Cluster
from autopar.searching.families import Families, Family, in_pieces
from autopar.searching.stages import Computing, Cut, Moving, Stages, seconds_of_calls, stages_of
from autopar.step_time import step_seconds

_PARTS = 16
"""Calls are cut by seconds that are rounded to so many parts of the usual call's."""
CONTEXTS = ("ring", "ulysses", "allgather_kv")


@dataclass
class Estimator:
    """Costs of one model on one cluster. rows: of one traced microbatch."""

    families: Families
    cluster: Cluster
    rows: int
    computed: dict[tuple[object, ...], Computing | None] = field(default_factory=dict)
    moved: dict[tuple[object, ...], Moving | None] = field(default_factory=dict)
    staged: dict[tuple[object, ...], Stages | None] = field(default_factory=dict)
    cuts: dict[tuple[object, ...], Cut] = field(default_factory=dict)
    ways: dict[tuple[int, int], tuple[str, ...]] = field(default_factory=dict)

    @property
    def num_calls(self) -> int:
        return len(self.families.traced.calls)

    def computing(self, point: Point) -> Computing | None:
        """Seconds and activations of the calls, whatever becomes of parameters."""
        key = (point.context, point.tensor, point.rematerialize, point.cp, point.tp, point.rows)
        if key not in self.computed:
            family = Family("ddp", point.context, point.tensor, point.rematerialize)
            sizes = {"dp": self.rows // point.rows, "cp": point.cp, "tp": point.tp}
            program = self.families.on(family, self.cluster.mesh({axis: sizes[axis] for axis in family.axes}))
            self.computed[key] = Computing.of(program) if program is not None else None
        return self.computed[key]

    def moving(self, point: Point) -> Moving | None:
        """What becomes of parameters: their gathers, reductions and bytes."""
        key = (point.data, point.context, point.tensor, point.dp, point.cp, point.tp, point.pp, point.microbatches > 1)
        if key not in self.moved:
            family = Family(point.data, point.context, point.tensor, "none")
            whole = self.cluster.mesh({"pp": point.pp, "dp": point.dp, "cp": point.cp, "tp": point.tp})
            own = Mesh([(axis, getattr(point, axis)) for axis in family.axes], hardware=self.cluster.hardware)
            object.__setattr__(own, "whole", whole)
            program = self.families.on(family, own, rows=False)
            if program is not None:
                program = in_pieces(program, own)
                program = replace(program, microbatches=2 if point.microbatches > 1 else 1)
                program = overlap(program, strategies=family.strategies(own))
            self.moved[key] = None if program is None else Moving.of(program)
        return self.moved[key]

    def stages(self, point: Point) -> Stages | None:
        """The stages of a point's pipeline, cut where it balances; whatever the schedule."""
        num = point.pp * point.stages_per_rank
        moving, own = self.moving(point), self.computing(point)
        if moving is None or own is None or num > self.num_calls:
            return None
        key = (id(moving), id(own), point.pp, point.stages_per_rank)
        if key not in self.staged:
            forward, backward = seconds_of_calls(own, moving)
            seconds = forward + backward
            relative = np.round(seconds / np.median(seconds) * _PARTS)
            shape = (num, *relative)
            if shape not in self.cuts:
                self.cuts[shape] = Cut.of(moving.program, relative, num)
            self.staged[key] = stages_of(own, moving, self.cuts[shape], point.pp)
        return self.staged[key]

    def alone_seconds(self, point: Point) -> float | None:
        """A step without a pipeline, gathers and reductions beside the compute."""
        moving, own = self.moving(point), self.computing(point)
        if moving is None or own is None:
            return None
        times = {}
        for name, time in own.times.items():
            other = moving.times[name]
            times[name] = replace(other, forward_s=time.forward_s, backward_s=time.backward_s + other.backward_s)
            times[name] = replace(times[name], forward_inside=time.forward_inside, backward_inside=time.backward_inside)
        program = moving.program
        calls = [times[call.region] for call in program.calls]
        seconds = step_seconds(
            calls,
            microbatches=point.microbatches,
            prefetch=True,
            at_end=False,
            training=program.training,
            slowdown=self.cluster.hardware.overlap_slowdown,
        )
        return seconds + moving.update_s

    def alone_bytes(self, point: Point, stages: Stages) -> float:
        """What a rank without a pipeline holds at most. Over microbatches gradients wait unreduced; in one alone they
        take the place of activations as the backward goes.
        """
        moving, own = self.moving(point), self.computing(point)
        assert moving is not None and own is not None
        working, saved = float(stages.working_bytes[0]), float(stages.saved_bytes[0])
        size = float(stages.static_bytes[0]) + working + point.microbatches * own.output_bytes
        if point.microbatches > 1:
            return size + saved
        leaving = 2 * float(moving.own["raw_bytes"].max())  # of two calls: made, and on its way
        return size - moving.whole("waiting_bytes") + max(saved, moving.whole("reduced_bytes") + leaving)

    def contexts(self, point: Point) -> tuple[str, ...]:
        """The ways to split the sequence, the fastest first, as they are without tensor parallelism."""
        key = (point.cp, point.rows)
        if key in self.ways:
            return self.ways[key]
        found = []
        for context in CONTEXTS:
            own = self.computing(replace(point, context=context, tensor="", tp=1, rematerialize="none"))
            if own is not None:
                found.append((float(own.own["forward"].sum() + own.own["backward"].sum()), context))
        self.ways[key] = tuple(context for _, context in sorted(found))
        return self.ways[key]

    def send_seconds(self, point: Point, num_bytes: float) -> float:
        """Of one message to the next stage."""
        if point.pp == 1:
            return 0.0
        link: Link = self.cluster.mesh({"pp": point.pp, "rest": self.cluster.num_devices // point.pp}).link("pp")
        return link.latency_s + num_bytes / (link.wire_bandwidth_bytes_per_s or link.bandwidth_bytes_per_s)
