"""What a predicted step is made of: seconds by kind of operator and of collective, bytes by kind.

plan.explain("cost")   autopar explain plan.json cost
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autopar.base.text import format_bytes, format_time, new_table, plain_text
from autopar.cost.accumulation import accumulation_seconds, added_bytes
from autopar.cost.collectives import num_calls
from autopar.cost.operator_time import operator_work, region_seconds
from autopar.cost.roofline import Work, compute_time_s
from autopar.ir.program import Program
from autopar.machine.hardware import Hardware
from autopar.planner.plan.record import PlanRecord
from autopar.views.text import collective_groups

ACCUMULATION = "gradients added up"
"""Beside the classes of operators: what microbatches' gradients take to be added to one another."""


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """Operators of one class and phase, of one rank and step. times: how often they run. moved_bytes: read and written.

    memory_bound_s: of `seconds`, those of operators that wait for memory; launch_s: of kernels' launches.
    """

    op_class: str
    phase: str
    times: int
    flops: float
    moved_bytes: float
    seconds: float
    memory_bound_s: float
    launch_s: float


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """Collectives of one purpose, kind, axis and phase, of one rank and step."""

    why: str
    kind: str
    axis: str
    phase: str
    times: int
    bytes_sent: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Breakdown:
    """A step's prediction in parts; of a pipeline, of the rank that is busiest.

    step: (what, seconds), which add up to the step. memory: (what, bytes) of the fullest rank, which add up to its
    peak. operators, collectives: costliest first.
    """

    title: str
    step: tuple[tuple[str, float], ...]
    memory: tuple[tuple[str, int], ...]
    operators: tuple[OperatorRow, ...]
    collectives: tuple[CollectiveRow, ...]

    @property
    def step_time_s(self) -> float:
        return sum(seconds for _, seconds in self.step)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**asdict(self), "step_time_s": self.step_time_s}

    def __str__(self) -> str:
        return plain_text(self.tables())

    def tables(self) -> RenderableType:
        """For a rich console of any width: the step, operators, collectives, memory."""
        return Group(Text(self.title), *(item for table in self._tables() for item in (Text(""), table)))

    def _tables(self) -> Iterator[Table]:
        table = new_table("A step", "what", ">seconds", ">share")
        for what, seconds in self.step:
            text = format_time(seconds) if seconds >= 0 else f"−{format_time(-seconds)}"
            table.add_row(what, text, self._share(seconds))
        table.add_row("step", format_time(self.step_time_s), "")
        yield table
        yield self._operators()
        if self.collectives:
            yield self._collectives()
        table = new_table("Memory of the fullest rank", "what", ">bytes")
        for what, size in self.memory:
            table.add_row(what, format_bytes(size))
        table.add_row("peak", format_bytes(sum(size for _, size in self.memory)))
        yield table

    def _operators(self) -> Table:
        numbers = (">×", ">seconds", ">share", ">memory-bound", ">launches", ">FLOP/s", ">bytes/s")
        table = new_table("Operators", "class", "phase", *numbers)
        for row in self.operators:
            memory = f"{row.memory_bound_s / row.seconds:.0%}" if row.seconds else "-"
            speeds = [f"{each / row.seconds:.3g}" if row.seconds else "-" for each in (row.flops, row.moved_bytes)]
            table.add_row(
                row.op_class, row.phase, str(row.times), format_time(row.seconds), self._share(row.seconds), memory,
                format_time(row.launch_s), *speeds,
            )  # fmt: skip
        return table

    def _collectives(self) -> Table:
        numbers = (">×", ">bytes sent", ">seconds", ">share")
        table = new_table("Collectives", "what for", "kind", "axis", "phase", *numbers)
        for row in self.collectives:
            table.add_row(
                row.why, row.kind, row.axis, row.phase, str(row.times), format_bytes(row.bytes_sent),
                format_time(row.seconds), self._share(row.seconds),
            )  # fmt: skip
        return table

    def _share(self, seconds: float) -> str:
        return f"{seconds / self.step_time_s:.1%}" if self.step_time_s else "-"


def breakdown(plan: PlanRecord) -> Breakdown:
    """The parts of `plan.cost`. The plan has its program (`explain.with_program`)."""
    assert plan.program is not None
    cost, memory = plan.cost, plan.cost.memory
    step = [("compute", cost.compute_s), ("communication", cost.communication_s)]
    step += [(what, each) for what, each in (
        ("hidden beside the compute", -cost.hidden_s), ("waiting for other ranks", cost.waiting_s),
        ("optimizer", cost.optimizer_s), ("waiting for the host", cost.host_s),
    ) if each]  # fmt: skip
    parts = [
        ("parameters", memory.parameters), ("gradients", memory.gradients),
        ("optimizer states", memory.optimizer_states), *[("cache", memory.states)] * (memory.states > 0),
        ("activations, and what is gathered", memory.activations),
    ]  # fmt: skip
    over = memory.peak - sum(size for _, size in parts)
    if over:
        parts.append(("of these not held at the peak", over))
    collectives = tuple(
        CollectiveRow(row.why, row.kind, row.axis, row.phase, times, sent, seconds)
        for row, times, sent, seconds in collective_groups(plan.collectives)
    )
    operators = tuple(sorted(_operators(plan.program, cost.compute_s), key=lambda row: -row.seconds))
    return Breakdown(
        plan.title + f" on {plan.mesh}, {plan.strategy}", tuple(step), tuple(parts), operators, collectives
    )


def _operators(program: Program, compute_s: float) -> list[OperatorRow]:
    """Of the rank that computes for `compute_s`, which of a pipeline is one of several."""
    ranks: list[int | None] = [None] if program.pipeline is None else list(range(program.pipeline.schedule.num_ranks))
    found = [_operators_on(program, rank) for rank in ranks]
    return min(found, key=lambda rows: abs(sum(row.seconds for row in rows) - compute_s))


def _operators_on(program: Program, rank: int | None) -> list[OperatorRow]:
    rows: dict[tuple[str, str], list[float]] = {}
    for region in program.regions:
        times = num_calls(program, region.name, rank) * program.microbatches
        taken = region_seconds(region, program.on_mesh) if times else {}
        for name, strategy in region.strategies.items() if times else ():
            seconds = taken[name]
            if not seconds:
                continue
            work = operator_work(*region.ops[name], strategy, program.on_mesh)
            if region.ops[name][1].alias:  # what the host takes for a view
                work = Work("view", work.dtype, 0.0, 0.0)
            phase = "forward" if name in region.forward_nodes else "backward"
            row = rows.setdefault((work.op_class, phase), [0.0] * 6)
            hardware, is_view = program.on_mesh.hardware, work.op_class == "view"
            waits = not is_view and _waits_for_memory(work, hardware)
            launch_s = 0.0 if is_view else hardware.launch_overhead_s
            own = (1, work.flops, work.moved_bytes, seconds, seconds * waits, launch_s)
            for place, each in enumerate(own):
                row[place] += each * times
        tensors, moved = added_bytes(program, region)
        if times and tensors:
            taken_s = accumulation_seconds(program, region)
            launch_s = tensors * program.on_mesh.hardware.launch_overhead_s
            row = rows.setdefault((ACCUMULATION, "backward"), [0.0] * 6)
            for place, each in enumerate((tensors, 0.0, moved, taken_s, taken_s - launch_s, launch_s)):
                row[place] += each * times
    return [
        OperatorRow(op_class, phase, int(row[0]), row[1], row[2], row[3], row[4], row[5])
        for (op_class, phase), row in rows.items()
    ]


def _waits_for_memory(work: Work, hardware: Hardware) -> bool:
    """Whether its bytes take longer than its floating point operations."""
    moving_s = work.moved_bytes / hardware.memory_bytes_per_s(work.moved_bytes, work.op_class, work.name)
    return compute_time_s(work, hardware, in_step=True) <= hardware.launch_overhead_s + moving_s
