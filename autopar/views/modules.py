"""Pictures of modules: each region once in a phase, as a frame with its modules as boxes, what flows between them, and
the collectives on the way; the forward down the page, the backward up beside it, in frames of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.base.text import format_bytes, format_count, format_time
from autopar.planner.plan.drawn import MoveView, OpView, RegionView, SlotView, ValueView, Views
from autopar.views.boxes import Arrow, Box, Boxes, axes_of, boxes_of, deepest, is_float
from autopar.views.dot import LABEL, TITLE, Dot
from autopar.views.style import BOLD, FAINT, FRAME, PAPER, QUIET_LINE, Style, collective_lines, operators, shortened

MAX_BOXES = 60
"""Nodes of an overview."""
MIN_BOXES = 2
"""Of a region, where its modules have others in them."""
MAX_LINES = 4
"""Parameters in a box of an overview."""
MAX_SLOTS = 12
"""Parameters in a bucket."""
MAX_WORDS = 28
"""Letters of a parameter's name."""


def depths_of(views: Views, phases: Sequence[str], others: int) -> dict[tuple[str, str], int]:
    """How deep the modules of each region and phase are drawn, so that boxes and `others` are no more than MAX_BOXES:
    one level below a repeated module, more where that is a single box; where that is too much, less of what has most
    boxes, of the backward first.
    """
    found: dict[tuple[str, str], int] = {}
    for region in views.regions:
        depth = len(region.module.split(".")) + 1 if region.module else deepest(region)
        while depth < deepest(region) and _count(region, phases[0], depth) < MIN_BOXES:
            depth += 1
        found |= {(region.name, phase): depth for phase in phases}
    counts = {key: _count(views.region(key[0]), key[1], depth) for key, depth in found.items()}
    while sum(counts.values()) > MAX_BOXES - others:
        for phase in reversed(phases):
            large = [key for key in counts if key[1] == phase and counts[key] > 1 and found[key] > 0]
            if large:
                key = max(large, key=lambda each: counts[each])
                found[key] -= 1
                counts[key] = _count(views.region(key[0]), phase, found[key])
                break
        else:
            break
    return found


def _count(region: RegionView, phase: str, depth: int) -> int:
    return len(boxes_of(region, phase, depth).boxes)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A region in one phase."""

    region: RegionView
    phase: str
    boxes: Boxes

    @property
    def up(self) -> bool:
        """Whether it is drawn from the bottom to the top."""
        return self.phase == "backward"

    @property
    def frame(self) -> str:
        return f"{'backward' if self.up else 'region'}:{self.region.name}"

    @property
    def parameters(self) -> str:
        return f"parameters:{self.region.name}" + ("@backward" if self.up else "")

    def id_of(self, end: str) -> str:
        """The node of one of its ends."""
        kind, name = "box", self.region.name
        if end.startswith("@"):
            kind, end = "after", end.removeprefix("@")
        elif end.startswith("saved:"):
            kind, end = "saved", end.removeprefix("saved:")
        elif end.startswith("p:"):
            return self.parameters
        return f"{kind}:{name}.{end}"


class Modules:
    """Regions in the making. full: every parameter and every bucket is named; else the first few, and sums."""

    def __init__(self, dot: Dot, style: Style, full: bool) -> None:
        self.dot, self.style, self.full = dot, style, full
        self.labelled: set[tuple[str, str]] = set()
        self.joined: set[tuple[str, str]] = set()
        self.buckets: list[str] = []

    def region(self, drawn: Drawn) -> None:
        """The frame with all that is inside."""
        region = drawn.region
        times = f" × {region.calls}" if region.calls > 1 else ""
        seconds = format_time(sum(box.seconds for box in drawn.boxes.boxes))
        title = f"{region.name}{times}, {drawn.phase}   {seconds}"
        tooltip = "\n".join([title, region.module, _summary(drawn)])
        outer = {"style": "rounded,filled", "fillcolor": FRAME, "color": FAINT}
        inner = {"style": "rounded,filled", "fillcolor": PAPER, "color": "#D5D9DF"}
        named = [title, shortened(region.module, 48)] if region.module else [title]
        with self.dot.cluster(drawn.frame, "", margin="10", tooltip=tooltip, **outer):
            self.dot.title(drawn.frame, named)
            moves, has_node = self.moves_of(drawn), self._has_parameters(drawn)
            if has_node:
                self._parameters(drawn)
            with self.dot.cluster(f"modules:{drawn.frame}", "", margin="8", **inner):
                self._modules(drawn)
            for way in drawn.boxes.ways:
                if self._leaves(drawn, way):
                    self.way(drawn, drawn.id_of(way.source), way)
            for id, rows in moves:
                (self._bucket if self.full else self._move)(drawn, id, rows)
            ends = self._ends(drawn, up=drawn.up)
            for end in ends if has_node else ():
                self.dot.below(drawn.parameters, end)
            buckets = [node for node in self.buckets if f":{drawn.frame}." in node]
            for node in [drawn.parameters] if has_node else [*ends, *buckets]:
                self.dot.below(self.head(drawn), node, weight=0 if node.startswith(LABEL) else 2)

    def stack(self, above: Drawn, below: Drawn) -> None:
        """What one frame begins with stands below all of another."""
        for foot in self._ends(above, up=not above.up):
            self.dot.below(foot, self.head(below))
        self.dot.below(self.head(above), self.head(below), weight=20)

    def head(self, drawn: Drawn) -> str:
        """What a frame begins with at the top: its title."""
        return f"{TITLE}{drawn.frame}"

    def way(self, drawn: Drawn, source: str, way: Arrow, first: bool = True) -> None:
        """An edge of collectives; within a box, one that leaves it and comes back. first: the one that says what they
        are, where a value comes from several places.
        """
        target = self._gradient_of(drawn, way.target) or drawn.id_of(way.target)
        value, style = way.ops[-1].result, self.style.collective(way.ops)
        ids = [f"op:{drawn.region.name}.{op.name}" for op in way.ops]
        id = ids[0] if first else ""
        self.dot.members |= {id: ids} if first else {}
        lines = collective_lines(way.ops) if first else []
        if source != target and first and value is not None and is_float(value):
            lines = [*lines, f"→ {self.style.type(value)}"]
        self.dot.edge(source, target, lines, drawn.up, id=id, **style)

    def flow(self, source: str, target: str, value: ValueView | None, up: bool, quiet: bool = False) -> None:
        """An edge with its value's type, which is said once where several boxes read it. quiet: what no gradient flows
        through.
        """
        if (source, target) in self.joined:
            return
        self.joined.add((source, target))
        quiet = quiet or value is None or not is_float(value)
        label = "" if value is None or quiet else self.style.type(value)
        style = {"color": QUIET_LINE, "arrowsize": "0.5"} if quiet else {}
        lines = [] if (source, label) in self.labelled or not label else [label]
        self.labelled.add((source, label))
        self.dot.edge(source, target, lines, up, **style)

    # -- inside a frame
    # -----------------------------------------------------------------------------------------------------------

    def _modules(self, drawn: Drawn) -> None:
        boxes = drawn.boxes
        for box in boxes.boxes:
            self._box(drawn, box)
        for name in boxes.junctions:
            if not self._gradient_of(drawn, f"@{name}"):
                axis = next(op.axis for way in boxes.ways for op in way.ops if op.name == name)
                self.dot.point(drawn.id_of(f"@{name}"), color=self.style.colour[axis])
        for flow in boxes.flows:
            if ":" not in flow.source:
                self.flow(drawn.id_of(flow.source), drawn.id_of(flow.target), flow.value, drawn.up)
        for source in dict.fromkeys(way.source for way in boxes.ways if way.source.startswith("saved:")):
            self.dot.point(drawn.id_of(source), color=FAINT, tooltip=f"saved by the forward: {source[6:]}")
        for way in boxes.ways:
            if not way.source.startswith(("in:", "grad:")) and not self._leaves(drawn, way):
                self.way(drawn, drawn.id_of(way.source), way)

    def _leaves(self, drawn: Drawn, way: Arrow) -> bool:
        """Whether a way begins or ends at the parameters: drawn within the modules' frame, it would draw them there."""
        inside = not way.source.startswith(("in:", "grad:"))
        return inside and (way.source.startswith("p:") or bool(self._gradient_of(drawn, way.target)))

    def _gradient_of(self, drawn: Drawn, end: str) -> str:
        """The node of the parameters, where an end is nothing but a gradient of one of them."""
        slots = [of for of, maker in drawn.region.gradients if f"@{maker}" == end and of.startswith("p:")]
        read = end in drawn.boxes.sources
        return drawn.parameters if slots and not read and self._has_parameters(drawn) else ""

    def _ends(self, drawn: Drawn, up: bool) -> list[str]:
        """The nodes of a region that nothing in it flows into; up: that nothing flows out of."""
        ways = [way for way in drawn.boxes.ways if not self._gradient_of(drawn, way.target)]
        inner = [(flow.source, flow.target) for flow in drawn.boxes.flows if ":" not in flow.source]
        inner += [(way.source, way.target) for way in ways if ":" not in way.source]
        inside = {pair[0 if up else 1] for pair in inner if pair[0] != pair[1]}
        ends = [*(box.key for box in drawn.boxes.boxes), *(way.target for way in ways if way.target.startswith("@"))]
        loops = [f"{LABEL}op:{drawn.region.name}.{way.ops[0].name}" for way in ways if way.source == way.target and up]
        return [*(drawn.id_of(end) for end in ends if end not in inside), *loops]

    def _box(self, drawn: Drawn, box: Box) -> None:
        region = drawn.region
        inside = box.path.removeprefix(region.module).lstrip(".") if region.module else box.path
        names = operators(box.ops)
        whole = inside or ("" if len(box.ops) < MAX_LINES else box.path)
        lines = [shortened(whole), names] if whole else [names]
        if box.seconds:
            lines.append(format_time(box.seconds))
        slots = [slot for slot in region.slots if slot.name in box.slots and slot.is_parameter]
        lines += self._slot_lines(slots, f"{inside}.")
        values = [op.result for op in box.ops if op.kind != "view" or op.op == "getitem"]
        style = self.style.fill([*values, *(slot.used for slot in slots)])
        tooltip = [box.path or region.name, *(_described(op) for op in box.ops)]
        weight = {"penwidth": "1.4", "color": BOLD} if slots else {}
        self.dot.members[drawn.id_of(box.key)] = [f"op:{region.name}.{op.name}" for op in box.ops]
        self.dot.node(drawn.id_of(box.key), lines, tooltip="\n".join(tooltip), **(style | weight))

    def _slot_lines(self, slots: Sequence[SlotView], prefix: str) -> list[str]:
        if not self.full:  # matrices before their biases
            slots = sorted(slots, key=lambda slot: len(slot.used.shape) == 1)
        most = len(slots) if self.full or len(slots) == MAX_LINES + 1 else MAX_LINES
        names = [slot.name.removeprefix(prefix).removesuffix(".weight") for slot in slots[:most]]
        lines = [
            f"{shortened(name, MAX_WORDS)} {self.style.shape(slot.used)}"
            for name, slot in zip(names, slots, strict=False)
        ]
        return lines + ([f"… {len(slots) - most} more"] if len(slots) > most else [])

    # -- parameters
    # -----------------------------------------------------------------------------------------------------------

    def _has_parameters(self, drawn: Drawn) -> bool:
        """Whether a region's parameters are a node, rather than one for each bucket."""
        moved = any(way.source.startswith("p:") for way in drawn.boxes.ways)
        return moved or (not self.full and bool(self.moves_of(drawn)))

    def moves_of(self, drawn: Drawn) -> list[tuple[str, list[MoveView]]]:
        """The collectives of parameters in the phases that are drawn, with an id: each, or those of a purpose, kind,
        axis and number of times a step together.
        """
        found: dict[object, tuple[str, list[MoveView]]] = {}
        counts: dict[str, int] = {}
        for move in drawn.region.moves:
            number = counts[move.which] = counts.get(move.which, -1) + 1
            if (move.which == "gather") is not drawn.up:
                key = (move.which, number) if self.full else (move.which, move.kind, move.axis, move.once)
                own = f"move:{drawn.region.name}.{move.which}.{number}"
                id, rows = found.setdefault(key, (own, []))
                rows.append(move)
                if own not in self.dot.members.setdefault(id, []):
                    self.dot.members[id].append(own)
        return list(found.values())

    def _parameters(self, drawn: Drawn) -> None:
        slots = [slot for slot in drawn.region.slots if slot.is_parameter]
        size = sum(math.prod(slot.stored.shape) for slot in slots)
        title = "parameters and gradients" if drawn.up else "parameters"
        lines = [title, f"{len(slots)} with {format_count(size)} elements", self._stored(slots)]
        texts = [
            f"{slot.tensor}: stored {self.style.type(slot.stored)}, used {self.style.type(slot.used)}" for slot in slots
        ]
        style = self.style.fill([slot.stored for slot in slots]) | {"penwidth": "1.4", "color": BOLD}
        self.dot.node(drawn.parameters, lines, tooltip="\n".join(texts), **style)

    def _stored(self, slots: Sequence[SlotView]) -> str:
        """`f32, dp splits all, tp 7`."""
        parts = ["/".join(dict.fromkeys(slot.stored.dtype for slot in slots))]
        for axis in self.style.axes:
            count = sum(axis in axes_of([slot.stored], self.style.axes) for slot in slots)
            if count:
                parts.append(f"{axis} splits {'all' if count == len(slots) else count}")
        return ", ".join(parts if len(parts) > 1 else [*parts, "whole on every rank"])

    def _move(self, drawn: Drawn, id: str, rows: Sequence[MoveView]) -> None:
        lines, style = collective_lines(rows), self.style.collective(rows) | {"id": id}
        boxes, frame = drawn.boxes.boxes, f"cluster_modules:{drawn.frame}"
        inside = drawn.id_of((boxes[-1] if drawn.up else boxes[0]).key)
        if rows[0].which == "reduce":
            self.dot.edge(inside, drawn.parameters, lines, True, ltail=frame, **style)
        else:
            lines += ["once a step"] * rows[0].once
            self.dot.edge(drawn.parameters, inside, lines, lhead=frame, **style)

    def _bucket(self, drawn: Drawn, id: str, rows: Sequence[MoveView]) -> None:
        """The parameters of one bucket, as stored, and its collectives; to or from the first module that has any."""
        move = rows[0]
        reduces = move.which == "reduce"
        node = f"{'gradients' if reduces else 'bucket'}:{drawn.frame}.{move.slots[0]}"
        slots = [slot for slot in drawn.region.slots if slot.name in move.slots]
        if node not in self.buckets:
            self.buckets.append(node)
            names = [f"{shortened(slot.name)} {self.style.type(slot.stored)}" for slot in slots[:MAX_SLOTS]]
            names += [f"… {len(slots) - MAX_SLOTS} more"] if len(slots) > MAX_SLOTS else []
            title = "gradients of" if reduces else "stored"
            style = self.style.fill([slot.stored for slot in slots]) | {"fontsize": "9"}
            self.dot.node(node, [title, *names], tooltip="\n".join(slot.tensor for slot in slots), **style)
        made = {of: drawn.boxes.end_of.get(maker, "") for of, maker in drawn.region.gradients}
        ends = [made.get(f"p:{slot.name}", "") for slot in slots] if reduces else []
        if not reduces:
            ends = [box.key for box in drawn.boxes.boxes if set(box.slots) & set(move.slots)]
        ends = [drawn.id_of(end) for end in dict.fromkeys(ends) if end]
        lines, style = collective_lines(rows), self.style.collective(rows)
        lines += ["once a step"] * (move.once and not reduces)
        for number, end in enumerate(ends):
            said, own = (lines, {"id": id}) if not number else ([], {"penwidth": "0.8"})
            if reduces:
                self.dot.edge(end, node, said, drawn.up, **(style | own))
            else:
                self.dot.edge(node, end, said, drawn.up, **(style | own))


def _described(op: OpView) -> str:
    seconds = op.compute_seconds if op.kind == "collective" else op.seconds
    return f"{op.name}: {op.op}" + (f", {format_time(seconds)}" if seconds else "")


def _summary(drawn: Drawn) -> str:
    """What one call computes and sends."""
    sent = sum(op.bytes_sent for op in drawn.region.ops if op.phase == drawn.phase)
    return f"{len(drawn.boxes.boxes)} boxes, {format_bytes(sent)} sent in a call"
