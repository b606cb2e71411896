"""place: choose a strategy for every operator of every distinct region, all together, by an integer program.

Requires: phase `annotated`.
Ensures: phase `placed`; `Region.strategies` names one strategy per operator, `Program.placement` a layout for every
    parameter and for every value between calls; the predicted peak fits the memory limit; the optimality gap is known.

    linear: b | n | k | -   with  dp=4: b costs no communication  →  linear: dp=b, result f32[8/dp, 64]

The problem itself stands in `placement/problem.py`, its solver in `autopar.solver`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace

from autopar.base.errors import AutoparError, DoesNotFit
from autopar.base.garbage import without_collection
from autopar.ir.placement import Learnt, ParameterLayout, Placement, PlacementResult
from autopar.ir.program import Program
from autopar.ir.region import NodeStrategy, Placed
from autopar.ir.sharding import Sharding, replicated
from autopar.passes.placement.conceding import concessions, may_be_refused, refusal
from autopar.passes.placement.explain import infeasible
from autopar.passes.placement.gathers import Blocked, blocked_operators
from autopar.passes.placement.least import FREE, without_edges
from autopar.passes.placement.narrow import narrowed
from autopar.passes.placement.problem import PlacementProblem, build_problem, priced_seconds
from autopar.passes.placement.unsplit import Unsplit
from autopar.passes.placement.variants import Variants
from autopar.solver.problem import AssignmentProblem, Solution
from autopar.solver.search import STANDING
from autopar.solver.solve import solve
from autopar.strategies.axis import AUTO, AxisStrategy
from autopar.strategies.context import family_of
from autopar.strategies.names import Pin

BY_CLOCK = (
    "the search for where values lie took so much longer than it should that the clock ended it: another run may find "
    "another plan, plan.save keeps this one"
)
SECONDS = 6.0
SECONDS_A_PAIR = 2.5e-7
AGAIN = 0.5
"""Of these, for the same problem at other prices where there was too little time: it is searched from what was chosen
before.
"""


@without_collection()
def place(
    program: Program,
    *,
    strategies: Sequence[AxisStrategy],
    pins: Sequence[Pin] = (),
    memory_limit_bytes: float | None = None,
    gap: float = 1e-3,
    proof_gap: float = 8e-3,
    time_limit_s: float | None = None,
    explain: bool = True,
    checks_limit: bool = False,
    overlap_price: float = 1.0,
    alike: Program | None = None,
    gathered: Sequence[Blocked] | None = None,
    excused: Sequence[Unsplit] | None = None,
    reasons: bool = True,
    learnt: Learnt | None = None,
) -> Program:
    """Build the placement problem, solve it, and write the answer into the program.

    gap, proof_gap: as of `solver.solve`: what is cheap to prove, and what is worth an integer program. time_limit_s: of
    the solver, in seconds of work (`solver.work`); None: more for larger problems.

    checks_limit: solve without the memory limit, and accept the answer if it keeps to it. overlap_price: as of
    `build_problem`. alike: a placed program; operators do as those of the same name do there, if that will do.
    gathered: whose operands may be gathered where nothing else will do; None: of operators that have no strategy for
    their operands as they come (gathers.py). excused: weight matrices that may stay whole where nothing else
    will do; None: those that must (unsplit.py). Of a program whose choices were narrowed, both are to be asked before.
    reasons: work out what keeps them whole, for the note (costs time). learnt: what was placed on this program before;
    gets what this tells. Without reasons, strategies are let off what others of their family were.

    Raises:
        AutoparError: nothing satisfies the strategy, the pins and the memory limit together (names what stands in the
        way,
            unless `explain` is off).
    """
    _check_pins(program, pins)
    hints = None if reasons else learnt
    if alike is not None:
        blocked = (
            blocked_operators(program, strategies, None if hints is None else hints.facts)
            if hints is None or family_of(strategies) not in hints.conceded
            else ()
        )
        with contextlib.suppress(DoesNotFit):
            placed = place(
                narrowed(program, alike), strategies=strategies, pins=pins, memory_limit_bytes=memory_limit_bytes,
                gap=gap, proof_gap=proof_gap, time_limit_s=time_limit_s, explain=False, checks_limit=checks_limit,
                overlap_price=overlap_price, gathered=blocked, excused=(), reasons=reasons,
                learnt=None if hints is None else Learnt(dict(hints.conceded), facts=hints.facts),
            )  # fmt: skip
            # Who asks what else an operator could do gets all of it.
            return placed.with_regions(
                {each.name: each.with_options(program.region(each.name).options) for each in placed.regions}
            )
    asked = hints is not None and may_be_refused(program, strategies, hints)
    refused = refusal(program, strategies, pins, hints) if hints is not None and asked else None
    if refused is not None:
        raise refused
    limit = None if checks_limit else memory_limit_bytes
    plain, excluded = program, True
    variants = Variants(program, strategies, pins, overlap_price, learnt.facts if learnt is not None else None)
    attempts = enumerate(concessions(variants, gathered, excused, reasons, hints))
    number, conceded = next(attempts)
    while True:
        program = replace(plain, notes=(*plain.notes, *conceded.notes))
        built = variants.problem(limit, conceded.gathered, conceded.whole)
        if learnt is not None and gathered is None and not pins and all(each is AUTO for each in strategies):
            learnt.facts[FREE] = without_edges(built)
        key = (tuple(strategies), limit, conceded)
        start = learnt.chosen.get(key) if learnt is not None else None
        given_s = time_limit_s or _seconds_for(built.problem) * (1.0 if start is None else AGAIN)
        solution = solve(
            built.problem, gap=gap, proof_gap=proof_gap, time_limit_s=given_s, explain=False,
            warm_starts=() if start is None else (start,),
        )  # fmt: skip
        if solution.choice:
            break
        excluded &= solution.excluded
        asks = hints is not None and excluded and not (number or asked)
        if hints is not None and asks and (refused := refusal(plain, strategies, pins, hints)) is not None:
            break
        following = next(attempts, None)
        if following is None:
            break
        number, conceded = following
    time_limit_s = given_s
    if not solution.choice and solution.status == "infeasible" and explain:
        solution = solve(built.problem, gap=gap, time_limit_s=time_limit_s)
    if checks_limit and memory_limit_bytes is not None and solution.choice:
        if (peak := built.problem.peak(solution.choice)[1]) > memory_limit_bytes:
            raise DoesNotFit(f"the peak is {peak:.0f} bytes, the limit {memory_limit_bytes:.0f}")
    if solution.status == "unknown" and explain:  # nothing found, nothing proven: worth more time before giving up
        solution = solve(built.problem, gap=gap, time_limit_s=4 * time_limit_s)
    if not solution.choice:
        if not explain:
            raise refused or _nothing(memory_limit_bytes, excluded=solution.excluded)
        raise infeasible(program, built, solution, strategies, pins, memory_limit_bytes)
    # One that did not run out of time ends early elsewhere.
    if learnt is not None and solution.gap > STANDING * proof_gap:
        learnt.chosen[key] = solution.choice
    if hints is not None and (excluded or limit is None):  # not for want of memory
        hints.conceded[family_of(strategies)] = conceded
    priced_s = math.inf
    if overlap_price < 1.0:  # dearer ones may follow
        priced_s = priced_seconds(built, program, strategies, solution.choice, variants.facts)
    return read_solution(program, built, solution, overlap_price, priced_s)


def _nothing(memory_limit_bytes: float | None, *, excluded: bool) -> DoesNotFit:
    error = DoesNotFit(f"nothing was found within {memory_limit_bytes} bytes")
    error.excluded = excluded
    return error


def try_place(
    program: Program,
    *,
    strategies: Sequence[AxisStrategy],
    memory_limit_bytes: float | None,
    overlap_price: float = 1.0,
    gap: float = 1e-3,
    proof_gap: float = 8e-3,
    time_limit_s: float | None = None,
) -> Program | None:
    """As `place`, but None where nothing was found: no explanation is worked out."""
    try:
        built = build_problem(program, strategies, (), memory_limit_bytes, overlap_price)
    except AutoparError:
        return None
    time_limit_s = time_limit_s or _seconds_for(built.problem)
    solution = solve(built.problem, gap=gap, proof_gap=proof_gap, time_limit_s=time_limit_s, explain=False)
    return read_solution(program, built, solution, overlap_price) if solution.choice else None


def _seconds_for(problem: AssignmentProblem) -> float:
    """Seconds of work that placement may take: the more, the more pairs of choices the edges have (four axes: 10^8)."""
    return SECONDS + SECONDS_A_PAIR * sum(edge.costs.size for edge in problem.edges)


def _check_pins(program: Program, pins: Sequence[Pin]) -> None:
    names = [name for v in program.variables if v.is_parameter for name in (v.name, *v.aliases)]
    names += [port.name for port in program.inputs] + list(program.output_names)
    known, seen = set(names), dict[tuple[str, str], Pin]()
    for pin in pins:
        if pin.is_name:
            matched = [pin.pattern] if pin.pattern in known else []
        else:
            matched = [name for name in names if pin.matches(name)]
        if not matched:
            close = sorted(names, key=lambda name: -_likeness(name, pin.pattern))[:3]
            raise AutoparError(
                f'pin("{pin.pattern}") matches no parameter, input or output',
                values=f"close names: {', '.join(close)}",
                remedy="use the names of model.named_parameters(), with * for any part",
            )
        for axis, placement in pin.placements:
            if axis not in program.on_mesh.axis_names:
                raise AutoparError(
                    f'pin("{pin.pattern}") names axis {axis!r}, which the mesh does not have',
                    values=f"mesh: {program.on_mesh}",
                )
            for name in matched:
                other = seen.setdefault((name, axis), pin)
                if dict(other.placements)[axis] != placement:
                    raise AutoparError(
                        f"two pins contradict each other on {name}",
                        values=f'pin("{other.pattern}", {axis}={dict(other.placements)[axis]}) and '
                        f'pin("{pin.pattern}", {axis}={placement})',
                        remedy="drop one of them",
                    )


def _likeness(name: str, pattern: str) -> float:
    parts = [part for part in pattern.replace("*", "").split(".") if part]
    return sum(part in name for part in parts) / (len(parts) or 1)


def read_solution(
    program: Program,
    built: PlacementProblem,
    solution: Solution,
    overlap_price: float = 1.0,
    priced_s: float = math.inf,
) -> Program:
    """The program with the solver's choices written into it. priced_s: of its result."""
    choice = solution.choice
    regions = {}
    for region in program.regions:
        strategies: dict[str, NodeStrategy] = {}
        for name in region.ops:
            index, options = built.operators[(region.name, name)]
            strategies[name] = options[choice[index]]
        own = [(name, found) for (owner, name), found in built.relays.items() if owner == region.name]
        relays = {name: layouts[choice[index]] for name, (index, layouts) in own}
        regions[region.name] = replace(region, placed=Placed(strategies, relays))
    result = PlacementResult(
        solution.cost,
        solution.bound,
        solution.gap,
        built.problem.peak(choice)[1],
        solution.memory_price,
        len(built.problem.nodes),
        sum(len(node.costs) for node in built.problem.nodes),
        len(built.problem.edges),
        solution.seconds,
        overlap_price,
        priced_s=priced_s,
    )
    placement = _placement(program, built, choice)
    if solution.is_ended_by_clock:
        program = replace(program, notes=(*program.notes, BY_CLOCK))
    return program.with_regions(regions, phase="placed", placement=placement, result=result, overlap=None)


def _placement(program: Program, built: PlacementProblem, choice: Sequence[int]) -> Placement:
    known = built.value_classes
    layouts: dict[object, Sharding] = {root: options[choice[index]] for root, (index, options) in built.classes.items()}
    parameters: dict[str, ParameterLayout] = {}
    for variable in program.variables:
        root = known.of.get(("var", variable.name, 0))
        if root is None:
            continue
        slot = built.slots[root]
        picked = slot.choices[choice[slot.node]]
        gradient = slot.gradient_layouts[choice[slot.gradient]] if slot.gradient >= 0 else picked.stored
        parameters[variable.name] = ParameterLayout(picked.stored, picked.held, picked.compute, gradient)
    inputs = {
        port.name: layouts[known.of[("program", port.name, 0)]]
        for port in program.inputs
        if ("program", port.name, 0) in known.of
    }
    values: dict[tuple[int, int], Sharding] = {}
    gradients: dict[tuple[int, int], Sharding] = {}
    for index, call in enumerate(program.calls):
        region = program.region(call.region)
        for position in range(len(region.outputs)):
            values[(index, position)] = layouts[known.of[("out", region.name, position)]]
            if position in region.tangents:
                gradients[(index, position)] = layouts[known.of[("gout", region.name, position)]]
    for _, ref in program.updates:  # buffers are whole on every rank, and so is what replaces them; no call reads it
        values[(ref.call, ref.index)] = replicated(len(program.on_mesh.axis_names))
    return Placement(parameters, inputs, values, gradients)
