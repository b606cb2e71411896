"""Programs cut into stages by hand, and all stages run one after the other: what the text of a pipeline computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from autopar.cost.memory.boundaries import boundaries
from autopar.ir.interface import ProgramInterface, StageInterface, TensorInterface
from autopar.ir.program import Program
from autopar.ir.schedule import Action, Kind, Schedule
from autopar.ir.sharding import local_shape
from autopar.ir.stages import Pipeline
from autopar.ir.verify import check_program
from autopar.machine.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.emit import emit, interface_of
from autopar.passes.insert_collectives import insert_collectives
from autopar.passes.overlap import overlap
from autopar.passes.place import place
from autopar.runtime.event import Event
from autopar.runtime.layout import assemble, local_part_shape, resized, shard
from autopar.runtime.loader import LoadedProgram, load_program
from autopar.runtime.microbatches import make_batch, seed_of
from autopar.runtime.simulated_comm import SimulatedComm, SimulatedMesh
from autopar.runtime.simulation import SimulationResult, shard_state
from autopar.strategies.axis import AxisStrategy
from autopar.strategies.names import resolve
from tests.unit.traced import Lowered, Traced, named, trace


def one_after_the_other(num_stages: int, halves: bool = False) -> Schedule:
    """One microbatch, one stage a rank: forward and backward; the order of communication is left out."""
    backward = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) if halves else (Kind.BACKWARD,)
    order = tuple(tuple(Action(stage, kind, 0) for kind in (Kind.FORWARD, *backward)) for stage in range(num_stages))
    return Schedule("1f1b", 1, tuple(range(num_stages)), order)


@dataclass(frozen=True, eq=False)
class Uncut:
    """A model placed and lowered on the mesh of one stage, in halves too."""

    traced: Traced
    program: Program
    strategies: tuple[AxisStrategy, ...]

    def cut(
        self,
        cuts: Sequence[int],
        *,
        halves: bool = False,
        recomputed: Sequence[Sequence[int]] = (),
    ) -> Lowered:
        """The program with stages that begin at the calls `cuts`, emitted."""
        pipeline = Pipeline("pp", boundaries(self.program, cuts, recomputed), one_after_the_other(len(cuts), halves))
        finished = overlap(replace(self.program, pipeline=pipeline), strategies=self.strategies)
        check_program(finished, after="overlap")
        return Lowered(self.traced, finished, self.strategies, emit(finished, strategies=self.strategies))


@lru_cache(maxsize=32)
def uncut(name: str, mesh: str, strategy: str, layers: int = 4, dropout: float = 0.0) -> Uncut:
    """A model of the catalogue on the inner mesh of `pp=2,…`."""
    return uncut_traced(trace(name, dropout, layers), mesh, strategy)


def uncut_traced(traced: Traced, mesh: str, strategy: str) -> Uncut:
    inner = Mesh.parse(f"pp=2,{mesh}", hardware="cpu").without("pp")
    strategies = resolve(named(strategy), inner)
    placed = place(annotate(traced.program, mesh=inner), strategies=strategies)
    return Uncut(traced, insert_collectives(placed, halves=True), strategies)


@dataclass(frozen=True)
class Ran:
    """What one rank of the inner mesh computed, all stages together.

    events: its collectives, by what it did: `unshard`, `forward`, `backward`, `reduce`.
    """

    outputs: dict[int, Tensor]
    updates: dict[str, Tensor]
    gradients: dict[str, Tensor]
    events: dict[str, tuple[Event, ...]]


def run_stages(program: Lowered, times: int = 1, seed: int = 0) -> tuple[SimulationResult, list[Ran]]:
    """Every rank of the inner mesh runs all stages forward, then all backward; gradients of tied parameters add up.

    times: how often, as if the batch were that many microbatches in a row; gradients are their mean.
    """
    interface = interface_of(program.program)
    loaded = load_program(program.source, "<stages>")

    def run(comm: SimulatedComm) -> Ran:
        with torch.no_grad():
            return _Rank(comm, interface, loaded, program).run(times, seed)

    ranks = SimulatedMesh(interface.axes, interface.sizes, 60.0).run(run)

    def whole(pieces: Sequence[Tensor], entry: TensorInterface) -> Tensor:
        return assemble(list(pieces), entry.sharding, interface.sizes, atol=1e-12, rtol=1e-12)

    outputs = tuple(whole([rank.outputs[place] for rank in ranks], e) for place, e in enumerate(interface.outputs))
    trained = [entry for entry in interface.parameters if entry.differentiable]
    gradients = {e.name: whole([rank.gradients[e.name] / times for rank in ranks], e) for e in trained}
    updates = {e.name: whole([rank.updates[e.name] for rank in ranks], e) for e in interface.updates}
    events = tuple(tuple(each for part in rank.events.values() for each in part) for rank in ranks)
    before = len(ranks[0].events["unshard"]) + len(ranks[0].events["forward"])
    return SimulationResult(outputs, gradients, events, before, updates), ranks


class _Rank:
    """All stages on one rank of the inner mesh."""

    def __init__(
        self, comm: SimulatedComm, interface: ProgramInterface, loaded: LoadedProgram, program: Lowered
    ) -> None:
        assert interface.pipeline is not None
        self.comm, self.interface, self.stages = comm, interface, loaded.stages
        self.borders = interface.pipeline.stages
        self.inputs = make_batch(loaded, interface, comm, program.traced.inputs).local_inputs(0)
        self.states = [self._state(shard_state(comm, interface, program.traced.state), each) for each in self.borders]
        self.held: list[dict[str, Tensor]] = [{} for _ in self.borders]
        self.sums: list[dict[str, Tensor]] = [{} for _ in self.borders]

    def run(self, times: int, seed: int) -> Ran:
        assert self.comm.log is not None
        marks = [len(self.comm.log)]
        for stage, state, held in zip(self.stages, self.states, self.held, strict=True):
            for pending in stage.unshard(self.comm, state, held):
                pending.wait()
        marks.append(len(self.comm.log))
        done = [self._forward(seed) for _ in range(times)]
        marks.append(len(self.comm.log))
        for _, _, saved in done:
            self._backward(saved)
        marks.append(len(self.comm.log))
        gradients = self._reduce()
        log = tuple(self.comm.log)
        parts = ("unshard", "forward", "backward", "reduce")
        events = {part: log[i:j] for part, i, j in zip(parts, marks, [*marks[1:], len(log)], strict=True)}
        outputs = {place: self._piece(value, self.interface.outputs[place]) for place, value in done[0][0].items()}
        return Ran(outputs, done[0][1], gradients, events)

    def _state(self, whole: dict[str, Tensor], border: StageInterface) -> dict[str, Tensor]:
        """What a stage may read: its own parameters and buffers alone."""
        found: dict[str, Tensor] = {}
        for entry in (*self.interface.parameters, *self.interface.buffers):
            if entry.name in (*border.parameters, *border.buffers):
                value = whole[entry.name] if entry.block is None else resized(whole[entry.name], entry.block)
                found.update(dict.fromkeys((entry.name, *entry.aliases), value))
        return found

    def _piece(self, value: Tensor, entry: TensorInterface) -> Tensor:
        if entry.block is None:
            return value
        at = [self.comm.index(axis) for axis in self.comm.axes]
        return resized(value, local_part_shape(entry.shape, entry.sharding, self.comm.sizes, at))

    def _forward(self, seed: int) -> tuple[dict[int, Tensor], dict[str, Tensor], list[list[Any]]]:
        outputs: dict[int, Tensor] = {}
        updates: dict[str, Tensor] = {}
        saved: list[list[Any]] = []
        values: tuple[Tensor, ...] = ()
        number = seed_of(seed, 0, self.comm.device)
        for i, (stage, border) in enumerate(zip(self.stages, self.borders, strict=True)):
            self._check(border.receives, values)
            values, made, changed, kept = stage.forward(
                self.comm, self.states[i], self.held[i], self.inputs, values, number
            )
            assert set(made) == set(border.outputs) and set(changed) == set(border.updates)
            outputs.update(made)
            updates.update(changed)
            saved.append(kept)
        assert values == ()
        return outputs, updates, saved

    def _backward(self, saved: list[list[Any]]) -> None:
        grads: tuple[Tensor, ...] = ()
        for i in reversed(range(len(self.stages))):
            stage, border, state, held = self.stages[i], self.borders[i], self.states[i], self.held[i]
            entries = {number: self.interface.outputs[number] for number in border.outputs}
            roots = {number: self._ones(entry) for number, entry in entries.items() if entry.differentiable}
            if stage.backward_input is None or stage.backward_weight is None:
                grads = stage.backward(self.comm, state, held, saved[i], grads, roots, self.sums[i])
            else:
                grads, kept = stage.backward_input(self.comm, state, held, saved[i], grads, roots)
                stage.backward_weight(self.comm, state, held, kept, self.sums[i])
                assert not kept
            assert not saved[i], "what was saved is still there"
            differentiable = [entry for entry in border.receives if entry.differentiable]
            self._check([replace(e, sharding=e.gradient or e.sharding) for e in differentiable], grads)
        assert grads == ()

    def _ones(self, entry: TensorInterface) -> Tensor:
        ones = torch.ones(entry.shape, dtype=getattr(torch, entry.dtype))
        part = shard(ones, entry.sharding, self.comm)
        return part if entry.block is None else resized(part, entry.block)

    def _reduce(self) -> dict[str, Tensor]:
        gradients: dict[str, Tensor] = {}
        for stage, border, sums in zip(self.stages, self.borders, self.sums, strict=True):
            for name, gradient in stage.reduce(self.comm, sums).items():
                entry = self.interface.parameter(name)
                assert entry.name in border.parameters
                piece = self._piece(gradient, entry)
                gradients[entry.name] = gradients[entry.name] + piece if entry.name in gradients else piece
            assert not sums
        return gradients

    def _check(self, entries: Sequence[TensorInterface], values: Sequence[Tensor]) -> None:
        for entry, value in zip(entries, values, strict=True):
            assert tuple(value.shape) == local_shape(entry.shape, entry.sharding, self.interface.sizes), entry
            assert value.dtype == getattr(torch, entry.dtype), entry
