"""Which values a later stage computes again, and which travel: rotary tables, masks, ids that many stages read.

A call that depends on the program's inputs alone (`separate.repeatable_calls`) can run on any stage. A value that
travels is handed on by every stage between; its bytes take their time on each hop, the latency it shares with what
travels anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from autopar.cost.memory.calls import CallCosts
from autopar.ir.program import Program
from autopar.ir.values import ValueRef
from autopar.passes.repeatable import repeatable_calls


class Wire(Protocol):
    """What carries messages between neighbours of the pipeline; `autopar.machine.hardware.Link` is one."""

    @property
    def bandwidth_bytes_per_s(self) -> float: ...
    @property
    def wire_bandwidth_bytes_per_s(self) -> float | None: ...


def recompute_or_carry(
    program: Program, cuts: Sequence[int], costs: CallCosts, link: Wire
) -> tuple[tuple[int, ...], ...]:
    """For each stage, the calls of earlier stages that it computes again rather than receives.

    Of each call, by itself, the choice with the least seconds of computing and carrying over all stages: exact, but for
    what calls need of each other. There a call that is computed again counts what it needs with it, unless its stage
    reads that anyway, and readers come before what they read.

    Args:
        cuts: the first call of each stage. link: of the mesh axis of the pipeline.
    """
    bandwidth = link.wire_bandwidth_bytes_per_s or link.bandwidth_bytes_per_s
    stage_of = _stages(cuts, len(program.calls))
    repeatable = repeatable_calls(program)
    readers: dict[int, dict[int, set[ValueRef]]] = {number: {} for number in repeatable}
    for number, call in enumerate(program.calls):
        _note(readers, call.arguments, stage_of[number])
    found: list[set[int]] = [set() for _ in cuts]
    for number in sorted(repeatable, reverse=True):
        home = stage_of[number]
        reads = {stage: refs for stage, refs in sorted(readers[number].items()) if stage > home}
        seconds = {stage: _seconds_with_needs(program, number, stage, costs, readers, stage_of) for stage in reads}
        indexed = {stage: frozenset(ref.index for ref in refs) for stage, refs in reads.items()}
        results = range(len(program.region(program.calls[number].region).outputs))
        hops = [costs.value_bytes[ValueRef(number, index)] / bandwidth for index in results]
        for stage in stages_that_compute(home, indexed, seconds, hops):
            found[stage].add(number)
            _note(readers, program.calls[number].arguments, stage)
    return tuple(tuple(sorted(calls)) for calls in found)


def stages_that_compute(
    home: int, reads: Mapping[int, frozenset[int]], seconds: Mapping[int, float], hop_s: Sequence[float]
) -> tuple[int, ...]:
    """The stages that compute a call again, so that all of them together take least; of equal choices, those that carry
    more.

    Args:
        home: the stage that computes it in any case. reads: later stage -> the results that it reads. seconds: of
            computing it again, by stage. hop_s: of each result, from one stage to the next.
    """
    stages = sorted(reads)
    # best[i]: the least when the stages from stages[i] on are served, and stages[i] computes it.
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())] * (len(stages) + 1)
    for first in range(len(stages) - 1, -2, -1):
        source = home if first < 0 else stages[first]
        start = 0.0 if first < 0 else seconds[source]
        last: dict[int, int] = {}
        options: list[tuple[float, tuple[int, ...]]] = []
        for stop in range(first + 1, len(stages) + 1):
            carried = sum(hop_s[index] * (reader - source) for index, reader in last.items())
            rest, computing = best[stop]
            options.append((start + carried + rest, (*stages[stop : stop + 1], *computing)))
            if stop < len(stages):
                last.update(dict.fromkeys(reads[stages[stop]], stages[stop]))
        chosen = min(options, key=lambda option: (option[0], len(option[1]), option[1]))
        if first < 0:
            return chosen[1]
        best[first] = chosen
    raise AssertionError("the first stage is always reached")


def _stages(cuts: Sequence[int], num_calls: int) -> list[int]:
    return [sum(first <= number for first in cuts) - 1 for number in range(num_calls)]


def _note(readers: Mapping[int, dict[int, set[ValueRef]]], arguments: Sequence[ValueRef], stage: int) -> None:
    for ref in arguments:
        if ref.call in readers:
            readers[ref.call].setdefault(stage, set()).add(ref)


def _seconds_with_needs(
    program: Program,
    number: int,
    stage: int,
    costs: CallCosts,
    readers: Mapping[int, Mapping[int, set[ValueRef]]],
    stage_of: Sequence[int],
) -> float:
    """Seconds of a call, and of the calls that it needs and that its stage would have no other use for."""
    needed, open_ = {number}, [number]
    while open_:
        for ref in program.calls[open_.pop()].arguments:
            has_it = ref.call < 0 or stage_of[ref.call] == stage or stage in readers[ref.call]
            if not has_it and ref.call not in needed:
                needed.add(ref.call)
                open_.append(ref.call)
    return sum(costs[program.calls[each].region].forward_s for each in needed)
