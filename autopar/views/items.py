"""What a click in the report shows: for every operator, collective, parameter and region some facts, and where it is in
the generated program.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autopar.base.errors import AutoparError
from autopar.base.text import format_bytes, format_count, format_time
from autopar.ir.sharding import format_shape, local_shape, parse_sharding
from autopar.ir.tensor_type import dtype_name
from autopar.planner.plan.drawn import MoveView, OpView, PortView, RegionView, SlotView, ValueView, Views
from autopar.planner.plan.record import PlanRecord

Item = dict[str, Any]
_ITEMSIZE = {"bf16": 2, "f16": 2, "f32": 4, "f64": 8, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u8": 1, "b8": 1}


class Items:
    """All items of a plan, by key: `op:REGION.NAME`, `p:REGION.SLOT`, `region:NAME`, `in:NAME`, `out:NAME`, `box:KEY`,
    `backward:REGION`, `move:REGION.WHICH.NUMBER`, `stage:N`.

    classes: parameters' names -> the name of their class. explained: what `plan.explain` has been asked.
    """

    def __init__(self, plan: PlanRecord, classes: Mapping[str, str], explained: Mapping[str, Any]) -> None:
        self.plan, self.views, self.classes, self.explained = plan, plan.drawn, classes, explained
        self.axes, self.sizes = plan.stage_mesh.axis_names, plan.stage_mesh.sizes
        self.lines = program_lines(plan.source, plan.drawn)
        self.steps = plan.interface.runs

    def all(self, boxes: Mapping[str, Sequence[str]]) -> dict[str, Item]:
        """boxes: what pictures draw as one, with the operators in it."""
        found: dict[str, Item] = {}
        for region in self.views.regions:
            found[f"region:{region.name}"] = self._region(region)
            found[f"backward:{region.name}"] = self._backward(region)
            for op in region.ops:
                found[f"op:{region.name}.{op.name}"] = self._op(region, op)
            for slot in region.slots:
                own = self._slot(region, slot)
                found[f"p:{region.name}.{slot.name}"] = own
                if any(op.phase == "backward" and f"p:{slot.name}" in op.reads for op in region.ops):
                    found[f"p:{region.name}.{slot.name}@backward"] = {**own, "phase": "backward"}
            for port in region.inputs:
                found[f"in:{region.name}.{port.name}"] = self._port(region, port, "enters")
            for name in (read[3:] for op in region.ops for read in op.reads if read.startswith("in:")):
                made = item("input", name, f"{name} enters {region.name}", region=region.name)
                found.setdefault(f"in:{region.name}.{name}", made)  # the seed of dropout
            for number, port in enumerate(region.outputs):
                found[f"out:{region.name}.{number}"] = self._port(region, port, "leaves")
            for which in dict.fromkeys(move.which for move in region.moves):
                for number, move in enumerate(move for move in region.moves if move.which == which):
                    found[f"move:{region.name}.{which}.{number}"] = self._move(region, move)
        for key, members in boxes.items():
            found.setdefault(key, self._box(key, members))
        border = self.plan.interface.of_program()
        for kind, tensors in (("in", border.inputs), ("out", border.outputs)):
            for tensor in tensors:
                text = format_shape(dtype_name(tensor.dtype), tensor.shape, tensor.sharding, self.axes)
                what = "input" if kind == "in" else "output"
                found[f"{kind}:{tensor.name}"] = item(
                    what, tensor.name, f"{what} {tensor.name}", facts=[("lies as", text)], explain=tensor.name
                )
        found.update(self._stages())
        return found

    def _op(self, region: RegionView, op: OpView) -> Item:
        facts = [("made by", f"{op.op}, {op.phase} of {region.name}")]
        if op.result is not None:
            facts += self._value("result", op.result)
        times = region.calls * self.steps
        if op.kind == "collective":
            facts += [
                ("moves", f"{op.op} over {op.axis}: {op.why}"),
                (
                    "sends",
                    f"{format_bytes(op.bytes_sent)} a rank and call, {format_bytes(op.bytes_sent * times)} a step",
                ),
                (
                    "takes",
                    f"{format_time(op.seconds)} a call, {format_time(op.seconds * times)} a step ({times} times)",
                ),
            ]
        elif op.seconds:
            facts.append(
                (
                    "computes",
                    f"{format_time(op.seconds)} a call, {format_time(op.seconds * times)} a step ({times} times)",
                )
            )
            if op.flops:
                speed = op.flops / op.seconds
                facts.append(("operations", f"{_si(op.flops)}FLOP a rank and call, {_si(speed)}FLOP/s"))
            if op.moved_bytes:
                facts.append(("reads and writes", f"{format_bytes(op.moved_bytes)} a rank and call"))
        elif op.kind == "view":
            facts.append(("computes", "nothing: another view of the same memory"))
        if op.op_class:
            facts.append(("class", op.op_class))
        facts.append(("reads", ", ".join(op.reads) or "nothing"))
        readers = [each.name for each in region.ops if op.name in each.reads and each.phase == op.phase]
        facts.append(("read by", ", ".join(readers) or "the region's results"))
        name = f"{region.name}.{op.name}"
        return item(
            "collective" if op.kind == "collective" else "view" if op.kind == "view" else "operator",
            op.name, f"{op.op} {op.module.removeprefix(region.module).lstrip('.') or region.module}".strip(),
            region=region.name, module=op.module, source=op.source, phase=op.phase, facts=facts,
            explain=name if op.kind == "compute" else None, line=self.lines.get(f"op:{name}"),
        )  # fmt: skip

    def _slot(self, region: RegionView, slot: SlotView) -> Item:
        facts = [*self._value("stored", slot.stored)]
        used = self._text(slot.used)
        facts.append(("in use", "as stored" if used == self._text(slot.stored) else used))
        for move in region.moves:
            if slot.name in move.slots:
                alone = "" if len(move.slots) == 1 else f", in a bucket of {len(move.slots)}"
                what = "gathered" if move.which.startswith("gather") else "gradient reduced"
                when = {"gather": "for the forward", "gather_for_backward": "for the backward"}.get(move.which, "")
                facts.append((f"{what} {when}".strip(), f"{move.kind} over {move.axis}{alone}"))
        readers = [f"{op.name} ({op.phase})" for op in region.ops if f"p:{slot.name}" in op.reads]
        facts.append(("read by", ", ".join(readers) or "nothing"))
        cls = self.classes.get(slot.tensor)
        module = ".".join(part for part in (region.module, *slot.name.split(".")[:-1]) if part)
        return item(
            "parameter", slot.name, cls or slot.tensor, region=region.name, module=module, facts=facts, parameter=cls,
            explain=cls if slot.is_parameter else None,
        )  # fmt: skip

    def _port(self, region: RegionView, port: PortView, way: str) -> Item:
        facts = self._value("lies as", port.value)
        facts.append(("gradient", "comes back" if port.differentiable else "none"))
        kind = "input" if way == "enters" else "output"
        return item(kind, port.name, f"{port.name} {way} {region.name}", region=region.name, facts=facts)

    def _move(self, region: RegionView, move: MoveView) -> Item:
        times = region.calls * (1 if move.once or move.which == "reduce" else self.steps)
        what = {"gather": "gather for the forward", "reduce": "reduce gradients"}
        facts = [
            ("moves", f"{move.kind} over {move.axis}"),
            ("tensors", ", ".join(move.slots)),
            (
                "sends",
                f"{format_bytes(move.bytes_sent)} a rank and call, {format_bytes(move.bytes_sent * times)} a step",
            ),
            ("takes", f"{format_time(move.seconds)} a call"),
        ]
        title = f"{what.get(move.which, 'gather for the backward')}: {move.kind} {move.axis}"
        return item("move", move.which, title, region=region.name, module=region.module, facts=facts)

    def _region(self, region: RegionView) -> Item:
        phases = ("forward", "backward")
        taken = {phase: _taken([op for op in region.ops if op.phase == phase]) for phase in phases}
        facts = [
            *([] if region.module else [("module", "around the blocks")]),  # the page names the item's own
            ("calls", f"{region.calls} a microbatch, {region.calls * self.steps} a step"),
            ("operators", str(sum(op.kind != "collective" for op in region.ops))),
            *((f"{phase}, a call", each) for phase, each in taken.items() if each),
        ]
        members = [f"op:{region.name}.{op.name}" for op in region.ops if op.kind != "view"]
        line = self.lines.get(f"region:{region.name}")
        return item("region", region.name, region.module or region.name, region=region.name, module=region.module,
                    facts=facts, members=members, line=line)  # fmt: skip

    def _backward(self, region: RegionView) -> Item:
        ops = [op for op in region.ops if op.phase == "backward"]
        facts = [
            ("operators", str(sum(op.kind == "compute" for op in ops))),
            ("collectives", str(sum(op.kind == "collective" for op in ops))),
            ("takes, a call", _taken(ops)),
        ]
        members = [f"op:{region.name}.{op.name}" for op in ops if op.kind != "view"]
        return item("backward", region.name, f"backward of {region.module or region.name}", region=region.name,
                    module=region.module, phase="backward", facts=facts, members=members,
                    line=self.lines.get(f"backward:{region.name}"))  # fmt: skip

    def _box(self, key: str, members: Sequence[str]) -> Item:
        name = key.removeprefix("box:")
        region = next(each for each in self.views.regions if name.startswith(f"{each.name}."))
        own = {f"op:{region.name}.{op.name}": op for op in region.ops}
        ops = [own[each] for each in members if each in own]
        modules = list(dict.fromkeys(op.module for op in ops if op.module))
        facts = [
            ("operators", ", ".join(dict.fromkeys(op.op for op in ops if op.kind == "compute")) or "views alone"),
            ("takes", f"{format_time(sum(op.seconds for op in ops))} a call"),
        ]
        slots = dict.fromkeys(read[2:] for op in ops for read in op.reads if read.startswith("p:"))
        if slots:
            facts.append(("parameters", ", ".join(slots)))
        title = _common(modules) or region.module or region.name
        source = next((op.source for op in ops if op.source), "")
        shown = [each for each in members if each in own and own[each].kind != "view"]
        shown += [f"p:{region.name}.{slot}" for slot in slots]
        line = next((self.lines[each] for each in members if each in self.lines), None)
        return item("box", name, title, region=region.name, module=title, source=source, facts=facts, members=shown,
                    line=line)  # fmt: skip

    def _stages(self) -> Iterator[tuple[str, Item]]:
        summary = self.plan.pipeline
        one, several = ("pair", "pairs") if self.plan.interface.together > 1 else ("microbatch", "microbatches")
        for number, stage in enumerate(summary.stages if summary is not None else ()):
            assert summary is not None
            facts = [
                ("runs", stage.runs),
                ("on", f"{summary.axis} rank {summary.schedule.rank_of[number]}"),
                ("parameters", format_count(stage.parameters)),
                (f"forward of a {one}", format_time(stage.cost.forward_s)),
                ("backward", format_time(stage.cost.backward_s)),
                (f"{several} in flight", str(summary.schedule.in_flight[number])),
            ]
            if stage.sends:
                facts.append(("sends on", f"{format_bytes(stage.cost.forward_bytes)} ({stage.sends})"))
            yield f"stage:{number}", item("stage", str(number), f"stage {number}", facts=facts)
        for rank in range(summary.schedule.num_ranks if summary is not None else 0):
            assert summary is not None
            numbers = summary.schedule.stages_of(rank)
            facts = [
                ("stages", ", ".join(map(str, numbers))),
                ("waits", f"{summary.timeline.bubble_shares[rank]:.1%} of the step"),
                ("holds at most", format_bytes(summary.timeline.peak_bytes[rank])),
            ]
            members = [f"stage:{number}" for number in numbers]
            yield (
                f"lane:{rank}",
                item("stage", f"rank {rank}", f"{summary.axis} rank {rank}", facts=facts, members=members),
            )

    def _value(self, what: str, value: ValueView) -> list[tuple[str, str]]:
        facts = [(what, self._text(value))]
        try:
            local = local_shape(value.shape, parse_sharding(value.sharding, self.axes), self.sizes)
        except AutoparError:
            return [*facts, ("each rank holds", "pieces that are not all alike")]
        size = math.prod(local) * _ITEMSIZE.get(value.dtype, 0)
        sized = f", {format_bytes(size)}" if size else ""
        return [*facts, ("each rank holds", f"{value.dtype}{list(local)}{sized}")]

    def _text(self, value: ValueView) -> str:
        return format_shape(value.dtype, value.shape, parse_sharding(value.sharding, self.axes), self.axes)


def item(
    kind: str, name: str, title: str, *, region: str = "", module: str = "", source: str = "", phase: str = "",
    facts: Sequence[tuple[str, str]] = (), parameter: str | None = None, explain: str | None = None,
    members: Sequence[str] = (), line: int | None = None,
) -> Item:  # fmt: skip
    """One item, as the page reads it."""
    rows = [[label[:1].upper() + label[1:], text] for label, text in facts]
    return {
        "kind": kind, "name": name, "title": title, "region": region, "module": module, "source": source,
        "phase": phase, "facts": rows, "parameter": parameter, "explain": explain,
        "members": list(members), "line": line, "picture": None,
    }  # fmt: skip


def program_lines(source: str, views: Views) -> dict[str, int]:
    """Where items are made in the generated program: key -> line, from 1."""
    found: dict[str, int] = {}
    phases = {
        f"{region.name}_{phase}": (region, phase) for region in views.regions for phase in ("forward", "backward")
    }
    made = {
        where: [(op.line or (op.name.removesuffix("@backward"), 0), op.name) for op in region.ops if op.phase == phase]
        for where, (region, phase) in phases.items()
    }
    where, assigned = "", Counter[str]()
    for number, line in enumerate(source.splitlines(), 1):
        if match := re.match(r"def (\w+)\(", line):
            where, assigned = (match[1] if match[1] in phases else ""), Counter()
            if where:
                region, phase = phases[where]
                found[f"{'region' if phase == 'forward' else 'backward'}:{region.name}"] = number
        elif where and (match := re.match(r"    (\S[^#=]*?) = ", line)):
            place = (match[1], assigned[match[1]])
            assigned[match[1]] += 1
            for name in (name for at, name in made[where] if at == place):
                found.setdefault(f"op:{phases[where][0].name}.{name}", number)
    return found


def _common(paths: Sequence[str]) -> str:
    """The longest path that all of these begin with."""
    same = itertools.takewhile(lambda level: len(set(level)) == 1, zip(*(path.split(".") for path in paths)))
    return ".".join(level[0] for level in same)


def _taken(ops: Sequence[OpView]) -> str:
    """`9.05 ms computing and 5.20 ms in collectives`; empty where there is nothing."""
    moving_s = sum(op.seconds for op in ops if op.kind == "collective")
    computing_s = sum(op.seconds for op in ops) - moving_s
    parts = [f"{format_time(computing_s)} computing"] * bool(computing_s)
    parts += [f"{format_time(moving_s)} in collectives"] * bool(moving_s)
    return " and ".join(parts)


def _si(value: float) -> str:
    for scale, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.3g} "
