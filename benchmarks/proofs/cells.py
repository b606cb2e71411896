"""Cells of the coverage matrices: one model, placed by one strategy on one mesh, run for all ranks beside eager.

A cell proves what `Plan.verify` proves, with its functions (`api/proof.py`): loss, outputs, every gradient and their
norm, the buffers that forward changes, in float64. `caught`, `judged` and `steps` serve every matrix; `run` is a cell
of `benchmarks/proofs/models.py`. What its cells share is made once: the captured model and what eager gives (for all
strategies and meshes), the differentiated program, the annotated one (for all strategies of a mesh).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from autopar import pipeline
from autopar.api import comparing, interpret, proof, reference
from autopar.api.promote import only
from autopar.api.small_model import small_model
from autopar.base.errors import AutoparError
from autopar.cli.models import catalogue
from autopar.ir.program import Program
from autopar.machine.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.differentiate import differentiate
from autopar.passes.emit import emit, interface_of
from autopar.passes.name_values import name_values
from autopar.passes.pad import pad
from autopar.passes.place import place
from autopar.strategies.names import Strategy, resolve
from autopar.strategies.request import Attempt

DTYPE = torch.float64
TOKENS = 16
PLACE_SECONDS = 10.0
PLACE_GAP = 0.05
"""How near the cheapest placement has to be: any placement has to compute the same."""

Status = Literal["ok", "refused", "failed"]


@dataclass(frozen=True, slots=True)
class Subject:
    """A row of models: `label` in the page, `name` and `dropout` for the catalogue."""

    label: str
    name: str
    dropout: float | None = None


@dataclass(frozen=True, slots=True)
class Column:
    """A mesh with a batch: `rows` of it, in `microbatches` parts."""

    mesh: str
    rows: int = 8
    microbatches: int = 1

    @property
    def label(self) -> str:
        extra = f", batch {self.rows}" * (self.rows != 8) + f", {self.microbatches} parts" * (self.microbatches > 1)
        return self.mesh + extra


@dataclass(frozen=True, slots=True)
class Cell:
    """What came of one: `error` is the worst relative error (of `tensor`), `message` what stood in the way.

    place_s, seconds: wall, of the solver and of all that the cell does not share. collectives: of one rank and step.
    """

    status: Status
    error: float = 0.0
    tensor: str = ""
    message: str = ""
    collectives: int = 0
    place_s: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class Captured:
    """A model in float64 with a batch, its program before it is placed, and what the program starts with."""

    model: nn.Module
    batch: Mapping[str, Any]
    program: Program
    state: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module, batch: Mapping[str, Any], program: Program) -> Captured:
        state, inputs = interpret.state_of(model, program), interpret.input_tensors(program, batch)
        return cls(model, batch, program, state, inputs)

    def expected(self, program: Program | None = None, source: str = "") -> proof.Expected:
        """What eager gives; `program` with its `source`: the placed one, whose dropout masks eager is given."""
        program = program or self.program
        return reference.expected(program, reference.Case(self.model, self.batch, self.inputs, 0, DTYPE), source)


def run(subject: Subject, strategy: Strategy, column: Column) -> Cell:
    """Prove one cell; every error is caught and told."""
    return caught(lambda: _proven(subject, strategy, column))


# --------------------------------------------------------------------------------------- what every matrix's cells do


def caught(prove: Callable[[], Cell]) -> Cell:
    """The cell with the seconds that it took; every error is a refusal or a failure."""
    start = time.perf_counter()
    try:
        cell = prove()
    except AutoparError as error:
        cell = Cell("refused", message=str(error))
    except Exception as error:  # a bug of ours, or a simulated rank's
        cell = Cell("failed", message=f"{type(error).__name__}: {str(error).strip()}"[:2000])
    return replace(cell, seconds=time.perf_counter() - start)


def judged(program: Program, source: str, captured: Captured, wanted: proof.Expected) -> Cell:
    """A whole step of the generated program for all ranks, compared tensor by tensor with what is wanted."""
    try:
        found = proof.run_all_ranks(interface_of(program), source, captured.state, captured.inputs, 0)
    except AutoparError as error:  # of ranks that disagree: no fault of the strategy's
        return Cell("failed", message=str(error))
    rows = comparing.compare(program, wanted, found, *comparing.TOLERANCES[DTYPE], comparing.NOISE[DTYPE])
    worst = max(rows, key=lambda row: row.error if row.error == row.error else float("inf"))
    bad = [row.name for row in rows if not row.ok]
    message = f"{len(bad)} of {len(rows)} tensors differ: {', '.join(bad[:6])}" if bad else ""
    events = max(len(each) for each in found.events)
    return Cell("failed" if bad else "ok", worst.error, worst.name, message, events)


def steps(first: str, before: str | None = None) -> tuple[pipeline.Pass, ...]:
    """The compiler's passes from `first` on, up to `before`."""
    names = [step.name for step in pipeline.DEFAULT]
    return pipeline.DEFAULT[names.index(first) : None if before is None else names.index(before)]


def ignore_some_labels(batch: dict[str, Any]) -> None:
    """-100 for as many labels as the row's number, so that microbatches weigh differently."""
    labels = batch.get("labels")
    if labels is None:
        return
    if labels.dim() == 1:
        labels[1] = labels[2] = -100
        return
    for row in range(labels.shape[0]):
        labels[row, labels.shape[1] - row :] = -100


# ------------------------------------------------------------------------------------- a cell of model_coverage.py


def _proven(subject: Subject, strategy: Strategy, column: Column) -> Cell:
    mesh = Mesh.parse(column.mesh, hardware="cpu")
    captured = _captured(subject, column.rows, column.microbatches)
    request = Attempt(captured.model, captured.batch, mesh, resolve(strategy, mesh), microbatches=column.microbatches)
    key = (subject, column.rows, column.microbatches)
    multiple = pipeline.vocabulary_ranks(Attempt.of(request))
    multiple = multiple if _padded(*key, multiple) is not captured.program else 1
    annotated = _annotated(subject, column, multiple)
    start = time.perf_counter()
    placed = place(annotated, strategies=request.strategies, gap=PLACE_GAP, time_limit_s=PLACE_SECONDS)
    place_s = time.perf_counter() - start
    with only(DTYPE):
        program, _ = pipeline.run(request, pipeline.LOWER, program=placed)
    source = emit(program, strategies=request.strategies)
    drops = subject.dropout and column.microbatches > 1
    wanted = captured.expected(program, source) if drops else _wanted(*key, multiple)
    return replace(judged(program, source, captured, wanted), place_s=place_s)


# ------------------------------------------------------------------------------------------------- what cells share


@lru_cache(maxsize=4)
def _captured(subject: Subject, rows: int, microbatches: int) -> Captured:
    loaded = catalogue.load(subject.name, tiny=True, device="cpu", dropout=subject.dropout, batch=(rows, TOKENS))
    given = dict(loaded.batch)
    if microbatches > 1:
        ignore_some_labels(given)
    model, batch = small_model(loaded.model, given, DTYPE, 0)
    mesh = Mesh({"dp": 1}, hardware="cpu")
    request = Attempt(model, batch, mesh, resolve("auto", mesh), microbatches=microbatches)
    with only(DTYPE):
        program, _ = pipeline.run(request, steps("capture", "pad"))
    return Captured.of(model, batch, program)


@lru_cache(maxsize=4)
def _wanted(subject: Subject, rows: int, microbatches: int, multiple: int) -> proof.Expected:
    """What eager gives; with dropout, what the program gives before it is placed."""
    captured = _captured(subject, rows, microbatches)
    program = _differentiated(subject, rows, microbatches, multiple if subject.dropout else 1)
    # The eager model changes its buffers; what it begins with stands in the state.
    return replace(captured, model=copy.deepcopy(captured.model)).expected(program)


@lru_cache(maxsize=8)
def _padded(subject: Subject, rows: int, microbatches: int, multiple: int) -> Program:
    """With vocabularies padded to a multiple; the outlined program itself where none needs it."""
    return pad(_captured(subject, rows, microbatches).program, multiple=multiple)


@lru_cache(maxsize=4)
def _differentiated(subject: Subject, rows: int, microbatches: int, multiple: int) -> Program:
    captured = _captured(subject, rows, microbatches)
    mesh = Mesh({"dp": 1}, hardware="cpu")
    request = Attempt(captured.model, captured.batch, mesh, resolve("auto", mesh), microbatches=microbatches)
    outlined = _padded(subject, rows, microbatches, multiple)
    with only(DTYPE):
        return pipeline.run(request, pipeline.RECOMPUTE, program=name_values(differentiate(outlined)))[0]


@lru_cache(maxsize=4)
def _annotated(subject: Subject, column: Column, multiple: int) -> Program:
    """multiple: 1 where nothing is padded, so that strategies which pad differently share what is alike."""
    program = _differentiated(subject, column.rows, column.microbatches, multiple)
    with only(DTYPE):
        return annotate(program, mesh=Mesh.parse(column.mesh, hardware="cpu"))
