"""An explanation read axis by axis: what each axis does to the tensor, and what it would cost if it did otherwise.

    Explanation (alternatives, what is excluded, what was not solved) ─ by_axis ─► AxisAnswer, AxisAnswer, …

Nothing is solved here. Of each alternative the explanation knows the step, its communication and its memory, not which
collectives make the difference; where one recomputes otherwise, too, the difference is of both changes together.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.base.text import format_bytes, format_time
from autopar.views.explain.explanation import Excluded, Explanation, Row

Layout = Mapping[str, str]
"""For each axis that does anything what it does: `dim 0`, `dim 0 in 8 stripes`, `terms`, of an attention `heads`."""

WHOLE = "whole"
TERMS = "terms"
_FORBIDS = {
    "strategy": "not with these strategies", "size": "not possible", "operator": "not possible for this operator",
    "pin": "not with the plan's own pins", "memory": "does not fit",
}  # fmt: skip
_MODES = {
    "none": "recompute nothing",
    "selective": "recompute all but products and attention",
    "full": "recompute whole blocks",
}


@dataclass(frozen=True, slots=True)
class AxisAnswer:
    """One axis. now: what it does to the tensor. sentences: one for each other thing it could do."""

    axis: str
    now: str
    sentences: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"axis": self.axis, "now": self.now, "sentences": list(self.sentences)}


def by_axis(explanation: Explanation, axes: Sequence[tuple[str, int]]) -> tuple[AxisAnswer, ...]:
    """One answer for each axis of several ranks; none for a value, which its operators decide.

    axes: (name, size) of those that may split tensors: a pipeline's own is none of them.
    """
    if explanation.kind == "value":
        return ()
    split = [(name, size) for name, size in axes if size > 1]
    answers = _Answers(explanation, [name for name, _ in split])
    return tuple(AxisAnswer(name, answers.now(name, size), tuple(answers.sentences(name))) for name, size in split)


def way_of_text(text: str) -> dict[str, str]:
    """`f32[64/8:dp, 256/tp] +cp`, or `dp: batch, cp: ring`, by axis; what is not named is whole."""
    match = re.fullmatch(r"\w+\[([^\]]*)\](.*)", text)
    if match is None:
        pairs = (part.split(": ", 1) for part in text.split(", ") if ": " in part)
        return {pair[0]: pair[1] for pair in pairs}
    found: dict[str, str] = {}
    for dim, sizes in enumerate(match[1].split(", ")):
        for part in sizes.split("/")[1:]:
            stripes, mark, axis = re.findall(r"^(?:(\d+)([:~]))?(.*)$", part)[0]
            dealt = ", every second backwards" if mark == "~" else ""
            found[axis] = f"dim {dim} in {stripes} stripes{dealt}" if stripes else f"dim {dim}"
    for axis in re.findall(r" (?:\+|\w+:)(\S+)", match[2]):
        found[axis] = TERMS
    return found


class _Answers:
    """An explanation with its texts read. axes: names of those that may split."""

    def __init__(self, explanation: Explanation, axes: Sequence[str]) -> None:
        self.explanation, self.axes = explanation, axes
        self.is_attention = explanation.kind == "attention"
        self.chosen = self._layout(explanation.chosen.stored)
        self.rows = [(self._layout(row.stored), row) for row in explanation.alternatives]
        self.excluded = [(self._layout(row.sharding), row) for row in explanation.excluded]
        self.unsolved = [self._layout(text) for text in explanation.unsolved]

    def now(self, axis: str, size: int) -> str:
        """What the axis does in the plan, as a phrase."""
        does = self.chosen[axis]
        if self.is_attention:
            return does
        if does == TERMS:
            return "holds terms of a sum"
        if striped := re.match(r"(dim \d+) in (\d+) stripes(.*)", does):
            return f"cuts each of {striped[2]} stripes of {striped[1]} in {size}{striped[3]}"
        return f"cuts {does} in {size}" if does != WHOLE else "every rank has the same"

    def sentences(self, axis: str) -> Iterator[str]:
        """The other axis in this one's place, then what this one alone could do otherwise: what was solved first."""
        dim = _dim(self.chosen[axis])
        for other in self.axes if dim else ():
            if other != axis and _dim(self.chosen[other]) != dim:
                yield self._instead(axis, other, dim)
        alone: dict[str, list[str]] = {}
        for layout, row in self.rows:
            if self._differs(layout) == [axis]:
                alone.setdefault(self._costs(row, [axis]), []).append(self._unlike(layout, axis))
        for costs, layouts in alone.items():
            yield f"{self._label(axis, ' or '.join(layouts))}: {costs}"
        if WHOLE not in (self.chosen[axis], *itertools.chain(*alone.values())) and not self.is_attention:
            yield f"{self._label(axis, WHOLE)}: {self._missing({**self.chosen, axis: WHOLE})}."
        yield from self._left_out(axis)

    def _unlike(self, layout: Layout, axis: str) -> str:
        """What an axis does, with that it leaves stripes out where that is all the difference."""
        does, now = layout[axis], self.chosen[axis]
        return f"{does} without stripes" if does == _dim(now) != now else does

    def _instead(self, axis: str, other: str, dim: str) -> str:
        """The best of what was solved in which `other` cuts the dim that `axis` cuts, which does not then."""
        label = f"Over {other} instead of {axis} ({dim})"
        found = [row for layout, row in self.rows if layout[other] == dim and _dim(layout[axis]) != dim]
        if found:
            return f"{label}: {self._costs(min(found, key=lambda row: row.step_time_s), [axis, other])}"
        return f"{label}: {self._missing({**self.chosen, other: dim, axis: WHOLE})}."

    def _left_out(self, axis: str) -> Iterator[str]:
        """What this axis alone cannot do, or what there was no time for; one sentence for each reason."""
        reasons: dict[str, list[str]] = {}
        for layout, row in self.excluded:
            if self._differs(layout) == [axis] and layout[axis] != WHOLE:
                reasons.setdefault(_why_not(row), []).append(layout[axis])
        for layout in self.unsolved:
            if self._differs(layout) == [axis] and layout[axis] != WHOLE:
                reasons.setdefault(_NO_TIME, []).append(layout[axis])
        for reason, layouts in reasons.items():
            yield f"{self._label(axis, ' or '.join(dict.fromkeys(layouts)))}: {reason}."

    def _costs(self, row: Row, asked: Sequence[str]) -> str:
        """The step with it, then each thing that changes beside what was asked for."""
        chosen, layout = self.explanation.chosen, self._layout(row.stored)
        texts = [f"a step would take {format_time(row.step_time_s)} ({_signed(row)})"]
        for delta, text, what in (
            (row.communication_delta_s, format_time(abs(row.communication_delta_s)), "communication"),
            (row.peak_delta_bytes, format_bytes(abs(row.peak_delta_bytes)), "memory on the fullest rank"),
        ):
            texts += [f"{text} {'more' if delta > 0 else 'less'} {what}"] * bool(delta)
        said = ", ".join(texts) + "."
        if others := [axis for axis in self._differs(layout) if axis not in asked]:
            said += f" {' and '.join(self._changed(axis, layout[axis]) for axis in others)}, too."
        elif len(asked) > 1 and layout[asked[0]] != WHOLE:
            said += f" {self._changed(asked[0], layout[asked[0]])} then."
        if row.rematerialize != chosen.rematerialize:
            said += (
                f" These are two changes: so split, the best within the memory limit has the backward "
                f"{_MODES[row.rematerialize]} ({row.rematerialize}; the plan: {chosen.rematerialize}). The numbers are "
                "of both together."
            )
        against = [note for note in row.note.split("; ") if note.startswith("against ")]
        return said + (f" It goes {' and '.join(against)}: only a pin has it so." if against else "")

    def _changed(self, axis: str, does: str) -> str:
        if does == WHOLE:
            return f"{axis} cuts nothing"
        return f"{axis} holds terms of a sum" if does == TERMS else f"{axis} cuts {does}"

    def _label(self, axis: str, does: str) -> str:
        if self.is_attention:
            return f"{axis}: {does}"
        if does == WHOLE:
            return f"Whole on {axis}"
        return f"Terms of a sum on {axis}" if does == TERMS else f"{does[:1].upper()}{does[1:]} over {axis}"

    def _missing(self, wanted: Layout) -> str:
        """Why nothing like it was solved, as far as the explanation knows."""
        exact = [row for layout, row in self.excluded if layout == wanted]
        if exact:
            return _why_not(exact[0])
        if wanted in self.unsolved:
            return _NO_TIME
        if self.explanation.kind == "operator" and TERMS in wanted.values():
            return _NOT_OFFERED
        if self.explanation.more:
            return f"not among the runners-up: what else was solved ({self.explanation.more}) is worse"
        nearer = [
            row for layout, row in self.excluded
            if layout != self.chosen and all(layout[a] in (self.chosen[a], wanted[a]) for a in self.axes)
        ]  # fmt: skip
        if nearer:
            return f"cannot be had, nor can {nearer[0].sharding}, which changes less ({_why_not(nearer[0])})"
        return "nothing of it was tried"

    def _differs(self, layout: Layout) -> list[str]:
        """The axes that do something else; stripes, which come of another axis on the same dim, count if nothing else
        differs.
        """
        exact = [axis for axis in self.axes if layout[axis] != self.chosen[axis]]
        other = [axis for axis in exact if not _dim(layout[axis]) or _dim(layout[axis]) != _dim(self.chosen[axis])]
        return other or exact

    def _layout(self, text: str) -> dict[str, str]:
        found = way_of_text(text)
        return {axis: found.get(axis, WHOLE) for axis in self.axes}


_RULE = "no such split: "
"""What follows is the operator's rule, which the list of what is excluded has in full."""
_NOT_OFFERED = "the operator was offered no such split"
_NO_TIME = "not tried within the time for explanations"


def _dim(does: str) -> str:
    """`dim 0` of `dim 0 in 8 stripes`; empty where no dim is cut."""
    match = re.match(r"dim \d+", does)
    return match[0] if match else ""


def _why_not(row: Excluded) -> str:
    """`not possible: dim 1 is 11, which tp=8 does not divide`."""
    if _RULE in row.reason:
        return _NOT_OFFERED
    forbids = _FORBIDS.get(row.kind)
    return f"{forbids}: {row.reason}" if forbids else row.reason


def _signed(row: Row) -> str:
    """`+37.6 ms, +2.46%`."""
    if not row.step_delta_s:
        return "as now"
    sign = "−" if row.step_delta_s < 0 else "+"
    return f"{sign}{format_time(abs(row.step_delta_s))}, {sign}{abs(row.relative):.2%}"
