"""Small models traced once in float64, and what a placement of them computes: for tests that prove many placements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from autopar import pipeline
from autopar.api import comparing, interpret, proof, reference
from autopar.api.promote import only
from autopar.api.small_model import small_model
from autopar.cli.models import catalogue
from autopar.ir.program import Program
from autopar.machine.hardware import Hardware
from autopar.machine.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.emit import emit, interface_of
from autopar.passes.insert_collectives import insert_collectives
from autopar.passes.overlap import overlap
from autopar.passes.place import place
from autopar.runtime.simulation import SimulationResult
from autopar.strategies.axis import AxisStrategy
from autopar.strategies.names import Pin, Strategy, parse, resolve
from autopar.strategies.request import Request

PRODUCT: Mapping[str, str] = {"dp": "zero3", "tp": "tensor"}
MODELS = ("llama", "gpt2", "bert", "mlp", "cnn")


@dataclass(frozen=True)
class Traced:
    """A model in float64 and its differentiated program; what eager gives on the batch."""

    program: Program
    state: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]
    expected: tuple[tuple[Tensor, ...], dict[str, Tensor], dict[str, Tensor]]


@dataclass(frozen=True)
class Lowered:
    """A traced model placed on a mesh, as the generated program."""

    traced: Traced
    program: Program
    strategies: tuple[AxisStrategy, ...]
    source: str

    def run(self) -> SimulationResult:
        """All ranks, forward and backward."""
        return proof.run_all_ranks(interface_of(self.program), self.source, self.traced.state, self.traced.inputs, 0)

    def worst(self, result: SimulationResult | None = None, rtol: float = 1e-9) -> float:
        """The largest relative error of loss, outputs, gradients and their norm; asserts that all are within `rtol`."""
        found = self.run() if result is None else result
        noise = comparing.NOISE[torch.float64]
        rows = comparing.compare(self.program, self.traced.expected, found, rtol, 1e-12, noise)
        bad = [row for row in rows if not row.ok]
        assert not bad, f"{len(bad)} of {len(rows)} differ: {bad[:5]}"
        return max(row.error for row in rows)


@lru_cache(maxsize=32)
def trace(name: str, dropout: float = 0.0, layers: int = 2, edit: Any = None) -> Traced:
    """Capture to differentiate. `edit(batch)` may change the batch in place."""
    plain = name in catalogue.PLAIN
    overrides = {} if layers == 2 else {"num_hidden_layers": layers}
    loaded = catalogue.load(
        name, tiny=True, device="cpu", dropout=None if plain else dropout, overrides=None if plain else overrides
    )
    if edit is not None:
        edit(loaded.batch)
    return trace_model(loaded.model, loaded.batch)


def trace_model(model: nn.Module, batch: dict[str, Tensor]) -> Traced:
    """Capture to differentiate, with seeded weights."""
    model, batch = small_model(model, batch, torch.float64, 0)
    request = Request(model, batch, Mesh({"dp": 1}, hardware="cpu"), resolve("auto", Mesh({"dp": 1})))
    with only(torch.float64):
        program, _ = pipeline.run(request, (*pipeline.TRACE, *pipeline.RECOMPUTE))
    state = interpret.state_of(model, program)
    inputs = interpret.input_tensors(program, batch)
    case = reference.Case(model, batch, inputs, 0, torch.float64)
    return Traced(program, state, inputs, reference.expected(program, case))


@lru_cache(maxsize=32)
def annotated(
    name: str, mesh: str, dropout: float = 0.0, edit: Any = None, hardware: str | Hardware = "cpu"
) -> Program:
    return annotate(trace(name, dropout, edit=edit).program, mesh=Mesh.parse(mesh, hardware=hardware))


def lower(
    name: str,
    mesh: str,
    strategy: Strategy = "auto",
    *,
    dropout: float = 0.0,
    pins: Sequence[Pin] = (),
    memory_limit_bytes: float | None = None,
    edit: Any = None,
    hardware: str | Hardware = "cpu",
) -> Lowered:
    """Place and lower, once. strategy: as a user names it, the command line's form too, or `product`."""
    strategies = resolve(named(strategy), Mesh.parse(mesh, hardware=hardware))
    return _lowered(name, mesh, strategies, dropout, tuple(pins), memory_limit_bytes, edit, hardware)


@lru_cache(maxsize=64)
def _lowered(
    name: str,
    mesh: str,
    strategies: tuple[AxisStrategy, ...],
    dropout: float,
    pins: tuple[Pin, ...],
    memory_limit_bytes: float | None,
    edit: Any,
    hardware: str | Hardware,
) -> Lowered:
    program = annotated(name, mesh, dropout, edit, hardware)
    placed = place(program, strategies=strategies, pins=pins, memory_limit_bytes=memory_limit_bytes)
    return finish(trace(name, dropout, edit=edit), placed, strategies)


def named(strategy: Strategy) -> Strategy:
    """`product` and `dp=zero1,tp=tensor` as mappings."""
    if isinstance(strategy, str):
        return PRODUCT if strategy == "product" else parse(strategy)
    return strategy


def finish(traced: Traced, placed: Program, strategies: tuple[AxisStrategy, ...]) -> Lowered:
    """Lower and emit a placed program."""
    lowered = overlap(insert_collectives(placed), strategies=strategies)
    return Lowered(traced, lowered, strategies, emit(lowered, strategies=strategies))
