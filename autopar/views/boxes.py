"""One phase of a region at the level of modules: which boxes there are, and what flows between them.

Operators are grouped by the module that called them, down to some depth. A module whose operators surround another's (a
block's two residual additions) becomes several boxes, so that the boxes have no cycle. Collectives are no boxes, but
ways from one to another: where several boxes read the result, it comes to a junction first, where all that reads it is
in the box that it comes from, it is a loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.ir.sharding import parse_sharding
from autopar.planner.plan.drawn import OpView, RegionView, ValueView

WHOLE = 99
"""A depth that no module path has."""


@dataclass(slots=True)
class Box:
    """A module's operators in one phase. key: `forward/self_attn`, unique in the region. slots: what they read."""

    key: str
    path: str
    ops: list[OpView] = field(default_factory=list)
    slots: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """What its operators compute, in one call."""
        return sum(op.compute_seconds if op.kind == "collective" else op.seconds for op in self.ops)


@dataclass(frozen=True, slots=True)
class Flow:
    """A value on its way between two ends; `more`: how many others take the same way. An end is a box's key, `@NAME`
    for the junction behind a collective, `in:NAME` or `grad:NAME`.
    """

    source: str
    target: str
    value: ValueView | None
    more: int = 0


@dataclass(frozen=True, slots=True)
class Arrow:
    """Collectives of one kind over one axis between the same two ends."""

    source: str
    target: str
    ops: tuple[OpView, ...]


@dataclass(frozen=True, slots=True)
class Boxes:
    """end_of: for each value of the phase, where it can be had. junctions: names of collectives that have one."""

    boxes: tuple[Box, ...]
    flows: tuple[Flow, ...]
    ways: tuple[Arrow, ...]
    junctions: tuple[str, ...]
    end_of: Mapping[str, str]

    @property
    def sources(self) -> set[str]:
        """Every end that something flows from."""
        return {flow.source for flow in self.flows} | {way.source for way in self.ways}


def boxes_of(region: RegionView, phase: str, depth: int = WHOLE) -> Boxes:
    """The boxes of one phase, modules cut to `depth` names of their path (never above the region's own)."""
    found = _Grouping(region, phase, depth)
    return found.result()


def deepest(region: RegionView) -> int:
    """How many names the longest path of a module of the region has."""
    return max((len(op.module.split(".")) for op in region.ops), default=1)


def is_ring(op: OpView) -> bool:
    """Whether a collective computes, too."""
    return op.kind == "collective" and bool(op.op_class)


def axes_of(values: Iterable[ValueView | None], axes: Sequence[str]) -> list[str]:
    """The axes that split one of these values, or of which each rank holds a term."""
    texts = [parse_sharding(value.sharding, axes) for value in values if value is not None]
    return [axis for number, axis in enumerate(axes) if any(str(each[number]) != "R" for each in texts)]


class _Grouping:
    """Puts each operator of a phase into a box, in the program's order."""

    def __init__(self, region: RegionView, phase: str, depth: int) -> None:
        self.region, self.phase, self.depth = region, phase, depth
        self.ops = {op.name: op for op in region.ops if op.phase == phase}
        self.boxes: dict[str, Box] = {}
        self.box_of: dict[str, str] = {}
        self.parents: dict[str, set[str]] = {}
        self.readers: dict[str, list[str]] = {}
        self.results = {port.name for port in region.outputs} | {name for _, name in region.gradients}
        for op in self.ops.values():
            for read in op.reads:
                self.readers.setdefault(read, []).append(op.name)
            self._add(op)

    def _add(self, op: OpView) -> None:
        before = [self.box_of[read] for read in op.reads if read in self.box_of]
        if _moves(op):
            if before:
                self.box_of[op.name] = before[0]  # for what comes before what; it is no part of the box
            return
        key = self._box_for(op, before)
        box = self.boxes[key]
        box.ops.append(op)
        self.box_of[op.name] = key
        self.parents[key].update(each for each in before if each != key)
        slots = [read.removeprefix("p:") for read in op.reads if read.startswith("p:")]
        box.slots += [slot for slot in slots if slot not in box.slots]

    def _box_for(self, op: OpView, before: Sequence[str]) -> str:
        first = next((read for read in op.reads if read in self.ops), None)
        if op.kind == "view" and first is not None and len(before) == 1 and not _moves(self.ops[first]):
            return before[0]
        path = self._cut(op.module)
        for key in reversed([key for key, box in self.boxes.items() if box.path == path]):
            if not any(key in self._ancestors(other) for other in before if other != key):
                return key
        return self._new(path)

    def _cut(self, module: str) -> str:
        """A path down to `depth`; a number in a list of modules belongs to the list's name."""
        parts = (module or self.region.module).split(".")
        own = len(self.region.module.split(".")) if self.region.module else 0
        end = max(self.depth, own)
        while end < len(parts) and parts[end].isdigit():
            end += 1
        return ".".join(parts[:end])

    def _new(self, path: str) -> str:
        inside = path.removeprefix(self.region.module).lstrip(".") or "own"
        key, number = f"{self.phase}/{inside}", 2
        while key in self.boxes:
            key, number = f"{self.phase}/{inside}/{number}", number + 1
        self.boxes[key], self.parents[key] = Box(key, path), set()
        return key

    def _ancestors(self, key: str) -> set[str]:
        seen: set[str] = set()
        stack = [key]
        while stack:
            for parent in self.parents[stack.pop()] - seen:
                seen.add(parent)
                stack.append(parent)
        return seen

    def result(self) -> Boxes:
        moving = [op for op in self.ops.values() if op.kind == "collective"]
        loops = {op.name for op in moving if is_ring(op) or self._stays(op)}
        direct = {op.name: self._only_reader(op) for op in moving if op.name not in loops}
        ways: dict[tuple[str, str, str, str], list[OpView]] = {}
        end_of = {name: f"@{name}" if name in direct else key for name, key in self.box_of.items()}
        end_of |= {name: f"@{name}" for name in direct}
        for op in moving:
            source = self.box_of[op.name] if op.name in loops else self._end(op.reads[0], end_of)
            target = source if op.name in loops else direct[op.name] or f"@{op.name}"
            ways.setdefault((source, target, op.op, op.axis), []).append(op)
        junctions = tuple(name for name, only in direct.items() if not only)
        return Boxes(
            tuple(self.boxes.values()),
            tuple(self._flows(end_of, {name for name, only in direct.items() if only})),
            tuple(Arrow(source, target, tuple(ops)) for (source, target, _, _), ops in ways.items()),
            junctions,
            end_of,
        )

    def _stays(self, op: OpView) -> bool:
        """Whether all that reads a collective's result, by way of others, is in the box that it comes from."""
        if op.name in self.results or op.name not in self.box_of:
            return False
        readers = [self.ops[name] for name in self.readers.get(op.name, ())]
        return all(
            self._stays(each) if _moves(each) else self.box_of[each.name] == self.box_of[op.name] for each in readers
        )

    def _only_reader(self, op: OpView) -> str:
        """The box that alone reads a collective's result; "" where there are several, or it goes further."""
        readers = [self.ops[name] for name in self.readers.get(op.name, ())]
        keys = {self.box_of[each.name] for each in readers if not _moves(each)}
        further = op.name in self.results or any(_moves(each) for each in readers)
        return next(iter(keys)) if len(keys) == 1 and not further else ""

    def _end(self, read: str, end_of: Mapping[str, str]) -> str:
        return end_of.get(read, read)

    def _flows(self, end_of: Mapping[str, str], direct: set[str]) -> Iterable[Flow]:
        values: dict[tuple[str, str], dict[str, ValueView | None]] = {}
        for op in self.ops.values():
            if _moves(op):
                continue
            for read in op.reads:
                source, target = self._end(read, end_of), self.box_of[op.name]
                if source != target and read not in direct and not read.startswith(("p:", "saved:")):
                    values.setdefault((source, target), {})[read] = self._value(read)
        for (source, target), found in values.items():
            largest = max(found.values(), key=_weight)
            yield Flow(source, target, largest, len(found) - 1)

    def _value(self, read: str) -> ValueView | None:
        if read in self.ops:
            return self.ops[read].result
        ports = (*self.region.inputs, *self.region.outputs)
        return next((port.value for port in ports if read in (f"in:{port.name}", f"grad:{port.name}")), None)


def _moves(op: OpView) -> bool:
    """Whether an op is a collective and nothing else."""
    return op.kind == "collective" and not op.op_class


def _weight(value: ValueView | None) -> tuple[bool, float]:
    return (False, 0.0) if value is None else (is_float(value), math.prod(value.shape))


def is_float(value: ValueView) -> bool:
    """Whether a value is of a floating point type."""
    return value.dtype.startswith(("f", "bf"))
