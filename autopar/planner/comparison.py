"""`auto` against the named strategies: it is never predicted slower than one that fits.

The objective counts a value that several readers want moved once per reader, the program moves it once; a named
strategy can gain from that by a hair. Those that split the sequence can gain more: attention may be dealt zigzag, key
heads repeated for ranks to share. They need a program that is prepared for it (`Spread`), and are tried only where the
least they could take is less than what was found.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar import pipeline
from autopar.base.errors import AutoparError, DoesNotFit
from autopar.cost.context import has_attention, least_seconds
from autopar.ir.program import Mode, Program
from autopar.passes.place import try_place
from autopar.passes.placement.choices import objective_of
from autopar.passes.placement.narrow import narrowed
from autopar.passes.placement.problem import build_problem
from autopar.planner.plan.record import PlanRecord
from autopar.planner.prepared import Prepared
from autopar.solver.problem import relative_gap
from autopar.strategies.axis import AxisStrategy
from autopar.strategies.context import Spread, check_order, is_context_axis
from autopar.strategies.names import AUTO, Strategy, is_tensor_axis, resolve
from autopar.strategies.request import Request

logger = logging.getLogger("autopar")
Steps = tuple[pipeline.Pass, ...]
HOPELESS = 1.1
"""Of a pipeline, a named strategy whose objective is so many times that of `auto` is not lowered: what the objective
leaves out (values that several read are moved once) is a few per cent.
"""
NOTE = "the decisions are a named strategy's"
PARTS = (1.0, 0.95, 0.9, 0.8)
"""Of the memory limit, what a named strategy is placed within, until the step that is walked fits."""
Lower = Callable[..., PlanRecord]
"""Makes a plan of a placed program: (request, steps, program=…, all_steps=…)."""


def best_of_named(request: Request, steps: Steps, found: PlanRecord, modes: Sequence[Mode], lower: Lower) -> PlanRecord:
    """The plan that was found, or a named strategy's decisions where they are predicted faster: solved from the same
    trace. modes: what may be computed again.
    """
    assert found.program is not None
    if found.traced is None or not Prepared.serves(steps):
        return _best_in_mode(request, steps, found, lower)
    prepared = Prepared(request, steps, found.traced)
    if found.spread is None:
        annotated = replace(found.program, phase="annotated", placement=None, pipeline=None)
        prepared.starting_from(found.rematerialize, annotated)
    if request.pipeline is not None:
        best = _best_in_mode(request, steps, found, lower)
    else:
        named = best_named(prepared, modes, found.cost.step_time_s, lower)
        best = found if named is None else _with_bound(prepared, named, found, lower)
    if has_attention(found.traced):
        best = _best_in_context(prepared, best, modes, lower)
    if best is found:
        return found
    logger.info("auto takes the decisions of a named strategy, predicted %.3g s a step", best.cost.step_time_s)
    return replace(best, times=found.times, traced=found.traced)


def best_named(prepared: Prepared, modes: Sequence[Mode], most_s: float, lower: Lower) -> PlanRecord | None:
    """The fastest of the named strategies' plans, each in the first of these modes of recomputation in which it fits;
    None where none takes less than most_s.
    """
    best: PlanRecord | None = None
    for strategies in _named_candidates(prepared.request):
        other = _as_named(prepared, strategies, modes, most_s, lower)
        if other is not None:
            best, most_s = other, other.cost.step_time_s
    return best


def _as_named(
    prepared: Prepared, strategies: Sequence[AxisStrategy], modes: Sequence[Mode], most_s: float, lower: Lower
) -> PlanRecord | None:
    """What `autopar.plan` does of these strategies, lowered as `auto`; None where it takes most_s or more, or does not
    fit. Until nothing else is left to try, the limit decides what is recomputed, not where things lie.
    """
    limit = _limit(prepared.request)
    alike = try_place(prepared.annotated_for("none"), strategies=strategies, memory_limit_bytes=None)
    for mode in modes:
        if alike is None or prepared.least_s(mode) >= most_s:
            return None
        placed = alike if mode == "none" else _alike(prepared, strategies, mode, alike, math.inf)
        free = _lowered(prepared, placed, mode, math.inf, lower)
        if placed is None or free is None or free.cost.step_time_s >= most_s:
            return None  # with all the memory there is; the next mode computes more
        fits = prepared.request.training or placed.result.peak_bytes <= limit  # a step that trains is walked
        found = _lowered(prepared, placed, mode, limit, lower) if fits else None
        for part in PARTS if found is None and mode == modes[-1] else ():
            within = _alike(prepared, strategies, mode, alike, part * limit)
            found = _lowered(prepared, within, mode, limit, lower)
            if within is None or found is not None:
                break
        if found is not None:
            return found if found.cost.step_time_s < most_s else None
        if free.cost.memory.peak - free.cost.memory.activations > limit:
            return None  # what is stored does not fit, whatever is recomputed
    return None


def _limit(request: Request) -> float:
    return math.inf if request.memory_limit_bytes is None else request.memory_limit_bytes


def _alike(
    prepared: Prepared, strategies: Sequence[AxisStrategy], mode: Mode, alike: Program, limit: float
) -> Program | None:
    """Placed with operators as they are in `alike`, or, where that will not do, in any way."""
    annotated = prepared.annotated_for(mode)
    most = None if limit == math.inf else limit
    for program in (narrowed(annotated, alike), annotated):
        placed = try_place(program, strategies=strategies, memory_limit_bytes=most)
        if placed is not None:
            return placed
    return None


def _lowered(prepared: Prepared, placed: Program | None, mode: Mode, limit: float, lower: Lower) -> PlanRecord | None:
    """Lowered as the request says (`auto`), not as the strategies that placed it: a saved plan is lowered again from
    what the user asked.
    """
    if placed is None:
        return None
    wanted = replace(prepared.request, rematerialize=mode, memory_limit_bytes=None if limit == math.inf else limit)
    try:
        return lower(wanted, prepared.phases.lower, program=placed, all_steps=prepared.steps)
    except DoesNotFit:
        return None


def _with_bound(prepared: Prepared, best: PlanRecord, found: PlanRecord, lower: Lower) -> PlanRecord:
    """A named strategy's plan, with what is proven of it in the measure of `auto`; or that of `auto` if it is faster.

    The named problem was solved in its own measure. What counts is what `auto` found where as much is recomputed, how
    far that is from the best of all, and that this is predicted faster still: a note says so, and what the objective
    makes of it. Where `auto` finds nothing there, computing alone is the bound.
    """
    mode, request = best.rematerialize, prepared.request
    own: PlanRecord | None = found
    price, limit = found.solved.overlap_price, _limit(request)
    annotated = prepared.annotated_for(mode)
    if mode != found.rematerialize:
        placed = try_place(
            annotated, strategies=request.strategies, memory_limit_bytes=request.memory_limit_bytes, overlap_price=price
        )
        own = _lowered(prepared, placed, mode, limit, lower)
    if own is None:
        return _bounded(best, best.cost.step_time_s, prepared.least_s(mode))
    if own.cost.step_time_s <= best.cost.step_time_s:
        return own
    assert best.program is not None
    charged = objective_of(best.program, build_problem(annotated, request.strategies, (), None, price))
    more = "" if charged is None else f", which charges {charged / own.solved.objective_s - 1:.1%} more for them"
    faster = 1 - best.cost.step_time_s / own.cost.step_time_s
    note = f"{NOTE}, predicted {faster:.1%} faster than what is best by the objective{more}; the gap is the objective's"
    return replace(best, solved=own.solved, notes=(*best.notes, note))


def _bounded(plan: PlanRecord, objective_s: float, bound_s: float) -> PlanRecord:
    """The plan with another bound; objective_s: its own in the measure of that bound."""
    gap = relative_gap(max(objective_s, bound_s), bound_s)
    return replace(plan, solved=replace(plan.solved, bound_s=bound_s, gap=gap))


def _best_in_mode(request: Request, steps: Steps, found: PlanRecord, lower: Lower) -> PlanRecord:
    """The plan that was found, of a pipeline, or a named strategy's decisions where as much is recomputed."""
    if not pipeline.Phases.of(steps).have("rematerialize", "place", "insert_collectives"):
        return found
    assert found.program is not None
    annotated = replace(found.program, phase="annotated", placement=None, pipeline=None)
    best = found
    wanted = replace(request, rematerialize=found.rematerialize, overlap_price=found.solved.overlap_price)
    for strategies in _named_candidates(request):
        other = _tried(wanted, steps, annotated, strategies, lower, HOPELESS * found.solved.objective_s)
        if other is not None and other.cost.step_time_s < best.cost.step_time_s:
            best = other
    if best is found:
        return found
    return _bounded(best, best.solved.objective_s, found.solved.bound_s)


def _tried(
    request: Request,
    steps: Steps,
    annotated: Program,
    strategies: Sequence[AxisStrategy],
    lower: Lower,
    most_s: float = math.inf,
) -> PlanRecord | None:
    """The plan of what these strategies place; None where that does not fit, or has an objective of more than most_s.

    Lowered as the request says (`auto`), not as the strategies that placed it: a saved plan is lowered again from what
    the user asked.
    """
    placed = try_place(
        annotated,
        strategies=strategies,
        memory_limit_bytes=request.memory_limit_bytes,
        overlap_price=request.overlap_price,
    )
    if placed is None or placed.result.cost_s > most_s:
        return None
    try:
        return lower(request, pipeline.Phases.of(steps).lower, program=placed, all_steps=steps)
    except DoesNotFit:
        return None


def _named_candidates(request: Request) -> list[tuple[AxisStrategy, ...]]:
    """Named strategies, products of two for data, and of one for data and one for tensors, on the axes that are `auto`;
    the others as asked.
    """
    mesh = request.mesh
    data, tensors = ("ddp", "zero2", "zero3"), ("tensor", "tensor+sequence")
    wanted: list[Strategy] = [*data, *tensors]
    if len(mesh.axis_names) > 1:
        own = [axis for axis in mesh.axis_names if is_tensor_axis(axis)]
        last = mesh.axis_names[-1]
        if not own:
            pairs = (("ddp", "zero2"), ("zero2", "zero3"))
            wanted += ["hsdp", *({a: inner if a == last else d for a in mesh.axis_names} for d, inner in pairs)]
        own = own or [last]
        wanted += [{a: t if a in own else d for a in mesh.axis_names} for d in data for t in tensors]
        wanted += ["hsdp"]
    return list(dict.fromkeys(_filled(request, resolve(strategy, mesh)) for strategy in wanted))


def _filled(request: Request, named: tuple[AxisStrategy, ...]) -> tuple[AxisStrategy, ...]:
    """These strategies on the axes that are `auto`, the others as asked."""
    return tuple(each if asked is AUTO else asked for asked, each in zip(request.strategies, named, strict=True))


# ------------------------------------------------------------------------------------------------ along the sequence

_ONE = ("ulysses", "allgather_kv", "ring")
_TWO = (("ring", "ulysses"), ("allgather_kv", "ulysses"), ("ulysses", "ulysses"), ("allgather_kv", "allgather_kv"))


def context_candidates(request: Request) -> list[tuple[AxisStrategy, ...]]:
    """Context strategies on the axes that are `auto`: on those that are for the sequence by name, else on any one; the
    others split data, or tensors where that is their name.
    """
    mesh = request.mesh
    free = [a for a, each in zip(mesh.axis_names, request.strategies, strict=True) if each is AUTO and mesh.size(a) > 1]
    named = [axis for axis in free if is_context_axis(axis)]
    groups = [named] if named else [[axis] for axis in free]
    found = []
    for own in groups:
        ways = _TWO if len(own) == 2 else tuple((each,) * len(own) for each in _ONE)
        for way, data in itertools.product(ways, ("ddp", "zero3") if len(free) > len(own) else ("ddp",)):
            given = dict(zip(own, way, strict=True))
            rest = {axis: "tensor" if is_tensor_axis(axis) else data for axis in mesh.axis_names if axis not in own}
            with contextlib.suppress(AutoparError):  # an order that cannot be
                strategies = _filled(request, resolve(given | rest, mesh))
                check_order(strategies, mesh)
                found.append(strategies)
    return list(dict.fromkeys(found))


def _best_in_context(prepared: Prepared, best: PlanRecord, modes: Sequence[Mode], lower: Lower) -> PlanRecord:
    """The best plan, or a faster one that splits the sequence by name, or `auto`'s own answer to what the fastest of
    these is prepared for. That has other operators, and so a bound of its own: the smaller one counts.
    """
    request, before = prepared.request, best

    def least(strategies: tuple[AxisStrategy, ...], mode: Mode) -> float:
        program = prepared.spread_for(mode, Spread.of(strategies, request.mesh))
        return least_seconds(program, prepared.computing_s(mode), strategies, request.mesh)

    def planned(strategies: tuple[AxisStrategy, ...], spread: Spread, mode: Mode) -> PlanRecord | None:
        wanted = replace(request, rematerialize=mode, spread=spread)
        return _tried(wanted, prepared.steps, prepared.annotated_for(mode, spread), strategies, lower)

    for strategies in sorted(context_candidates(request), key=lambda each: least(each, modes[0])):
        for mode in modes:
            if least(strategies, mode) >= best.cost.step_time_s:
                break
            found = planned(strategies, Spread.of(strategies, request.mesh), mode)
            if found is not None:
                best = min(best, found, key=lambda each: each.cost.step_time_s)
                break
    if best.spread is None:
        return best
    own = planned(request.strategies, best.spread, best.rematerialize)
    if own is None:
        return _bounded(best, best.solved.objective_s, min(before.solved.bound_s, best.solved.bound_s))
    faster_s = max(0.0, own.cost.step_time_s - best.cost.step_time_s)
    fastest = own if own.cost.step_time_s <= best.cost.step_time_s else best
    bound_s = min(before.solved.bound_s, own.solved.bound_s)
    return _bounded(fastest, own.solved.objective_s - faster_s, bound_s)
