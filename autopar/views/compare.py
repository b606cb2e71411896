"""Two plans beside each other: what was decided differently, and what that costs.

autopar.views.compare.compare(plan, other)     autopar diff a.json b.json
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.text import Text

from autopar.base.text import format_bytes, format_time, new_table, plain_text, plural
from autopar.ir.interface_text import format_tensor, format_tensors, starred
from autopar.planner.plan.record import PlanRecord
from autopar.views.text import collective_groups, parameter_groups

Unit = Literal["s", "B", "%", ""]


@dataclass(frozen=True, slots=True)
class Number:
    """One figure of both plans; None where a plan has none. unit: seconds, bytes, a share of 1, or a count."""

    what: str
    left: float | None
    right: float | None
    unit: Unit

    def texts(self) -> tuple[str, str, str]:
        """Left, right, and the change in its unit and in percent."""
        left, right = (_text(value, self.unit) for value in (self.left, self.right))
        if self.left is None or self.right is None or self.left == self.right:
            return left, right, "" if self.left == self.right else "-"
        change = self.right - self.left
        sign = "+" if change > 0 else "−"
        relative = f" ({sign}{abs(change / self.left):.1%})" if self.left and self.unit != "%" else ""
        return left, right, f"{sign}{_text(abs(change), self.unit)}{relative}"


@dataclass(frozen=True, slots=True)
class ParameterChange:
    """Parameters that lie alike in each plan, and differently in both: as stored, and as used where that is not so."""

    name: str
    count: int
    left: str
    right: str


@dataclass(frozen=True, slots=True)
class CollectiveChange:
    """Collectives of one purpose, kind, axis and phase, in bytes a rank and step and seconds a step of each plan."""

    what: str
    left_bytes: float
    right_bytes: float
    left_s: float
    right_s: float


@dataclass(frozen=True, slots=True)
class Setting:
    """A choice that is not a number."""

    what: str
    left: str
    right: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two plans. left, right: what they are called. numbers: of both; parameters, collectives, settings: what differs.

    only_left, only_right: parameters that the other plan's model does not have.
    """

    title: str
    left: str
    right: str
    summary: str
    numbers: tuple[Number, ...]
    parameters: tuple[ParameterChange, ...]
    collectives: tuple[CollectiveChange, ...]
    settings: tuple[Setting, ...]
    only_left: int = 0
    only_right: int = 0

    @property
    def same(self) -> bool:
        """Whether the plans decide and predict the same."""
        equal = all(number.left == number.right for number in self.numbers)
        return equal and not (self.parameters or self.settings or self.only_left or self.only_right)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "same": self.same}

    def __str__(self) -> str:
        return plain_text(self.tables())

    def tables(self) -> RenderableType:
        """For a rich console of any width."""
        return Group(Text(self.summary), *(part for table in self._tables() for part in (Text(""), table)))

    def _tables(self) -> Iterator[RenderableType]:
        if self.settings:
            table = new_table("Decided differently", "what", self.left, self.right)
            for row in self.settings:
                table.add_row(row.what, row.left, row.right)
            yield table
        table = new_table("In numbers", "what", f">{self.left}", f">{self.right}", ">change")
        for number in self.numbers:
            table.add_row(number.what, *number.texts())
        yield table
        if self.parameters:
            table = new_table("Parameters that lie differently", "parameter", ">×", self.left, self.right)
            for each in self.parameters:
                table.add_row(each.name, str(each.count), each.left, each.right)
            yield table
        if changed := [each for each in self.collectives if each.left_bytes != each.right_bytes]:
            table = new_table(
                "Collectives that differ", "what for", f">bytes, {self.left}", f">{self.right}", ">predicted", ">"
            )
            for found in changed:
                sizes = (format_bytes(found.left_bytes), format_bytes(found.right_bytes))
                table.add_row(found.what, *sizes, format_time(found.left_s), format_time(found.right_s))
            yield table


def compare(
    left: PlanRecord, right: PlanRecord, *, title: str = "", names: tuple[str, str] = ("left", "right")
) -> Comparison:
    """What differs between two plans, of the same model or not.

    names: what the plans are called; title: of the comparison.
    """
    numbers = tuple(_numbers(left, right))
    parameters = tuple(_parameters(left, right))
    own, others = ({each.name for each in plan.interface.parameters} for plan in (left, right))
    settings = tuple(row for row in _settings(left, right) if row.left != row.right)
    summary = _summary(left, right, names, len(parameters))
    return Comparison(
        title or f"{names[0]} against {names[1]}", *names, summary, numbers, parameters,
        tuple(_collectives(left, right)), settings, len(own - others), len(others - own),
    )  # fmt: skip


def _summary(left: PlanRecord, right: PlanRecord, names: tuple[str, str], num_changed: int) -> str:
    before, after = left.cost.step_time_s, right.cost.step_time_s
    if before == after:
        speed = f"predicted as fast ({format_time(before)} a step)"
    else:
        change = f"{abs(after - before) / before:.1%} {'faster' if after < before else 'slower'}" if before else "other"
        speed = f"predicted {change}, {format_time(after)} a step instead of {format_time(before)}"
    held, holds = left.cost.peak_memory_bytes, right.cost.peak_memory_bytes
    memory = f"{format_bytes(holds)} a rank instead of {format_bytes(held)}" if held != holds else ""
    kinds = plural(num_changed, "kind of parameters lies", "kinds of parameters lie")
    lies = f"{kinds} differently" if num_changed else "all parameters lie alike"
    return f"{names[1]} against {names[0]}: " + "; ".join(part for part in (speed, memory, lies) if part)


def _numbers(left: PlanRecord, right: PlanRecord) -> Iterator[Number]:
    def both(what: str, unit: Unit, get: Any) -> Number:
        return Number(what, get(left), get(right), unit)

    yield both("step", "s", lambda plan: plan.cost.step_time_s)
    yield both("compute", "s", lambda plan: plan.cost.compute_s)
    yield both("communication", "s", lambda plan: plan.cost.communication_s)
    yield both("hidden beside the compute", "s", lambda plan: plan.cost.hidden_s)
    yield both("waiting for other ranks", "s", lambda plan: plan.cost.waiting_s)
    yield both("optimizer", "s", lambda plan: plan.cost.optimizer_s)
    yield both("waiting for the host", "s", lambda plan: plan.cost.host_s)
    if left.pipeline is not None or right.pipeline is not None:
        yield both("bubble", "%", lambda plan: plan.pipeline.timeline.bubble_share if plan.pipeline else 0.0)
    yield both("peak memory", "B", lambda plan: float(plan.cost.memory.peak))
    yield both("parameters", "B", lambda plan: float(plan.cost.memory.parameters))
    yield both("gradients, reduced", "B", lambda plan: float(plan.cost.memory.gradients))
    yield both("optimizer states", "B", lambda plan: float(plan.cost.memory.optimizer_states))
    if left.cost.memory.states or right.cost.memory.states:
        yield both("cache", "B", lambda plan: float(plan.cost.memory.states))
    yield both("all else at the peak", "B", lambda plan: float(plan.cost.memory.activations))
    yield both("memory limit", "B", lambda plan: plan.memory_limit_bytes)
    yield both("bytes a rank sends", "B", lambda plan: sum(row.bytes_sent for row in plan.collectives))
    for axis in dict.fromkeys((*left.mesh.axis_names, *right.mesh.axis_names)):
        yield both(f"bytes over {axis}", "B", lambda plan, axis=axis: plan.bytes_by_axis().get(axis))
    yield both("devices", "", lambda plan: float(plan.mesh.num_devices))
    yield both("optimality gap", "%", lambda plan: plan.gap if math.isfinite(plan.gap) else None)


def _settings(left: PlanRecord, right: PlanRecord) -> Iterator[Setting]:
    def both(what: str, get: Any) -> Setting:
        return Setting(what, str(get(left)), str(get(right)))

    yield both("model", lambda plan: plan.title)
    yield both("mesh", lambda plan: plan.mesh)
    yield both("hardware", lambda plan: plan.mesh.hardware.name)
    yield both("strategy", lambda plan: plan.strategy)
    yield both("precision", lambda plan: str(plan.precision or "the model's own").removeprefix("torch."))
    yield both("computed again in the backward", lambda plan: plan.rematerialize)
    yield both("microbatches", lambda plan: plan.interface.microbatches)
    yield both("schedule", lambda plan: plan.pipeline.schedule.name if plan.pipeline else "none")
    yield both("stages", lambda plan: plan.pipeline.schedule.num_stages if plan.pipeline else 1)
    yield both("parameters are gathered ahead", lambda plan: "yes" if _prefetches(plan) else "no")
    yield both(
        "pins",
        lambda plan: ", ".join(dict.fromkeys(starred(pin.pattern) for pin in plan.pins if not pin.taken)) or "none",
    )
    yield both(
        "batch",
        lambda plan: ", ".join(kind for _, kind in format_tensors(plan.interface.inputs, plan.interface.axes)),
    )


def _prefetches(plan: PlanRecord) -> bool:
    overlap = plan.decisions.overlap
    return overlap is not None and overlap.prefetch


def _parameters(left: PlanRecord, right: PlanRecord) -> Iterator[ParameterChange]:
    texts = {each.name: format_tensor(each, right.interface.axes) for each in right.interface.parameters}
    for name, members in parameter_groups(left):
        own = format_tensor(members[0], left.interface.axes)
        changed: dict[str, int] = {}
        for member in members:
            other = texts.get(member.name)
            if other is not None and other != own:
                changed[other] = changed.get(other, 0) + 1
        for other, count in changed.items():
            yield ParameterChange(name, count, own, other)


def _collectives(left: PlanRecord, right: PlanRecord) -> Iterator[CollectiveChange]:
    found: dict[str, list[float]] = {}
    for side, plan in enumerate((left, right)):
        for first, _, sent, seconds in collective_groups(plan.collectives):
            row = found.setdefault(f"{first.why}, {first.kind} {first.axis}, {first.phase}", [0.0] * 4)
            row[side] += sent
            row[2 + side] += seconds
    for what, row in sorted(found.items(), key=lambda item: -max(item[1][2], item[1][3])):
        yield CollectiveChange(what, *row)


def _text(value: float | None, unit: Unit) -> str:
    if value is None:
        return "-"
    if unit == "s":
        return format_time(value)
    if unit == "B":
        return format_bytes(value)
    return f"{value:.2%}" if unit == "%" else f"{value:,.0f}"
