"""What is proven of a plan whose placement is a named strategy's, in the measure of `auto`."""

from __future__ import annotations

from dataclasses import replace

from autopar.cost.beside import with_work_beside
from autopar.passes.placement.choices import objective_of
from autopar.passes.placement.variants import Variants
from autopar.planner.plan.record import PlanRecord
from autopar.planner.programs import Programs
from autopar.planner.tried import Tried
from autopar.solver.problem import relative_gap
from autopar.strategies.names import AUTO
from autopar.strategies.request import Attempt

NOTE = "the decisions are a named strategy's"


def with_bound(programs: Programs, tried: Tried) -> PlanRecord:
    """The best plan with what is proven of it.

    A program that is prepared for a strategy has other operators, and so a bound of its own: the smaller one counts.
    """
    assert tried.best is not None
    attempt, best = tried.best
    if AUTO not in programs.asked.strategies:
        return best
    if attempt.spread is None:
        return _as_auto(programs, tried, attempt, best)
    before = [] if tried.plain is None else [_as_auto(programs, tried, *tried.plain).solved.bound_s]
    own = tried.own.get((attempt.rematerialize, attempt.spread))
    if own is None:
        return _bounded(best, best.solved.objective_s, min(*before, best.solved.bound_s, float("inf")))
    faster_s = max(0.0, own.cost.step_time_s - best.cost.step_time_s)
    bound_s = min(*before, own.solved.bound_s, float("inf"))
    return _bounded(best, own.solved.objective_s - faster_s, bound_s)


def _as_auto(programs: Programs, tried: Tried, attempt: Attempt, best: PlanRecord) -> PlanRecord:
    """A named problem was solved in its own measure. What counts is what `auto` found where as much is recomputed, how
    far that is from the best of all, and that this is predicted faster still: a note says so, and what the objective
    makes of it. Where `auto` finds nothing there, computing alone is the bound.
    """
    if attempt.placed_by is None:
        return best
    mode = attempt.rematerialize
    own = tried.own.get((mode, None))
    if own is None:
        return _bounded(best, best.cost.step_time_s, programs.least_s(mode))
    if programs.asked.pipeline is not None:
        return _bounded(best, best.solved.objective_s, own.solved.bound_s)
    assert best.program is not None
    annotated = programs.annotated(mode)
    priced = with_work_beside(annotated) if own.solved.hides_exchanges else annotated
    facts = programs.learnt(mode).facts
    variants = Variants(priced, programs.asked.strategies, (), own.solved.overlap_price, facts)
    problem = variants.problem(None, (), ())
    charged = objective_of(best.program, problem)
    more = "" if charged is None else f", which charges {_more(charged / own.solved.objective_s)} for them"
    less = 1 - best.cost.step_time_s / own.cost.step_time_s
    note = f"{NOTE}, predicted {less:.1%} faster than what is best by the objective{more}; the gap is the objective's"
    return replace(best, solved=own.solved, notes=(*best.notes, note))


def _more(ratio: float) -> str:
    return f"{abs(ratio - 1):.1%} {'more' if ratio >= 1 else 'less'}"


def _bounded(plan: PlanRecord, objective_s: float, bound_s: float) -> PlanRecord:
    """The plan with another bound; objective_s: its own in the measure of that bound."""
    gap = relative_gap(max(objective_s, bound_s), bound_s)
    return replace(plan, solved=replace(plan.solved, bound_s=bound_s, gap=gap))
