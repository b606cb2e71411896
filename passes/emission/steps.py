"""The functions that run the calls in order: `split_inputs` and `forward`; `backward` is in backward.py."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir import Call, Region, ValueRef
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
from autopar.passes.emission.segments import Segment, numbers_of, segments, updates_alike
from autopar.passes.emission.statements import identifier
from autopar.sharding import Shard


class ForwardWriter:
    """Writes `split_inputs` and `forward` over the segments of a program, and what starts gathers."""

    def __init__(self, names: Names) -> None:
        self.names, self.program = names, names.program
        self.segments = segments(self.program)
        self.variables: dict[ValueRef, str] = {}
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
        lines = ["def split_inputs(comm, inputs):", "    local = dict(inputs)"]
        for port in self.program.inputs:
            sharding = self.program.placement.inputs.get(port.name)
            text = f'inputs["{port.name}"]'
            if port.type.is_float:
                text = f"{text}.to({port.type.dtype})"
            for axis, placement in zip(self.names.axes, sharding or (), strict=False):
                if isinstance(placement, Shard):
                    outer = f", {placement.outer}" if placement.outer != 1 else ""
                    text = f'comm.slice({text}, "{axis}", {placement.dim}{outer})'
            if text != f'inputs["{port.name}"]':
                lines.append(f'    local["{port.name}"] = {text}')
        return "\n".join([*lines, "    return local"])

    # -- forward
    # --------------------------------------------------------------------------------------------------------

    def forward(self) -> str:
        lines = ["def forward(comm, state, held, inputs, seed):"]
        for port in self.program.inputs:
            variable = self._fresh(port.name)
            self.variables[ValueRef(name=port.name)] = variable
            lines.append(f'    {variable} = inputs["{port.name}"]')
        lines += self._shared_gather()
        order = list(range(len(self.segments)))
        lines += self._first_gather(order, backward=False)
        for number in order:
            following = self._following(order, number, backward=False)
            write = self._forward_loop if self.segments[number].count > 1 else self._forward_call
            lines += write(number, self.segments[number], following)
        names = [self.variables[ref] for ref in self.program.outputs]
        if self.program.updates:
            lines.insert(1, "    updates = {}  # what replaces buffers, in the order of the calls")
            names.append("*updates.values()")
        outputs = parenthesized(names)
        saved = ", ".join(f"saved_{n}" for n in range(len(self.segments)))
        return "\n".join([*lines, f"    return {outputs}, [{saved}]"])

    # -- parameters in flight

    def _region(self, number: int) -> Region:
        return self.program.region(self.program.calls[self.segments[number].first].region)

    def _which(self, number: int, backward: bool) -> str:
        own = backward and has_own_backward_gather(self._region(number))
        return "gather_for_backward" if own else "gather"

    def _moves(self, number: int, backward: bool) -> bool:
        return moves_anything(self._region(number).transfers[self._which(number, backward)])

    def _gather_at(self, number: int, backward: bool, at: str | None = None) -> str:
        """The gather of a segment's first call in this direction, or at `at`."""
        segment = self.segments[number]
        call = self.program.calls[segment.last if backward else segment.first]
        return gather_call(self._region(number), self._which(number, backward), at or repr_at(call))

    def _first_gather(self, order: Sequence[int], backward: bool) -> list[str]:
        moving = [number for number in order if self._moves(number, backward)]
        if not moving or not self.names.overlap.prefetch:
            return []
        return [f"    pending = {self._gather_at(moving[0], backward)}"]

    def _following(self, order: Sequence[int], number: int, backward: bool) -> str:
        """What gathers for the next segment that gathers; `None` after the last."""
        later = [each for each in order[order.index(number) + 1 :] if self._moves(each, backward)]
        return self._gather_at(later[0], backward) if later else "None"

    def _gathered(self, number: int, call: Call, following: str, indent: str, backward: bool) -> list[str]:
        """`p` for a single call, and the next gather on its way."""
        start = self._gather_at(number, backward)
        if not self._moves(number, backward):
            lines = [f"{indent}p = {start}"]
        elif not self.names.overlap.prefetch:
            lines = [f"{indent}p = {start}.wait()"]
        else:
            lines = [f"{indent}p = pending.wait()"]
            lines += [f"{indent}pending = {following}"] if following != "None" else []
        return [*lines, *self._whole_slots(number, call, indent, backward)]

    def _gathered_in_loop(self, number: int, call: Call, following: str, backward: bool) -> list[str]:
        """The same in a loop over `i`: the next call's gather starts before this call computes."""
        prefix, first = self._numbers(number)
        indent, end = "        ", first if backward else first + self.segments[number].count - 1
        start = self._gather_at(number, backward, f'f"{prefix}.{{i}}."')
        if not self._moves(number, backward):
            lines = [f"{indent}p = {start}"]
        elif not self.names.overlap.prefetch:
            lines = [f"{indent}p = {start}.wait()"]
        else:
            next_at = f'f"{prefix}.{{i {"-" if backward else "+"} 1}}."'
            more = f"i {'>' if backward else '<'} {end}"
            step = self._gather_at(number, backward, next_at)
            lines = [f"{indent}p = pending.wait()", f"{indent}pending = {step} if {more} else {following}"]
        return [*lines, *self._whole_slots(number, call, indent, backward)]

    def _whole_slots(self, number: int, call: Call, indent: str, backward: bool) -> list[str]:
        """What a region's gather leaves to do: parameters from uneven pieces, parameters that several calls share."""
        region = self._region(number)
        own = slots_of(self.names, region, call, self._which(number, backward))
        lines = list(resize_lines(self.names, "p", own, indent)) if self._moves(number, backward) else []
        pairs = zip(region.slots, call.slots, strict=True)
        return lines + [f'{indent}p["{s.name}"] = shared["{name}"]' for s, name in pairs if name in self.names.shared]

    def _numbers(self, number: int) -> tuple[str, int]:
        segment = self.segments[number]
        found = numbers_of(self.program.calls[segment.first : segment.last + 1])
        assert found is not None
        return found

    def _fresh(self, wanted: str) -> str:
        name = base = identifier(wanted)
        number = 1
        while name in self.taken:
            name, number = f"{base}_{number}", number + 1
        self.taken.add(name)
        return name

    def _shared_gather(self) -> list[str]:
        if not self.names.shared:
            return []
        lines = ["    shared = comm.transfers(held)  # parameters that several calls use: gathered once"]
        lines += [*shared_lines(self.names, "gather"), "    shared = shared.wait()"]
        entries = [(name, self.program.variable(name)) for name in self.names.shared]
        return [*lines, *resize_lines(self.names, "shared", entries, "    ")]

    def _forward_call(self, number: int, segment: Segment, following: str) -> list[str]:
        call = self.program.calls[segment.first]
        region = self.program.region(call.region)
        arguments = [self.variables[ref] for ref in call.arguments]
        for position, port in enumerate(region.outputs):
            self.variables[ValueRef(segment.first, position)] = self._fresh(port.name)
        results = [self.variables[ValueRef(segment.first, i)] for i in range(len(region.outputs))]
        lines = [
            f'    comm.at("{call.path or region.name} forward")',
            *self._gathered(number, call, following, "    ", False),
        ]
        own_seed = [_plus("seed", segment.first)] if region.uses_dropout else []
        called = f"{region.name}_forward({', '.join(['comm', 'p', *arguments, *own_seed])})"
        lines.append(f"    {parenthesized(results)}, saved_{number} = {called}")
        updates = [(name, ref) for name, ref in self.program.updates if ref.call == segment.first]
        lines += [f'    updates["{name}"] = {self.variables[ref]}' for name, ref in updates]
        return [*lines, *(["    del p"] if following != "None" and self._moves(number, False) else [])]

    def _forward_loop(self, number: int, segment: Segment, following: str) -> list[str]:
        call = self.program.calls[segment.first]
        region = self.program.region(call.region)
        lines = [f"    saved_{number} = []"]
        by_result: dict[int, str] = {}
        arguments: list[str] = []
        for position, ref in enumerate(call.arguments):
            if position in segment.carried:
                result = segment.carried[position]
                if result not in by_result:
                    by_result[result] = self._fresh(region.outputs[result].name)
                    lines.append(f"    {by_result[result]} = {self.variables[ref]}")
                arguments.append(by_result[result])
            else:
                arguments.append(self.variables[ref])
        results = [by_result.get(i) or self._fresh(port.name) for i, port in enumerate(region.outputs)]
        prefix, first = self._numbers(number)
        numbers = span(first, segment.count)
        alike = updates_alike(self.program, segment) or ()
        own_seed = [_plus("seed + i", segment.first - first)] if region.uses_dropout else []
        called = f"{region.name}_forward({', '.join(['comm', 'p', *arguments, *own_seed])})"
        lines += [
            f"    for i in {numbers}:",
            f'        comm.at(f"{prefix}.{{i}} forward")',
            *self._gathered_in_loop(number, call, following, False),
            f"        {parenthesized(results)}, saved = {called}",
            f"        saved_{number}.append(saved)",
            *(f'        updates[f"{prefix}.{{i}}.{name}"] = {results[index]}' for index, name in alike),
            "        del p, saved",
        ]
        for position, name in enumerate(results):
            self.variables[ValueRef(segment.last, position)] = name
        return lines


def span(first: int, count: int) -> str:
    """The numbers of a loop, as Python text."""
    return f"range({count})" if not first else f"range({first}, {first + count})"


def repr_at(call: Call) -> str:
    """The prefix of a block's parameter names, as Python text."""
    return f'"{call.path}."' if call.path else '""'


def _plus(text: str, number: int) -> str:
    return text if number == 0 else f"{text} + {number}" if number > 0 else f"{text} - {-number}"
