"""One step of a pipelined program on one rank: its stages, run by torch's schedule runtime in the schedule's order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.pipelining import make_runtime
from autopar.base.trace import Recorded
from autopar.ir.batching import is_of_batch
from autopar.ir.interface import PipelineInterface, ProgramInterface, TensorInterface
from autopar.ir.schedule import Action, Kind, Schedule
from autopar.runtime.communicator import Communicator
from autopar.runtime.holders import holders, keepers, own_inputs
from autopar.runtime.input_gradients import InputGradients
from autopar.runtime.layout import in_blocks, local_part_shape
from autopar.runtime.loader import LoadedProgram, Tensors
from autopar.runtime.microbatches import Batch
from autopar.runtime.recording import Recorder
from autopar.runtime.stage import StageRun, Work
from autopar.runtime.step import Grads
from autopar.strategies.pipelining.schedules import forward_only

Order = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class PipelineProgram:
    """A pipelined program with what follows from its border: made once for all steps.

    Raises:
        AutoparError: text and border that do not fit together.
    """

    program: LoadedProgram
    interface: ProgramInterface

    def __post_init__(self) -> None:
        _check(self.program, self.interface)

    @property
    def pipeline(self) -> PipelineInterface:
        """The stages and their order."""
        assert self.interface.pipeline is not None
        return self.interface.pipeline

    @cached_property
    def holders(self) -> dict[str, tuple[int, ...]]:
        """The pipeline ranks that hold each parameter."""
        return holders(self.interface)

    @cached_property
    def tied(self) -> tuple[str, ...]:
        """The trained parameters that stages on several ranks use, by name."""
        used = {name for stage in self.pipeline.stages for name in stage.parameters}
        return tuple(
            sorted(
                entry.name
                for entry in self.interface.parameters
                if entry.differentiable
                and len(self.holders[entry.name]) > 1
                and used.intersection((entry.name, *entry.aliases))
            )
        )

    @cached_property
    def forward_order(self) -> Order:
        """The order of a run without backwards."""
        pipeline = self.pipeline
        order = tuple(tuple(map(Action.parse, row)) for row in pipeline.order)
        schedule = Schedule(pipeline.schedule, self.interface.runs, pipeline.rank_of, order)
        return tuple(tuple(map(str, row)) for row in forward_only(schedule).order)

    def stage_of_output(self, place: int) -> int:
        """The stage that makes an output."""
        return next(k for k, stage in enumerate(self.pipeline.stages) if place in stage.outputs)

    def rank_of_output(self, place: int) -> int:
        """The pipeline rank that makes an output."""
        return self.pipeline.rank_of[self.stage_of_output(place)]

    @cached_property
    def keepers(self) -> dict[str, int]:
        """The pipeline rank that keeps each state."""
        return keepers(self.interface)

    def own(self, rank: int) -> frozenset[str]:
        """The inputs that the stages of a pipeline rank take: the batch, and of the states those that it keeps."""
        return own_inputs(self.interface, rank)

    @cached_property
    def shared(self) -> tuple[int, ...]:
        """The places of the outputs that every rank gets: scalars; beside states all of them, as a token is chosen on
        every rank from logits that the last stage makes.
        """
        outputs = enumerate(self.interface.outputs)
        if not self.interface.states:
            return tuple(place for place, entry in outputs if not entry.shape)
        return tuple(place for place, entry in outputs if entry.name not in self.keepers)

    @cached_property
    def made_apart(self) -> frozenset[int]:
        """The places of the outputs that the ranks of one stage alone have, but for states."""
        return frozenset(
            place
            for place, entry in enumerate(self.interface.outputs)
            if place not in self.shared and entry.name not in self.keepers
        )

    def rank_of_update(self, name: str) -> int:
        """The pipeline rank that changes a buffer."""
        return self.pipeline.rank_of[next(k for k, stage in enumerate(self.pipeline.stages) if name in stage.updates)]


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """What a step leaves on one rank, all local.

    outputs: in the interface's order: those that are `shared` on every rank, others where they are made, None
    elsewhere. updates: the new values of the buffers that forward changes, on every rank. gradients: of the rank's own
    parameters. inputs: on every rank, by `gradient_key`, those of inputs whose gradients are wanted.
    """

    outputs: tuple[Tensor | None, ...]
    updates: Tensors
    gradients: Tensors
    inputs: Tensors = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class PipelineStep:
    """One step on one rank: the batch (of the mesh of one stage), the whole mesh, the seed of its first microbatch.

    record: a list to which every action is added with its times; the ranks then meet before they begin.
    """

    program: PipelineProgram
    batch: Batch
    comm: Communicator
    seed: int | Tensor
    record: list[Recorded] | None = None

    def forward(self, state: Tensors) -> PipelineResult:
        """All microbatches' forwards."""
        return self._run(state, None, self.program.forward_order)

    def train(self, state: Tensors, grads: Grads) -> PipelineResult:
        """The whole schedule. grads: of the step's differentiable outputs, local, the same for all pipeline ranks.

        Raises:
            AutoparError: no output has a gradient; a schedule that leaves something undone; a peer that does not come.
        """
        if all(grad is None for grad in grads):
            raise AutoparError("the loss does not depend on any trainable parameter")
        return self._run(state, grads, self.program.pipeline.order)

    def _run(self, state: Tensors, grads: Grads | None, order: Order) -> PipelineResult:
        pipeline, comm = self.program.pipeline, self.comm
        rank = comm.index(pipeline.axis)
        recorder = Recorder(comm, pipeline.axis, self.record)
        padded = in_blocks(self.batch.interface, state)
        here = (stage for stage, owner in zip(pipeline.stages, pipeline.rank_of, strict=True) if owner == rank)
        if any(is_of_batch(name) for stage in here for name in stage.buffers):
            padded = self.batch.with_values(padded)
        gradients: Tensors = {}
        made: dict[int, dict[int, Tensor]] = {}
        stages: dict[int, StageRun] = {}
        sums: dict[int, Tensors] = {}
        of_inputs = InputGradients(self.batch)
        runs, groups = self.program.interface.runs, self.batch.together
        # Where each goes through alone though the schedule is of two at a time, it is gone through twice.
        for first in range(0, len(groups), runs):
            found = gradients if first + runs >= len(groups) else None
            stages = self._gone_through(
                groups[first : first + runs], padded, grads, order, recorder, sums, found, of_inputs
            )
            for number, stage in stages.items():
                sums[number] = stage.sums
                for place, values in stage.outputs.items():
                    made.setdefault(place, {}).update(values)
        gradients = self._with_tied(gradients, rank) if grads is not None else {}
        outputs, updates = self._shared(self._outputs(made), self._updates(stages), rank)
        inputs: Tensors = {}
        if grads is not None:
            places = self.program.interface.given(grads)
            inputs = of_inputs.joined_over(comm, pipeline.axis, places)
        recorder.finish()
        return PipelineResult(outputs, updates, gradients, inputs)

    def _gone_through(
        self,
        groups: Sequence[tuple[int, ...]],
        state: Tensors,
        grads: Grads | None,
        order: Order,
        recorder: Recorder,
        sums: Mapping[int, Tensors],
        gradients: Tensors | None,
        of_inputs: InputGradients,
    ) -> dict[int, StageRun]:
        """The schedule once, for these microbatches; the stages of this rank.

        sums: by stage, what is there of gradients from those before. gradients: of its parameters, filled; None where
        more microbatches follow. of_inputs: collects the gradients of inputs.
        """
        pipeline, comm = self.program.pipeline, self.comm
        rank, axis = comm.index(pipeline.axis), pipeline.axis
        keeps = grads is None or pipeline.keeps_outputs
        here = [number for number, owner in enumerate(pipeline.rank_of) if owner == rank]
        own = self.program.own(rank)
        work = Work(
            self.batch,
            groups,
            comm,
            axis,
            pipeline.rank_of,
            self.seed,
            grads,
            recorder,
            len(here),
            own,
            of_inputs,
            keeps,
        )
        functions = self.program.program.stages
        stages = {k: StageRun(k, work, functions[k], pipeline.stages[k], state, sums.get(k, {})) for k in here}
        for number, stage in stages.items():
            stage.before, stage.after = stages.get(number - 1), stages.get(number + 1)
        if stages:
            make_runtime(list(stages.values()), len(groups), order, rank, _functions(stages, recorder, gradients)).run()
        _check_done(stages, rank, reduced=gradients is not None)
        for sent in work.pending:
            sent.wait()
        return stages

    def _with_tied(self, gradients: Tensors, rank: int) -> Tensors:
        """Gradients of parameters that several ranks hold, added in the order of the ranks: equal bit for bit."""
        program = self.program
        peers = {
            name: [peer for peer in program.holders[name] if peer != rank]
            for name in program.tied
            if rank in program.holders[name]
        }
        lacking = [name for name in peers if name not in gradients]
        if lacking:
            raise AutoparError(f"backward returned no gradient for {lacking[0]}", where=program.program.filename)
        self.comm.at("gradients of tied parameters")
        sends = [(peer, gradients[name], name) for name, others in peers.items() for peer in others]
        receives = [(peer, tuple(x.shape), x.dtype, name) for peer, x, name in sends]
        received = iter(self.comm.exchange(program.pipeline.axis, sends, receives).wait() if sends else ())
        for name, others in peers.items():
            terms = {rank: gradients[name]} | {peer: next(received) for peer in others}
            ordered = [terms[each] for each in sorted(terms)]
            total = ordered[0]
            for term in ordered[1:]:
                total = total + term
            gradients[name] = total
        return gradients

    def _outputs(self, made: Mapping[int, Mapping[int, Tensor]]) -> dict[int, Tensor]:
        """The step's outputs that this rank makes, by place. made: of each microbatch."""
        self.batch.comm.at("outputs")
        return {
            place: self.batch.output(place, [made[place][i] for i in range(self.batch.num)])
            for place in range(len(self.batch.interface.outputs))
            if made.get(place)
        }

    def _updates(self, stages: Mapping[int, StageRun]) -> Tensors:
        """The new buffers that this rank makes, of all microbatches together."""
        entries = {entry.name: entry for entry in self.batch.interface.updates}
        return {
            name: self.batch.together_of(entries[name], [values[i] for i in range(self.batch.num)])
            for stage in stages.values()
            for name, values in stage.updates.items()
        }

    def _shared(
        self, outputs: dict[int, Tensor], updates: Tensors, rank: int
    ) -> tuple[tuple[Tensor | None, ...], Tensors]:
        """Outputs that all get, and new buffers, go from the rank that has them to all, those of one dtype together."""
        program, comm = self.program, self.comm
        interface = program.interface
        shared = {place: interface.outputs[place] for place in program.shared}
        pieces = [(entry, outputs.get(place), program.rank_of_output(place)) for place, entry in shared.items()]
        pieces += [(entry, updates.get(entry.name), program.rank_of_update(entry.name)) for entry in interface.updates]
        found: dict[int, Tensor] = {}
        comm.at("outputs")
        for dtype in sorted({entry.dtype for entry, _, _ in pieces}):
            numbers = [number for number, (entry, _, _) in enumerate(pieces) if entry.dtype == dtype]
            parts = [self._part(pieces[number][0], pieces[number][1], pieces[number][2] == rank) for number in numbers]
            flat = comm.all_reduce(torch.cat([part.reshape(-1) for part in parts]), program.pipeline.axis)
            split = flat.split([part.numel() for part in parts])
            found |= {number: x.view(part.shape) for number, x, part in zip(numbers, split, parts, strict=True)}
        every = {place: found[number] for number, place in enumerate(shared)}
        values = tuple(every.get(place, outputs.get(place)) for place in range(len(interface.outputs)))
        return values, {entry.name: found[len(shared) + n] for n, entry in enumerate(interface.updates)}

    def _part(self, entry: TensorInterface, value: Tensor | None, is_here: bool) -> Tensor:
        dtype = getattr(torch, entry.dtype)
        if is_here:
            assert value is not None
            return value.to(dtype)
        inner = self.batch.comm
        shape = local_part_shape(entry.shape, entry.sharding, inner.sizes, [inner.index(axis) for axis in inner.axes])
        return torch.zeros(shape, dtype=dtype, device=inner.device)


def _functions(
    stages: Mapping[int, StageRun], recorder: Recorder, gradients: Tensors | None
) -> dict[str, Callable[[str], None]]:
    """What torch's runtime is to do at each kind of action. gradients: filled by REDUCE_GRAD; None: not yet."""

    def on_microbatch(function: Callable[[StageRun, int], None]) -> Callable[[str], None]:
        def run(text: str) -> None:
            action = Action.parse(text)
            assert action.microbatch is not None
            function(stages[action.stage], action.microbatch)

        return run

    def on_stage(function: Callable[[StageRun], None]) -> Callable[[str], None]:
        def run(text: str) -> None:
            with recorder.action(text):
                function(stages[Action.parse(text).stage])

        return run

    def reduce(stage: StageRun) -> None:
        if gradients is None:
            return
        for name, gradient in stage.reduce().items():
            gradients[name] = gradients[name] + gradient if name in gradients else gradient

    return {
        Kind.FORWARD: on_microbatch(StageRun.forward),
        Kind.BACKWARD: on_microbatch(StageRun.backward),
        Kind.BACKWARD_INPUT: on_microbatch(StageRun.backward_input),
        Kind.BACKWARD_WEIGHT: on_microbatch(StageRun.backward_weight),
        Kind.UNSHARD: on_stage(StageRun.unshard),
        Kind.RESHARD: on_stage(StageRun.reshard),
        Kind.REDUCE_GRAD: on_stage(reduce),
    }


def _check_done(stages: Mapping[int, StageRun], rank: int, *, reduced: bool) -> None:
    left = ", ".join(text for stage in stages.values() if (text := stage.left_over(reduced=reduced)))
    if left:
        raise AutoparError(
            f"the pipeline schedule ends on rank {rank} before all is done",
            values=f"what {left} would use is left",
            remedy="let every microbatch go through F and B (or I and W) of every stage, and end with REDUCE_GRAD",
        )


def _check(program: LoadedProgram, interface: ProgramInterface) -> None:
    """That text and border have the same stages, and that each stage takes what the one before gives."""
    pipeline = interface.pipeline
    assert pipeline is not None
    numbers = {
        "stages in the text": len(program.stages),
        "stages planned": len(pipeline.stages),
        "stages on ranks": len(pipeline.rank_of),
    }
    num_ranks = dict(zip(pipeline.axes, pipeline.sizes, strict=True))[pipeline.axis]
    if len(set(numbers.values())) != 1 or len(pipeline.order) != num_ranks:
        raise AutoparError(
            "the generated program and its schedule do not fit together",
            where=program.filename,
            values=", ".join(f"{number} {what}" for what, number in numbers.items())
            + f"; {len(pipeline.order)} rows of actions for {num_ranks} ranks",
            remedy="plan again",
        )
    for number, (stage, following) in enumerate(pairwise(pipeline.stages)):
        if [_kind(entry) for entry in stage.sends] != [_kind(entry) for entry in following.receives]:
            raise AutoparError(
                f"stage {number} sends other values than stage {number + 1} receives",
                where=program.filename,
                values=f"{[entry.name for entry in stage.sends]}, {[entry.name for entry in following.receives]}",
                remedy="plan again",
            )
    made = {place for stage in pipeline.stages for place in stage.outputs}
    changed = {name for stage in pipeline.stages for name in stage.updates}
    lacking = [entry.name for place, entry in enumerate(interface.outputs) if place not in made]
    lacking += [entry.name for entry in interface.updates if entry.name not in changed]
    if lacking:
        raise AutoparError(f"no stage makes {lacking[0]}", where=program.filename, remedy="plan again")


def _kind(entry: TensorInterface) -> tuple[object, ...]:
    gradient = (entry.gradient or entry.sharding) if entry.differentiable else None
    return entry.shape, entry.dtype, entry.sharding, entry.block, gradient
