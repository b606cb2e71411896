"""The three functions that run the calls in order: `split_inputs`, `forward`, `backward`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.ir import Call, Program, Region, ValueRef
from autopar.passes.emission.parameters import (
    Names,
    accumulates_in_other_dtype,
    gather_call,
    has_own_backward_gather,
    moves_anything,
    parenthesized,
    shared_lines,
    tied_lines,
)
from autopar.passes.emission.statements import identifier
from autopar.passes.insert_collectives import port_shardings
from autopar.sharding import Shard, local_shape


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive calls of one region, written as one call or as one loop.

    carried: input position -> result position that the next call reads there.
    """

    first: int
    count: int
    carried: dict[int, int] = field(default_factory=dict)

    @property
    def last(self) -> int:
        return self.first + self.count - 1


def segments(program: Program) -> list[Segment]:
    """The calls as runs: the longest loops that mean the same."""
    found: list[Segment] = []
    start = 0
    while start < len(program.calls):
        segment = Segment(start, 1)
        for count in range(2, len(program.calls) - start + 1):
            carried = _carried(program, start, count)
            if carried is None:
                break
            segment = Segment(start, count, carried)
        while segment.count > 1 and not _is_closed(program, segment):
            segment = Segment(start, segment.count - 1, segment.carried)
        found.append(segment if segment.count > 1 else Segment(start, 1))
        start += segment.count
    return found


def _carried(program: Program, start: int, count: int) -> dict[int, int] | None:
    """What one call hands to the next, if `count` calls from `start` are one loop."""
    calls = program.calls[start : start + count]
    first = calls[0]
    region = program.region(first.region)
    if any(call.region != first.region for call in calls) or not region.module or _numbers(calls) is None:
        return None
    carried: dict[int, int] = {}
    for position in range(len(first.arguments)):
        refs = [call.arguments[position] for call in calls]
        steps = {ref.index for i, ref in enumerate(refs[1:]) if ref.call == start + i}
        if all(ref.call == start + i for i, ref in enumerate(refs[1:])) and len(steps) == 1:
            carried[position] = steps.pop()
        elif any(ref != refs[0] for ref in refs):
            return None
    for i, slot in enumerate(region.slots):
        names = [call.slots[i] for call in calls]
        if (
            any(name != f"{call.path}.{slot.name}" for name, call in zip(names, calls, strict=True))
            and len(set(names)) > 1
        ):
            return None
    return carried if set(region.tangents) <= set(carried.values()) or not region.tangents else None


def _numbers(calls: Sequence[Call]) -> tuple[str, int] | None:
    """The common prefix and the first number, when paths are `prefix.n`, `prefix.n+1`, …"""
    parts = [call.path.rsplit(".", 1) for call in calls]
    if any(len(part) != 2 or not part[1].isdigit() for part in parts) or len({part[0] for part in parts}) > 1:
        return None
    first = int(parts[0][1])
    return (parts[0][0], first) if all(int(part[1]) == first + i for i, part in enumerate(parts)) else None


def _is_closed(program: Program, segment: Segment) -> bool:
    """Whether nothing outside the loop reads a result of any call but the last."""
    inner = range(segment.first, segment.last)
    inside = range(segment.first, segment.first + segment.count)
    readers = [(i, ref) for i, call in enumerate(program.calls) for ref in call.arguments]
    readers += [(-1, ref) for ref in program.outputs]
    for reader, ref in readers:
        if ref.call in inner and (reader not in inside or ref.index not in segment.carried.values()):
            return False
    return True


class StepWriter:
    """Writes `forward` and `backward` over the segments of a program."""

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
        outputs = parenthesized([self.variables[ref] for ref in self.program.outputs])
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
        return [*lines, *self._shared_slots(self._region(number), call, indent)]

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
        return [*lines, *self._shared_slots(self._region(number), call, indent)]

    def _shared_slots(self, region: Region, call: Call, indent: str) -> list[str]:
        pairs = zip(region.slots, call.slots, strict=True)
        return [f'{indent}p["{s.name}"] = shared["{name}"]' for s, name in pairs if name in self.names.shared]

    def _numbers(self, number: int) -> tuple[str, int]:
        segment = self.segments[number]
        found = _numbers(self.program.calls[segment.first : segment.last + 1])
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
        return [*lines, *shared_lines(self.names, "gather"), "    shared = shared.wait()"]

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
        freed = ["    del p"] if following != "None" and self._moves(number, False) else []
        return [*lines, f"    {parenthesized(results)}, saved_{number} = {called}", *freed]

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
        span = _span(first, segment.count)
        own_seed = [_plus("seed + i", segment.first - first)] if region.uses_dropout else []
        called = f"{region.name}_forward({', '.join(['comm', 'p', *arguments, *own_seed])})"
        lines += [
            f"    for i in {span}:",
            f'        comm.at(f"{prefix}.{{i}} forward")',
            *self._gathered_in_loop(number, call, following, False),
            f"        {parenthesized(results)}, saved = {called}",
            f"        saved_{number}.append(saved)",
            "        del p, saved",
        ]
        for position, name in enumerate(results):
            self.variables[ValueRef(segment.last, position)] = name
        return lines

    # -- backward
    # -------------------------------------------------------------------------------------------------------

    def backward(self, roots: Sequence[ValueRef]) -> str:
        """roots: the outputs whose gradients come in, in the order of `grads`."""
        lines = ["def backward(comm, state, held, saved, grads, sums, last):", "    gradients = {}"]
        self.gradients: dict[ValueRef, str] = {}
        names = [self._fresh(f"grad_{self.variables[ref]}") for ref in roots]
        lines.append(f"    {parenthesized(names)} = grads")
        self.gradients.update(zip(roots, names, strict=True))
        lines += self._shared_gather()
        if self.names.tied:
            lines.append("    tied = {}  # gradients of parameters that several calls use")
        order = [n for n in reversed(range(len(self.segments))) if "backward" in self._region(n).lowered]
        if self._in_flight(order):
            start = "[]" if self._to_the_end() else "comm.transfers()"
            lines.append(f"    reducing = {start}  # gradients under way")
        lines += self._first_gather(order, backward=True)
        for number in reversed(range(len(self.segments))):
            if number not in order:
                lines.append("    saved.pop()")
                continue
            following = self._following(order, number, backward=True)
            write = self._backward_loop if self.segments[number].count > 1 else self._backward_call
            lines += write(number, self.segments[number], following)
        return "\n".join([*lines, *self._last_reductions(order), "    return gradients"])

    def _in_flight(self, order: Sequence[int]) -> bool:
        """Whether reductions run on while the next call computes."""
        moving = any(moves_anything(self._region(number).transfers["reduce"]) for number in order)
        return moving and self.names.overlap.prefetch

    def _to_the_end(self) -> bool:
        """Whether reductions are waited for at the end: sums of whole gradients need no memory but their results'.

        Others free what they reduce, so at most one call's are under way.
        """
        buckets = [bucket for region in self.program.regions for bucket in region.transfers.get("reduce", ())]
        return all([kind for kind, _ in bucket.chain] in ([], ["all_reduce"]) for bucket in buckets)

    def _last_reductions(self, order: Sequence[int]) -> list[str]:
        """What is reduced when the backward is through: gradients that waited, and those of tied parameters."""
        lines: list[str] = []
        if self.names.overlap.at_end:
            for number in order:
                segment = self.segments[number]
                call = self.program.calls[segment.first]
                if not self._region(number).transfers["reduce"]:
                    continue
                if segment.count == 1:
                    lines += self._reduction(number, repr_at(call), "        ")
                else:
                    prefix, first = self._numbers(number)
                    lines.append(f"        for i in reversed({_span(first, segment.count)}):")
                    lines += self._reduction(number, f'f"{prefix}.{{i}}."', "            ")
        if self._in_flight(order) and self._to_the_end():
            lines += ["        for each in reducing:", "            gradients.update(each.wait())"]
        elif self._in_flight(order):
            lines.append("        gradients.update(reducing.wait())")
        if self.names.tied:
            lines.append("        reducing = comm.transfers()")
            lines += [f"    {line}" for line in shared_lines(self.names, "reduce")]
            lines.append("        gradients.update(reducing.wait())")
        if not self.names.waits:
            return [line.removeprefix("    ") for line in lines]
        tied = [f"    {self._accumulate('tied', chr(34) * 2, self.names.tied)}"] if self.names.tied else []
        return [*tied, *(["    if last:", *lines] if lines else [])]

    def _accumulate(self, source: str, at: str, names: Sequence[str]) -> str:
        others = [v for v in map(self.program.variable, names) if accumulates_in_other_dtype(self.names, v)]
        dtypes = f", dict.fromkeys({source}, {others[0].stored_dtype})" if others else ""
        return f"comm.accumulate(sums, {source}, {at}{dtypes})"

    def _reduction(self, number: int, at: str, indent: str) -> list[str]:
        """Start reducing one call's gradients; those of the call before are through by then."""
        region = self._region(number)
        source = "sums" if self.names.waits else "g"
        if not moves_anything(region.transfers["reduce"]):
            return [f"{indent}gradients.update({region.name}_reduce({source}, {at}))"]
        start = f"{region.name}_reduce(comm, {source}, {at})"
        if not self.names.overlap.prefetch:
            return [f"{indent}gradients.update({start}.wait())"]
        if self._to_the_end():
            return [f"{indent}reducing.append({start})"]
        return [f"{indent}gradients.update(reducing.wait())", f"{indent}reducing = {start}"]

    def _backward_call(self, number: int, segment: Segment, following: str) -> list[str]:
        call = self.program.calls[segment.first]
        region = self.program.region(call.region)
        tangents = [self._tangent(segment.first, region, position) for position in region.tangents]
        results: list[str] = []
        sums: list[str] = []
        for position, port in enumerate(region.inputs):
            if port.differentiable:
                results.append(self._receive(call.arguments[position], port.name, sums, "    "))
        lines = [
            f'    comm.at("{call.path or region.name} backward")',
            *self._gathered(number, call, following, "    ", True),
        ]
        called = f"{region.name}_backward({', '.join(['comm', 'p', 'saved.pop()', *tangents])})"
        lines.append(f"    {', '.join([*results, 'g'])} = {called}")
        return [*lines, *sums, *self._reduce(number, call, repr_at(call), "    "), "    del p, g"]

    def _tangent(self, index: int, region: Region, position: int) -> str:
        known = self.gradients.get(ValueRef(index, position))
        if known is not None:
            return known
        sharding = port_shardings(self.program, region)[("gout", region.name, position)]
        type_ = region.outputs[position].type
        shape = local_shape(type_.shape, sharding, self.names.sizes)
        return f"torch.zeros({shape}, dtype={type_.dtype}, device=comm.device)"

    def _receive(self, ref: ValueRef, name: str, sums: list[str], indent: str) -> str:
        """The variable for a gradient that comes back for `ref`; added to what is there."""
        if ref.call < 0 or ref.index not in self.program.region(self.program.calls[ref.call].region).tangents:
            return "_"
        if ref in self.gradients:
            new = self._fresh(f"grad_{name}")
            sums.append(f"{indent}{self.gradients[ref]} = {self.gradients[ref]} + {new}")
            return new
        self.gradients[ref] = self._fresh(f"grad_{self.variables.get(ref, name)}")
        return self.gradients[ref]

    def _reduce(self, number: int, call: Call, at: str, indent: str) -> list[str]:
        """What becomes of one call's gradients: reduced, or added to those of other microbatches."""
        region = self._region(number)
        lines = list(tied_lines(self.names, region, call, indent))
        if not region.transfers["reduce"]:
            return lines
        if not self.names.waits:
            return [*lines, *self._reduction(number, at, indent)]
        slots = [call.slots[move.slot] for bucket in region.transfers["reduce"] for move in bucket.moves]
        lines.append(indent + self._accumulate("g", at, slots))
        if not self.names.overlap.at_end:
            lines += [f"{indent}if last:", *self._reduction(number, at, f"{indent}    ")]
        return lines

    def _backward_loop(self, number: int, segment: Segment, following: str) -> list[str]:
        call = self.program.calls[segment.first]
        region = self.program.region(call.region)
        prefix, first = self._numbers(number)
        lines: list[str] = []
        carried: dict[int, str] = {}
        for result in region.tangents:
            given = self._tangent(segment.last, region, result)
            if not given.isidentifier():
                name = self._fresh(f"grad_{region.outputs[result].name}")
                lines.append(f"    {name} = {given}")
                given = name
            carried[result] = given  # under the same name, so that nothing holds the last call's
        results: list[str] = []
        sums: list[str] = []
        before: list[str] = []
        for position, port in enumerate(region.inputs):
            if not port.differentiable:
                continue
            if position in segment.carried:
                name = carried[segment.carried[position]]
                self.gradients.setdefault(call.arguments[position], name)
                results.append(name)
                continue
            ref = call.arguments[position]
            if ref not in self.gradients and ref.call >= 0:
                self.gradients[ref] = self._fresh(f"grad_{self.variables[ref]}")
                before.append(f"    {self.gradients[ref]} = 0")
            results.append(self._receive(ref, port.name, sums, "        "))
        tangents = [carried[result] for result in region.tangents]
        at = f'f"{prefix}.{{i}}."'
        called = f"{region.name}_backward({', '.join(['comm', 'p', 'saved_of_calls.pop()', *tangents])})"
        lines += [
            *before,
            "    saved_of_calls = saved.pop()",
            f"    for i in reversed({_span(first, segment.count)}):",
            f'        comm.at(f"{prefix}.{{i}} backward")',
            *self._gathered_in_loop(number, call, following, True),
            f"        {', '.join([*results, 'g'])} = {called}",
            *sums,
        ]
        return [*lines, *self._reduce(number, call, at, "        "), "        del p, g"]


def _span(first: int, count: int) -> str:
    return f"range({count})" if not first else f"range({first}, {first + count})"


def repr_at(call: Call) -> str:
    """The prefix of a block's parameter names, as Python text."""
    return f'"{call.path}."' if call.path else '""'


def _plus(text: str, number: int) -> str:
    return text if number == 0 else f"{text} + {number}" if number > 0 else f"{text} - {-number}"
