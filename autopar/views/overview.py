"""The overview of a plan: all regions at the level of modules, with what flows between them, and the stages of a
pipeline as lanes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from autopar.ir.interface_text import format_tensor
from autopar.planner.plan.drawn import RegionView, Views
from autopar.planner.plan.record import PlanRecord
from autopar.views.boxes import boxes_of
from autopar.views.dot import Dot
from autopar.views.lanes import draw_lanes, num_lane_boxes
from autopar.views.modules import Drawn, Modules, depths_of
from autopar.views.style import LEGEND, PAPER, Style


def draw_overview(dot: Dot, plan: PlanRecord, views: Views, style: Style, phases: Sequence[str], others: int) -> str:
    """All regions. others: nodes that come on top, such as the legend's. Returns a node above all regions."""
    return _Overview(dot, plan, views, style, phases, others).draw()


class _Overview:
    def __init__(
        self, dot: Dot, plan: PlanRecord, views: Views, style: Style, phases: Sequence[str], others: int
    ) -> None:
        self.dot, self.plan, self.views, self.style = dot, plan, views, style
        self.io = {f"in:{each.name}": each for each in plan.interface.of_program().inputs}
        self.io |= {f"out:{each.name}": each for each in plan.interface.of_program().outputs}
        others += num_lane_boxes(plan.pipeline) if plan.pipeline is not None else 0
        moves = sum(bool(region.moves) for region in views.regions) * len(phases)
        depths = depths_of(views, phases, others + len(self.io) + moves)
        self.drawn = {
            (region.name, phase): Drawn(region, phase, boxes_of(region, phase, depths[region.name, phase]))
            for phase in phases
            for region in views.regions
        }
        self.drawn = {key: drawn for key, drawn in self.drawn.items() if drawn.boxes.boxes}
        self.modules = Modules(dot, style, full=False)
        self.phases = phases

    def draw(self) -> str:
        """The forward's column left of the backward's; above them the legend, above that the stages of a pipeline."""
        lanes = draw_lanes(self.dot, self.plan, self.style, self.phases) if self.plan.pipeline is not None else []
        tops = [self._column(phase) for phase in self.phases]
        for drawn in self.drawn.values():
            self._between(drawn, "out:")
        self.dot.columns("top", tops)
        for lane in lanes:
            self.dot.below(lane, LEGEND)
        return "top"

    def _column(self, phase: str) -> str:
        """One phase, its regions one below another. Returns the node that it begins with."""
        order = list(dict.fromkeys(call.region for call in self.views.calls))
        column = [self.drawn[name, phase] for name in order if (name, phase) in self.drawn]
        with self.dot.cluster(f"column:{phase}", "", style="invis", margin="4"):
            for name in self.io:
                if phase == self.phases[0]:
                    self._border(name)
            for drawn in column:
                self.modules.region(drawn)
            for above, below in itertools.pairwise(column):
                self.modules.stack(above, below)
            for drawn in column:
                self._between(drawn, "")
            for name, ref in self.views.outputs if phase == "forward" else ():
                for source in self._made(ref):
                    self.modules.flow(source, f"out:{name}", None, False)
        return self.modules.head(column[0])

    def _border(self, id: str) -> None:
        tensor = self.io[id]
        text = format_tensor(tensor, self.plan.interface.axes)
        self.dot.node(
            id, [tensor.name, text], style="rounded,filled", fillcolor=PAPER, tooltip=f"{tensor.name}: {text}"
        )

    def _between(self, drawn: Drawn, beginning: str) -> None:
        """What enters a region: from others and from the program's inputs (`beginning` is ""), or from the program's
        outputs, whose gradients they are (`out:`).
        """
        kind = "grad:" if drawn.up else "in:"
        fixed = {f"in:{port.name}" for port in drawn.region.inputs if not port.differentiable}
        for flow in drawn.boxes.flows:
            if flow.source.startswith(kind):
                for source in self._sources(drawn.region, flow.source):
                    if source.startswith("out:") is bool(beginning):
                        target = drawn.id_of(flow.target)
                        self.modules.flow(source, target, flow.value, drawn.up, flow.source in fixed)
        for way in drawn.boxes.ways:
            if way.source.startswith(kind):
                for number, source in enumerate(self._sources(drawn.region, way.source)):
                    if source.startswith("out:") is bool(beginning):
                        self.modules.way(drawn, source, way, first=not number)

    def _sources(self, region: RegionView, end: str) -> list[str]:
        """The nodes from which a region gets an input, or the gradient of an output; its own calls left out."""
        kind, _, name = end.partition(":")
        found: list[str] = []
        for number, call in enumerate(self.views.calls):
            if call.region != region.name:
                continue
            if kind == "in":
                at = next((i for i, port in enumerate(region.inputs) if port.name == name), None)
                refs = self._made(call.reads[at]) if at is not None else []
            else:
                refs = [
                    ref
                    for index, port in enumerate(region.outputs)
                    if port.name == name
                    for ref in self._wanting(f"{number}.{index}", set())
                ]
            found += [ref for ref in refs if ref not in found]
        own = (f"box:{region.name}.", f"after:{region.name}.")
        return [ref for ref in found if not ref.startswith(own)]

    def _made(self, ref: str) -> Iterator[str]:
        """The node that makes what `CALL.INDEX` or `in:NAME` stands for; none where its region draws nothing."""
        if ref.startswith("in:"):
            yield ref
            return
        call = self.views.calls[int(ref.split(".")[0])]
        region, drawn = self.views.region(call.region), self.drawn.get((call.region, "forward"))
        name = region.outputs[int(ref.split(".")[1])].name
        if name.startswith("in:"):
            at = [f"in:{port.name}" for port in region.inputs].index(name)
            yield from self._made(call.reads[at])
        elif drawn is not None and (end := drawn.boxes.end_of.get(name)) is not None:
            yield drawn.id_of(end)

    def _wanting(self, ref: str, seen: set[str]) -> Iterator[str]:
        """The nodes that make the gradient of a call's result: in the backward of the calls that read it, or the user's
        of an output.
        """
        if ref in seen:
            return
        seen.add(ref)
        for name, other in self.views.outputs:
            if other == ref and self.io[f"out:{name}"].differentiable:
                yield f"out:{name}"
        for number, call in enumerate(self.views.calls):
            for at, read in enumerate(call.reads):
                if read == ref:
                    yield from self._gradient(number, at, seen)

    def _gradient(self, number: int, at: int, seen: set[str]) -> Iterator[str]:
        call = self.views.calls[number]
        drawn = self.drawn.get((call.region, "backward"))
        if drawn is None:
            return
        wanted = f"in:{drawn.region.inputs[at].name}"
        maker = next((maker for of, maker in drawn.region.gradients if of == wanted), None)
        if maker is None:
            return
        if maker.startswith("grad:"):
            output = [port.name for port in drawn.region.outputs].index(maker.removeprefix("grad:"))
            yield from self._wanting(f"{number}.{output}", seen)
        elif (end := drawn.boxes.end_of.get(maker)) is not None:
            yield drawn.id_of(end)
