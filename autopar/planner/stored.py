"""Parameters stored as their readers want them: of the ways that take the same time the one of the fewest bytes.

The objective of a placement is of seconds. A forward reads a slice of what a rank stores for nothing, so to it a
parameter that each rank has whole, and of which it multiplies a part, is as good as the part. In training gradients and
optimizers tell these apart; a forward alone, or the programs of a prompt and of a token, are placed first, and then
every parameter is stored in the fewest bytes of which *each* of these programs reads a slice:

    prompt: experts' e over tp    token: experts' e over tp      stored whole → 1/tp of the experts
    prompt: rows of the batch     token: q_proj's outputs        stored whole: the prompt reads all of it

No operator does anything else for it, and nothing more is sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar import pipeline
from autopar.base.errors import AutoparError
from autopar.ir.placement import ParameterLayout
from autopar.ir.program import Program
from autopar.ir.sharding import Sharding, format_sharding
from autopar.ir.uneven import block_shape
from autopar.passes.placement.storage import ways_to_store
from autopar.planner.assembly import make_plan
from autopar.planner.plan.record import PlanRecord
from autopar.strategies.names import Pin
from autopar.strategies.request import Attempt


def in_fewest_bytes(plans: Sequence[PlanRecord], pins: Sequence[Pin]) -> list[PlanRecord]:
    """The plans with the parameters that they share stored in the fewest bytes, all else as it was.

    plans: of programs of one model on one mesh, without gradients, each with its program. pins: what the user asked
    for. Plans of passes of the user's own, which may do anything with what was placed, are given back as they are.
    """
    least = _least(plans, pins)
    return [stored_as(plan, least) for plan in plans]


def read_apart(plan: PlanRecord, other: PlanRecord, pins: Sequence[Pin]) -> dict[str, Sharding]:
    """Of parameters that both programs read in slices, but others, those of the first, by name: stored so, it stays
    what it is, and whether the other one is slower for it has to be planned.
    """
    own, its, shared = _least([plan], pins), _least([other], pins), _least([plan, other], pins)
    found = {}
    for name in own.keys() & its.keys():
        program = _program(plan)
        now = shared.get(name, program.placed.parameters[name].stored)
        if max(_num_bytes(program, name, each[name]) for each in (own, its)) < _num_bytes(program, name, now):
            found[name] = own[name]
    return found


def stored_as(plan: PlanRecord, stored: Mapping[str, Sharding]) -> PlanRecord:
    """The plan, lowered and priced again, with these parameters stored so, each of which its readers take slices of."""
    known = plan.decisions.placement.parameters
    layouts = {name: ParameterLayout(way, way, way, way) for name, way in stored.items() if name in known}
    if not layouts:
        return plan
    placement = replace(plan.decisions.placement, parameters={**known, **layouts})
    decisions, axes = replace(plan.decisions, placement=placement), plan.stage_mesh.axis_names
    pins = tuple(
        Pin(each.pattern, tuple(zip(axes, stored[each.pattern], strict=True)), taken=True)
        if each.taken and each.pattern in layouts else each
        for each in plan.pins
    )  # fmt: skip
    assert plan.model is not None and plan.inputs is not None
    request = Attempt(
        plan.model, plan.inputs, plan.stage_mesh, plan.strategies, pins, plan.memory_limit_bytes, plan.precision,
        training=False, microbatches=plan.interface.microbatches, pipeline=plan.asked, roots=plan.roots,
        wanted=plan.wanted, rematerialize=plan.rematerialize, spread=plan.spread,
    )  # fmt: skip
    lowered, _ = pipeline.run(request, pipeline.LOWER, program=decisions.apply(_program(plan)))
    again = make_plan(request, lowered, pipeline.DEFAULT, plan.times)
    stages = again.pipeline
    if stages is not None and plan.pipeline is not None:
        stages = replace(stages, considered=plan.pipeline.considered)
    return replace(
        again, solved=plan.solved, notes=plan.notes, pipeline=stages, traced=plan.traced, from_cache=plan.from_cache
    )


def stored_bytes(plan: PlanRecord) -> int:
    """Of the parameters that one rank stores."""
    program = _program(plan)
    named = program.placed.parameters.items()
    return sum(_num_bytes(program, name, each.stored) for name, each in named if program.variable(name).is_parameter)


def _least(plans: Sequence[PlanRecord], pins: Sequence[Pin]) -> dict[str, Sharding]:
    """By name, where that is not how it is stored: the sharding of the fewest bytes that serves all of these plans."""
    if any(each.training or each.program is None or each.passes != pipeline.DEFAULT for each in plans):
        return {}
    programs = [_program(plan) for plan in plans]
    try:
        pairs = zip(plans, programs, strict=True)
        ways = [ways_to_store(program, plan.strategies, pins) for plan, program in pairs]
    except AutoparError:  # pins of what only another program has
        return {}
    found, axes = {}, programs[0].on_mesh.axis_names
    for name in dict.fromkeys(name for each in ways for name in each):
        users = [number for number, program in enumerate(programs) if name in program.placed.parameters]
        first = programs[users[0]]
        chosen = first.placed.parameters[name].stored
        shared = frozenset.intersection(*(ways[number].get(name, frozenset()) for number in users))
        if chosen not in shared:
            continue  # gathered in one of them, or nothing binds them together
        sizes = {way: _num_bytes(first, name, way) for way in shared}
        least = min(shared, key=lambda way: (sizes[way], way != chosen, format_sharding(way, axes)))
        if sizes[least] < sizes[chosen]:
            found[name] = least
    return found


def _num_bytes(program: Program, name: str, stored: Sharding) -> int:
    variable, layout = program.variable(name), ParameterLayout(stored, stored, stored, stored)
    return math.prod(block_shape(variable, layout, program.on_mesh.sizes)) * variable.stored_dtype.itemsize


def _program(plan: PlanRecord) -> Program:
    assert plan.program is not None
    return plan.program
