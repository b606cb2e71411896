"""The step's `backward`: the calls in reverse, and when their gradients are reduced."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.classes import port_shardings
from autopar.ir.region import Call, Region
from autopar.ir.sharding import local_shape
from autopar.ir.values import ValueRef, gradient_key
from autopar.passes.emission.literals import inside, quoted
from autopar.passes.emission.names import result_names
from autopar.passes.emission.parameters import (
    accumulates_in_other_dtype,
    moves_anything,
    parenthesized,
    shared_lines,
    tied_lines,
)
from autopar.passes.emission.segments import Segment
from autopar.passes.emission.steps import ForwardWriter, FunctionPhase, prefix_at, said


class StepWriter(ForwardWriter):
    """Writes all functions of a step. begins: the segment whose reduction is the first, where it is one call's."""

    begins: int | None = None

    def backward(self, roots: Sequence[ValueRef]) -> str:
        """roots: the outputs whose gradients come in, in the order of `grads`."""
        lines = ["def backward(comm, state, held, saved, grads, sums, last):", "    gradients = {}"]
        self.gradients: dict[ValueRef, str] = {}
        names = [self._fresh(f"grad_{self.variables[ref]}") for ref in roots]
        lines.append(f"    {parenthesized(names)} = grads")
        if len(roots) > 1:
            lines += [self._zero_where_none(name, ref) for name, ref in zip(names, roots) if self._is_weighted(ref)]
        self.gradients.update(zip(roots, names, strict=True))
        lines += self._shared_gather("backward")
        if self.names.tied:
            lines.append("    tied = {}  # gradients of parameters that several calls use")
        order = [n for n in reversed(range(len(self.segments))) if "backward" in self._region(n).lowered]
        if self._in_flight(order):
            lines += self._reductions_begin(order)
        lines += self._backward_calls(order, "backward")
        return "\n".join([*lines, *self._of_inputs(), *self._last_reductions(order), "    return gradients"])

    def _of_inputs(self) -> list[str]:
        """The gradients of inputs that are wanted: those of this microbatch."""
        wanted = [port.name for port in self.program.inputs if port.differentiable]
        made = [(quoted(gradient_key(name)), self.gradients[ValueRef(name=name)]) for name in wanted]
        return [f"    gradients[{key}] = {variable}  # of an input" for key, variable in made]

    def _is_weighted(self, ref: ValueRef) -> bool:
        batching = self.program.batching
        return batching is not None and any(
            how.combine == "weighted" and output == ref
            for output, how in zip(self.program.outputs, batching.outputs, strict=True)
        )

    def _zero_where_none(self, name: str, ref: ValueRef) -> str:
        """An average in which this microbatch has no part, or for which no gradient came beside the others."""
        zero = f"torch.zeros((), dtype={self.program.port(ref).type.dtype}, device=comm.device)"
        return f"    {name} = {zero} if {name} is None else {name}"

    def _reductions_begin(self, order: Sequence[int]) -> list[str]:
        """What the first reduction joins; nothing where that is one call's, which begins by itself."""
        if self._to_the_end():
            return ["    reducing = []  # gradients under way"]
        first = next(number for number in order if moves_anything(self._region(number).transfers["reduce"]))
        self.begins = None if self.segments[first].is_loop else first
        return ["    reducing = comm.transfers()  # gradients under way"] if self.begins is None else []

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
        lines = self._waiting_reductions(order)
        if not self.names.waits:
            return lines
        return [*self._tied_sums(), *(["    if last:", *(f"    {line}" for line in lines)] if lines else [])]

    def _waiting_reductions(self, order: Sequence[int]) -> list[str]:
        lines: list[str] = []
        if self.names.at_end:
            for number in order:
                if not self._region(number).transfers["reduce"]:
                    continue
                if self.segments[number].is_loop:
                    blocks = self._blocks(number)
                    lines.append(f"    for i in reversed({blocks.numbers}):")
                    lines += self._reduction(number, prefix_at(blocks, "i"), "        ")
                else:
                    lines += self._reduction(number, self._at(number, "backward"), "    ")
        if self._in_flight(order) and self._to_the_end():
            lines += ["    for each in reducing:", "        gradients.update(each.wait())"]
        elif self._in_flight(order):
            lines.append("    gradients.update(reducing.wait())")
        if self.names.tied:
            lines += ["    reducing = comm.transfers()", *shared_lines(self.names, "reduce")]
            lines.append("    gradients.update(reducing.wait())")
        return lines

    def _tied_sums(self) -> list[str]:
        empty = chr(34) * 2
        return [f"    {self._accumulate('tied', empty, self.names.tied)}"] if self.names.tied else []

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
        if number == self.begins:
            return [f"{indent}reducing = {start}  # under way"]
        return [f"{indent}gradients.update(reducing.wait())", f"{indent}reducing = {start}"]

    def _backward_calls(self, order: Sequence[int], phase: FunctionPhase) -> list[str]:
        """All calls in reverse; what those saved that nothing differentiates is dropped."""
        self._spent: set[str] = set()
        """Variables of gradients that nothing reads any more: their names may go on."""
        lines = self._first_gather(order, phase)
        for number in reversed(range(len(self.segments))):
            if number not in order:
                lines.append("    saved.pop()")
                continue
            following = self._following(order, number, phase)
            write = self._backward_loop if self.segments[number].is_loop else self._backward_call
            lines += write(number, self.segments[number], following, phase)
        return lines

    def _backward_call(self, number: int, segment: Segment, following: str, phase: FunctionPhase) -> list[str]:
        call = self.program.calls[segment.first]
        region = self.program.region(call.region)
        tangents = [self._tangent(ValueRef(segment.first, position)) for position in region.tangents]
        self._spent.update(tangents)
        results: list[str] = []
        sums: list[str] = []
        for position, port in enumerate(region.inputs):
            if port.differentiable:
                results.append(self._receive(call.arguments[position], port.name, sums, "    "))
        lines = [f"    comm.at({self._where(number, phase)})", *self._gathered(number, call, following, phase)]
        called = f"{region.name}_{phase}({', '.join(['comm', self._p(number, phase), 'saved.pop()', *tangents])})"
        lines.append(f"    {', '.join([*results, self._rest(region, phase)])} = {called}")
        return [*lines, *sums, *self._after(number, self._at(number, phase), "    ", phase)]

    def _rest(self, region: Region, phase: FunctionPhase) -> str:
        """What a call gives beside the gradients of its inputs: its parameters' gradients, or what these need."""
        if phase == "backward":
            return "g"
        return "kept_of_call" if region.trainable_slots else "_"

    def _p(self, number: int, phase: FunctionPhase) -> str:
        return "p" if self._reads(number, phase) else "{}"

    def _after(self, number: int, at: str, indent: str, phase: FunctionPhase) -> list[str]:
        """What becomes of a call's results, and of what it read."""
        lines: list[str] = []
        done = ["p"] if self._reads(number, phase) else []
        if phase != "backward_input":
            lines += self._reduce(number, self.program.calls[self.segments[number].first], at, indent)
            done.append("g")
        elif self._region(number).trainable_slots:
            lines.append(f"{indent}kept.append(kept_of_call)")
            done.append("kept_of_call")
        return [*lines, *([f"{indent}del {', '.join(done)}"] if done else [])]

    def _tangent(self, ref: ValueRef) -> str:
        """The gradient of a value; zeros where nothing gave it one."""
        known = self.gradients.get(ref)
        if known is not None:
            return known
        region = self.program.region(self.program.calls[ref.call].region)
        sharding = port_shardings(self.program, region)[("gout", region.name, ref.index)]
        type_ = region.outputs[ref.index].type
        shape = local_shape(type_.shape, sharding, self.names.sizes)
        return f"torch.zeros({shape}, dtype={type_.dtype}, device=comm.device)"

    def _receive(self, ref: ValueRef, name: str, sums: list[str], indent: str) -> str:
        """The variable for a gradient that comes back for `ref`; added to what is there."""
        if not self.program.has_gradient(ref):
            return "_"
        if ref in self.gradients:
            new = self._fresh(f"grad_{name}")
            sums.append(f"{indent}{self.gradients[ref]} = {self.gradients[ref]} + {new}")
            return new
        wanted = f"grad_{self.variables.get(ref, name)}"
        self.gradients[ref] = wanted if wanted in self._spent else self._fresh(wanted)
        self._spent.discard(wanted)
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
        if not self.names.at_end:
            lines += [f"{indent}if last:", *self._reduction(number, at, f"{indent}    ")]
        return lines

    def _backward_loop(self, number: int, segment: Segment, following: str, phase: FunctionPhase) -> list[str]:
        call = self.program.calls[segment.first]
        region = self.program.region(call.region)
        blocks = self._blocks(number)
        lines: list[str] = []
        carried: dict[int, str] = {}
        for result in region.tangents:
            given = self._tangent(ValueRef(segment.last, result))
            if not given.isidentifier():
                name = self._fresh(f"grad_{result_names(region)[result]}")
                lines.append(f"    {name} = {given}")
                given = name
            carried[result] = given  # under the same name, so that nothing holds the last call's
        results: list[str] = []
        sums: list[str] = []
        before: list[str] = []
        after: list[str] = []
        for position, port in enumerate(region.inputs):
            if not port.differentiable:
                continue
            if position in segment.carried:
                results.append(carried[segment.carried[position]])
                after += self._given(call.arguments[position], results[-1])
                continue
            ref = call.arguments[position]
            if ref not in self.gradients and self.program.has_gradient(ref):
                self.gradients[ref] = self._fresh(f"grad_{self.variables[ref]}")
                before.append(f"    {self.gradients[ref]} = 0")
            results.append(self._receive(ref, port.name, sums, "        "))
        tangents = [carried[result] for result in region.tangents]
        arguments = ["comm", self._p(number, phase), "saved_of_calls.pop()", *tangents]
        called = f"{region.name}_{phase}({', '.join(arguments)})"
        lines += [
            *before,
            "    saved_of_calls = saved.pop()",
            f"    for i in reversed({blocks.numbers}):",
            f'        comm.at(f"{inside(blocks.prefix)}.{{i}} {said(phase)}")',
            *self._gathered_in_loop(number, call, following, phase),
            f"        {', '.join([*results, self._rest(region, phase)])} = {called}",
            *sums,
        ]
        return [*lines, *self._after(number, prefix_at(blocks, "i"), "        ", phase), *after]

    def _given(self, ref: ValueRef, name: str) -> list[str]:
        """The variable `name` holds a gradient of `ref`, which others may have given one already."""
        known = self.gradients.get(ref)
        if known is None:
            self.gradients[ref] = name
            return []
        return [f"    {known} = {known} + {name}"]
