"""What a stage holds while it computes one microbatch, from what its calls hold (memory.py)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from autopar.cost.memory.boundaries import carries_gradient
from autopar.cost.memory.calls import CallCosts, stage_of_range
from autopar.cost.memory.regions import Held
from autopar.ir.halves import INPUT_HALF, WEIGHT_HALF
from autopar.ir.program import Program
from autopar.ir.region import Call, Region
from autopar.ir.stages import Stage
from autopar.ir.values import ValueRef
from autopar.strategies.pipelining.costs import StageCost

_Key = tuple[Literal["value", "gradient", "own"], ValueRef | int, str]


class StageMemory:
    """What a stage holds while it computes one microbatch.

    Times are the places of its calls. saved, kept: storages, with bytes and the places of the first and the last call
    that holds them.
    """

    def __init__(self, program: Program, stage: Stage, costs: CallCosts) -> None:
        self.program, self.stage, self.costs = program, stage, costs
        self.calls = [program.calls[number] for number in stage.calls]
        self.memories = [costs[call.region].memory for call in self.calls]
        self.saved = self._collected([memory.saved for memory in self.memories])
        self.kept = self._collected([memory.kept for memory in self.memories])
        self.saved_bytes = _total(self.saved)
        self.freed_bytes = _total({key: each for key, each in self.saved.items() if key not in self.kept})
        self.kept_bytes = _total({key: each for key, each in self.kept.items() if key not in self.saved})
        self.last_reads: dict[ValueRef, int] = {}
        for place, call in enumerate(self.calls):
            self.last_reads.update(dict.fromkeys(call.arguments, place))

    def _collected(self, held: Sequence[Sequence[Held]]) -> dict[_Key, tuple[float, int, int]]:
        found: dict[_Key, tuple[float, int, int]] = {}
        for place, storages in enumerate(held):
            for each in storages:
                key = self._key(place, each)
                size, first, _ = found.get(key, (each.num_bytes, place, place))
                found[key] = (size, first, place)
        return found

    def _key(self, place: int, held: Held) -> _Key:
        number, call = self.stage.calls[place], self.calls[place]
        if held.source == "input":
            return "value", self._origin(call.arguments[held.index]), ""
        if held.source == "output":
            return "value", ValueRef(number, held.index), ""
        if held.source == "gradient":
            return "gradient", ValueRef(number, held.index), ""
        return "own", number, held.name

    def _origin(self, ref: ValueRef) -> ValueRef:
        return origin_of(self.program, self.costs, ref)

    def forward(self) -> float:
        """The most beyond what is saved, at any time of the forward."""
        end = len(self.calls)
        lives = {key: (size, first + 1, end) for key, (size, first, _) in self.saved.items()}
        for ref, (start, stop) in self._values().items():
            key: _Key = ("value", self._origin(ref), "")
            if key in lives:
                size, saved_from, _ = lives[key]
                lives[key] = (size, min(saved_from, start), end)
            else:
                lives[key] = (self.costs.value_bytes[ref], start, stop)
        gathered = [self.costs[call.region].moves.forward_gathered for call in self.calls]
        peaks = [memory.peaks["forward"] for memory in self.memories]
        return max(0.0, self._peak(lives.values(), peaks, gathered) - self.saved_bytes)

    def backward(self, has_halves: bool) -> float:
        """The most beyond what is counted as saved and kept, at any time of the backward or of one of its halves."""
        phases = ("backward", INPUT_HALF, WEIGHT_HALF) if has_halves else ("backward",)
        return max(self._backward(phase) for phase in phases)

    def _backward(self, phase: str) -> float:
        counted = self.saved_bytes + (self.kept_bytes if phase == INPUT_HALF else 0.0)
        if phase == WEIGHT_HALF:
            counted += self.kept_bytes - self.freed_bytes
        peaks = [memory.peaks.get(phase, 0.0) for memory in reversed(self.memories)]
        gathered = [self._gathered_again(call, phase) for call in reversed(self.calls)]
        return max(0.0, self._peak(self._backward_lives(phase), peaks, gathered) - counted)

    def _backward_lives(self, phase: str) -> Iterable[tuple[float, int, int]]:
        """What is held from which place to which. Times run backwards: place 0 is the last call's."""
        last = len(self.calls) - 1
        if phase == WEIGHT_HALF:
            return [(size, 0, last - first) for size, first, _ in self.kept.values()]
        lives = {key: (size, 0, last - first) for key, (size, first, _) in self.saved.items()}
        if phase == INPUT_HALF:
            for key, (size, _, holder) in self.kept.items():
                lives[key] = (size, 0 if key in self.saved else last - holder + 1, last + 1)
        for ref, (start, stop) in self._gradients().items():
            name: _Key = ("gradient", ref, "")
            _, first, until = lives.get(name, (0.0, start, stop))
            lives[name] = (self.costs.gradient_bytes[ref], min(first, start), max(until, stop))
        return lives.values()

    def _gathered_again(self, call: Call, phase: str) -> float:
        """Bytes of parameters that a call gathers for its backward, or a half of it."""
        if phase == WEIGHT_HALF and call.region not in self.costs.reading_weights:
            return 0.0
        return self.costs[call.region].moves.backward_gathered

    def _values(self) -> dict[ValueRef, tuple[int, int]]:
        """From which place to which a value between calls is held, beside the calls that make it. Of a program without
        a backward, outputs are counted as what is held all the time.
        """
        end = len(self.calls)
        found = {ref: (0, self.last_reads.get(ref, -1)) for ref in self.stage.receives}
        kept = {*self.stage.sends, *self.program.outputs}
        for place, number in enumerate(self.stage.calls):
            for index in range(len(self._region(place).outputs)):
                ref = ValueRef(number, index)
                found[ref] = (place + 1, self.last_reads.get(ref, -1))
        if not self.program.training:  # `CallCosts.kept_of_call`
            found = {ref: times for ref, times in found.items() if ref not in self.program.outputs}
        return {ref: (start, end if ref in kept else stop) for ref, (start, stop) in found.items()}

    def _gradients(self) -> dict[ValueRef, tuple[int, int]]:
        """The same of gradients, backwards: from the last reader, or from the beginning, to the call that made the
        value, or to the end.
        """
        last = len(self.calls) - 1
        given = {*self.stage.sends, *self.program.roots}
        made = {number: place for place, number in enumerate(self.stage.calls)}
        refs = {ref for ref in (*self.last_reads, *given) if ref in self.costs.gradient_bytes}
        found = {}
        for ref in refs:
            if ref.call >= 0 and ref.call not in made and ref not in self.stage.receives:
                continue
            start = 0 if ref in given else last - self.last_reads[ref] + 1
            found[ref] = (start, last - made[ref.call] if ref.call in made else last + 1)
        return found

    def _region(self, place: int) -> Region:
        return self.program.region(self.calls[place].region)

    def _peak(
        self, lives: Iterable[tuple[float, int, int]], peaks: Sequence[float], gathered: Sequence[float]
    ) -> float:
        """The most over all calls, and after the last one."""
        end = len(peaks)
        changes = changes_of(lives, end)
        most = now = 0.0
        for place in range(end):
            now += changes[place]
            following = gathered[place + 1] if self.costs.prefetches and place + 1 < end else 0.0
            most = max(most, now + peaks[place] + gathered[place] + following)
        return max(most, now + changes[end])


def changes_of(lives: Iterable[tuple[float, int, int]], end: int) -> list[float]:
    """By place, up to two after `end`: what is held more than before. lives: bytes, first and last place."""
    changes = [0.0] * (end + 3)
    for size, start, stop in lives:
        if stop >= start:
            changes[start] += size
            changes[stop + 1] -= size
    return changes


def origin_of(program: Program, costs: CallCosts, ref: ValueRef) -> ValueRef:
    """The value in whose storage a value between calls lies."""
    while ref.call >= 0:
        call = program.calls[ref.call]
        passed = costs[call.region].memory.passes.get(ref.index)
        if passed is None:
            break
        ref = call.arguments[passed]
    return ref


def _total(held: Mapping[_Key, tuple[float, int, int]]) -> float:
    return sum(size for size, _, _ in held.values())


def stage_cost(program: Program, stage: Stage, costs: CallCosts) -> StageCost:
    """What one stage takes on one rank; calls that it computes again for itself included. Stages that run the same
    number of the same blocks are worked out once.
    """
    key = _stage_key(program, stage, costs)
    if key not in costs.stages:
        costs.stages[key] = _stage_cost(program, stage, costs)
    return costs.stages[key]


def _stage_key(program: Program, stage: Stage, costs: CallCosts) -> tuple[object, ...]:
    """What a stage's cost depends on: its calls, and what flows between them, in and out, whatever their numbers."""
    places = {number: place for place, number in enumerate(stage.calls)}
    outside: dict[ValueRef, int] = {}

    def name(ref: ValueRef) -> tuple[object, ...]:
        if ref.call in places:
            return places[ref.call], ref.index
        origin = origin_of(program, costs, ref)
        numbers = [outside.setdefault(each, len(outside)) for each in (ref, origin)]
        return "outside", *numbers, costs.value_bytes.get(ref), costs.gradient_bytes.get(ref)

    calls = [
        (call.region, costs.static_of_call[number], tuple(map(name, call.arguments)), costs.shared_by_call[number])
        for number, call in ((number, program.calls[number]) for number in stage.calls)
    ]
    again = tuple(places[number] for number in stage.recomputed)
    roots = sorted(program.roots, key=lambda ref: (ref.call, ref.index))
    returned = [tuple(name(ref) for ref in refs if ref.call in places) for refs in (program.outputs, roots)]
    return tuple(calls), again, tuple(map(name, stage.receives)), tuple(map(name, stage.sends)), *returned


def _stage_cost(program: Program, stage: Stage, costs: CallCosts) -> StageCost:
    calls = [(number, program.calls[number]) for number in stage.calls]
    each = [costs[call.region] for _, call in calls]
    names = dict.fromkeys(name for _, call in calls for name in call.slots)
    parameters = [costs.parameters[name] for name in names]
    held = StageMemory(program, stage, costs)
    kept = sum(costs.kept_of_call[number] for number in stage.calls if number not in stage.recomputed)
    gathered = sum(parameter.gathered_bytes for parameter in parameters)
    has_halves = any(cost.input_s or cost.weight_s for cost in each)
    again = sum(p.backward_s for p in parameters)
    weights_gather = any(call.region in costs.reading_weights for _, call in calls)
    first, last = (each[0].first_s, each[-1].last_s) if each else (0.0, 0.0)
    return StageCost(
        forward_s=sum(cost.forward_s for cost in each) + sum(p.forward_s for p in parameters) + first,
        backward_s=sum(cost.backward_s for cost in each) + again + last,
        input_s=sum(cost.input_s for cost in each) + (again + last) * has_halves,
        weight_s=sum(cost.weight_s for cost in each) + again * (has_halves and weights_gather),
        forward_bytes=sum(costs.value_bytes[ref] for ref in stage.sends),
        backward_bytes=sum(costs.gradient_bytes[ref] for ref in stage.receives if carries_gradient(program, ref)),
        unshard_s=sum(cost.moves.unshard_s for cost in each) + sum(p.unshard_s for p in parameters),
        reduce_s=sum(cost.moves.reduce_s for cost in each) + sum(p.reduce_s for p in parameters),
        static_bytes=sum(parameter.static_bytes for parameter in parameters) + kept,
        held_bytes=sum(parameter.held_bytes for parameter in parameters),
        saved_bytes=held.saved_bytes,
        input_bytes=held.freed_bytes,
        kept_bytes=held.kept_bytes,
        forward_working_bytes=held.forward() + gathered,
        backward_working_bytes=held.backward(has_halves) + gathered,
        update_s=sum(parameter.update_s for parameter in parameters),
        add_s=sum(cost.moves.add_s for cost in each),
    )


def peak_bytes(cost: StageCost, in_flight: int, splits_backward: bool = False) -> float:
    """The most that a rank holds that runs this stage alone, with so many microbatches in flight."""
    kept = cost.kept_bytes if splits_backward else 0.0
    working = max(cost.forward_working_bytes, cost.backward_working_bytes + kept)
    return cost.static_bytes + cost.held_bytes + in_flight * cost.saved_bytes + working


def memory_fits(
    program: Program, costs: CallCosts, in_flight: Sequence[int], limit_bytes: float, splits_backward: bool = False
) -> Callable[[int, int, int], bool]:
    """For `best_cut`: fits(stage, first, stop), where each rank runs one stage.

    in_flight, splits_backward: as of the schedule (`Schedule`).
    """

    @functools.cache
    def cost(first: int, stop: int) -> StageCost:
        return stage_cost(program, stage_of_range(program, first, stop), costs)

    return lambda stage, first, stop: peak_bytes(cost(first, stop), in_flight[stage], splits_backward) <= limit_bytes
