"""Which expert lies on which rank, so that ranks get about as many tokens: as many experts each, packed by their loads.

Greedy, the heaviest first, each to the rank that has least and room (longest processing time first: Graham, Bounds on
multiprocessing timing anomalies, 1969; with room for so many each, as in DeepSeek's EPLB). Then groups are given to the
ranks that have most of them already, so that few experts move. Experts that one rank has too many tokens of may visit
others, which take their parts.
"""

from __future__ import annotations

from collections.abc import Sequence


def packed(loads: Sequence[float], ranks: int, slots: Sequence[int]) -> tuple[int, ...]:
    """expert -> slot: the place among those of rank 0, then of rank 1, …; an expert that stays on its rank keeps its
    own. `slots` itself where the busiest rank would not have less.

    Args:
        loads: the tokens of each expert. ranks: which divide the experts. slots: where the experts lie now.
    """
    room = len(loads) // ranks
    groups: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0.0] * ranks
    for expert in sorted(range(len(loads)), key=lambda expert: (-loads[expert], slots[expert])):
        lightest = min((g for g in range(ranks) if len(groups[g]) < room), key=lambda g: (totals[g], g))
        groups[lightest].append(expert)
        totals[lightest] += loads[expert]
    if max(totals) >= busiest(loads, ranks, slots):
        return tuple(slots)
    found = dict[int, int]()
    for rank, group in enumerate(_at_home(groups, slots)):
        stay = {expert: slots[expert] for expert in group if slots[expert] // room == rank}
        free = (slot for slot in range(rank * room, (rank + 1) * room) if slot not in stay.values())
        found |= stay | {expert: next(free) for expert in sorted(group) if expert not in stay}
    return tuple(found[expert] for expert in range(len(loads)))


def replicated(loads: Sequence[float], ranks: int, slots: Sequence[int], most: int) -> tuple[tuple[int, ...], ...]:
    """rank -> the experts that visit it, at most so many: of the busiest rank, as long as that helps, the expert of
    which it has most tokens becomes a guest of the rank that has least. All ranks that have an expert get as many of
    its tokens.
    """
    guests: list[tuple[int, ...]] = [()] * ranks
    while True:
        found = _with_one_more(loads, ranks, slots, most, guests)
        if found is None:
            return tuple(guests)
        guests = found


def _with_one_more(
    loads: Sequence[float], ranks: int, slots: Sequence[int], most: int, guests: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]] | None:
    hosts = hosts_of(len(loads), ranks, slots, guests)
    totals = _totals(loads, ranks, hosts)
    full = max(range(ranks), key=totals.__getitem__)
    for expert in sorted((e for e in range(len(loads)) if full in hosts[e]), key=lambda e: -loads[e] / len(hosts[e])):
        free = [rank for rank in range(ranks) if len(guests[rank]) < most and rank not in hosts[expert]]
        if not free:
            continue
        goal = min(free, key=lambda rank: (totals[rank], rank))
        tried = [(*own, expert) if rank == goal else own for rank, own in enumerate(guests)]
        if busiest(loads, ranks, slots, tried) < totals[full]:
            return tried
    return None


def hosts_of(num: int, ranks: int, slots: Sequence[int], guests: Sequence[Sequence[int]] = ()) -> list[tuple[int, ...]]:
    """expert -> the ranks that have it: its own first, then those that it visits."""
    room = num // ranks
    visits = [[rank for rank, own in enumerate(guests) if expert in own] for expert in range(num)]
    return [(slots[expert] // room, *visits[expert]) for expert in range(num)]


def busiest(loads: Sequence[float], ranks: int, slots: Sequence[int], guests: Sequence[Sequence[int]] = ()) -> float:
    """The tokens of the rank that has most."""
    return max(_totals(loads, ranks, hosts_of(len(loads), ranks, slots, guests)))


def _totals(loads: Sequence[float], ranks: int, hosts: Sequence[Sequence[int]]) -> list[float]:
    totals = [0.0] * ranks
    for load, own in zip(loads, hosts, strict=True):
        for rank in own:
            totals[rank] += load / len(own)
    return totals


def _at_home(groups: Sequence[Sequence[int]], slots: Sequence[int]) -> list[Sequence[int]]:
    """The groups by rank: each in turn that has most in common with a rank that has none yet goes there."""
    room, ranks = len(groups[0]), range(len(groups))
    common = {(g, r): sum(slots[expert] // room == r for expert in groups[g]) for g in ranks for r in ranks}
    home: dict[int, Sequence[int]] = {}
    left = set(ranks)
    for g, r in sorted(common, key=lambda pair: (-common[pair], pair)):
        if g in left and r not in home:
            home[r] = groups[g]
            left.remove(g)
    return [home[r] for r in ranks]
