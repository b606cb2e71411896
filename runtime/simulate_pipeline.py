"""Run a pipelined program for all ranks of the whole mesh in one process, each by torch's schedule runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.ir.interface import TensorInterface
from autopar.ir.values import gradient_key
from autopar.runtime.event import Event
from autopar.runtime.holders import held_by
from autopar.runtime.layout import shard
from autopar.runtime.microbatches import make_batch, whole_batch, whole_output
from autopar.runtime.pipeline import PipelineProgram, PipelineResult, PipelineStep
from autopar.runtime.simulated_comm import SimulatedComm, SimulatedMesh
from autopar.runtime.simulation import SimulationResult, assemble_checked, gradient_of, shard_state
from autopar.runtime.step import Grads


@dataclass(frozen=True, slots=True)
class _RankResult:
    """place: of the rank along the pipeline's axis."""

    result: PipelineResult
    events: tuple[Event, ...]
    place: int


def simulate_pipeline(
    program: PipelineProgram,
    state: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    grads: Sequence[Tensor | None],
    seed: int,
    mesh: SimulatedMesh,
) -> SimulationResult:
    """As `simulate`. grads: global, of the step's differentiable outputs; none of them: forwards only. mesh: of the
    pipeline's axes.

    Raises:
        AutoparError: ranks that wait for each other, messages that are received as others, replicas that differ,
            copies of a tied parameter's gradient that are not equal, tensors of unplanned shapes.
    """
    interface, pipeline = program.interface, program.pipeline
    wants_backward = any(grad is not None for grad in grads)
    given = interface.given(grads) if wants_backward else frozenset[int]()

    def run(comm: SimulatedComm) -> _RankResult:
        return _run_rank(program, comm, state, inputs, tuple(grads) if wants_backward else None, seed)

    ranks = mesh.run(run)

    everywhere = tuple(range(len(pipeline.order)))

    def whole(places: Sequence[int], values: Sequence[Tensor | None], entry: TensorInterface, what: str) -> Tensor:
        """The global tensor; where several places along the pipeline's axis have it, they have the same."""
        copies: list[Tensor] = []
        for place in places:
            here = [x for rank, x in zip(ranks, values, strict=True) if rank.place == place and x is not None]
            copies.append(assemble_checked(here, entry, interface, what))
        _check_equal(f"{what} {entry.name}", copies, places)
        return copies[0]

    outputs: list[Tensor] = []
    for number, entry in enumerate(interface.outputs):
        places = everywhere if number in program.shared else (program.rank_of_output(number),)
        values = [rank.result.outputs[number] for rank in ranks]
        outputs.append(whole(places, values, whole_output(entry, interface.microbatches), "output"))
    updates: dict[str, Tensor] = {}
    for entry in interface.updates:
        values = [rank.result.updates[entry.name] for rank in ranks]
        updates[entry.name] = whole(everywhere, values, entry, "buffer")
    gradients: dict[str, Tensor] = {}
    for entry in interface.parameters:
        if wants_backward and entry.differentiable and entry.is_reached(given):
            places = program.holders[entry.name]
            values = [
                gradient_of(rank.result.gradients, entry, number) if rank.place in places else None
                for number, rank in enumerate(ranks)
            ]
            gradients[entry.name] = whole(places, values, entry, "gradient")
    for entry in interface.wanted:
        if wants_backward and entry.is_reached(given):
            key, each = gradient_key(entry.name), whole_batch(entry, interface.microbatches)
            gradients[key] = whole(everywhere, [r.result.inputs[key] for r in ranks], each, "gradient of the input")
    events = tuple(rank.events for rank in ranks)
    return SimulationResult(tuple(outputs), gradients, events, 0 if wants_backward else len(events[0]), updates)


def _run_rank(
    program: PipelineProgram,
    comm: SimulatedComm,
    state: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    grads: Grads | None,
    seed: int,
) -> _RankResult:
    interface = program.interface
    place = comm.index(program.pipeline.axis)
    inner = comm.within(interface.axes)
    with torch.no_grad():
        names = [entry.name for entry in held_by(interface, place)]
        local_state = shard_state(inner, interface, state, names)
        step = PipelineStep(program, make_batch(program.program, interface, inner, inputs), comm, seed)
        if grads is None:
            result = step.forward(local_state)
        else:
            differentiable = [output for output in interface.outputs if output.differentiable]
            local_grads = tuple(
                None if grad is None else shard(grad.to(comm.device), output.sharding, inner)
                for grad, output in zip(grads, differentiable, strict=True)
            )
            result = step.train(local_state, local_grads)
    return _RankResult(result, tuple(comm.log or ()), place)


def _check_equal(what: str, copies: Sequence[Tensor], places: Sequence[int]) -> None:
    for place, copy in zip(places, copies, strict=True):
        if not torch.equal(copy.nan_to_num(), copies[0].nan_to_num()):
            worst = (copy.to(torch.float64) - copies[0].to(torch.float64)).abs().max().item()
            raise AutoparError(
                f"the {what} is not the same on pipeline ranks {places[0]} and {place}",
                values=f"they differ by up to {worst:.3g}",
            )
