"""Run a generated program for all ranks in one process, and put the results together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.ir.interface import ProgramInterface
from autopar.ir.values import gradient_key
from autopar.runtime.event import Event
from autopar.runtime.layout import shard
from autopar.runtime.loader import LoadedProgram, load_program
from autopar.runtime.microbatches import make_batch, whole_batch, whole_output
from autopar.runtime.pipeline import PipelineProgram
from autopar.runtime.simulate_pipeline import simulate_pipeline
from autopar.runtime.simulated_comm import SimulatedComm, SimulatedMesh
from autopar.runtime.simulation import SimulationResult, assemble_checked, gradient_of, shard_state
from autopar.runtime.step import Step
from autopar.runtime.streams import Streams


def simulate(
    interface: ProgramInterface,
    source: str,
    state: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    grads: Sequence[Tensor | None] | None = None,
    seed: int = 0,
    *,
    backward: bool = True,
    filename: str = "<generated program>",
    timeout_s: float = 300.0,
    device: torch.device | str = "cpu",
    late_s: float = 0.0,
    streams: Streams | None = None,
) -> SimulationResult:
    """Run all microbatches' forwards, and backwards unless told not to, for every rank of the interface's mesh.

    Parameters to which none of the gradients comes have none.

    With a pipeline each rank runs its row of the schedule, in the whole mesh (runtime/simulate_pipeline.py).

    state, inputs: global tensors by name, of the whole batch. grads: global gradients of the step's differentiable
    outputs, in their order; left out, ones for the first scalar among them (the loss) and None for the rest.
    device, late_s, streams: as of `SimulatedMesh`; state and inputs lie on that device.

    Raises:
        AutoparError: ranks that issue different collectives, replicas that differ, tensors of unplanned shapes.
    """
    program = load_program(source, filename)
    if interface.pipeline is not None:
        wanted = (_loss_gradient(interface) if grads is None else tuple(grads)) if backward else ()
        pipeline = interface.pipeline
        mesh = SimulatedMesh(pipeline.axes, pipeline.sizes, timeout_s, device=device, late_s=late_s, streams=streams)
        return simulate_pipeline(PipelineProgram(program, interface), state, inputs, wanted, seed, mesh)
    given_grads = _loss_gradient(interface) if grads is None else tuple(grads)
    wants_backward = backward and any(grad is not None for grad in given_grads)

    def run(comm: SimulatedComm) -> _RankResult:
        return _run_rank(comm, interface, program, state, inputs, given_grads if wants_backward else None, seed)

    mesh = SimulatedMesh(interface.axes, interface.sizes, timeout_s, device=device, late_s=late_s, streams=streams)
    ranks = mesh.run(run)
    outputs = tuple(
        assemble_checked(
            [rank.outputs[i] for rank in ranks], whole_output(output, interface.microbatches), interface, "output"
        )
        for i, output in enumerate(interface.outputs)
    )
    updates = {
        entry.name: assemble_checked([rank.updates[entry.name] for rank in ranks], entry, interface, "buffer")
        for entry in interface.updates
    }
    gradients: dict[str, Tensor] = {}
    given = interface.given(given_grads) if wants_backward else frozenset[int]()
    for parameter in interface.parameters:
        if wants_backward and parameter.differentiable and parameter.is_reached(given):
            pieces = [gradient_of(rank.gradients, parameter, number) for number, rank in enumerate(ranks)]
            gradients[parameter.name] = assemble_checked(pieces, parameter, interface, "gradient")
    for entry in interface.wanted:
        if wants_backward and entry.is_reached(given):
            key, whole = gradient_key(entry.name), whole_batch(entry, interface.microbatches)
            pieces = [rank.gradients[key] for rank in ranks]
            gradients[key] = assemble_checked(pieces, whole, interface, "gradient of the input")
    events = tuple(rank.events for rank in ranks)
    return SimulationResult(outputs, gradients, events, ranks[0].num_forward_events, updates)


@dataclass(frozen=True, slots=True)
class _RankResult:
    outputs: tuple[Tensor, ...]
    gradients: dict[str, Tensor]
    events: tuple[Event, ...]
    num_forward_events: int
    updates: dict[str, Tensor]


def _run_rank(
    comm: SimulatedComm,
    interface: ProgramInterface,
    program: LoadedProgram,
    state: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    grads: tuple[Tensor | None, ...] | None,
    seed: int,
) -> _RankResult:
    with torch.no_grad():
        local_state = shard_state(comm, interface, state)
        step = Step(make_batch(program, interface, comm, inputs), seed)
        done = step.forward(local_state)
        events = comm.log
        assert events is not None
        num_forward_events = len(events)
        gradients: dict[str, Tensor] = {}
        if grads is not None:
            differentiable = [output for output in interface.outputs if output.differentiable]
            local_grads = tuple(
                None if grad is None else shard(grad.to(comm.device), output.sharding, comm)
                for grad, output in zip(grads, differentiable, strict=True)
            )
            gradients = step.backward(done.states, done.saved, done.held, local_grads)
        return _RankResult(done.outputs, gradients, tuple(events), num_forward_events, done.updates)


def _loss_gradient(interface: ProgramInterface) -> tuple[Tensor | None, ...]:
    grads: list[Tensor | None] = []
    for output in interface.outputs:
        if output.differentiable:
            is_loss = output.shape == () and all(grad is None for grad in grads)
            grads.append(torch.ones((), dtype=getattr(torch, output.dtype)) if is_loss else None)
    return tuple(grads)
