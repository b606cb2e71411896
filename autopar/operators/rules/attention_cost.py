"""What each rank computes of an attention whose queries are split, and what its ring takes.

A causal mask, a window or a prefix leaves some pairs of a query and a key; how many fall to a rank depends on where its
queries lie. Pairs are counted exactly, run by run. All ranks wait for the slowest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.ir.choices import Choice
from autopar.ir.op_call import OpCall
from autopar.ir.positions import starts
from autopar.ir.rule import Rule

Window = tuple[int | None, int | None, int]
"""left, right, prefix: query s sees key t where s - left <= t <= s + right, or t < prefix; None: no bound."""
Splits = tuple[tuple[int, int, bool], ...]
"""(axis size, outer, zigzag) of each axis that splits the queries, in mesh order."""


def pairs_by_rank(call: OpCall, rule: Rule, choices: Sequence[Choice], sizes: Sequence[int]) -> NDArray[np.int64]:
    """[rank, block]: the pairs of a query and a key that each rank computes, of one head.

    Ranks are those of the axes that split the queries, row-major. Blocks are those of the ring, by their home, if there
    is one; else all keys are one block.
    """
    assert rule.ring is not None
    found = [(axis, choice) for axis, choice in enumerate(choices) if choice.factor == rule.ring.query]
    splits = tuple((sizes[axis], choice.outer, choice.zigzag) for axis, choice in found)
    ring = next((place for place, (_, choice) in enumerate(found) if choice.kind == "ring"), None)
    return _pairs(rule.sizes[rule.ring.query], rule.sizes[rule.ring.key], window_of(call), splits, ring)


def window_of(call: OpCall) -> Window:
    """What an attention's queries see."""
    return call.arg("left"), call.arg("right"), call.arg("prefix", 0)


def share_of_slowest(call: OpCall, rule: Rule, choices: Sequence[Choice], sizes: Sequence[int]) -> float:
    """The part of all pairs that the rank with most of them computes: 1/n where all ranks have as many."""
    pairs = pairs_by_rank(call, rule, choices, sizes)
    return float(pairs.sum(1).max() / pairs.sum()) if pairs.any() else 1.0 / len(pairs)


def visits(call: OpCall, rule: Rule, choices: Sequence[Choice], sizes: Sequence[int]) -> tuple[int, ...]:
    """How far from home, in places along the ring's axis, some rank sees anything of the blocks; ascending, from 0."""
    pairs = pairs_by_place(call, rule, choices, sizes)
    num = len(pairs)
    return tuple(d for d in range(num) if d == 0 or any(pairs[i, (i - d) % num] for i in range(num)))


def pairs_by_place(call: OpCall, rule: Rule, choices: Sequence[Choice], sizes: Sequence[int]) -> NDArray[np.int64]:
    """[place, block]: of the ring's axis, `pairs_by_rank` of the rank with most of them; without a ring all ranks."""
    pairs = pairs_by_rank(call, rule, choices, sizes)
    assert rule.ring is not None
    splitting = [axis for axis, choice in enumerate(choices) if choice.factor == rule.ring.query]
    ring = next((place for place, axis in enumerate(splitting) if choices[axis].kind == "ring"), None)
    if ring is None:
        return pairs
    by_axis = pairs.reshape(*(sizes[axis] for axis in splitting), pairs.shape[1])
    others = tuple(place for place in range(len(splitting)) if place != ring)
    return by_axis.max(axis=others) if others else by_axis


@lru_cache(maxsize=4096)
def _pairs(queries: int, keys: int, window: Window, splits: Splits, ring: int | None) -> NDArray[np.int64]:
    ranks = itertools.product(*(range(size) for size, _, _ in splits))
    begins = np.array([starts(queries, *((at, *s) for at, s in zip(rank, splits, strict=True))) for rank in ranks])
    length = queries // math.prod(size for size, _, _ in splits) // begins.shape[1]
    if ring is None:
        blocks = np.zeros((1, 1), dtype=np.int64)
    else:
        size, outer, zigzag = splits[ring]
        blocks = np.array([starts(keys, (place, size, outer, zigzag)) for place in range(size)])
    key_length = keys // blocks.size
    seen = seen_pairs(begins[:, :, None, None], length, blocks[None, None], key_length, window)
    found: NDArray[np.int64] = seen.sum(axis=(1, 3))
    return found


def seen_pairs(
    query: NDArray[np.int64], queries: int, key: NDArray[np.int64], keys: int, window: Window
) -> NDArray[np.int64]:
    """How many pairs see each other of runs of queries and of keys that begin at these positions; broadcasts."""
    left, right, prefix = window
    query, key = np.broadcast_arrays(query, key)
    ahead = np.clip(prefix - key, 0, keys)  # keys of the prefix, which all queries see
    first, rest = key + ahead, keys - ahead

    def up_to(distance: int) -> NDArray[np.int64]:
        """Pairs (s, t) with t - s <= distance, of the keys behind the prefix."""
        most = query + distance + 1 - first  # keys that the first query sees, were there enough of them
        return _sum_clipped(most + queries - 1, rest) - _sum_clipped(most - 1, rest)

    upper = queries * rest if right is None else up_to(right)
    lower = np.int64(0) if left is None else up_to(-left - 1)
    return queries * ahead + np.maximum(upper - lower, 0)


def _sum_clipped(last: NDArray[np.int64], most: NDArray[np.int64]) -> NDArray[np.int64]:
    """The sum of min(max(u, 0), most) over all integers u up to `last`."""
    inside = np.clip(last, 0, most)
    return inside * (inside + 1) // 2 + np.maximum(last - most, 0) * most
