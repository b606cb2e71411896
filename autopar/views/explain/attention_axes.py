"""What each axis of the mesh does to attention, in words: what it splits, and what that sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.base.text import format_bytes
from autopar.cost.collectives import Collective, phase_collectives
from autopar.cost.rings import Ring, ring_of
from autopar.ir.choices import Choice
from autopar.ir.program import Program
from autopar.strategies.axis import AxisStrategy
from autopar.views.explain.attention_choices import Attention, attentions, choices_of, does, short
from autopar.views.explain.attribution import moves_of_attention

_NAMES = {"all_to_all": "all-to-all", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter"}


@dataclass(frozen=True, slots=True)
class OnAxis:
    """What an axis does to one call of an attention, and what one rank sends for it, in words."""

    does: str
    sends: str

    def __str__(self) -> str:
        return f"{self.does}; {self.sends}"


def describe(program: Program, attention: Attention, axis: int, sent: Sequence[Collective]) -> OnAxis:
    """What an axis does to an attention. sent: `sent_by`."""
    region, name, size = program.region(attention.region), *program.on_mesh.axes[axis]
    choice = region.strategies[attention.node].choices[axis]
    moves = [row for row in sent if row.axis == name]
    text = _sentence(choice, {row.kind for row in moves}, size)
    if (ring := _ring(program, attention.region, attention.node)) is not None and ring.axis == axis:
        text += _unseen(len(ring.visits) - 1, size - 1)
    gradient = next((n for n in attention.others if "backward" in str(region.ops[n][0].target)), attention.node)
    other = region.strategies[gradient].choices[axis]
    text += f"; its gradient: {short(other)}" if other != choice else ""
    parts = [part for phase in region.phases if (part := _phase_text(program, attention, moves, phase))]
    return OnAxis(text, "each layer a rank sends: " + ", ".join(parts) if parts else "nothing is sent")


def _sentence(choice: Choice, kinds: set[str], size: int) -> str:
    what = does(choice)
    mark = " (zigzag)" if choice.zigzag else ""
    if what == "ring":
        return f"queries and keys split{mark}; keys and values go round {size} ranks"
    if what == "queries":
        return f"queries split{mark}; " + ("keys and values gathered" if "all_gather" in kinds else "keys whole")
    if "heads" in what:
        return f"{what} split" + ("; all-to-alls turn tokens to heads and back" if "all_to_all" in kinds else "")
    return "whole: every rank computes all of it" if what == "whole" else f"{what} split"


def sent_by(program: Program, attention: Attention) -> list[Collective]:
    """The collectives of one call: of what attention and its gradient read and give. The program is lowered."""
    region = program.region(attention.region)
    moves = set(moves_of_attention(region, attention.nodes))
    rows = [(phase, row) for phase in region.phases for row in phase_collectives(program, region, phase, 1)]
    return [row for phase, row in rows if (region.name, phase, row.tensor, row.kind, row.axis) in moves]


def _phase_text(program: Program, attention: Attention, moves: Sequence[Collective], phase: str) -> str:
    """`forward 4 all-to-alls (48.0 KiB)`."""
    rows = [row for row in moves if row.phase == phase]
    parts = [_steps_text(program, attention, row) for row in rows if row.kind == "ring"]
    if others := [row for row in rows if row.kind != "ring"]:
        counts = Counter(row.kind for row in others)
        kinds = [f"{n} {_NAMES.get(kind, kind)}{'s' * (n > 1)}" for kind, n in counts.items()]
        parts.append(f"{' and '.join(kinds)} ({format_bytes(sum(row.bytes_sent for row in others))})")
    return f"{phase} {' and '.join(parts)}" if parts else ""


def _ring(program: Program, region: str, node: str) -> Ring | None:
    found = program.region(region)
    return ring_of(*found.ops[node], found.strategies[node], program.on_mesh.sizes)


def _unseen(visited: int, others: int) -> str:
    """Where a mask keeps blocks at home."""
    if visited == others:
        return ""
    return f", to {visited} of {others} others: the mask hides the rest" if visited else ", but nobody sees another's"


def _steps_text(program: Program, attention: Attention, row: Collective) -> str:
    """`3 steps of 2.10 MiB and 4 of 4.20 MiB of gradients`."""
    ring = _ring(program, attention.region, row.tensor)
    assert ring is not None
    steps = len(ring.visits) - 1
    moves = len(ring.visits) if ring.gradients and steps else 0
    gradients = f" and {moves} of {format_bytes(ring.gradients)} of gradients" if moves else ""
    return f"{steps} step{'s' * (steps != 1)} of {format_bytes(ring.blocks)}{gradients}"


def context_rows(program: Program, strategies: Sequence[AxisStrategy]) -> tuple[tuple[str, str, str], ...]:
    """(axis, where, what it does to attention), of axes that split or turn the sequence there; where is empty if an
    axis does the same to every attention. What is sent stands there if it is the same too. The program is lowered.
    """
    if program.placement is None:
        return ()
    rows = []
    every = [(each, sent_by(program, each)) for each in attentions(program)]
    for axis, (name, size) in enumerate(program.on_mesh.axes):
        found: dict[str, list[tuple[str, str]]] = {}
        for each, sent in every if size > 1 else ():
            what = does(choices_of(program, each.region, each.node)[axis])
            is_named = strategies[axis].attention != "free" and program.region(each.region).module
            is_turned = "heads" in what and any(row.kind == "all_to_all" and row.axis == name for row in sent)
            if is_named or what in ("ring", "queries") or is_turned:
                said = describe(program, each, axis, sent)
                found.setdefault(said.does, []).append((each.label, said.sends))
        for text, own in found.items():
            sends = {each for _, each in own}
            where = ", ".join(label for label, _ in own) if len(found) > 1 else ""
            rows.append((name, where, f"{text}; {sends.pop()}" if len(sends) == 1 else text))
    return tuple(rows)
