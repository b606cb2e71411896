"""Why a tensor of a plan lies as it does: every other sharding is pinned in turn, and the whole placement solved again.

    plan.explain("model.layers.*.mlp.down_proj.weight")   autopar explain plan.json model.layers.0.mlp.down_proj.weight

An alternative costs what `autopar.plan(..., constraints=[pin])` would predict: the same objective, gap and memory
limit, and no comparison with named strategies, which a pin switches off there too. Operators cannot be pinned by name;
their strategies are cut down to those with the result wanted.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from autopar import pipeline
from autopar.base.errors import AutoparError
from autopar.base.progress import Steps
from autopar.base.text import format_time
from autopar.ir.sharding import Replicate, Shard, local_shape
from autopar.ir.uneven import block_shape
from autopar.planner import assembly
from autopar.planner.inputs import bind_inputs
from autopar.planner.plan.record import PlanRecord
from autopar.strategies.request import Progress
from autopar.views.explain.alternatives import Alternatives, request_of
from autopar.views.explain.attention_axes import describe, sent_by
from autopar.views.explain.attention_choices import attentions, found_text, reason
from autopar.views.explain.attribution import collectives_of
from autopar.views.explain.breakdown import Breakdown, breakdown
from autopar.views.explain.exclusions import forbidden, nearest, pin_texts, pins_on, required, sift, why_pinned
from autopar.views.explain.explanation import Excluded, Explanation, Row
from autopar.views.explain.subjects import Layout, choices_in, find, layouts_in, names_of

Record = TypeVar("Record", bound=PlanRecord)
MAX_ALTERNATIVES = 8
COST = "cost"
"""The name under which the parts of the cost are explained."""


def explain(
    plan: PlanRecord,
    name: str,
    *,
    model: nn.Module | None = None,
    example_inputs: Mapping[str, Any] | None = None,
    max_alternatives: int = MAX_ALTERNATIVES,
    time_limit_s: float = 120.0,
    progress: Progress | None = None,
) -> Explanation | Breakdown:
    """See `Plan.explain`."""
    plan = with_program(plan, model, example_inputs)
    assert plan.program is not None
    if is_cost(plan, name):
        return breakdown(plan)
    alternatives = Alternatives(plan, find(plan.program, name))
    wanted, out = sift(plan, alternatives.subject)
    rows: list[Row] = []
    refused: list[Layout] = []
    unsolved: list[str] = []
    begun = time.perf_counter()
    with ExitStack() as stack:
        show = progress or _own_progress(stack)
        for number, sharding in enumerate(wanted):
            if time.perf_counter() - begun > time_limit_s:
                unsolved.append(alternatives.text(sharding))
                continue
            show(f"alternative {alternatives.text(sharding)}", number, len(wanted))
            found = alternatives.price(sharding)
            if isinstance(found, Row):
                rows.append(found)
            elif found is None:
                refused.append(sharding)
            else:
                out[sharding] = found
        listed = nearest(alternatives.chosen, [*out, *refused])
        asked = [sharding for sharding in refused if sharding in listed]
        for number, sharding in enumerate(asked):
            show(f"why not {alternatives.text(sharding)}", number, len(asked))
            late = time.perf_counter() - begun > time_limit_s
            out[sharding] = _no_time(alternatives, sharding) if late else alternatives.why_not(sharding)
    rows.sort(key=lambda row: (row.step_time_s, row.peak_bytes))
    return _answer(alternatives, rows, [out[sharding] for sharding in listed], unsolved, max_alternatives)


def is_cost(plan: PlanRecord, name: str) -> bool:
    """Whether the name asks for the parts of the cost: nothing in the plan is called so."""
    assert plan.program is not None
    return name == COST and not names_of(plan.program) & {COST}


def _no_time(alternatives: Alternatives, sharding: Layout) -> Excluded:
    return Excluded(alternatives.text(sharding), "none found", "no placement has it; no time was left to find out why")


def with_program(plan: Record, model: nn.Module | None, example_inputs: Mapping[str, Any] | None) -> Record:
    """The plan with its program: its own, or the model traced again with the plan's decisions applied.

    Raises:
        AutoparError: a loaded plan without a model, or with another than it was made for.
    """
    if plan.program is not None:
        if plan.program.placement is None or plan.program.mesh is None:
            raise AutoparError("this plan's passes place nothing", remedy="plan with pipeline.DEFAULT")
        return plan
    if model is None or example_inputs is None:
        raise AutoparError(
            "the plan was loaded from a file, which holds decisions and no program",
            remedy="pass the model it was made for: plan.explain(name, model=model, example_inputs=batch)",
        )
    inputs = bind_inputs(model, (), example_inputs)
    request = request_of(replace(plan, model=model, inputs=inputs))
    traced, _ = pipeline.run(request, pipeline.TRACE)
    again = assembly.redo(plan, request, pipeline.DEFAULT, traced)
    return replace(plan, model=model, inputs=inputs, program=again.program, passes=again.passes, traced=traced)


def _own_progress(stack: ExitStack) -> Progress:
    """A spinner where somebody looks at a terminal."""
    if not sys.stderr.isatty():
        return lambda name, number, total: None
    steps = stack.enter_context(Steps())
    return steps.part


def _local_shape(alternatives: Alternatives) -> Sequence[int]:
    """Of the rank that holds most: an axis need not divide what a parameter is stored along."""
    subject, sizes = alternatives.subject, alternatives.plan.stage_mesh.sizes
    if subject.kind == "parameter":
        variable = alternatives.program.variable(subject.members[0])
        return block_shape(variable, alternatives.program.placed.parameters[variable.name], sizes)
    return local_shape(subject.type.shape, layouts_in(alternatives.program, subject)["stored"], sizes)


def _answer(
    alternatives: Alternatives, rows: Sequence[Row], excluded: Sequence[Excluded], unsolved: Sequence[str], limit: int
) -> Explanation:
    plan, subject = alternatives.plan, alternatives.subject
    chosen = Row.of(
        alternatives.layout_texts(alternatives.program), plan.cost, plan.cost, rematerialize=plan.rematerialize
    )
    due = collectives_of(alternatives.program, plan.collectives, subject)
    local = _local_shape(alternatives)
    return Explanation(
        subject.name,
        subject.kind,
        subject.members,
        f"{plan.title} on {plan.mesh} ({plan.mesh.hardware.name}), {plan.strategy}",
        plan.strategy,
        chosen,
        math.prod(local) * subject.stored_dtype.itemsize * len(subject.members),
        tuple(_reasons(alternatives, rows, unsolved)),
        tuple(row for row, _ in due),
        tuple(share for _, share in due),
        tuple(rows[:limit]),
        tuple(excluded),
        tuple(unsolved),
        max(0, len(rows) - limit),
        tuple(_facts(alternatives)),
    )


def _facts(alternatives: Alternatives) -> Iterator[tuple[str, str]]:
    """Of attention: what was found in the model, and what each axis does."""
    if alternatives.subject.kind != "attention":
        return
    program, subject = alternatives.program, alternatives.subject
    own = next(each for each in attentions(program) if (each.region, each.node) == (subject.region, subject.node))
    yield "found", found_text(program.attention, own)
    sent = sent_by(program, own)
    for axis, (name, size) in enumerate(alternatives.plan.stage_mesh.axes):
        if size > 1:
            yield f"on {name}", str(describe(program, own, axis, sent))


def _reasons(alternatives: Alternatives, rows: Sequence[Row], unsolved: Sequence[str]) -> Iterator[str]:
    """What forces the choice, then how it compares with the best of the others."""
    subject, plan = alternatives.subject, alternatives.plan
    if subject.kind == "attention":
        axes = zip(plan.strategies, choices_in(alternatives.chosen), plan.stage_mesh.axes, strict=True)
        yield from (reason(strategy, choice, axis) for strategy, choice, (axis, size) in axes if size > 1)
    for pinned, text in pin_texts(pins_on(plan, subject)):
        yield f"{why_pinned(pinned)} {text}" if pinned.taken else f"asked for: {text}"
    others = [Replicate(), *(Shard(dim) for dim in range(len(subject.type.shape)))]
    for axis, (strategy, placement) in enumerate(zip(plan.strategies, alternatives.chosen, strict=True)):
        if plan.stage_mesh.sizes[axis] > 1 and subject.kind != "attention":
            asked = [required(strategy, subject, alternatives.axes[axis])] if isinstance(placement, Shard) else []
            asked += [forbidden(plan, subject, axis, other) or "" for other in others if other != placement]
            yield from dict.fromkeys(text for text in asked if text)
    if subject.kind == "value":
        yield "as the operators that make and read it agree; explain one of these to see what else there is"
    elif rows:
        yield _comparison(alternatives, rows[0])
    elif not unsolved:
        yield "the strategies leave nothing else" if subject.kind == "attention" else "no other sharding can be had"


def _comparison(alternatives: Alternatives, best: Row) -> str:
    """The chosen sharding beside the best of the others."""
    delta = f"{format_time(abs(best.step_delta_s))} ({abs(best.relative):.2%})"
    against = f", {best.note}" if best.note else ""
    if abs(best.relative) < 5e-5:
        more_s = best.communication_delta_s
        more = f", with {format_time(more_s)} more communication beside the compute" if more_s > 0 else ""
        return f"the best of the others, {best.stored}, is predicted as fast{more}"
    if best.step_delta_s > 0:
        return f"the best of the others, {best.stored}, is predicted {delta} slower"
    to_have = ": pin it to have it" if best.pin else ""
    solved, cost = alternatives.plan.solved, alternatives.plan.cost
    if any(strategy.name != "auto" for strategy in alternatives.plan.strategies) or not math.isfinite(solved.gap):
        return f"{best.stored} is predicted {delta} faster{against}{to_have}"
    off = abs(solved.objective_s - cost.step_time_s) / cost.step_time_s
    return (
        f"{best.stored} is predicted {delta} faster{to_have} (the solver's objective, proven within "
        f"{solved.gap:.2%}, is {off:.2%} off the prediction)"
    )
