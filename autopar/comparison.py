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
from dataclasses import dataclass, field, replace

from autopar import pipeline
from autopar.context_strategies import Spread, check_order, is_context_axis
from autopar.errors import AutoparError, DoesNotFit
from autopar.ir import Mode, Program
from autopar.passes.context_gain import computing_seconds, has_attention, least_seconds
from autopar.passes.place import try_place
from autopar.plans import Plan
from autopar.solver.problem import relative_gap
from autopar.strategies import AUTO, AxisStrategy, Strategy, is_tensor_axis, resolve

logger = logging.getLogger("autopar")
Steps = tuple[pipeline.Pass, ...]
HOPELESS = 1.1
"""A named strategy whose objective is so many times that of `auto` is not lowered: what the objective leaves out
(values that several read are moved once) is a few per cent.
"""
Lower = Callable[..., Plan]
"""Makes a plan of a placed program: (request, steps, program=…, all_steps=…)."""


def best_of_named(request: pipeline.Request, steps: Steps, found: Plan, modes: Sequence[Mode], lower: Lower) -> Plan:
    """The plan that was found, or a named strategy's decisions where they are predicted faster: solved from the same
    trace. modes: what may be computed again.
    """
    assert found.program is not None
    names = [step.name for step in steps]
    if not {"rematerialize", "place", "insert_collectives"} <= set(names):
        return found
    annotated = replace(found.program, phase="annotated", placement=None, pipeline=None)
    best, bound_s = found, math.inf
    wanted = replace(request, rematerialize=found.rematerialize, overlap_price=found.solved.overlap_price)
    for strategies in _named_candidates(request):
        other = _tried(wanted, steps, annotated, strategies, lower, _hopeless_s(found))
        if other is not None and other.cost.step_time_s < best.cost.step_time_s:
            best = other
    if found.traced is not None and {"spread_heads", "annotate"} <= set(names) and has_attention(found.traced):
        best, bound_s = _best_in_context(request, steps, best, found.traced, modes, lower)
    if best is found:
        return found
    logger.info("auto takes the decisions of a named strategy, predicted %.3g s a step", best.cost.step_time_s)
    # The named problem was solved to its own gap, in its own measure; what counts is how far its answer is from the
    # best of all in that of `auto`: as far as what was found, less what it is faster. What is prepared for sequences
    # has other operators, and so a bound of its own.
    bound_s = min(found.solved.bound_s, bound_s)
    objective_s = best.solved.objective_s
    if request.pipeline is None:
        faster_s = found.cost.step_time_s - best.cost.step_time_s
        objective_s = max(bound_s, found.solved.objective_s - faster_s)
    solved = replace(best.solved, bound_s=bound_s, gap=relative_gap(objective_s, bound_s))
    return replace(best, solved=solved, times=found.times, traced=found.traced)


def _hopeless_s(found: Plan) -> float:
    """The objective from which on a named strategy is not lowered. Where gathers and reductions are placed at their
    full price, the objective says nothing of what runs beside the compute: as much as there is to compute.
    """
    if found.solved.overlap_price < 1.0 or found.asked is not None:
        return HOPELESS * found.solved.objective_s
    return HOPELESS * max(found.solved.objective_s, found.cost.step_time_s + found.cost.compute_s)


def _tried(
    request: pipeline.Request,
    steps: Steps,
    annotated: Program,
    strategies: Sequence[AxisStrategy],
    lower: Lower,
    most_s: float = math.inf,
) -> Plan | None:
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
    later = steps[[step.name for step in steps].index("place") + 1 :]
    try:
        return lower(request, later, program=placed, all_steps=steps)
    except DoesNotFit:
        return None


def _named_candidates(request: pipeline.Request) -> list[tuple[AxisStrategy, ...]]:
    """Named strategies, and products of one for data and one for tensors, on the axes that are `auto`; the others as
    asked.
    """
    mesh = request.mesh
    data, tensors = ("ddp", "zero2", "zero3"), ("tensor", "tensor+sequence")
    wanted: list[Strategy] = [*data, *tensors]
    if len(mesh.axis_names) > 1:
        own = [axis for axis in mesh.axis_names if is_tensor_axis(axis)] or [mesh.axis_names[-1]]
        wanted += ["hsdp", *({a: t if a in own else d for a in mesh.axis_names} for d in data for t in tensors)]
    return list(dict.fromkeys(_filled(request, resolve(strategy, mesh)) for strategy in wanted))


def _filled(request: pipeline.Request, named: tuple[AxisStrategy, ...]) -> tuple[AxisStrategy, ...]:
    """These strategies on the axes that are `auto`, the others as asked."""
    return tuple(each if asked is AUTO else asked for asked, each in zip(request.strategies, named, strict=True))


# ------------------------------------------------------------------------------------------------ along the sequence

_ONE = ("ulysses", "allgather_kv", "ring")
_TWO = (("ring", "ulysses"), ("allgather_kv", "ulysses"), ("ulysses", "ulysses"), ("allgather_kv", "allgather_kv"))


def context_candidates(request: pipeline.Request) -> list[tuple[AxisStrategy, ...]]:
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


@dataclass(slots=True)
class _Prepared:
    """The traced program, as far as `annotate`, for what candidates need."""

    request: pipeline.Request
    steps: Steps
    traced: Program
    spread: dict[tuple[Mode, Spread], Program] = field(default_factory=dict)
    annotated: dict[tuple[Mode, Spread], Program] = field(default_factory=dict)
    computing: dict[Mode, float] = field(default_factory=dict)

    def spread_for(self, mode: Mode, spread: Spread) -> Program:
        key = (mode, spread)
        if key not in self.spread:
            self.spread[key] = self._run("rematerialize", "annotate", self.traced, mode, spread)
        return self.spread[key]

    def computing_s(self, mode: Mode) -> float:
        if mode not in self.computing:
            self.computing[mode] = computing_seconds(self.spread_for(mode, Spread()), self.request.mesh)
        return self.computing[mode]

    def annotated_for(self, mode: Mode, spread: Spread) -> Program:
        key = (mode, spread)
        if key not in self.annotated:
            self.annotated[key] = self._run("annotate", "place", self.spread_for(mode, spread), mode, spread)
        return self.annotated[key]

    def _run(self, first: str, before: str, program: Program, mode: Mode, spread: Spread) -> Program:
        names = [step.name for step in self.steps]
        request = replace(self.request, rematerialize=mode, spread=spread)
        return pipeline.run(request, self.steps[names.index(first) : names.index(before)], program=program)[0]


def _best_in_context(
    request: pipeline.Request, steps: Steps, best: Plan, traced: Program, modes: Sequence[Mode], lower: Lower
) -> tuple[Plan, float]:
    """The best plan, or a faster one that splits the sequence by name, or `auto`'s own answer to what the fastest of
    these is prepared for; and what any answer to that takes at least (infinite where it is not needed).
    """
    prepared = _Prepared(request, steps, traced)

    def least(strategies: tuple[AxisStrategy, ...], mode: Mode) -> float:
        program = prepared.spread_for(mode, Spread.of(strategies, request.mesh))
        return least_seconds(program, prepared.computing_s(mode), strategies, request.mesh)

    def planned(strategies: tuple[AxisStrategy, ...], spread: Spread, mode: Mode) -> Plan | None:
        wanted = replace(request, rematerialize=mode, spread=spread)
        return _tried(wanted, steps, prepared.annotated_for(mode, spread), strategies, lower)

    for strategies in sorted(context_candidates(request), key=lambda each: least(each, modes[0])):
        for mode in modes:
            if least(strategies, mode) >= best.cost.step_time_s:
                break
            found = planned(strategies, Spread.of(strategies, request.mesh), mode)
            if found is not None:
                best = min(best, found, key=lambda each: each.cost.step_time_s)
                break
    if best.spread is None:
        return best, math.inf
    own = planned(request.strategies, best.spread, best.rematerialize)
    if own is None:
        return best, best.solved.bound_s
    return min(best, own, key=lambda each: each.cost.step_time_s), own.solved.bound_s
