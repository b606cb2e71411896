"""Every operator of a region as a node, every collective as an edge."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.base.text import format_bytes, format_count, format_time
from autopar.planner.plan.drawn import OpView, RegionView, ValueView
from autopar.views.boxes import is_float, is_ring
from autopar.views.dot import TITLE, Dot
from autopar.views.style import BOLD, FAINT, PAPER, QUIET_LINE, Style, collective_lines, shortened

HEAVY = ("matmul", "attention", "attention_backward", "convolution")


def draw_operators(dot: Dot, regions: Sequence[RegionView], style: Style, phases: Sequence[str]) -> str:
    """Each phase of each region in a frame of its own, the forward left of the backward. Returns a node above the
    first: one above all would let Graphviz put backwards on the left.
    """
    for region in regions:
        titles = []
        times = f" × {region.calls}" if region.calls > 1 else ""
        for phase in phases:
            if not any(op.phase == phase for op in region.ops):
                continue
            id = f"{'backward' if phase == 'backward' else 'region'}:{region.name}"
            with dot.cluster(id, "", style="rounded,filled", fillcolor=PAPER, color=FAINT, margin="12"):
                title = f"{region.name}{times}, {phase}"
                dot.title(id, [title, region.module] if region.module else [title])
                _Phase(dot, region, style, phase, f"{TITLE}{id}").draw()
            titles.append(f"{TITLE}{id}")
        dot.columns(f"top:{region.name}", titles)
    return f"top:{regions[0].name}"


class _Phase:
    def __init__(self, dot: Dot, region: RegionView, style: Style, phase: str, title: str) -> None:
        self.dot, self.region, self.style, self.phase, self.title = dot, region, style, phase, title
        self.ops = {op.name: op for op in region.ops if op.phase == phase}
        self.readers: dict[str, list[OpView]] = {}
        for op in self.ops.values():
            for read in op.reads:
                self.readers.setdefault(read, []).append(op)
        self.others: list[str] = []
        self.results = {port.name for port in region.outputs} | {maker for _, maker in region.gradients}

    def draw(self) -> None:
        for op in self.ops.values():
            if not _moves(op):
                self._node(op)
            elif self._target(op) is None:
                self.dot.point(f"after:{self.region.name}.{op.name}", color=self.style.colour[op.axis])
        for op in self.ops.values():
            if _moves(op):
                target = self._target(op) or f"after:{self.region.name}.{op.name}"
                lines = collective_lines([op])
                if op.result is not None:
                    lines = [*lines, f"→ {self.style.type(op.result)}"]
                self.dot.edge(
                    self._source(op.reads[0]), target, lines, id=self._id(op), **self.style.collective([op])
                )  # fmt: skip
                continue
            for read in op.reads:
                other = self.ops.get(read)
                if other is None or not _moves(other) or self._target(other) is None:
                    self._edge(read, op)
            if is_ring(op):
                self.dot.edge(
                    self._id(op), self._id(op), collective_lines([op]), id=f"{self._id(op)}.ring",
                    **self.style.collective([op]),
                )  # fmt: skip
        self._results()
        for id in [id for id in self.others if id.startswith(("in:", "grad:"))]:  # of all, Graphviz would take a minute
            self.dot.below(self.title, id)

    def _id(self, op: OpView) -> str:
        return f"op:{self.region.name}.{op.name}"

    def _target(self, op: OpView) -> str | None:
        """The operator that alone reads a collective's result."""
        readers = self.readers.get(op.name, [])
        alone = len(readers) == 1 and not _moves(readers[0]) and op.name not in self.results
        return self._id(readers[0]) if alone else None

    def _source(self, read: str) -> str:
        """The node of what is read, drawn where it comes from elsewhere."""
        if read in self.ops:
            op = self.ops[read]
            return f"after:{self.region.name}.{read}" if _moves(op) else self._id(op)
        kind, _, name = read.partition(":")
        id = f"{kind}:{self.region.name}.{name}"
        if kind == "saved" or (kind == "in" and self.phase == "backward"):
            id = f"saved:{self.region.name}.{name}"
        elif kind == "p" and self.phase == "backward":
            id += "@backward"
        if id not in self.others:
            self.others.append(id)
            self._given(id, kind, name)
        return id

    def _given(self, id: str, kind: str, name: str) -> None:
        value = self._value(kind, name)
        text = {"in": "", "p": "", "saved": "saved ", "grad": "gradient of "}[kind] + shortened(name)
        lines = [text] + ([self.style.type(value)] if value is not None else [])
        style = {"style": "rounded,filled", "fillcolor": PAPER, "color": FAINT}
        if kind == "p" and value is not None:
            style = self.style.fill([value]) | {"shape": "box3d"}
        self.dot.node(id, lines, tooltip="\n".join([name, *lines[1:]]), fontsize="9", **style)

    def _value(self, kind: str, name: str) -> ValueView | None:
        if kind == "p":
            return next((slot.used for slot in self.region.slots if slot.name == name), None)
        if kind == "saved":
            return next((op.result for op in self.region.ops if op.name == name), None)
        ports = self.region.inputs if kind == "in" else self.region.outputs
        return next((port.value for port in ports if port.name == name), None)

    def _node(self, op: OpView) -> None:
        seconds = op.compute_seconds if op.kind == "collective" else op.seconds
        lines = [op.op + (f" · {format_time(seconds)}" if seconds else "")]
        lines += [self.style.type(op.result)] if op.result is not None else []
        tooltip = [f"{self.region.name}.{op.name}", *lines, op.module, op.source]
        if op.op_class:
            amount = f"{format_count(op.flops)} FLOP, {format_bytes(op.moved_bytes)} read and written"
            tooltip.append(f"{op.op_class}: {amount}")
        # Of several results, the picks tell how they lie.
        results = [op.result] if op.result is not None else [each.result for each in self.readers.get(op.name, [])]
        style = self.style.fill(results) | {"color": FAINT}
        if op.kind == "view":
            style |= {"color": QUIET_LINE, "fontcolor": "#4A5058", "fontsize": "8"}
        elif op.op_class in HEAVY:
            style |= {"penwidth": "2", "color": BOLD}
        self.dot.node(self._id(op), lines, tooltip="\n".join(line for line in tooltip if line), **style)

    def _edge(self, read: str, op: OpView) -> None:
        value = self.ops[read].result if read in self.ops else None
        quiet = value is not None and not is_float(value)
        self.dot.edge(self._source(read), self._id(op), **({"color": QUIET_LINE} if quiet else {}))

    def _results(self) -> None:
        """What leaves the region in this phase."""
        if self.phase == "forward":
            wanted = [
                (f"out:{self.region.name}.{i}", port.name, port.name) for i, port in enumerate(self.region.outputs)
            ]
        else:
            wanted = [
                (f"grad:{self.region.name}.{of}", f"gradient of {of.partition(':')[2]}", maker)
                for of, maker in self.region.gradients
            ]
        for id, text, maker in wanted:
            if maker in self.ops:
                self.dot.node(id, [shortened(text, 44)], style="rounded,filled", fillcolor=PAPER, fontsize="9")
                self.dot.edge(self._source(maker), id)


def _moves(op: OpView) -> bool:
    return op.kind == "collective" and not is_ring(op)
