"""Programs cut into stages by hand, and all stages run one after the other: what the text of a pipeline computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autopar.interface import ProgramInterface, TensorInterface
from autopar.ir import Pipeline, Program
from autopar.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.emit import emit, interface_of
from autopar.passes.insert_collectives import insert_collectives
from autopar.passes.overlap import overlap
from autopar.passes.place import place
from autopar.passes.stages.boundaries import boundaries
from autopar.pipelining.actions import Action, Kind, Schedule
from autopar.runtime.comm import Event
from autopar.runtime.layout import assemble, local_part_shape, resized, shard
from autopar.runtime.loader import LoadedProgram, load_program
from autopar.runtime.microbatches import make_batch, seed_of
from autopar.runtime.simulate import SimulationResult, shard_state
from autopar.runtime.simulated_comm import SimulatedComm, SimulatedMesh
from autopar.sharding import local_shape
from autopar.strategies import AxisStrategy, resolve
from tests.unit.traced import Lowered, named, trace, Traced

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


def one_after_the_other(num_stages: int, halves: bool = False) -> Schedule:
    """One microbatch, one stage a rank: forward and backward; the order of communication is left out."""
    backward = (I, W) if halves else (B,)
    order = tuple(
        tuple(Action(stage, kind, 0) for kind in (F, *backward)) + (Action(stage, Kind.REDUCE_GRAD),)
        for stage in range(num_stages)
    )
    return Schedule("1f1b", 1, tuple(range(num_stages)), order)


def lowered(
    name: str, mesh: str, strategy: str, *, layers: int = 4, dropout: float = 0.0
) -> tuple[Traced, Program, tuple[AxisStrategy, ...]]:
    """A model placed and lowered on the inner mesh of `pp=2,…`, in halves too."""
    traced = trace(name, dropout, layers)
    inner = Mesh.parse(f"pp=2,{mesh}", hardware="cpu").without("pp")
    strategies = resolve(named(strategy), inner)
    placed = place(annotate(traced.program, mesh=inner), strategies=strategies)
    return traced, insert_collectives(placed, halves=True), strategies


def piped(
    traced: Traced,
    program: Program,
    strategies: tuple[AxisStrategy, ...],
    cuts: Sequence[int],
    *,
    halves: bool = False,
    again: Sequence[Sequence[int]] = (),
) -> Lowered:
    """The program with stages that begin at the calls `cuts`, emitted."""
    pipeline = Pipeline("pp", boundaries(program, cuts, again), one_after_the_other(len(cuts), halves))
    finished = overlap(replace(program, pipeline=pipeline), strategies=strategies)
    return Lowered(traced, finished, strategies, emit(finished, strategies=strategies))


@dataclass(frozen=True)
class _Rank:
    outputs: dict[int, Tensor]
    updates: dict[str, Tensor]
    gradients: dict[str, Tensor]
    forward_events: int
    events: tuple[Event, ...]


def run_stages(program: Lowered, seed: int = 0) -> SimulationResult:
    """Every rank of the inner mesh runs all stages forward, then all backward; gradients of tied parameters add up."""
    interface = interface_of(program.program)
    loaded = load_program(program.source, "<stages>")

    def run(comm: SimulatedComm) -> _Rank:
        with torch.no_grad():
            return _run_rank(comm, interface, loaded, program, seed)

    ranks = SimulatedMesh(interface.axes, interface.sizes, 60.0).run(run)

    def whole(pieces: Sequence[Tensor], entry: TensorInterface) -> Tensor:
        return assemble(list(pieces), entry.sharding, interface.sizes, atol=1e-12, rtol=1e-12)

    outputs = tuple(
        whole([rank.outputs[place] for rank in ranks], entry) for place, entry in enumerate(interface.outputs)
    )
    gradients = {e.name: whole([r.gradients[e.name] for r in ranks], e) for e in interface.parameters if e.differentiable}
    updates = {e.name: whole([r.updates[e.name] for r in ranks], e) for e in interface.updates}
    events = tuple(rank.events for rank in ranks)
    return SimulationResult(outputs, gradients, events, ranks[0].forward_events, updates)


def _run_rank(
    comm: SimulatedComm, interface: ProgramInterface, loaded: LoadedProgram, program: Lowered, seed: int
) -> _Rank:
    pipeline = interface.pipeline
    assert pipeline is not None and comm.log is not None
    at = [comm.index(axis) for axis in comm.axes]
    whole_state = shard_state(comm, interface, program.traced.state)
    for entry in interface.parameters:
        if entry.block is not None:
            block = resized(whole_state[entry.name], entry.block)
            whole_state.update(dict.fromkeys((entry.name, *entry.aliases), block))
    batch = make_batch(loaded, interface, comm, program.traced.inputs)
    inputs = batch.local_inputs(0)
    outputs: dict[int, Tensor] = {}
    updates: dict[str, Tensor] = {}
    gradients: dict[str, Tensor] = {}
    saved, held, states = [], [], []
    received: tuple[Tensor, ...] = ()
    for stage, border in zip(loaded.stages, pipeline.stages, strict=True):
        _check_values(interface, border.receives, received)
        own = {*border.parameters, *border.buffers}
        aliases = {e.name: (e.name, *e.aliases) for e in (*interface.parameters, *interface.buffers) if e.name in own}
        states.append({alias: whole_state[alias] for names in aliases.values() for alias in names})
        held.append({})
        for pending in stage.unshard(comm, states[-1], held[-1]):
            pending.wait()
        received, made, changed, kept = stage.forward(
            comm, states[-1], held[-1], inputs, received, seed_of(seed, 0, comm.device)
        )
        assert set(made) == set(border.outputs) and set(changed) == set(border.updates)
        outputs.update(made)
        updates.update(changed)
        saved.append(kept)
    forward_events = len(comm.log)
    grads: tuple[Tensor, ...] = ()
    ones = {
        place: shard(torch.ones(e.shape, dtype=getattr(torch, e.dtype)), e.sharding, comm)
        for place, e in enumerate(interface.outputs)
        if e.differentiable
    }
    for number in reversed(range(len(loaded.stages))):
        stage, border = loaded.stages[number], pipeline.stages[number]
        sums: dict[str, Tensor] = {}
        roots = {place: ones[place] for place in border.outputs if place in ones}
        given = comm, states[number], held[number], saved[number], grads, roots
        if stage.backward_input is None or stage.backward_weight is None:
            grads = stage.backward(*given, sums)
        else:
            grads, left = stage.backward_input(*given)
            stage.backward_weight(comm, states[number], held[number], left, sums)
            assert not left
        assert not saved[number]
        _check_gradients(interface, border.receives, grads)
        for name, gradient in stage.reduce(comm, sums).items():
            entry = interface.parameter(name)
            assert entry.name in border.parameters
            if entry.block is not None:
                shape = local_part_shape(entry.shape, entry.sharding, comm.sizes, at)
                gradient = resized(gradient, shape)
            gradients[entry.name] = gradients[entry.name] + gradient if entry.name in gradients else gradient
        assert not sums
    pieces = {
        place: resized(value, local_part_shape(e.shape, e.sharding, comm.sizes, at)) if e.block is not None else value
        for place, (value, e) in enumerate(zip((outputs[i] for i in range(len(outputs))), interface.outputs, strict=True))
    }
    return _Rank(pieces, updates, gradients, forward_events, tuple(comm.log))


def _check_values(interface: ProgramInterface, entries: Sequence[TensorInterface], values: Sequence[Tensor]) -> None:
    for entry, value in zip(entries, values, strict=True):
        assert tuple(value.shape) == local_shape(entry.shape, entry.sharding, interface.sizes), entry
        assert value.dtype == getattr(torch, entry.dtype), entry


def _check_gradients(interface: ProgramInterface, entries: Sequence[TensorInterface], grads: Sequence[Tensor]) -> None:
    for entry, grad in zip([entry for entry in entries if entry.differentiable], grads, strict=True):
        assert entry.gradient is not None
        assert tuple(grad.shape) == local_shape(entry.shape, entry.gradient, interface.sizes), entry
        assert grad.dtype == getattr(torch, entry.dtype), entry
