"""The three functions that run the calls in order: `split_inputs`, `forward`, `backward`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autopar.ir import Call, Program, Region, ValueRef
from autopar.passes.emission.functions import (
    Names,
    gathered,
    has_own_backward_gather,
    parenthesized,
    reduced,
    reduced_slots,
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
    if updates_alike(program, segment) is None:
        return False
    for reader, ref in readers:
        if ref.call in inner and (reader not in inside or ref.index not in segment.carried.values()):
            return False
    return True


def updates_alike(program: Program, segment: Segment) -> list[tuple[int, str]] | None:
    """Result positions and the buffers that they replace, below the block's path; None where the calls do not agree."""
    calls = range(segment.first, segment.first + segment.count)
    found: dict[tuple[int, str], int] = {}
    for name, ref in program.updates:
        if ref.call in calls:
            path = f"{program.calls[ref.call].path}."
            if not name.startswith(path):
                return None
            key = (ref.index, name.removeprefix(path))
            found[key] = found.get(key, 0) + 1
    return list(found) if all(count == segment.count for count in found.values()) else None


class StepWriter:
    """Writes `forward` and `backward` over the segments of a program."""

    def __init__(self, names: Names) -> None:
        self.names, self.program = names, names.program
        self.segments = segments(self.program)
        self.variables: dict[ValueRef, str] = {}
        self.taken: set[str] = {
            "comm",
            "state",
            "inputs",
            "seed",
            "p",
            "g",
            "updates",
            "gradients",
            "saved",
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
        lines = ["def forward(comm, state, inputs, seed):"]
        for port in self.program.inputs:
            variable = self._fresh(port.name)
            self.variables[ValueRef(name=port.name)] = variable
            lines.append(f'    {variable} = inputs["{port.name}"]')
        lines += self._shared_gather()
        for number, segment in enumerate(self.segments):
            lines += self._forward_loop(number, segment) if segment.count > 1 else self._forward_call(number, segment)
        names = [self.variables[ref] for ref in self.program.outputs]
        if self.program.updates:
            lines.insert(1, "    updates = {}  # what replaces buffers, in the order of the calls")
            names.append("*updates.values()")
        outputs = parenthesized(names)
        saved = parenthesized([f"saved_{n}" for n in range(len(self.segments))])
        return "\n".join([*lines, f"    return {outputs}, {saved}"])

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
        lines = ["    shared = {}  # parameters that several calls use: gathered once"]
        for name in self.names.shared:
            lines.append(
                f'    shared["{name}"] = ' + gathered(self.names, self.program.variable(name), f'state["{name}"]')
            )
        return lines

    def _forward_call(self, number: int, segment: Segment) -> list[str]:
        call = self.program.calls[segment.first]
        region = self.program.region(call.region)
        arguments = [self.variables[ref] for ref in call.arguments]
        for position, port in enumerate(region.outputs):
            self.variables[ValueRef(segment.first, position)] = self._fresh(port.name)
        results = [self.variables[ValueRef(segment.first, i)] for i in range(len(region.outputs))]
        lines = [
            f'    comm.at("{call.path or region.name} forward")',
            *self._gather(region, call, repr_at(call), "    ", False),
        ]
        own_seed = [_plus("seed", segment.first)] if region.uses_dropout else []
        called = f"{region.name}_forward({', '.join(['comm', 'p', *arguments, *own_seed])})"
        lines.append(f"    {parenthesized(results)}, saved_{number} = {called}")
        updates = [(name, ref) for name, ref in self.program.updates if ref.call == segment.first]
        return lines + [f'    updates["{name}"] = {self.variables[ref]}' for name, ref in updates]

    def _gather(self, region: Region, call: Call, at: str, indent: str, backward: bool) -> list[str]:
        suffix = "_for_backward" if backward and has_own_backward_gather(self.names, region, call) else ""
        lines = [f"{indent}p = {region.name}_gather{suffix}(comm, state, {at})"]
        for slot, name in zip(region.slots, call.slots, strict=True):
            if name in self.names.shared:
                lines.append(f'{indent}p["{slot.name}"] = shared["{name}"]')
        return lines

    def _forward_loop(self, number: int, segment: Segment) -> list[str]:
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
        numbers = _numbers(self.program.calls[segment.first : segment.last + 1])
        assert numbers is not None
        prefix, first = numbers
        span = f"range({segment.count})" if not first else f"range({first}, {first + segment.count})"
        alike = updates_alike(self.program, segment) or ()
        own_seed = [_plus("seed + i", segment.first - first)] if region.uses_dropout else []
        called = f"{region.name}_forward({', '.join(['comm', 'p', *arguments, *own_seed])})"
        lines += [
            f"    for i in {span}:",
            f'        comm.at(f"{prefix}.{{i}} forward")',
            *self._gather(region, call, f'f"{prefix}.{{i}}."', "        ", False),
            f"        {parenthesized(results)}, saved = {called}",
            f"        saved_{number}.append(saved)",
            *(f'        updates[f"{prefix}.{{i}}.{name}"] = {results[index]}' for index, name in alike),
            "        del p, saved",
        ]
        for position, name in enumerate(results):
            self.variables[ValueRef(segment.last, position)] = name
        return lines

    # -- backward
    # -------------------------------------------------------------------------------------------------------

    def backward(self, roots: Sequence[ValueRef]) -> str:
        """roots: the outputs whose gradients come in, in the order of `grads`."""
        self.taken |= {f"saved_{n}" for n in range(len(self.segments))}
        lines = ["def backward(comm, state, saved, grads):", "    gradients = {}"]
        lines.append(f"    {parenthesized([f'saved_{n}' for n in range(len(self.segments))])} = saved")
        self.gradients: dict[ValueRef, str] = {}
        names = [self._fresh(f"grad_{self.variables[ref]}") for ref in roots]
        lines.append(f"    {parenthesized(names)} = grads")
        self.gradients.update(zip(roots, names, strict=True))
        lines += self._shared_gather()
        if self.names.accumulated:
            lines.append("    sums = {}  # gradients of parameters that several calls use, before their reduction")
        for number, segment in reversed(list(enumerate(self.segments))):
            region = self.program.region(self.program.calls[segment.first].region)
            if "backward" in region.lowered:
                lines += (
                    self._backward_loop(number, segment) if segment.count > 1 else self._backward_call(number, segment)
                )
        for name in self.names.accumulated:
            text = reduced(self.names, self.program.variable(name), f'sums["{name}"]')
            lines.append(f'    gradients["{name}"] = {text}')
        return "\n".join([*lines, "    return gradients"])

    def _backward_call(self, number: int, segment: Segment) -> list[str]:
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
            *self._gather(region, call, repr_at(call), "    ", True),
        ]
        called = f"{region.name}_backward({', '.join(['comm', 'p', f'saved_{number}', *tangents])})"
        lines.append(f"    {', '.join([*results, 'g'])} = {called}")
        return [*lines, *sums, *self._reduce(region, call, repr_at(call), "    ")]

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

    def _reduce(self, region: Region, call: Call, at: str, indent: str) -> Iterator[str]:
        for slot, name in zip(region.slots, call.slots, strict=True):
            if slot.trainable and name in self.names.accumulated:
                new, old = f'g["{slot.name}"]', f'sums["{name}"]'
                yield f'{indent}{old} = {old} + {new} if "{name}" in sums else {new}'
        if reduced_slots(self.names, region, call):
            yield f"{indent}{region.name}_reduce(comm, gradients, g, {at})"

    def _backward_loop(self, number: int, segment: Segment) -> list[str]:
        call = self.program.calls[segment.first]
        region = self.program.region(call.region)
        numbers = _numbers(self.program.calls[segment.first : segment.last + 1])
        assert numbers is not None
        prefix, first = numbers
        lines: list[str] = []
        carried: dict[int, str] = {}
        for result in region.tangents:
            carried[result] = self._fresh(f"grad_{region.outputs[result].name}")
            lines.append(f"    {carried[result]} = {self._tangent(segment.last, region, result)}")
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
        first_of = f"range({segment.count})" if not first else f"range({first}, {first + segment.count})"
        tangents = [carried[result] for result in region.tangents]
        at = f'f"{prefix}.{{i}}."'
        called = f"{region.name}_backward({', '.join(['comm', 'p', f'saved_{number}.pop()', *tangents])})"
        lines += [
            *before,
            f"    for i in reversed({first_of}):",
            f'        comm.at(f"{prefix}.{{i}} backward")',
            *self._gather(region, call, at, "        ", True),
            f"        {', '.join([*results, 'g'])} = {called}",
            *sums,
        ]
        return [*lines, *self._reduce(region, call, at, "        "), "        del p, g"]


def repr_at(call: Call) -> str:
    """The prefix of a block's parameter names, as Python text."""
    return f'"{call.path}."' if call.path else '""'


def _plus(text: str, number: int) -> str:
    return text if number == 0 else f"{text} + {number}" if number > 0 else f"{text} - {-number}"
