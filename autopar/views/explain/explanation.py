"""An answer of `plan.explain`: why one tensor lies as it does, what else there was, and what that would cost."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autopar.base.text import format_bytes, format_time, new_table, plain_text
from autopar.cost.collectives import Collective
from autopar.cost.estimate import Cost

ReasonKind = Literal["strategy", "size", "operator", "pin", "memory", "none found"]
"""Why a sharding is out: the strategy forbids it; an axis does not divide a dim; the operator's rule has no such split;
the plan's own pin; the memory limit; nothing was found with it."""

MAX_NAMES = 6
"""Shardings excluded for one reason that the table lists; the data has them all."""


@dataclass(frozen=True, slots=True)
class Row:
    """One way to place the tensor, and the whole plan's predicted cost with it.

    layouts: `stored` and, of a parameter, `compute`, `gradient` …, as `f32[64, 256/tp]`. Times are seconds a step, peak
    bytes of one rank; the differences are to the chosen plan. rematerialize: what the backward computes again. pin: the
    constraint that asks for it ("" where there is none). note: what is special.
    """

    layouts: Mapping[str, str]
    step_time_s: float
    communication_s: float
    peak_bytes: int
    step_delta_s: float = 0.0
    communication_delta_s: float = 0.0
    peak_delta_bytes: int = 0
    rematerialize: str = "none"
    pin: str = ""
    note: str = ""

    @staticmethod
    def of(layouts: Mapping[str, str], cost: Cost, chosen: Cost, **fields: Any) -> Row:
        """The row of a plan that costs `cost`, beside one that costs `chosen`."""
        return Row(
            layouts,
            cost.step_time_s,
            cost.communication_s,
            cost.peak_memory_bytes,
            cost.step_time_s - chosen.step_time_s,
            cost.communication_s - chosen.communication_s,
            cost.peak_memory_bytes - chosen.peak_memory_bytes,
            **fields,
        )

    @property
    def stored(self) -> str:
        return self.layouts["stored"]

    @property
    def relative(self) -> float:
        """The difference in step time, as a fraction of the chosen plan's."""
        chosen = self.step_time_s - self.step_delta_s
        return self.step_delta_s / chosen if chosen else 0.0


@dataclass(frozen=True, slots=True)
class Excluded:
    """A sharding that cannot be had. bytes_over: by how much the smallest placement with it exceeds the limit."""

    sharding: str
    kind: ReasonKind
    reason: str
    bytes_over: int | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a tensor lies as it does.

    name: of the class, with `*` for the blocks that share the decision; members: the tensors in it. bytes_a_rank: of
    all members as they are stored. why: what forces or favours the choice. collectives: rows of `Plan.collectives` that
    are there because of it; shares: the part of each row's bytes that is its own (below 1 where it travels in a bucket
    with other parameters). alternatives: the whole placement solved again with each other sharding, best first; `more`
    were solved and are worse than these. excluded: nearest to the chosen one first; what differs from the chosen one in
    more than an excluded sharding does is left out. unsolved: there was no time for these. facts: of attention, what
    was found in the model, and what each axis does: (label, text).
    """

    name: str
    kind: str
    members: tuple[str, ...]
    plan: str
    strategy: str
    chosen: Row
    bytes_a_rank: int
    why: tuple[str, ...]
    collectives: tuple[Collective, ...]
    shares: tuple[float, ...]
    alternatives: tuple[Row, ...]
    excluded: tuple[Excluded, ...]
    unsolved: tuple[str, ...] = ()
    more: int = 0
    facts: tuple[tuple[str, str], ...] = ()

    @property
    def collective_bytes(self) -> float:
        """Bytes that one rank sends a step because of it."""
        return sum(row.bytes_sent * share for row, share in zip(self.collectives, self.shares, strict=True))

    @property
    def collective_s(self) -> float:
        """Predicted seconds a step of its collectives, those of a bucket shared out by bytes."""
        return sum(row.seconds * share for row, share in zip(self.collectives, self.shares, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    def __str__(self) -> str:
        return plain_text(self.tables())

    def tables(self) -> RenderableType:
        """For a rich console of any width: the choice, its collectives, the alternatives, what is excluded."""
        parts = [_header(self), _collectives(self), _alternatives(self), _excluded(self)]
        items = [item for part in parts if part is not None for item in (part, Text(""))]
        left = f"no time was left to solve {', '.join(self.unsolved)}" if self.unsolved else ""
        return Group(*items, *([Text(f"note: {left}")] if left else []))


_LABELS = {"compute": "in use", "held": "held a step"}


def _header(explanation: Explanation) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    chosen, members = explanation.chosen, explanation.members
    table.add_row(explanation.kind, explanation.name + (f", {len(members)} alike" if len(members) > 1 else ""))
    table.add_row("plan", explanation.plan)
    for name, text in chosen.layouts.items():
        if name == "held" and text.split("[")[1:] in (
            chosen.stored.split("[")[1:],
            chosen.layouts["compute"].split("[")[1:],
        ):
            continue  # nothing is gathered once a step
        label = _LABELS.get(name, name) if explanation.kind == "parameter" else "chosen"
        table.add_row(label, text)
    for label, text in explanation.facts:
        table.add_row(label, text)
    if explanation.kind == "parameter":
        table.add_row("bytes a rank", format_bytes(explanation.bytes_a_rank))
    table.add_row(
        "step",
        f"{format_time(chosen.step_time_s)} predicted, {format_time(chosen.communication_s)} of it communication; "
        f"peak {format_bytes(chosen.peak_bytes)} a rank",
    )
    for number, line in enumerate(explanation.why):
        table.add_row("why" if number == 0 else "", line)
    return table


def _collectives(explanation: Explanation) -> RenderableType:
    if not explanation.collectives:
        return Text("Its collectives: none; nothing moves because of it")
    table = new_table(
        "Its collectives", "what for", "kind", "axis", "where", ">times", ">bytes a rank and step", ">predicted"
    )
    for row, share in zip(explanation.collectives, explanation.shares, strict=True):
        where = row.where.split(" (")[0] if row.why not in ("gather parameter", "reduce gradient") else row.phase
        where += f", {share:.1%} of a bucket" if share < 1 else ""
        size, seconds = format_bytes(row.bytes_sent * share), format_time(row.seconds * share)
        table.add_row(row.why, row.kind, row.axis, where, str(row.times), size, seconds)
    if len(explanation.collectives) > 1:
        table.add_section()
        times = str(sum(row.times for row in explanation.collectives))
        size, seconds = format_bytes(explanation.collective_bytes), format_time(explanation.collective_s)
        table.add_row("all", "", "", "", times, size, seconds)
    return table


def _alternatives(explanation: Explanation) -> RenderableType | None:
    rows = explanation.alternatives
    if not rows:
        return None
    is_parameter = explanation.kind == "parameter"
    columns = ["stored", "in use"] if is_parameter else [_what(explanation)]
    columns += [">step", ">change", ">", ">communication", ">change", ">peak", ">change"]
    table = new_table("Alternatives: the whole placement solved again with each", *columns)
    for place, column in enumerate(table.columns):
        column.no_wrap = not (is_parameter and place == 1)
    for row in (explanation.chosen, *rows):
        used = row.layouts.get("compute", "")
        if used.split("[")[1:] == row.stored.split("[")[1:]:
            used = "same"
        cells = [row.stored, used] if is_parameter else [row.stored]
        is_chosen = row is explanation.chosen
        table.add_row(*cells, *_numbers(row, is_chosen=is_chosen), style="bold" if is_chosen else None)
    if explanation.more:
        table.add_row(f"({explanation.more} more, none better)")
    notes = {row.note: [other.stored for other in rows if other.note == row.note] for row in rows if row.note}
    return Group(table, *(Text(f"{note}: {', '.join(names)}") for note, names in notes.items()))


def _numbers(row: Row, *, is_chosen: bool) -> list[str]:
    values = (format_time(row.step_time_s), format_time(row.communication_s), format_bytes(row.peak_bytes))
    if is_chosen:
        return [values[0], "chosen", "", values[1], "", values[2], ""]
    more = [_signed(row.step_delta_s, format_ms), f"{row.relative:+.2%}"]
    communication = _signed(row.communication_delta_s, format_ms)
    return [values[0], *more, values[1], communication, values[2], _signed(row.peak_delta_bytes, format_bytes)]


def format_ms(seconds: float) -> str:
    """`0.048 ms`, `12.3 ms`: milliseconds, so that differences can be compared at a glance."""
    value = seconds * 1e3
    return f"{value:.{3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0}f} ms"


def _signed(value: float, text: Any) -> str:
    return f"{'-' if value < 0 else '+'}{text(abs(value))}"


def _what(explanation: Explanation) -> str:
    return "axes" if explanation.kind == "attention" else "sharding"


def _excluded(explanation: Explanation) -> RenderableType | None:
    if not explanation.excluded:
        return None
    table = new_table("Excluded", _what(explanation), "reason")
    ordered = sorted(explanation.excluded, key=lambda row: _first(explanation.excluded, row.reason))
    for reason, rows in itertools.groupby(ordered, key=lambda row: row.reason):
        names = [row.sharding for row in rows]
        rest = [f"({len(names) - MAX_NAMES} more)"] if len(names) > MAX_NAMES else []
        table.add_row("\n".join([*names[:MAX_NAMES], *rest]), reason)
    return table


def _first(rows: Sequence[Excluded], reason: str) -> int:
    return next(number for number, row in enumerate(rows) if row.reason == reason)
