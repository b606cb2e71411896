"""Proof: run the generated program for all ranks in one process, and compare everything with the eager model.

    loss, outputs, every gradient, the gradient norm, buffers that forward changes; and that every rank of a group
    issues the same collectives in one order.

The model gets small random weights in float64 (casts that its code writes stay in float64 too, so that rounding cannot
hide or feign an error), the batch is random, and where the program draws random numbers, the model gets the same ones.
Nothing but these is of autopar on the model's side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autopar import pipeline
from autopar.api import interpret
from autopar.api.comparing import NOISE, TOLERANCES, Comparison, Expected, change, compare
from autopar.api.draws import draws_of
from autopar.api.edited import edited_program
from autopar.api.planned_text import border_in, is_proven_text, own_text, state_for, text_in
from autopar.api.promote import default_dtype, only
from autopar.api.reference import Case, expected, rounding
from autopar.api.small_model import as_drawn, small_model
from autopar.base.errors import AutoparError
from autopar.base.stored_weights import ways_of
from autopar.base.torch_compat.autograd import with_gradients
from autopar.ir.interface import ProgramInterface
from autopar.ir.program import Program
from autopar.machine.mesh import Mesh
from autopar.passes.branches import put_ways
from autopar.passes.emit import emit, interface_of
from autopar.runtime.branches import other_ways
from autopar.runtime.microbatches import whole_output
from autopar.runtime.simulate import simulate
from autopar.runtime.simulation import SimulationResult
from autopar.strategies.pipelining.asked import refusal
from autopar.strategies.pipelining.spec import AXIS, PipelineSpec
from autopar.strategies.request import Attempt

if TYPE_CHECKING:
    from autopar.planner.plan.record import PlanRecord

MAX_RANKS = 16
MAX_PARAMETERS = 200_000_000
_NONE: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Proof:
    """What was compared, on which mesh, and how far apart it lies.

    `raise_on_failure()` turns a failure into an error.
    """

    comparisons: tuple[Comparison, ...]
    mesh: str
    scaled_down: bool
    dtype: str
    num_collectives: int
    dropout: bool
    rtol: float
    notes: tuple[str, ...] = ()
    """What else was measured."""

    @property
    def ok(self) -> bool:
        return all(comparison.ok for comparison in self.comparisons)

    @property
    def worst(self) -> Comparison:
        return max(
            self.comparisons, key=lambda comparison: comparison.error if comparison.error == comparison.error else 1e300
        )

    def raise_on_failure(self) -> Proof:
        """Itself when everything is equal.

        Raises:
            AutoparError: names the worst tensor and its error.
        """
        if not self.ok:
            bad = [comparison for comparison in self.comparisons if not comparison.ok]
            raise AutoparError(
                f"the program does not compute what the model computes: "
                f"{len(bad)} of {len(self.comparisons)} tensors differ",
                where=self.worst.name,
                values=f"relative error {self.worst.error:.3g}, allowed {self.rtol:.1g}, on {self.mesh}",
                remedy="this is a bug of autopar: please report it with the plan file; pin the tensors named to go on",
            )
        return self

    def __str__(self) -> str:
        verdict = "ok" if self.ok else "NOT EQUAL"
        scaled = " (scaled down)" if self.scaled_down else ""
        drawn = ", with the same random draws" if self.dropout else ""
        return (
            f"{verdict}: {len(self.comparisons)} tensors on {self.mesh}{scaled} in {self.dtype}{drawn}, "
            f"worst relative error {self.worst.error:.2g} ({self.worst.name}), "
            f"{self.num_collectives} collectives a rank in one order" + "".join(f"; {note}" for note in self.notes)
        )


def verify(
    plan: PlanRecord,
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
    prepare: Callable[[nn.Module, Mapping[str, Any]], None] | None = None,
) -> Proof:
    """Prove a plan (see the module's text). Works on the plan's mesh when it has at most 16 ranks, else on one scaled
    down.

    Args:
        prepare: is given the copy of the model that is proven, with random weights, and its batch, before anything is
            computed: to give it weights for which something is to be seen, as those of a crowded router.

    Raises:
        AutoparError: the plan was loaded without its model, or the model is too large to run here (verify it with
        --tiny).
    """
    fits_here(plan)
    with torch.random.fork_rng(devices=()), with_gradients():  # what the script draws next is what it was
        return _verified(plan, dtype, seed, rtol, atol, prepare)


def _verified(
    plan: PlanRecord,
    dtype: torch.dtype,
    seed: int,
    rtol: float | None,
    atol: float | None,
    prepare: Callable[[nn.Module, Mapping[str, Any]], None] | None,
) -> Proof:
    assert plan.model is not None and plan.inputs is not None
    if plan.source_is_edited:
        mesh, scaled = plan.mesh, False
    else:
        mesh, scaled = _mesh_of(plan)
    default_rtol, default_atol = TOLERANCES[dtype]
    tolerance = (default_rtol if rtol is None else rtol, default_atol if atol is None else atol)
    model, inputs = _prepared(plan, dtype, seed, prepare)
    went = False
    while True:
        with only(dtype):
            lowered, source = program_of(plan, model, inputs, mesh, scaled, dtype)
        program = lowered.single or lowered  # eager has one border, however many microbatches go through it together
        state = interpret.state_of(model, program)
        tensors = interpret.input_tensors(program, inputs)
        with default_dtype(dtype), edited_program("<generated program>", plan.source_is_edited):
            found = run_all_ranks(interface_of(lowered), source, state, tensors, seed)
        other = other_ways(program.branches, found.outputs)
        if other is None:
            break
        went = True
        put_ways(model, other)  # of these weights and this batch, which are not the plan's
    case = Case(model, inputs, tensors, seed, dtype)
    wanted = expected(program, case, source)
    runs = [_Run(program, wanted, found)]
    goes_by_others = went or program.told is not None  # branches, or Python's numbers, that are not the plan's
    if not (scaled or goes_by_others or is_proven_text(plan, lowered, source, state, dtype)):
        fresh = Case(*_prepared(plan, dtype, seed, prepare), tensors, seed, dtype)
        runs.append(_of_own_text(plan, runs[0], source, fresh, state))
    comparisons = [row for run in runs for row in run.compared(*tolerance, NOISE[dtype])]
    if program.training and not all(comparison.ok for comparison in comparisons):
        measured = rounding(program, case, source, state, wanted[1])
        comparisons = [row for run in runs for row in run.compared(*tolerance, NOISE[dtype], measured)]
    comparisons += [
        Comparison(f"gradient of {name} (the plan has none)", 1.0, ok=False) for name in _lost(plan, program)
    ]
    notes: tuple[str, ...] = ()
    if ways := ways_of(model):
        with as_drawn(model):
            plain = expected(program, case, source)
        pairs = zip(program.output_names, plain[0], wanted[0], strict=True)
        notes = tuple(change(f"weights in {ways}", x, y) for name, x, y in pairs if name == "logits")
    events = max((len(events) for events in found.events), default=0)
    drops = any(region.uses_dropout for region in program.regions)
    name = str(dtype).removeprefix("torch.")
    return Proof(tuple(comparisons), str(mesh), scaled, name, events, drops, tolerance[0], notes)


def _prepared(
    plan: PlanRecord, dtype: torch.dtype, seed: int, prepare: Callable[[nn.Module, Mapping[str, Any]], None] | None
) -> tuple[nn.Module, dict[str, Any]]:
    """The copy of the model that is proven, and its batch."""
    assert plan.model is not None and plan.inputs is not None
    model, inputs = small_model(plan.model, plan.inputs, dtype, seed)
    if prepare is not None:
        prepare(model, inputs)
    return model, inputs


def _lost(plan: PlanRecord, program: Program) -> list[str]:
    """Parameters to which gradients come in the program that is proven, and in the plan's own from no output: it was
    traced again, at other sizes, and perhaps otherwise.
    """
    own = {each.name: each.reached_by for each in plan.interface.parameters}
    proven = interface_of(program).parameters
    return [each.name for each in proven if each.reached_by != () and own.get(each.name) == ()]


def fits_here(plan: PlanRecord) -> None:
    """Raises an AutoparError for a plan without a model, or with one that is too large to run here."""
    if plan.model is None or plan.inputs is None:
        raise AutoparError(
            "this plan was loaded from a file and has no model to compare with", remedy="make it with autopar.plan"
        )
    size = sum(p.numel() for p in plan.model.parameters())
    if size > MAX_PARAMETERS:
        raise AutoparError(
            f"the model has {size / 1e9:.3g} billion parameters: too many to run in eager float64 here",
            remedy="verify the same architecture at small sizes (autopar verify MODEL --tiny), or fewer layers",
        )


def run_all_ranks(
    interface: ProgramInterface,
    source: str,
    state: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    seed: int,
) -> SimulationResult:
    """Forward and backward of the whole batch, with ones as the gradients of all outputs that have one."""
    if interface.pipeline is not None:  # the proof compares them all
        interface = replace(interface, pipeline=replace(interface.pipeline, keeps_outputs=True))
    entries = [whole_output(output, interface.microbatches) for output in interface.outputs if output.differentiable]
    ones = [torch.ones(entry.shape, dtype=getattr(torch, entry.dtype)) for entry in entries]
    return simulate(interface, source, state, tensors, ones, seed=seed)


@dataclass(frozen=True, slots=True)
class _Run:
    """What eager gives, and what a program's text does. note: which text, where it is not that which was traced now."""

    program: Program
    wanted: Expected
    found: SimulationResult
    note: str = ""

    def compared(
        self, rtol: float, atol: float, noise: float, rounding: Mapping[str, float] = _NONE
    ) -> list[Comparison]:
        rows = compare(self.program, self.wanted, self.found, rtol, atol, noise, rounding)
        return [replace(row, name=row.name + self.note) for row in rows]


def _of_own_text(plan: PlanRecord, run: _Run, source: str, fresh: Case, state: Mapping[str, torch.Tensor]) -> _Run:
    """What the plan's own text gives, in one dtype. run, source: what was proven. fresh: as before that."""
    program, wanted, seed, dtype = run.program, run.wanted, fresh.seed, fresh.dtype
    if plan.program is not None:
        program = plan.program.single or plan.program
    own, draws = own_text(plan, source, dtype), draws_of(program, seed)
    if draws and (program.microbatches > 1 or draws != draws_of(run.program, seed)):  # it draws other numbers
        wanted = expected(program, fresh, own)
    with default_dtype(dtype):
        border, held = border_in(plan.interface, dtype), state_for(plan, state, dtype)
        found = run_all_ranks(border, own, held, fresh.tensors, seed)
    return _Run(program, wanted, found, " (the plan's own text)")


def scaled_mesh(mesh: Mesh, least: Mapping[str, int] = MappingProxyType({})) -> tuple[Mesh, bool]:
    """The mesh itself, or one whose axes are halved, largest first, until it has at most 16 ranks. least: of an axis,
    the size that it keeps.
    """
    sizes = dict(mesh.axes)
    while math.prod(sizes.values()) > MAX_RANKS:
        axes = [axis for axis in sizes if sizes[axis] > least.get(axis, 1)]
        if not axes:
            break
        largest = max(axes, key=sizes.__getitem__)
        smaller = sizes[largest] // 2 if sizes[largest] % 2 == 0 else 1
        sizes[largest] = max(smaller, least.get(largest, 1))
    if sizes == dict(mesh.axes):
        return mesh, False
    return Mesh(sizes, hardware=mesh.hardware), True


def _mesh_of(plan: PlanRecord) -> tuple[Mesh, bool]:
    """Where a plan is proven: a pipeline keeps two stages or more, and all its ranks where its schedule is a file; and
    as many as its schedule's number of microbatches admits.
    """
    if plan.asked is None or plan.pipeline is None:
        return scaled_mesh(plan.mesh)
    ranks = plan.mesh.size(AXIS)
    if plan.asked.is_file:
        return scaled_mesh(plan.mesh, {AXIS: ranks})
    mesh, scaled = scaled_mesh(plan.mesh, {AXIS: min(2, ranks)})
    for size in range(mesh.size(AXIS), 1, -1) if scaled else ():
        smaller = Mesh({**dict(mesh.axes), AXIS: size}, hardware=mesh.hardware)
        spec = _as_planned(plan, smaller)
        if spec is not None and (not plan.training or refusal(spec, size, plan.interface.runs) is None):
            return smaller, True
    return mesh, scaled


def program_of(
    plan: PlanRecord, model: nn.Module, inputs: Mapping[str, Any], mesh: Mesh, scaled: bool, dtype: torch.dtype
) -> tuple[Any, str]:
    """The program of a plan's decisions on the proof's model, and its text; planned afresh where the mesh or the dtype
    changes what can be decided: then without fused operators where these do not go with the plan's pins, as the plan
    may have none of them (a norm that casts is matched in one dtype, and not in several).
    """
    request = Attempt(
        model, inputs, mesh if plan.asked is None else mesh.without(AXIS), plan.strategies, plan.pins, None,
        training=plan.training, rematerialize=plan.rematerialize, microbatches=plan.interface.microbatches,
        together=plan.interface.together, pipeline=_as_planned(plan, mesh),
        spread=None if scaled else plan.spread, roots=plan.roots, wanted=plan.wanted,
    )  # fmt: skip
    phases = pipeline.Phases.of(plan.passes)
    traced, _ = pipeline.run(request, (*phases.trace, *phases.prepare))
    program = None if scaled or plan.decisions is None else _decided(plan, traced)
    if program is not None:
        program, _ = pipeline.run(request, phases.lower, program=program)
    else:
        try:
            program, _ = pipeline.run(request, phases.decide, program=traced)
        except AutoparError:
            if phases.spelled_out == phases.trace:
                raise
            traced, _ = pipeline.run(request, (*phases.spelled_out, *phases.prepare))
            program, _ = pipeline.run(request, phases.decide, program=traced)
    source = text_in(plan.source, dtype) if plan.source_is_edited else emit(program, strategies=plan.strategies)
    return program, source


def _decided(plan: PlanRecord, program: Program) -> Program | None:
    """The traced program with the plan's decisions; None where that of `dtype` alone has other operators: the planned
    one casts, as the model's code does or its precision asks, and this one has a single dtype.
    """
    try:
        return plan.decisions.apply(program)
    except AutoparError:
        if plan.source_is_edited:
            raise
        return None


def _as_planned(plan: PlanRecord, mesh: Mesh) -> PipelineSpec | None:
    """The schedule that the plan has, not merely what was asked for; the cut only on as many stages."""
    if plan.asked is None or plan.pipeline is None:
        return plan.asked
    schedule = plan.pipeline.schedule
    name = plan.asked.schedule if plan.asked.is_file or not schedule.has_backward else schedule.name
    same = mesh.size(AXIS) == schedule.num_ranks
    cut, ranks = (plan.asked.cut, schedule.rank_of) if same else ((), ())
    return PipelineSpec(name, schedule.num_stages // schedule.num_ranks, cut, plan.asked.rows, ranks)
