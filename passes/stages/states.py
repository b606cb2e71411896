"""Which rank of a pipeline keeps a state (a cache): the one whose stage makes it anew, and who else reads it.

A state is handed from one call of the program to the next, so the rank that makes it has it when it is read again.
Single numbers, such as how many positions are written, are outputs that every rank gets: any stage may read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.base.errors import AutoparError
from autopar.ir.nodes import format_target
from autopar.ir.program import Program
from autopar.ir.stages import Stage
from autopar.passes.repeatable import kept_states
from autopar.strategies.pipelining.spec import AXIS


@dataclass(frozen=True, slots=True)
class StateUse:
    """The calls that touch a state of some elements: the one that makes it, and those that read it, ascending."""

    name: str
    maker: int
    readers: tuple[int, ...]

    @property
    def span(self) -> tuple[int, int]:
        """The first and the last call, between which a cut would part them."""
        calls = (self.maker, *self.readers)
        return min(calls), max(calls)


def state_uses(program: Program) -> tuple[StateUse, ...]:
    """Of every state that one rank keeps, in the order of the program's outputs."""
    kept = kept_states(program)
    made = zip(program.output_names, program.outputs, strict=True)
    return tuple(
        StateUse(name, ref.call, tuple(_readers(program, name))) for name, ref in made if name in kept and ref.call >= 0
    )


def _readers(program: Program, name: str) -> Iterator[int]:
    for number, call in enumerate(program.calls):
        if any(ref.call < 0 and ref.name == name for ref in call.arguments):
            yield number


def parts_states(uses: Sequence[StateUse], cut: Sequence[int]) -> bool:
    """Whether a stage would read a state that another one makes. cut: the first call of each stage."""
    return any(first < place <= last for use in uses for first, last in [use.span] for place in cut)


def check_states(program: Program, stages: Sequence[Stage], rank_of: Sequence[int]) -> None:
    """That every state is read where it is kept.

    Raises:
        AutoparError: a call reads a state that a stage on another rank makes; names the operator that does.
    """
    stage_of = {call: k for k, stage in enumerate(stages) for call in stage.calls if call not in stage.recomputed}
    for use in state_uses(program):
        home = stage_of[use.maker]
        for number, stage in enumerate(stages):
            for call in use.readers:
                if call in stage.calls and rank_of[number] != rank_of[home]:
                    raise _cannot_keep(program, use, call, number, home)


def _cannot_keep(program: Program, use: StateUse, reader: int, stage: int, home: int) -> AutoparError:
    call, maker = program.calls[reader], program.calls[use.maker]
    region = program.region(call.region)
    place = len(region.slots) + next(i for i, ref in enumerate(call.arguments) if ref.call < 0 and ref.name == use.name)
    holder = [node for node in region.graph.nodes if node.op == "placeholder"][place]
    user = next((node for node in region.graph.nodes if holder in node.all_input_nodes), None)
    operator = "" if user is None or user.op == "output" else f" by {format_target(user)}"
    return AutoparError(
        f"no stage of the pipeline can keep the state {use.name}: one reads it, and another one makes it",
        where=f"{call.path or call.region}{operator}",
        values=f"read in stage {stage} by {call.path or call.region}, made in stage {home} by "
        f"{maker.path or maker.region}",
        remedy=f"use a mesh without {AXIS}; where the two lie next to each other, a cut that leaves them in one stage",
    )
