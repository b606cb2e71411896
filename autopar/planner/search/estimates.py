"""What the points of a search take: one trace, a placement for each family of strategies, the rest by substitution.

A model is traced once, for the rows of one microbatch, and a rank's rows follow from the size of the data axis that is
put in: 4 traced rows over dp=2 are what 128 rows over dp=64 are, to every operator. What is moved of parameters does
not depend on rows, and is read off the same placement with the data axis as large as it is.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.cost.call_times import hidden_seconds, with_shared
from autopar.ir.graphs import operands_of
from autopar.ir.placement import Overlap
from autopar.machine.hardware import Link
from autopar.passes.placement.mixtures import is_experts
from autopar.planner.search.candidate import Point
from autopar.planner.search.cluster import Cluster
from autopar.planner.search.families import Families, Family
from autopar.planner.search.space import CONTEXTS, TENSOR
from autopar.planner.search.stages import Computing, Cut, Moving, Stages, seconds_of_calls, stages_of
from autopar.strategies.names import by_name

_PARTS = 16
"""Calls are cut by seconds that are rounded to so many parts of the usual call's."""
_ALIKE = 0.99
"""Of two ways to split a sample the slower one is worked out where it holds less than this part of the other."""
THERE_AND_BACK = frozenset({"zbv", "dualpipev"})
"""Schedules whose second stages go back through the ranks."""


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
    known_ways: dict[tuple[int, int, int], frozenset[tuple[str, str]]] = field(default_factory=dict)

    @property
    def num_calls(self) -> int:
        return len(self.families.traced.calls)

    @property
    def experts(self) -> int:
        """What axes divide over which tokens go to their experts; 1 where the model has none, or an odd number."""
        counts = [
            operands_of(node)[3].meta["val"].shape[0]
            for region in self.families.traced.regions for node in region.graph.nodes if is_experts(node)
        ]  # fmt: skip
        number = math.gcd(*counts)
        return number if number and number % 2 == 0 else 1

    @property
    def num_blocks(self) -> int:
        """Calls of regions that repeat."""
        calls = [call.region for call in self.families.traced.calls]
        return sum(calls.count(region) > 1 for region in calls) or len(calls)

    def computing(self, point: Point) -> Computing | None:
        """Seconds and activations of the calls, whatever becomes of parameters."""
        key = (point.context, point.tensor, point.rematerialize, point.ep, point.cp, point.tp, point.rows)
        if key not in self.computed:
            family = Family(point.context, point.tensor, point.rematerialize, point.ep > 1)
            ranks, rest = divmod(self.rows, point.rows * point.ep)
            sizes = {"dp": ranks, "ep": point.ep, "cp": point.cp, "tp": point.tp}
            program = None
            if ranks and not rest:
                program = self.families.on(family, self.cluster.mesh({axis: sizes[axis] for axis in family.axes}))
            self.computed[key] = Computing.of(program) if program is not None else None
        return self.computed[key]

    def moving(self, point: Point) -> Moving | None:
        """What becomes of parameters: their gathers, reductions and bytes."""
        several = point.microbatches > 1
        key = (point.kind[:-1], several)
        if key not in self.moved:
            family = Family(point.context, point.tensor, "none", point.ep > 1)
            data = {"node": point.across} if point.across else {}
            data["dp"] = point.data
            if point.exchange:
                data["ep"] = point.exchange
            sizes = {axis: getattr(point, axis) for axis in dict.fromkeys((*data, *family.axes))}
            mesh = self.cluster.mesh({"pp": point.pp, **sizes}).without("pp")
            program = self.families.moving(family, mesh, data, 2 if several else 1)
            self.moved[key] = None if program is None else Moving.of(program)
        return self.moved[key]

    def stages(self, point: Point) -> Stages | None:
        """The stages of a point's pipeline, cut where it balances; whatever the schedule."""
        num = point.pp * point.stages_per_rank
        moving, own = self.moving(point), self.computing(point)
        if moving is None or own is None or num > self.num_calls:
            return None
        back = point.schedule in THERE_AND_BACK
        key = (id(moving), id(own), point.pp, point.stages_per_rank, back)
        if key not in self.staged:
            forward, backward = seconds_of_calls(own, moving)
            seconds = forward + backward
            relative = np.round(seconds / np.median(seconds) * _PARTS)
            shape = (num, *relative)
            if shape not in self.cuts:
                self.cuts[shape] = Cut.of(moving.program, relative, num)
            self.staged[key] = stages_of(own, moving, self.cuts[shape], point.pp, back=back)
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
        program = replace(moving.program, microbatches=point.microbatches)
        calls = [times[call.region] for call in program.calls]
        for shared in program.shared:
            calls = with_shared(program, shared, calls)
        overlapped = Overlap(prefetch=True, at_end=_reduces_at_end(point), extra_bytes=0)
        after_another, hidden = hidden_seconds(program, overlapped, calls)
        return after_another - hidden + moving.update_s

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
        made = moving.whole["raw_bytes" if _reduces_at_end(point) else "reduced_bytes"]
        leaving = 2 * moving.largest_gradient_bytes  # of two calls: made, and on its way
        return size - moving.whole["waiting_bytes"] + max(saved, made + leaving)

    def ways(self, point: Point) -> frozenset[tuple[str, str]]:
        """The ways to split the sequence, with tensor parallelism beside them, that are worth more than their name on
        the axes of a point: the fastest, and those that are slower and hold less.
        """
        key = (point.ep, point.cp, point.tp)
        if key not in self.known_ways:
            tensors, contexts = TENSOR if point.tp > 1 else ("",), CONTEXTS if point.cp > 1 else ("",)
            found = []
            for context, tensor in itertools.product(contexts, tensors):
                own = self.computing(replace(point, context=context, tensor=tensor, rematerialize="none"))
                if own is not None:
                    found.append((own.total_s, own.saved_bytes, (context, tensor)))
            least, kept = math.inf, []
            for _, size, way in sorted(found):
                if size < _ALIKE * least:
                    least = size
                    kept.append(way)
            self.known_ways[key] = frozenset(kept)
        return self.known_ways[key]

    def send_seconds(self, point: Point, num_bytes: float) -> float:
        """Of one message to the next stage."""
        if point.pp == 1:
            return 0.0
        link: Link = self.cluster.mesh({"pp": point.pp, "rest": self.cluster.num_devices // point.pp}).link("pp")
        return link.latency_s + num_bytes / (link.wire_bandwidth_bytes_per_s or link.bandwidth_bytes_per_s)


def _reduces_at_end(point: Point) -> bool:
    return by_name(point.innermost).reduces == "at_end"
