"""`autopar.plan`: what the planner decides, dressed with its program's text, its views, and words."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar import pipeline
from autopar.api.plan import Plan
from autopar.base import environment
from autopar.base.errors import AutoparError
from autopar.base.garbage import older_spared
from autopar.base.torch_compat.autograd import with_gradients
from autopar.ir.meaning import meaning_of
from autopar.machine.mesh import Mesh
from autopar.passes.emit import emit, emit_with_places
from autopar.passes.placement.gathers import WHOLE
from autopar.planner.decide import decide
from autopar.planner.inputs import Batch, by_name
from autopar.planner.plan.record import PlanRecord
from autopar.planner.with_loss import Loss, Watched, with_loss
from autopar.runtime.checker.program import check_types
from autopar.strategies.names import Pin, Strategy
from autopar.strategies.request import Progress
from autopar.views.explain.attention_axes import context_rows
from autopar.views.graphs import views_of, with_places
from autopar.views.step_memory import step_views


def _level_of_user() -> int:
    """How many calls lie between the caller's own and the first that is not autopar's: what a warning points to."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "autopar":
        level, frame = level + 1, frame.f_back
    return level


def dressed(record: PlanRecord) -> Plan:
    """The plan of a record. Records that are only compared are never dressed: text and views take time."""
    program = record.program
    for note in record.notes:
        if WHOLE in note:
            warnings.warn(f"autopar: {note}", stacklevel=_level_of_user())
    if record.source or program is None:
        return Plan.of(record)
    spans, memory = step_views(program, record.cost, record.pipeline)
    source, places = emit_with_places(program, strategies=record.strategies, title=record.title)
    views = replace(with_places(views_of(program), places), spans=spans, memory=memory)
    context = context_rows(program, record.strategies)
    interface = replace(record.interface, meaning=meaning_of(program))
    found = replace(record, source=source, views=views, context=context, interface=interface)
    if environment.read().types:
        _check(found)
    return Plan.of(found)


def written(record: PlanRecord) -> Plan:
    """The plan of a record with what runs alone: its program's text, which the ranks check before they run it."""
    program = record.program
    assert program is not None
    source = emit(program, strategies=record.strategies, title=record.title)
    return Plan.of(replace(record, source=source, interface=replace(record.interface, meaning=meaning_of(program))))


def _check(record: PlanRecord) -> None:
    try:
        check_types(record.source, record.interface, identity=environment.read().identity)
    except AutoparError as error:
        raise AutoparError(
            f"autopar has written a program that does not pass its own checker: {error.what}",
            where=error.where,
            values=error.values,
            remedy="Please report it with your model. With AUTOPAR_CHECK=0 it is planned all the same: prove it by "
            "plan.verify() before you run it",
        ) from error


def plan(
    model: nn.Module,
    mesh: Mesh | DeviceMesh | str | Mapping[str, int],
    *,
    example_inputs: Batch,
    strategy: Strategy = "auto",
    precision: str | torch.dtype | None = None,
    memory_limit: float | None = None,
    constraints: Sequence[Pin] = (),
    passes: Sequence[pipeline.Pass] | None = None,
    hardware: str | None = None,
    inference: bool = False,
    rematerialize: str = "auto",
    microbatches: int | None = None,
    halves: bool | None = None,
    roots: Sequence[str] | None = None,
    loss: Loss | None = None,
    expert_imbalance: float | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Decide how `model` runs on `mesh`. Needs no process group, no GPU, no weights (the model may be on meta).

    Args:
        mesh: an `autopar.Mesh`, its axes (`"dp=2,tp=2"`, `{"dp": 2, "tp": 2}`), or a torch DeviceMesh.
        example_inputs: arguments of `forward`, by keyword (a mapping), in order (a tuple), or the only one (a tensor):
            the global batch (shapes and dtypes count, values do not).
        strategy: "auto", a name (`autopar strategies` lists them), or a mapping from axes to names.
        precision: compute dtype ("bf16", "fp32", …) of floating-point parameters and inputs; None keeps the model's.
        memory_limit: bytes one rank may use; None takes the hardware profile's.
        constraints: `autopar.pin(...)`s.
        passes: the list of passes (default `autopar.pipeline.DEFAULT`).
        inference: plan the forward alone.
        rematerialize: what repeated blocks compute again in the backward: "none", "selective", "full", or "auto", the
            first of these that fits the memory limit (under "auto" strategies also the next, where memory is short).
        microbatches: how many parts of the batch a step runs one after the other; gradients are reduced once, and the
            loss stays the whole batch's. None: 1, and with a pipeline as many as are predicted fastest.
        halves: whether two microbatches go through the program together, so that tokens of one travel to their experts
            while the other is computed (docs/experts.md). True: that, in 2 microbatches where no number is given;
            None: where there is an even number of microbatches, and it is predicted faster.
        roots: the outputs whose gradients a backward takes, by name. None: the loss where there is one, else all that
            depend on parameters. (`autopar.compile` plans again by itself when a gradient comes for another one.)
        loss: a function of the outputs and the batch that becomes a part of the program (see `autopar.compile`).
        expert_imbalance: where tokens go to the ranks of their experts, how many the busiest rank gets for each that a
            rank gets on the average, as assumed or as `autopar.expert_imbalance` measures it; None takes the profile's.

    Raises:
        AutoparError: bad input; says what, where, the numbers, and the remedy.
    """
    return first_plan(
        model, mesh, alone=True, example_inputs=example_inputs, strategy=strategy, precision=precision,
        memory_limit=memory_limit, constraints=constraints, passes=passes, hardware=hardware, inference=inference,
        rematerialize=rematerialize, microbatches=microbatches, halves=halves, roots=roots, loss=loss,
        expert_imbalance=expert_imbalance, progress=progress,
    )  # fmt: skip


def first_plan(
    model: nn.Module,
    mesh: Mesh | DeviceMesh | str | Mapping[str, int],
    *,
    example_inputs: Batch,
    loss: Loss | None = None,
    alone: bool = False,
    **options: Any,
) -> Plan:
    """As `plan`, whose other options these are, where other programs of the model may follow that share its parameters:
    what they will read of them is not known. alone: that none will.

    Raises:
        AutoparError: as `plan`.
    """
    with older_spared(), with_gradients(not options.get("inference", False)):
        watched = None if loss is None else Watched(loss)
        batch = by_name(model, example_inputs)
        found = decide(with_loss(model, loss, batch), mesh, example_inputs=batch, alone=alone, **options)
        if watched is not None:
            watched.check_planned(found)
        return dressed(found)
