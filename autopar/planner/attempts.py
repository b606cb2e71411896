"""What is tried for a request, and why: one loop over attempts, one rule that picks.

A step's time depends on decisions that cannot all be taken together: what the backward computes again (a mode), where
everything lies (a placement, by an integer program), what runs beside what and whether it all fits (known only once the
step is lowered and walked). So a placement is asked for, its step is walked, and what is asked next depends on what
came of it. That is one loop (`tried_for`) over `attempts`, a generator that looks at `Tried` between two of them.

**The rule.** The fastest predicted step among the plans made for the request's own memory limit; of equal ones the
request's own placement before a named strategy's, then the earlier one (`Tried.takes`).

**Named strategies** mean one thing, so the first plan that fits is taken. In each mode, least recomputing first:

1. what moves least, memory left out of it; operators do as they do without recomputing, since another layout may hold
   what the strategy is to split. The limit only says whether it will do: memory that is short changes what is
   recomputed, not where things lie,
2. in the last mode, when nothing else is left: within the limit. So from the first mode on where a strategy leaves it
   to memory how parameters lie (those that split the sequence).

**`auto`**, in each mode whose computing alone takes less than the best step so far:

3. with gathers and reductions next to free, as they may run beside the compute; where memory lets nothing run beside
   it, with less memory, a few times; where much is waited for all the same, at their full price, and where that is most
   of the step, before that at a multiple of it, as what is waited for are latencies then (neither, where nothing of the
   first placement has that price; where the multiple brings less, nothing in between); of mixtures again with exchanges
   at what waits for them where all that is independent of them runs beside them, but where latencies are most of it: an
   exchange is two more,
4. no further mode once memory costs nothing: recomputing would only add work.

Then what a user could ask for by name, so that `auto` is never slower than a name; not where pins were given, which
names do not know:

5. each named strategy, in its first mode that fits (1 and 2), as long as it is faster with all the memory there is; of
   those that differ in how parameters are kept alone, no other where what the first does with values takes longer than
   the best step, and at first with operators doing as the first's do: only what comes close is placed anew; of those
   that split what flows between blocks none where the sums of the same without it take longer; of those that keep
   experts apart none where the first took longer and the same without experts were no faster for it; none of which
   `auto`'s own problem tells that it takes longer whatever is chosen (`passes/placement/least.py`),
6. what splits the sequence by name, where the least it could take is less than the best step (and one of a family, as
   in 5; and no other way to meet in attention where what the first computes and moves outside of it takes longer, or
   its step but for attention where parameters are kept alike, or where something else there forbids the split; and
   none of which what does the same but for splitting the batch tells that it takes longer),
   recomputing more where memory is what it lacks; if one wins, `auto` itself on what that one's program is prepared for
   (heads repeated, sequences dealt zigzag).

**`auto` over the stages of a pipeline**: the placement sees them on average only.

7. in each mode the full price first, then what runs beside the compute as free, until a mode brings nothing,
8. named strategies in that mode, but for those whose objective says that they are hopeless; then 6.

**A limit that was met on paper only** (`tighter`): the placement counts the step folded, and stages on average. Where
what was walked does not fit, or no stages are found, it gets less memory, or more, a few times.

Outside the loop, as they choose nothing: what is proven of a named strategy's plan in the measure of `auto`
(`bounds.py`), the same decisions without padded rows (`assembly.without_padding`), the smallest limit that would have
done (`least_memory.py`). Numbers of microbatches are requests of their own (`microbatches.py`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial

from autopar.base.errors import AutoparError, DoesNotFit
from autopar.cost.context import has_attention, least_in_attention, least_seconds
from autopar.cost.memory.step import step_peak_bytes
from autopar.ir.program import Mode
from autopar.passes.placement.mixtures import has_experts
from autopar.planner.assembly import check_fits
from autopar.planner.candidates import context_candidates, named_candidates
from autopar.planner.plan.record import PlanRecord
from autopar.planner.programs import Programs
from autopar.planner.shares import (
    by_sequence_s,
    faster,
    is_priced,
    outside_s,
    prefetches,
    seconds_in_experts,
    values_s,
    waited_for,
    without_attention_s,
)
from autopar.planner.tried import Tried
from autopar.strategies.axis import DDP, AxisStrategy
from autopar.strategies.context import (
    Spread,
    but_for_attention,
    family_of,
    of_rows,
    outside_attention,
    splits_of,
    splits_sequence,
)
from autopar.strategies.names import AUTO
from autopar.strategies.request import Attempt

logger = logging.getLogger("autopar")
TIGHTER = 3
"""How often a placement is asked for less memory, or more, when what comes of it does not fit."""
OVERLAP_PRICE = 0.05
"""What a second of communication counts that may run beside the compute: the less of it, the better."""
WORTH_WAITING = 0.02
"""The part of a step that is waited for gathers and reductions from which on they are placed at their full price."""
MOSTLY_WAITING = 0.5
"""The part of a step from which on that is mostly latencies of many small messages: the objective, which counts bytes,
cannot tell placements apart by them.
"""
DEAR = 25.0
"""What a second of gathers and reductions counts then, for there to be few of them."""
TOGETHER = 0.995
"""What a placement gets of what should just do, as it comes in steps."""
MOST_PLACED = 1.4
"""Where a placement finds nothing within so many times the memory limit, no stages will fit it."""
HOPELESS = 1.1
"""Of a pipeline, a named strategy whose objective is so many times that of `auto` is not lowered: what the objective
leaves out (values that several read are moved once) is a few per cent.
"""
BEYOND = 1.15
"""Of named strategies that do the same with values, no other is placed where computing and moving them alone took the
first so many times the best step: within such a family these seconds are the same but for a few per cent.
"""
OUTSIDE = 1.05
"""Of ways to meet in attention, no other is tried where what the first computes and moves outside of it takes so many
times the best step, or, of those that keep parameters alike, all of its step but for attention: there they do the same,
to what placements are proven to, about a hundredth.
"""
CLOSE = 1.01
"""Of such, one whose operators do as the first's is placed anew where it takes no more than so many times the best
step. Free to do otherwise, they gain about as much as placements are proven to.
"""
PARTS = (1.0, 0.95, 0.9, 0.8)
"""Of the memory limit, what a named strategy under `auto` is placed within, until the step that is walked fits."""


Attempts = Generator[Attempt, None, PlanRecord | None]
"""Attempts, and the plan that came of them; None where nothing fits."""


def tried_for(programs: Programs, attempts: Callable[[Tried], Iterator[Attempt]]) -> Tried:
    """The loop: each attempt is planned, and what came of it is there for the next.

    Raises:
        AutoparError: what was asked cannot be had, whatever memory there is.
    """
    tried = Tried(programs.asked.memory_limit_bytes)
    for attempt in attempts(tried):
        try:
            plan = programs.plan(attempt)
            check_fits(plan)
        except DoesNotFit as error:
            tried.fails(attempt, error)
        except AutoparError as error:
            if attempt.placed_by is None:
                raise
            logger.info("%s cannot be had here: %s", [each.name for each in attempt.placed_by], error)
            tried.fails(attempt, error)
        else:
            tried.takes(attempt, plan)
    return tried


def attempts(programs: Programs, modes: Sequence[Mode], tried: Tried) -> Iterator[Attempt]:
    """All that is tried for a request, in order; modes: what may be computed again, least first."""
    asked = programs.asked
    if AUTO not in asked.strategies:
        yield from named(programs, modes, tried)
        return
    staged = asked.pipeline is not None
    yield from (_auto_staged if staged else _auto)(programs, modes, tried)
    if asked.pins or (staged and tried.best is None):
        return
    yield from _names_staged(programs, tried) if staged else _names(programs, modes, tried)
    if has_attention(programs.traced):
        yield from _contexts(programs, modes, tried)


def named(programs: Programs, modes: Sequence[Mode], tried: Tried) -> Iterator[Attempt]:
    """Named strategies (1, 2): the first that fits."""
    asked = programs.asked
    bends = any(splits_sequence(each) for each in asked.strategies)
    for mode in modes:
        last, staged = mode == modes[-1], asked.pipeline is not None
        attempt = replace(asked, rematerialize=mode, alike=programs.layouts(mode), explain=False)
        if not bends and not (staged and last):
            yield replace(attempt, checks_limit=True)
            if tried.last is not None:
                return
        if bends or last:
            yield from tighter(replace(attempt, explain=asked.explain and last and not staged), tried)
            if tried.last is not None:
                return
        logger.info("recomputing %s, nothing was found that fits", mode)


def tighter(attempt: Attempt, tried: Tried) -> Attempts:
    """The attempt within other parts of the memory limit, until what comes of it fits."""
    low, high, limit = 0.0, math.inf, attempt.placement_limit
    for number in range(TIGHTER + 1):
        yield replace(attempt, placement_limit=limit)
        if tried.last is not None or number == TIGHTER:
            break
        ratio = tried.error.ratio if isinstance(tried.error, DoesNotFit) else None
        if ratio is None and attempt.pipeline is None:
            break  # with less there is even less to be found
        low, high = (limit, high) if ratio is None else (low, limit)
        if low > MOST_PLACED:
            break
        limit = limit * 1.2 if ratio is None else limit / ratio * 0.97
        if not low < limit < high:
            limit = math.sqrt(low * high)
        logger.info("what was placed does not fit: placing within %.3g of the memory limit", limit)
    return tried.last


def _auto(programs: Programs, modes: Sequence[Mode], tried: Tried) -> Iterator[Attempt]:
    """The request's own placement (3, 4)."""
    asked = programs.asked
    for mode in modes:
        if tried.best is not None and programs.least_s(mode) >= tried.step_s:
            continue
        explain = asked.explain and mode == modes[-1] and tried.best is None
        found = yield from _beside(replace(asked, rematerialize=mode, explain=explain), tried)
        if found is not None and may_exchange(programs) and found.solved.overlap_price < DEAR:
            found = faster(found, (yield from _exchanging(programs, found, tried)))
        if found is None:
            logger.info("recomputing %s, nothing was found that fits", mode)
        elif prefetches(found) and not found.solved.memory_price_s_per_byte:
            return


def _beside(attempt: Attempt, tried: Tried) -> Attempts:
    """Gathers and reductions beside the compute (3)."""
    cheap = replace(attempt, overlap_price=OVERLAP_PRICE)
    best = latest = first = yield from tighter(cheap, tried)
    for _ in range(TIGHTER):
        if latest is None or prefetches(latest):
            break
        latest = yield from tighter(replace(cheap, placement_limit=_limit_beside(latest), explain=False), tried)
        best = faster(best, latest)
    if best is not None and best is first and not is_priced(best):
        return best
    if best is not None and waited_for(best) > MOSTLY_WAITING * best.cost.step_time_s:
        dear = yield from tighter(replace(attempt, overlap_price=DEAR, explain=False), tried)
        if dear is not None and dear.cost.step_time_s < best.cost.step_time_s:
            return dear
        best = faster(best, dear)
    if best is not None and waited_for(best) > WORTH_WAITING * best.cost.step_time_s:
        best = faster(best, (yield from tighter(replace(attempt, explain=False), tried)))
    return best


def _exchanging(programs: Programs, found: PlanRecord, tried: Tried) -> Attempts:
    """With exchanges beside what may run there (3), the rest priced as in the best placement so far; nothing where that
    cannot be told from what waits.
    """
    attempt = replace(
        programs.asked, rematerialize=found.rematerialize, overlap_price=found.solved.overlap_price,
        hides_exchanges=True, explain=False,
    )  # fmt: skip
    yield from tighter(attempt, tried)
    return tried.last


def may_exchange(programs: Programs) -> bool:
    """Whether a request leaves it to the solver where tokens go to their experts."""
    return AUTO in programs.asked.strategies and has_experts(programs.traced)


def _auto_staged(programs: Programs, modes: Sequence[Mode], tried: Tried) -> Iterator[Attempt]:
    """The request's own placement of a pipeline's stages (7)."""
    for mode in modes:
        before = tried.best
        attempt = replace(programs.asked, rematerialize=mode, explain=False)
        found = yield from tighter(attempt, tried)
        if found is not None:
            yield replace(attempt, overlap_price=OVERLAP_PRICE)
            if may_exchange(programs):
                yield replace(attempt, overlap_price=OVERLAP_PRICE, hides_exchanges=True)
        elif before is None:
            logger.info("recomputing %s, nothing was found that fits", mode)
            continue
        if tried.best is before or tried.best is None or not tried.best[1].solved.memory_price_s_per_byte:
            return


def _names(programs: Programs, modes: Sequence[Mode], tried: Tried) -> Iterator[Attempt]:
    """Named strategies on the axes that are `auto` (5), and what `auto` does where the best of them recomputes as much:
    the bound is that one's.
    """
    own = tried.best
    values, firsts = dict[tuple[str, ...], float](), dict[tuple[str, ...], tuple[AxisStrategy, ...]]()
    for strategies in named_candidates(programs.asked, mixture=has_experts(programs.traced)):
        family = family_of(strategies)
        if values.get(family, 0.0) > BEYOND * tried.step_s:
            logger.info("%s cannot win by how it keeps parameters", [each.name for each in strategies])
            continue
        if tried.splits_hidden_in_vain(strategies, BEYOND):
            logger.info("%s cannot win by what it splits between blocks", [each.name for each in strategies])
            continue
        like = programs.placed_by(modes[0], firsts[family]) if family in firsts else None
        enough = BEYOND * tried.step_s
        of_values_s, transfers_s = programs.least_named_s(modes[0], strategies, enough, like, tried.step_s)
        if of_values_s > enough or transfers_s >= tried.step_s:
            logger.info("%s takes %.3g s or more", [each.name for each in strategies], max(of_values_s, transfers_s))
            if of_values_s > enough:
                values[family] = of_values_s
            continue
        if _experts_are_no_help(strategies, tried):
            logger.info("%s cannot win by where experts are", [each.name for each in strategies])
            continue
        least_s, first = values.get(family, 0.0), firsts.get(family)
        if first is not None and tried.keeping_is_no_help(strategies, first, BEYOND):
            logger.info("%s cannot win by how it keeps parameters", [each.name for each in strategies])
            continue
        if first is not None and not (yield from _is_close(programs, strategies, first, least_s, modes[0], tried)):
            continue
        free = yield from _as_named(programs, strategies, modes, tried)
        if free is not None:
            firsts.setdefault(family, strategies)
            values[family] = min(values.get(family, math.inf), values_s(free))
    if own is None or tried.best is None or tried.best[0].placed_by is None:
        return
    mode = tried.best[0].rematerialize
    if (mode, None) not in tried.own:
        price = own[1].solved.overlap_price
        yield replace(programs.asked, rematerialize=mode, overlap_price=price, explain=False)


def _as_named(
    programs: Programs, strategies: tuple[AxisStrategy, ...], modes: Sequence[Mode], tried: Tried
) -> Attempts:
    """What a user would get of these strategies, lowered as `auto`: a saved plan is lowered from what was asked.

    Returns what the first mode that was tried gives with all the memory there is.
    """
    limit = programs.asked.memory_limit_bytes
    first: PlanRecord | None = None
    for mode in modes:
        if programs.least_s(mode) >= tried.step_s:
            return first
        alike = programs.layouts(mode, strategies)
        attempt = replace(programs.asked, rematerialize=mode, placed_by=strategies, alike=alike, explain=False)
        before = tried.step_s
        yield replace(attempt, memory_limit_bytes=None)
        free = tried.last
        first = first or free
        tried.knows(strategies, free)
        if free is None or limit is None or free.cost.step_time_s >= before:
            return first  # the next mode computes more
        yield replace(attempt, checks_limit=True)
        for part in PARTS if tried.last is None and mode == modes[-1] else ():
            yield replace(attempt, placement_limit=part)
            walked = isinstance(tried.error, DoesNotFit) and tried.error.ratio is not None
            if not walked:
                break
        if tried.last is not None or free.cost.memory.peak - free.cost.memory.activations > limit:
            return first  # what is stored does not fit, whatever is recomputed
    return first


def _is_close(
    programs: Programs,
    strategies: tuple[AxisStrategy, ...],
    first: tuple[AxisStrategy, ...],
    least_s: float,
    mode: Mode,
    tried: Tried,
) -> Generator[Attempt, None, bool]:
    """Whether strategies come close to the best step, memory aside, in the first mode where operators do as those of
    `first` do, which differ from them in how parameters are kept. True where that cannot be told. least_s: what these
    compute and move of values.
    """
    alike = programs.placed_by(mode, first)
    if alike is None or programs.least_s(mode) >= tried.step_s:
        return True
    if least_s >= CLOSE * tried.step_s:
        return False
    yield replace(
        programs.asked, rematerialize=mode, placed_by=strategies, alike=alike, memory_limit_bytes=None, explain=False
    )
    tried.knows(strategies, tried.last)
    return tried.last is None or tried.last.cost.step_time_s < CLOSE * tried.step_s


def _experts_are_no_help(strategies: tuple[AxisStrategy, ...], tried: Tried) -> bool:
    """Whether strategies that keep some experts on each rank take too long by what the same do where these ranks split
    the batch alone: to send tokens comes on top, but for what experts compute there.
    """
    axes = [axis for axis, each in enumerate(strategies) if each.experts in ("whole", "exchange")]
    splits = splits_of(strategies)
    together = tried.named.get((*splits, *(DDP.experts if a in axes else e.experts for a, e in enumerate(strategies))))
    if not axes or together is None:
        return False
    return values_s(together) - seconds_in_experts(together) > BEYOND * tried.step_s


def _names_staged(programs: Programs, tried: Tried) -> Iterator[Attempt]:
    """Named strategies for a pipeline's stages (8)."""
    assert tried.best is not None
    _, own = tried.best
    for strategies in named_candidates(programs.asked, mixture=has_experts(programs.traced)):
        attempt = replace(
            programs.asked, rematerialize=own.rematerialize, placed_by=strategies,
            overlap_price=own.solved.overlap_price, explain=False,
        )  # fmt: skip
        objective_s = programs.objective_s(attempt)
        if objective_s is not None and objective_s <= HOPELESS * own.solved.objective_s:
            yield attempt


def _contexts(programs: Programs, modes: Sequence[Mode], tried: Tried) -> Iterator[Attempt]:
    """What splits the sequence by name, and `auto` on the program of the one that wins (6)."""
    asked = programs.asked

    def least_s(strategies: tuple[AxisStrategy, ...], mode: Mode) -> float:
        program = programs.recomputing(mode, Spread.of(strategies, asked.mesh))
        return least_seconds(program, programs.computing_s(mode), strategies, asked.mesh)

    excluded, values = set[tuple[str, ...]](), dict[tuple[str, ...], float]()
    forbidden, outside = set[tuple[str, ...]](), dict[tuple[str, ...], float]()
    rest = dict[tuple[str, ...], float]()
    cached = bool(programs.traced.states) and not asked.training
    candidates = [
        each for each in context_candidates(asked, cached=cached)
        if not _rows_are_better(programs, each, tried, lambda _: 0.0)  # whatever attention takes
    ]  # fmt: skip
    for strategies in sorted(candidates, key=lambda each: least_s(each, modes[0])):
        spread, splits = Spread.of(strategies, asked.mesh), splits_of(strategies)
        others, kept = outside_attention(strategies), but_for_attention(strategies)
        for mode in modes:
            if splits in excluded or others in forbidden or least_s(strategies, mode) >= tried.step_s:
                break
            if values.get(family_of(strategies), 0.0) > BEYOND * tried.step_s:
                break
            if max(outside.get(others, 0.0), rest.get(kept, 0.0)) > OUTSIDE * tried.step_s:
                logger.info("%s takes too long outside of attention", [each.name for each in strategies])
                break
            if _rows_are_better(programs, strategies, tried, partial(_in_attention_s, programs, strategies)):
                logger.info("%s cannot be faster than what splits the batch", [each.name for each in strategies])
                break
            if programs.cannot_split(mode, strategies):
                logger.info("%s cannot split the sequence", [each.name for each in strategies])
                forbidden.add(others)
                break
            yield replace(asked, rematerialize=mode, placed_by=strategies, spread=spread, explain=False)
            if tried.excluded:
                excluded.add(splits)
            if isinstance(tried.error, DoesNotFit) and tried.error.outside_attention:
                forbidden.add(others)
            if tried.last is not None:
                values.setdefault(family_of(strategies), values_s(tried.last))
                outside.setdefault(others, outside_s(tried.last))
                rest.setdefault(kept, without_attention_s(tried.last))
                break
    if tried.best is not None and tried.best[0].spread is not None:
        attempt = tried.best[0]
        yield replace(asked, rematerialize=attempt.rematerialize, spread=attempt.spread, explain=False)


def _rows_are_better(
    programs: Programs,
    strategies: tuple[AxisStrategy, ...],
    tried: Tried,
    in_attention_s: Callable[[Mode], float],
) -> bool:
    """Whether strategies that split the sequence take longer than the best step, going by what the same do that split
    the batch on their axes: outside of attention they have as much to compute and to move, but for what these leave
    whole there. in_attention_s: what attention takes at least in a mode.
    """
    axes = [axis for axis, each in enumerate(strategies) if splits_sequence(each)]
    rows = tried.named.get(family_of(of_rows(strategies)))
    if rows is None or programs.asked.pipeline is not None:
        return False
    return by_sequence_s(rows, axes) + in_attention_s(rows.rematerialize) > tried.step_s


def _in_attention_s(programs: Programs, strategies: tuple[AxisStrategy, ...], mode: Mode) -> float:
    mesh = programs.asked.mesh
    return least_in_attention(programs.recomputing(mode, Spread.of(strategies, mesh)), strategies, mesh)


def _limit_beside(plan: PlanRecord) -> float:
    """The part of the memory limit that a placement may get for gathers and reductions to run beside the compute, going
    by how much more than the limit this one then takes.
    """
    program, limit = plan.program, plan.memory_limit_bytes
    assert program is not None and program.overlap is not None and program.result is not None and limit is not None
    needed = step_peak_bytes(replace(program, overlap=replace(program.overlap, prefetch=True)))
    return program.result.peak_bytes / needed * TOGETHER
