"""What strategies are let off so that there is a placement at all, and what of it serves other strategies.

An operator that no split serves has its operands gathered (gathers.py), a weight that an axis cannot split stays whole
(unsplit.py): the least first, as `concessions` has it. `auto` is held against many strategies by name, one after the
other, and what came of one tells of the others (`ir.placement.Learnt`):

- Where the problem of `auto` tells that there is no placement with nothing let off, none is built.
- Strategies that do the same with values, and differ in how parameters are kept, are let off the same.
- Where one that splits the sequence could not be had, or some operator cannot be split so, it is asked first whether
  they can be had at all, with all that they could be let off. Where attention had no part in that, no other way to
  split it can be had either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from autopar.base.errors import AutoparError, DoesNotFit
from autopar.ir.placement import Conceded, Learnt
from autopar.ir.program import Program
from autopar.passes.placement.context import values_of_attention
from autopar.passes.placement.gathers import Blocked, blocked_operators, jointly_blocked, notes_of
from autopar.passes.placement.least import LEAST, Least
from autopar.passes.placement.problem import PlacementProblem, build_problem
from autopar.passes.placement.unsplit import Unsplit, notes_of_unsplit, tensor_axes, unsplit_weights
from autopar.passes.placement.variants import Variants
from autopar.solver.consistency import Domains, needed, propagate
from autopar.strategies.axis import AxisStrategy
from autopar.strategies.context import family_of, splits_sequence
from autopar.strategies.names import Pin


def concessions(
    variants: Variants,
    gathered: Sequence[Blocked] | None,
    excused: Sequence[Unsplit] | None,
    reasons: bool,
    learnt: Learnt | None = None,
) -> Iterator[Conceded]:
    """Nothing, then what strategies may be let off, the least first; arguments as of `place`. What others of their
    family were let off comes before all.
    """
    program, strategies = variants.program, variants.strategies
    known = learnt.conceded.get(family_of(strategies)) if learnt is not None else None
    if known is not None and known != Conceded():
        yield known
    needs_more = gathered is None and excused is None and learnt is not None and _is_forbidden(variants, learnt)
    if not needs_more:
        yield Conceded()
    blocked = blocked_operators(program, strategies, variants.facts) if gathered is None else gathered
    at = tuple((each.region, each.node) for each in blocked)
    notes = notes_of(blocked)
    if blocked:
        yield Conceded(at, (), notes)
    # Of those that split matrices over one axis it is told by neighbours first, and sought where that is too little.
    quick = excused is None and len(tensor_axes(program, strategies)) == 1
    unsplit = unsplit_weights(variants, blocked, reasons, not quick) if excused is None else excused
    if unsplit:
        yield _staying(program, at, notes, unsplit)
    if quick and (proven := unsplit_weights(variants, blocked, reasons)) != unsplit:
        unsplit = proven
        if unsplit:
            yield _staying(program, at, notes, unsplit)
    last = _staying(program, at, notes, unsplit)
    if gathered is None:
        together = jointly_blocked(program, strategies)
        if len(together) > len(blocked):
            at = tuple((each.region, each.node) for each in together)
            yield _staying(program, at, notes_of(together), unsplit)
    if blocked:
        yield replace(last, gathered=_around(program, blocked))
    elif needs_more and not unsplit:
        yield Conceded()  # what is in the way is said of it


def _staying(
    program: Program, at: tuple[tuple[str, str], ...], notes: tuple[str, ...], unsplit: Sequence[Unsplit]
) -> Conceded:
    """Operands of operators gathered, of which notes tell, and matrices whole."""
    whole = tuple((each.name, each.axis) for each in unsplit)
    return Conceded(at, whole, (*notes, *notes_of_unsplit(program, unsplit)))


def _is_forbidden(variants: Variants, learnt: Learnt) -> bool:
    """Whether it is known of the problem of `auto` that there is no placement with nothing let off (least.py): then
    none is built.
    """
    least, strategies = learnt.facts.get(LEAST), variants.strategies
    if not isinstance(least, Least) or least.program is not variants.program or variants.pins:
        return False
    if any(each.experts in ("whole", "exchange") or splits_sequence(each) for each in strategies):
        return False
    try:
        return least.forbids(strategies)
    except AutoparError:  # the problem says the same
        return False


def _around(program: Program, blocked: Sequence[Blocked]) -> tuple[tuple[str, str], ...]:
    """The operators of regions in which some are blocked.

    Rows that an index chooses of all: what is computed of them meets, also backward, those that stayed in place.
    """
    regions = [program.region(name) for name in dict.fromkeys(each.region for each in blocked)]
    return tuple((region.name, node) for region in regions for node in region.ops)


def refusal(
    program: Program, strategies: Sequence[AxisStrategy], pins: Sequence[Pin], learnt: Learnt
) -> DoesNotFit | None:
    """The error of strategies that split the sequence and have no placement, memory aside, even with all that they
    might be let off: what that is need not be found out then. None where there may be one.
    """
    if not any(map(splits_sequence, strategies)):
        return None
    most = _around(program, blocked_operators(program, strategies, learnt.facts))
    built = build_problem(program, strategies, pins, None, gathered=most, excused=None, facts=learnt.facts)
    alive = [np.isfinite(node.costs) for node in built.problem.nodes]
    domains = propagate(alive, built.problem.edges)
    if domains.empty is None:
        return None
    learnt.refused.append(family_of(strategies))
    error = DoesNotFit(f"{', '.join(each.name for each in strategies)} exclude each other here")
    error.excluded, error.outside_attention = True, not _is_at_attention(program, built, domains)
    return error


def may_be_refused(program: Program, strategies: Sequence[AxisStrategy], learnt: Learnt) -> bool:
    """Whether strategies that split the sequence are asked first whether they can be had at all: others could not, or
    some operator cannot be split so, and there is hardly a placement with nothing let off.
    """
    if not any(map(splits_sequence, strategies)):
        return False
    return bool(learnt.refused) or bool(blocked_operators(program, strategies, learnt.facts))


def _is_at_attention(program: Program, built: PlacementProblem, domains: Domains) -> bool:
    """Whether attention, or what it reads and gives, is needed to leave a node of the problem without a choice: without
    its edges none is.
    """
    near = {region.name: values_of_attention(region) for region in program.regions if region.module}
    if not any(near.values()):  # then strategies speak of all attention
        near = {region.name: values_of_attention(region) for region in program.regions}
    places = [*built.operators.items(), *built.relays.items()]
    there = {index for (region, name), (index, _) in places if name.partition(".")[0] in near.get(region, ())}
    edges = built.problem.edges
    blamed = {end for index in needed(edges, domains) for end in (edges[index].u, edges[index].v)} | {domains.empty}
    if there.isdisjoint(blamed):
        return False
    alive = [
        np.ones(len(node.costs), dtype=bool) if index in there else np.isfinite(node.costs)
        for index, node in enumerate(built.problem.nodes)
    ]
    others = [edge for edge in edges if edge.u not in there and edge.v not in there]
    return propagate(alive, others).empty is None
