"""What `autopar.plan` decides: from a user's words to the record of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autopar import pipeline
from autopar.base.errors import AutoparError
from autopar.base.garbage import older_spared
from autopar.base.huggingface.caches import states_among
from autopar.base.stored_weights import check_not_trained
from autopar.ir.program import MODES, Mode, Program
from autopar.machine.mesh import Mesh
from autopar.passes.pair import TOGETHER
from autopar.planner.generation import pieces_pinned
from autopar.planner.inputs import bind_inputs, to_dtype, wanted_in, without_graph
from autopar.planner.microbatches import best_microbatches, check_microbatches
from autopar.planner.plan.record import PlanRecord
from autopar.planner.planning import best_plan
from autopar.planner.stored import in_fewest_bytes
from autopar.strategies.axis import AxisStrategy
from autopar.strategies.context import SequenceDoesNotDivide, Spread, of_cache, of_whole_sequence
from autopar.strategies.names import Pin, Strategy, pipeline_of, resolve
from autopar.strategies.pipelining.spec import AXIS
from autopar.strategies.request import Attempt, Progress

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@older_spared()
def decide(
    model: nn.Module,
    mesh: Mesh | DeviceMesh | str | Mapping[str, int],
    *,
    example_inputs: Mapping[str, Any],
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
    expert_imbalance: float | None = None,
    progress: Progress | None = None,
    captured: dict[object, Program] | None = None,
    alone: bool = False,
) -> PlanRecord:
    """See `autopar.plan`, which dresses what this finds.

    captured: what was traced for this batch before; gets what is. alone: whether no other program shares the
    parameters, so that those of a forward are stored as this one reads them (`stored.py`).

    Raises:
        AutoparError: bad input; says what, where, the numbers, and the remedy.
    """
    mesh = Mesh.of(mesh, hardware)
    mesh = mesh.with_experts(expert_imbalance)
    if inference and mesh.num_devices == 1:
        mesh = mesh.in_graphs()
    asked = pipeline_of(strategy, mesh)
    asked = asked.read() if asked is not None else None
    if microbatches is not None and microbatches < 1:
        raise AutoparError(f"{microbatches} microbatches", remedy="use 1 or more")
    inputs, strategies = without_graph(bind_inputs(model, (), example_inputs)), resolve(strategy, mesh)
    strategies = of_cache(strategies) if inference and states_among(inputs) else strategies
    stage = mesh if asked is None else mesh.without(AXIS)
    request = Attempt(
        model,
        inputs,
        stage,
        strategies,
        tuple(constraints),
        float(mesh.hardware.memory_bytes) if memory_limit is None else float(memory_limit),
        to_dtype(precision),
        not inference,
        microbatches=_number(microbatches, halves, inference),
        pipeline=asked,
        roots=None if roots is None else tuple(roots),
        halves=None if inference else halves,  # as microbatches, which a forward alone has none of
        wanted=frozenset() if inference else _wanted(inputs, mesh),
        together=TOGETHER if halves and asked is not None and not inference else 1,
        spread=_as_before(strategies, stage, pieces_pinned(inputs, constraints, stage)),
        captured={} if captured is None else captured,
    )
    if not inference:
        check_not_trained(model)
    if rematerialize not in ("auto", *MODES):
        raise AutoparError(f"unknown rematerialize mode {rematerialize!r}", remedy=f"use auto, {', '.join(MODES)}")
    steps = tuple(pipeline.DEFAULT if passes is None else passes)
    modes: tuple[Mode, ...] = tuple(mode for mode in MODES if rematerialize in ("auto", mode))

    def make(request: Attempt) -> PlanRecord:
        try:
            return best_plan(request, steps, modes, progress)
        except SequenceDoesNotDivide:  # as that of a token does not, whatever splits a prompt
            whole = of_whole_sequence(strategies)
            if not inference or whole == strategies:
                raise
            spread = _as_before(whole, stage, pieces_pinned(inputs, constraints, stage))
            return best_plan(replace(request, strategies=whole, spread=spread), steps, modes, progress)

    if asked is not None and microbatches is not None and not inference:
        check_microbatches(request)
    is_given = asked is None or inference or microbatches is not None
    found = make(request) if is_given else best_microbatches(request, make)
    return in_fewest_bytes([found], constraints)[0] if inference and alone else found


def _wanted(inputs: Mapping[str, Any], mesh: Mesh) -> frozenset[str]:
    """The inputs whose gradients the backward returns: those that require one.

    Raises:
        AutoparError: over a pipeline; of a cache.
    """
    names = wanted_in(inputs)
    if caches := [name for name in names if name.partition(".")[0] in states_among(inputs)]:
        raise AutoparError(
            f"input {min(caches)} requires a gradient, and caches have none",
            remedy="make the cache under torch.no_grad(), or hand it in detached",
        )
    return names


def _number(microbatches: int | None, halves: bool | None, inference: bool) -> int:
    """Of microbatches, where no schedule has a say."""
    if inference or microbatches is None:
        return 2 if halves and not inference else 1
    return microbatches


def _as_before(strategies: Sequence[AxisStrategy], mesh: Mesh, pieces: int) -> Spread | None:
    """What a program is prepared for beyond what its strategies need: caches that come in more pieces."""
    own = Spread.of(strategies, mesh)
    return replace(own, pieces=pieces) if pieces > own.pieces else None
