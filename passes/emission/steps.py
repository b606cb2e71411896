"""The functions that run the calls in order: `split_inputs` and `forward`; `backward` is in backward.py."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Collection, Sequence
from typing import Literal

from autopar.ir.names import RESERVED
from autopar.ir.reads import reads_in_half
from autopar.ir.region import Call, Region
from autopar.ir.sharding import Shard
from autopar.ir.values import Port, ValueRef
from autopar.passes.emission.literals import escaped, inside, quoted
from autopar.passes.emission.names import WIDEST, result_names
from autopar.passes.emission.parameters import (
    Names,
    gather_call,
    has_own_backward_gather,
    moves_anything,
    parenthesized,
    resize_lines,
    shared_lines,
    slots_of,
)
from autopar.passes.emission.segments import Blocks, Segment, segments, updates_alike
from autopar.passes.emission.statements import identifier

FunctionPhase = Literal["forward", "backward", "backward_input", "backward_weight"]
"""What a function over the calls runs of each: its forward, its backward, or one half of that."""


class ForwardWriter:
    """Writes `split_inputs` and `forward` over the segments of a program, and what starts gathers."""

    def __init__(self, names: Names, runs: Sequence[Segment] | None = None) -> None:
        """runs: the segments to write; all calls of the program where left out."""
        self.names, self.program = names, names.program
        self.segments = segments(self.program) if runs is None else list(runs)
        self.variables: dict[ValueRef, str] = {}
        self._read: dict[tuple[int, FunctionPhase], frozenset[str]] = {}
        self.taken: set[str] = {
            "comm",
            "state",
            "held",
            "pending",
            "reducing",
            "sums",
            "last",
            "tied",
            "inputs",
            "seed",
            "p",
            "g",
            "updates",
            "gradients",
            "saved",
            "saved_of_calls",
            "each",
            "grads",
            "shared",
            "i",
            "at",
        }

    # -- inputs
    # ---------------------------------------------------------------------------------------------------------

    def split_inputs(self) -> str:
        assert self.program.placement is not None
        alike: dict[str, list[str]] = {}
        for port in self.program.inputs[: len(self.program.inputs) // self.program.together]:
            sharding = self.program.placement.inputs.get(port.name)
            text = "inputs[name]"
            if port.type.is_float:
                text = f"{text}.to({port.type.dtype})"
            for axis, placement in zip(self.names.axes, sharding or (), strict=False):
                if isinstance(placement, Shard):
                    outer = f", {placement.outer}" if placement.outer != 1 else ""
                    outer += ", zigzag=True" if placement.zigzag else ""
                    text = f'comm.slice({text}, "{axis}", {placement.dim}{outer})'
            if text != "inputs[name]":
                alike.setdefault(text, []).append(quoted(port.name))
        lines = ["def split_inputs(comm, inputs):", "    local = dict(inputs)"]
        for text, names in alike.items():
            lines += [f"    for name in {parenthesized(names)}:", f"        local[name] = {text}"]
        return "\n".join([*lines, "    return local"])

    # -- forward
    # --------------------------------------------------------------------------------------------------------

    def forward(self) -> str:
        lines = ["def forward(comm, state, held, inputs, seed):"]
        for port in self.program.inputs:
            self.variables[ValueRef(name=port.name)] = self._fresh(port.name)
        lines += self._read_inputs(self.program.inputs)
        lines += self._forward_calls()
        names = [self.variables[ref] for ref in self.program.outputs]
        if self.program.updates:
            lines.insert(1, "    updates = {}  # what replaces buffers, in the order of the calls")
            names.append("*updates.values()")
        outputs = parenthesized(names)
        saved = ", ".join(f"saved_{n}" for n in range(len(self.segments)))
        return "\n".join([*lines, f"    return {outputs}, [{saved}]"])

    def _read_inputs(self, ports: Sequence[Port]) -> list[str]:
        left = ", ".join(self.variables[ValueRef(name=port.name)] for port in ports)
        right = ", ".join(f"inputs[{quoted(port.name)}]" for port in ports)
        lines = [f"    {self.variables[ValueRef(name=p.name)]} = inputs[{quoted(p.name)}]" for p in ports]
        return [f"    {left} = {right}"] if ports and len(left) + len(right) < WIDEST else lines

    def _forward_calls(self) -> list[str]:
        lines = self._shared_gather("forward")
        order = list(range(len(self.segments)))
        lines += self._first_gather(order, "forward")
        for number in order:
            following = self._following(order, number, "forward")
            write = self._forward_loop if self.segments[number].is_loop else self._forward_call
            lines += write(number, self.segments[number], following)
            if number != order[-1]:
                lines += self._dropped(self._last_read_in(self.segments[number]))
        return lines

    def _last_read_in(self, segment: Segment) -> list[ValueRef]:
        """Values that nothing reads after this segment, and that no backward needs: those of inference."""
        if self.program.training:
            return []
        calls = range(segment.first, segment.last + 1)
        results = range(len(self.program.region(self.program.calls[segment.last].region).outputs))
        made = [ValueRef(segment.last, position) for position in results]
        read = [ref for number in calls for ref in self.program.calls[number].arguments if ref.call >= 0]
        later = {ref for call in self.program.calls[segment.last + 1 :] for ref in call.arguments}
        kept = {*later, *self.program.outputs, *(ref for _, ref in self.program.updates)}
        return [ref for ref in dict.fromkeys([*read, *made]) if ref not in kept]

    def _dropped(self, refs: Sequence[ValueRef]) -> list[str]:
        gone = dict.fromkeys(self.variables.pop(ref) for ref in refs if ref in self.variables)
        names = [name for name in gone if name not in self.variables.values()]
        return [f"    del {', '.join(names)}"] if names else []

    # -- parameters in flight

    def _region(self, number: int) -> Region:
        return self.program.region(self.program.calls[self.segments[number].first].region)

    def _which(self, number: int, phase: FunctionPhase) -> str:
        own = phase != "forward" and has_own_backward_gather(self._region(number))
        return "gather_for_backward" if own else "gather"

    def _moves(self, number: int, phase: FunctionPhase) -> bool:
        return self._reads(number, phase) and moves_anything(self._region(number).transfers[self._which(number, phase)])

    def _reads(self, number: int, phase: FunctionPhase) -> bool:
        """Whether a call reads parameters; half a backward need not."""
        return phase == "forward" or phase == "backward" or bool(self._read_in(number, phase))

    def _shared_in(self, phase: FunctionPhase) -> Sequence[str]:
        """The parameters, of those that several calls use, that are read in a phase."""
        if phase == "forward" or phase == "backward":
            return self.names.shared
        read = frozenset[str]().union(*(self._read_in(number, phase) for number in range(len(self.segments))))
        return [name for name in self.names.shared if name in read]

    def _read_in(self, number: int, phase: FunctionPhase) -> frozenset[str]:
        """What a segment's first call reads in half a backward."""
        if (number, phase) not in self._read:
            region = self._region(number)
            slots = enumerate(self.program.calls[self.segments[number].first].slots)
            found = [name for slot, name in slots if phase in region.lowered and reads_in_half(region, slot, phase)]
            self._read[number, phase] = frozenset(found)
        return self._read[number, phase]

    def _gather_at(self, number: int, phase: FunctionPhase, at: str | None = None) -> str:
        """The gather of a segment's first call in this direction, or at `at`."""
        return gather_call(self._region(number), self._which(number, phase), at or self._at(number, phase))

    def _at(self, number: int, phase: FunctionPhase) -> str:
        """The prefix of the names of a segment's first call in this direction, as Python text."""
        segment = self.segments[number]
        if segment.blocks is not None and segment.blocks.parameter:
            blocks = segment.blocks
            last = segment.is_loop and phase != "forward"
            return prefix_at(blocks, blocks.last_number if last else blocks.first_number)
        return repr_at(self.program.calls[segment.first if phase == "forward" else segment.last])

    def _first_gather(self, order: Sequence[int], phase: FunctionPhase) -> list[str]:
        moving = [number for number in order if self._moves(number, phase)]
        if not moving or not self.names.overlap.prefetch:
            return []
        return [f"    pending = {self._gather_at(moving[0], phase)}"]

    def _following(self, order: Sequence[int], number: int, phase: FunctionPhase) -> str:
        """What gathers for the next segment that gathers; `None` after the last."""
        later = [each for each in order[order.index(number) + 1 :] if self._moves(each, phase)]
        return self._gather_at(later[0], phase) if later else "None"

    def _gathered(self, number: int, call: Call, following: str, phase: FunctionPhase) -> list[str]:
        """`p` for a single call, and the next gather on its way."""
        return self._held(number, call, "    ", self._gather_at(number, phase), following, phase)

    def _gathered_in_loop(self, number: int, call: Call, following: str, phase: FunctionPhase) -> list[str]:
        """The same in a loop over `i`: the next call's gather starts before this call computes."""
        blocks, forward = self._blocks(number), phase == "forward"
        more = f"i < {blocks.last_number}" if forward else f"i > {blocks.first_number}"
        step = self._gather_at(number, phase, prefix_at(blocks, f"i {'+' if forward else '-'} 1"))
        start = self._gather_at(number, phase, prefix_at(blocks, "i"))
        return self._held(number, call, "        ", start, f"{step} if {more} else {following}", phase)

    def _held(
        self, number: int, call: Call, indent: str, start: str, following: str, phase: FunctionPhase
    ) -> list[str]:
        """`p`, by what starts its gather, or of one that is under way, with the next one started."""
        if not self._reads(number, phase):
            return []
        if not self._moves(number, phase):
            lines = [f"{indent}p = {start}"]
        elif not self.names.overlap.prefetch:
            lines = [f"{indent}p = {start}.wait()"]
        else:
            lines = _waited(indent, following)
        return [*lines, *self._whole_slots(number, call, indent, phase)]

    def _whole_slots(self, number: int, call: Call, indent: str, phase: FunctionPhase) -> list[str]:
        """What a region's gather leaves to do: parameters from uneven pieces, parameters that several calls share."""
        region = self._region(number)
        own = slots_of(self.names, region, call, self._which(number, phase))
        lines = list(resize_lines(self.names, "p", own, indent)) if self._moves(number, phase) else []
        pairs, shared = zip(region.slots, call.slots, strict=True), self._shared_in(phase)
        return lines + [f"{indent}p[{quoted(s.name)}] = shared[{quoted(name)}]" for s, name in pairs if name in shared]

    def _blocks(self, number: int) -> Blocks:
        blocks = self.segments[number].blocks
        assert blocks is not None
        return blocks

    def _where(self, number: int, phase: FunctionPhase) -> str:
        """What `comm` says of a single call, as Python text."""
        call = self.program.calls[self.segments[number].first]
        blocks = self.segments[number].blocks
        if blocks is not None:
            return f'f"{inside(blocks.prefix)}.{{{blocks.first_number}}} {said(phase)}"'
        return quoted(f"{call.path or call.region} {said(phase)}")

    def _fresh(self, wanted: str) -> str:
        name = base = identifier(wanted)
        number = 1
        while name in self.taken or keyword.iskeyword(name) or hasattr(builtins, name) or name in RESERVED:
            name, number = f"{base}_{number}", number + 1
        self.taken.add(name)
        return name

    def _shared_gather(self, phase: FunctionPhase) -> list[str]:
        wanted = self._shared_in(phase)
        if not wanted:
            return []
        lines = ["    shared = comm.transfers(held)  # parameters that several calls use: gathered once"]
        lines += [*shared_lines(self.names, "gather", wanted), "    shared = shared.wait()"]
        entries = [(name, self.program.variable(name)) for name in wanted]
        return [*lines, *resize_lines(self.names, "shared", entries, "    ")]

    def _forward_call(self, number: int, segment: Segment, following: str) -> list[str]:
        call = self.program.calls[segment.first]
        region = self.program.region(call.region)
        arguments = [self.variables[ref] for ref in call.arguments]
        results: list[str] = []
        for position, name in enumerate(result_names(region)):
            results.append(self._variable(name, segment, results))
            self.variables[ValueRef(segment.first, position)] = results[-1]
        lines = [
            f"    comm.at({self._where(number, 'forward')})",
            *self._gathered(number, call, following, "forward"),
        ]
        called = f"{region.name}_forward({', '.join(['comm', 'p', *arguments, *self._seeds(segment, region)])})"
        lines.append(f"    {parenthesized(results)}, saved_{number} = {called}")
        lines += self._updates(number)
        return [*lines, *(["    del p"] if following != "None" and self._moves(number, "forward") else [])]

    def _variable(self, wanted: str, segment: Segment, others: Collection[str]) -> str:
        """What a result is called: a name goes on where nobody reads the value that has it any more, and no other
        result of the same statement has it.
        """
        name = identifier(wanted)
        holders = [ref for ref, variable in self.variables.items() if variable == name]
        first = segment.first if segment.is_loop else segment.last + 1
        if holders and name not in others and not any(self._is_read_from(first, ref) for ref in holders):
            return name
        return self._fresh(wanted)

    def _is_read_from(self, first: int, ref: ValueRef) -> bool:
        """Whether anything reads a value from a call on."""
        return ref in self.program.outputs or any(ref in call.arguments for call in self.program.calls[first:])

    def _goes_on(self, ref: ValueRef, wanted: str, segment: Segment) -> bool:
        """Whether a loop may go on under the name of the value that it begins with."""
        arguments = enumerate(self.program.calls[segment.first].arguments)
        places = [position for position, other in arguments if other == ref]
        is_alike = re.fullmatch(rf"{re.escape(identifier(wanted))}(_\d+)?", self.variables[ref]) is not None
        is_carried = len(places) == 1 and places[0] in segment.carried
        return is_alike and is_carried and not self._is_read_from(segment.first + 1, ref)

    def _updates(self, number: int) -> list[str]:
        """What replaces buffers, of a single call."""
        segment = self.segments[number]
        path = f"{self.program.calls[segment.first].path}."
        lines: list[str] = []
        for name, ref in self.program.updates:
            if ref.call == segment.first:
                key = quoted(name)
                if segment.blocks is not None and name.startswith(path):
                    at, rest = self._at(number, "forward"), name.removeprefix(path)
                    key = f'{at[:-1]}{inside(rest) if at.startswith("f") else escaped(rest)}"'
                lines.append(f"    updates[{key}] = {self.variables[ref]}")
        return lines

    def _seeds(self, segment: Segment, region: Region) -> list[str]:
        """The dropout seeds of a call: each microbatch's, plus the call's number in the program."""
        blocks, more = segment.blocks, ""
        if blocks is not None:
            more = f" + {'i' if segment.is_loop else blocks.first_number}"
        number = segment.first - (0 if blocks is None else blocks.first)
        seeds = ["seed"] if region.seeds == 1 else [f"seed[{place}]" for place in range(region.seeds)]
        return [_plus(seed + more, number) for seed in seeds]

    def _forward_loop(self, number: int, segment: Segment, following: str) -> list[str]:
        call = self.program.calls[segment.first]
        region = self.program.region(call.region)
        lines = [f"    saved_{number} = []"]
        wanted = result_names(region)
        by_result: dict[int, str] = {}
        arguments: list[str] = []
        begun: list[ValueRef] = []
        for position, ref in enumerate(call.arguments):
            if position in segment.carried:
                result = segment.carried[position]
                if result not in by_result and self._goes_on(ref, wanted[result], segment):
                    by_result[result] = self.variables[ref]
                elif result not in by_result:
                    by_result[result] = self._variable(wanted[result], segment, by_result.values())
                    lines.append(f"    {by_result[result]} = {self.variables[ref]}")
                    begun.append(ref)
                arguments.append(by_result[result])
            else:
                arguments.append(self.variables[ref])
        held = {ref for position, ref in enumerate(call.arguments) if position not in segment.carried}
        lines += self._dropped([ref for ref in self._last_read_in(segment) if ref in begun and ref not in held])
        results: list[str] = []
        for position, name in enumerate(wanted):
            others = [*results, *by_result.values()]
            results.append(by_result.get(position) or self._variable(name, segment, others))
        blocks = self._blocks(number)
        alike = updates_alike(self.program, segment) or ()
        called = f"{region.name}_forward({', '.join(['comm', 'p', *arguments, *self._seeds(segment, region)])})"
        lines += [
            f"    for i in {blocks.numbers}:",
            f'        comm.at(f"{inside(blocks.prefix)}.{{i}} forward")',
            *self._gathered_in_loop(number, call, following, "forward"),
            f"        {parenthesized(results)}, saved = {called}",
            f"        saved_{number}.append(saved)",
            *(
                f'        updates[f"{inside(blocks.prefix)}.{{i}}.{inside(name)}"] = {results[index]}'
                for index, name in alike
            ),
            "        del p, saved",
        ]
        for position, name in enumerate(results):
            self.variables[ValueRef(segment.last, position)] = name
        return lines


def _waited(indent: str, following: str) -> list[str]:
    """Wait for what is under way, then start what follows."""
    if following == "None":
        return [f"{indent}p = pending.wait()"]
    line = f"{indent}p, pending = pending.wait(), {following}"
    return [line] if len(line) <= WIDEST else [f"{indent}p = pending.wait()", f"{indent}pending = {following}"]


def said(phase: FunctionPhase) -> str:
    """A phase as `comm` says it."""
    return phase.replace("backward_", "backward of ") + ("s" if "_" in phase else "")


def prefix_at(blocks: Blocks, number: str) -> str:
    """The prefix of the names of the block with this number, as Python text."""
    return f'f"{inside(blocks.prefix)}.{{{number}}}."'


def repr_at(call: Call) -> str:
    """The prefix of a block's parameter names, as Python text."""
    return quoted(f"{call.path}.") if call.path else '""'


def _plus(text: str, number: int) -> str:
    return text if number == 0 else f"{text} + {number}" if number > 0 else f"{text} - {-number}"
