"""The functions of a pipeline's stages: the step's, over some of the calls, with values that come in and go out.

Stages whose functions are equal but for the numbers of their blocks share them: they are of one *kind*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost.memory.boundaries import carries_gradient, inputs_wanted_of
from autopar.ir.program import Program
from autopar.ir.stages import Stage
from autopar.ir.values import ValueRef
from autopar.passes.emission.backward import StepWriter
from autopar.passes.emission.literals import inside
from autopar.passes.emission.names import result_names
from autopar.passes.emission.parameters import Names, parenthesized, shared_unshard_lines
from autopar.passes.emission.segments import Segment, segments, stage_segments
from autopar.passes.emission.steps import FunctionPhase, prefix_at, said


@dataclass(frozen=True, slots=True)
class StageFunction:
    """One function of a kind of stage; its name begins with the kind's."""

    name: str
    parameters: tuple[str, ...]
    lines: tuple[str, ...]

    def text(self, kind: str) -> str:
        return "\n".join([f"def {kind}_{self.name}({', '.join(self.parameters)}):", *self.lines])


@dataclass(frozen=True, slots=True)
class StageKind:
    """A kind of stage: its functions, and the stages of it with the blocks that each runs."""

    name: str
    functions: tuple[StageFunction, ...]
    ranges: dict[int, dict[str, range]]


def stage_kinds(program: Program) -> list[StageKind]:
    """The kinds of a program's stages, in the order of their first ones: `first`, `middle`, `middle_2`, …, `last`."""
    assert program.pipeline is not None
    found: dict[tuple[StageFunction, ...], dict[int, dict[str, range]]] = {}
    loops = segments(program)
    for number, stage in enumerate(program.pipeline.stages):
        writer = StageWriter(program, stage, loops)
        found.setdefault(writer.functions(), {})[number] = writer.ranges
    taken = {region.name for region in program.regions}
    kinds: list[StageKind] = []
    for functions, ranges in found.items():
        name = _kind_name(list(ranges), len(program.pipeline.stages), taken)
        taken.add(name)
        kinds.append(StageKind(name, functions, ranges))
    return kinds


def _kind_name(stages: Sequence[int], num_stages: int, taken: set[str]) -> str:
    base = "first" if stages[0] == 0 else "last" if stages == [num_stages - 1] else "middle"
    names = [base, *(f"{base}_{number}" for number in range(2, len(taken) + 3))]
    return next(name for name in names if name not in taken)


class StageWriter(StepWriter):
    """Writes the functions of one stage."""

    def __init__(self, program: Program, stage: Stage, loops: Sequence[Segment]) -> None:
        runs, self.ranges = stage_segments(program, stage.calls, loops)
        super().__init__(Names.of(program, stage.calls), runs)
        self.stage = stage
        self.taken |= {"received", "roots", "outputs", "kept", "kept_of_call", *self.ranges}
        own = set(stage.calls) - set(stage.recomputed)
        self.outputs = [(place, ref) for place, ref in enumerate(program.outputs) if ref.call in own]

    def functions(self) -> tuple[StageFunction, ...]:
        """All functions of the stage, in the order in which they are first called."""
        functions = [self._unshard(), self._stage_forward()]
        if self.program.training:
            known = set(self.taken)
            assert self.program.pipeline is not None
            if self.program.pipeline.schedule.runs_whole_backward:
                functions.append(self._stage_backward("backward"))
            if self.program.pipeline.schedule.splits_backward:
                self.taken = known
                functions += [self._stage_backward("backward_input"), self._weights()]
            functions.append(self._reduce_all())
        return tuple(functions)

    def _function(self, name: str, parameters: str, lines: Sequence[str]) -> StageFunction:
        ranges = ["*", *self.ranges] if self.ranges else []
        return StageFunction(name, (*parameters.split(), *ranges), tuple(lines))

    # -- parameters held for the step

    def _unshard(self) -> StageFunction:
        lines: list[str] = []
        for number, segment in enumerate(self.segments):
            region = self._region(number)
            if not any(bucket.keep for bucket in region.transfers["gather"]):
                continue
            start = f"{region.name}_unshard(comm, state, held, "
            if segment.is_loop:
                blocks = self._blocks(number)
                lines.append(f"    pending += [{start}{prefix_at(blocks, 'i')}) for i in {blocks.numbers}]")
            else:
                lines.append(f"    pending.append({start}{self._at(number, 'forward')}))")
        if shared := shared_unshard_lines(self.names):
            lines += ["    shared = comm.transfers(held)", *shared, "    pending.append(shared)"]
        if not lines:
            return self._function("unshard", "comm state held", ["    return []"])
        return self._function("unshard", "comm state held", ["    pending = []", *lines, "    return pending"])

    # -- forward

    def _stage_forward(self) -> StageFunction:
        lines: list[str] = []
        read = {ref for number in self.stage.calls for ref in self.program.calls[number].arguments}
        ports = [port for port in self.program.inputs if ValueRef(name=port.name) in read]
        for port in ports:
            self.variables[ValueRef(name=port.name)] = self._fresh(port.name)
        lines += self._read_inputs(ports)
        for ref in self.stage.receives:
            self.variables[ref] = self._fresh(self._received_name(ref))
        if self.stage.receives:
            lines.append(f"    {parenthesized([self.variables[ref] for ref in self.stage.receives])} = received")
        updates = any(ref.call in self.stage.calls for _, ref in self.program.updates)
        lines += ["    updates = {}  # what replaces buffers"] if updates else []
        lines += self._forward_calls()
        sent = parenthesized([self.variables[ref] for ref in self.stage.sends])
        outputs = ", ".join(f"{place}: {self.variables[ref]}" for place, ref in self.outputs)
        saved = ", ".join(f"saved_{number}" for number in range(len(self.segments)))
        lines.append(f"    return {sent}, {{{outputs}}}, {'updates' if updates else '{}'}, [{saved}]")
        return self._function("forward", "comm state held inputs received seed", lines)

    def _received_name(self, ref: ValueRef) -> str:
        """As the first call that reads a value names it, so that stages alike have one text whoever sent it."""
        for segment in self.segments:
            call = self.program.calls[segment.first]
            if ref in call.arguments:
                position = call.arguments.index(ref)
                region = self.program.region(call.region)
                if position in segment.carried:
                    return result_names(region)[segment.carried[position]]
                return region.inputs[position].name
        return result_names(self.program.region_of(ref))[ref.index]

    def _is_read_from(self, first: int, ref: ValueRef) -> bool:
        own = (self.program.calls[number] for number in self.stage.calls if number >= first)
        is_output = ref in self.stage.sends or any(ref == output for _, output in self.outputs)
        return is_output or any(ref in call.arguments for call in own)

    # -- backward, whole or in halves

    def _stage_backward(self, phase: FunctionPhase) -> StageFunction:
        """The gradients of what the stage received; the parameters' into `sums`, or into `kept` what they need."""
        whole = phase == "backward"
        lines = self._given_gradients()
        lines += self._shared_gather(phase)
        lines += self._tied_start() if whole else ["    kept = []  # what the weight halves need, last call first"]
        lines += self._backward_calls(self._backward_order(), phase)
        lines += self._tied_sums() if whole else []
        returned = [self._tangent(ref) for ref in self.stage.receives if carries_gradient(self.program, ref)]
        own = sorted(set(self.stage.calls) - set(self.stage.recomputed))
        returned += [self.gradients[ValueRef(name=name)] for name in inputs_wanted_of(self.program, own)]
        result = parenthesized(returned)
        lines.append(f"    return {result if whole else f'{result}, kept'}")
        parameters = "comm state held saved grads roots"
        return self._function(phase, f"{parameters} sums" if whole else parameters, lines)

    def _given_gradients(self) -> list[str]:
        """The gradients of what the stage sent, and of the program's outputs that it made."""
        lines: list[str] = []
        self.gradients = {}
        given = [ref for ref in self.stage.sends if carries_gradient(self.program, ref)]
        for ref in given:
            self.gradients[ref] = self._fresh(f"grad_{self.variables[ref]}")
        if given:
            lines.append(f"    {parenthesized([self.gradients[ref] for ref in given])} = grads")
        for place, ref in self.outputs:
            if ref not in self.program.roots:
                continue
            root = f"roots[{place}]"
            if len(self.program.roots) > 1 and self._is_weighted(ref):
                root = self._fresh(f"root_{self.variables[ref]}")
                lines += [f"    {root} = roots[{place}]", self._zero_where_none(root, ref)]
            if ref in self.gradients:
                lines.append(f"    {self.gradients[ref]} = {self.gradients[ref]} + {root}")
            else:
                self.gradients[ref] = self._fresh(f"grad_{self.variables[ref]}")
                lines.append(f"    {self.gradients[ref]} = {root}")
        return lines

    def _backward_order(self) -> list[int]:
        return [n for n in reversed(range(len(self.segments))) if "backward" in self._region(n).lowered]

    def _tied_start(self) -> list[str]:
        return ["    tied = {}  # gradients of parameters that several calls use"] if self.names.tied else []

    def _weights(self) -> StageFunction:
        """The weight halves of all calls, in the order in which their input halves ran."""
        phase: FunctionPhase = "backward_weight"
        lines = [*self._shared_gather(phase), *self._tied_start()]
        order = [number for number in self._backward_order() if self._region(number).trainable_slots]
        lines += self._first_gather(order, phase)
        for number in order:
            segment, region = self.segments[number], self._region(number)
            call, following = self.program.calls[segment.first], self._following(order, number, phase)
            run = f"g = {region.name}_{phase}(comm, {self._p(number, phase)}, kept.pop(0))"
            if segment.is_loop:
                blocks = self._blocks(number)
                lines += [f"    for i in reversed({blocks.numbers}):"]
                lines += [f'        comm.at(f"{inside(blocks.prefix)}.{{i}} {said(phase)}")']
                lines += [*self._gathered_in_loop(number, call, following, phase), f"        {run}"]
                lines += self._after(number, prefix_at(blocks, "i"), "        ", phase)
            else:
                lines.append(f"    comm.at({self._where(number, phase)})")
                lines += [*self._gathered(number, call, following, phase), f"    {run}"]
                lines += self._after(number, self._at(number, phase), "    ", phase)
        return self._function(phase, "comm state held kept sums", [*lines, *self._tied_sums()] or ["    pass"])

    # -- reductions

    def _reduce_all(self) -> StageFunction:
        order = self._backward_order()
        lines = ['    comm.at("reduction of gradients")', "    gradients = {}"]
        if self._in_flight(order):
            lines += self._reductions_begin(order)
        lines += self._waiting_reductions(order)
        return self._function("reduce", "comm sums", [*lines, "    return gradients"])
