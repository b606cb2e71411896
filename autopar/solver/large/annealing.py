"""Simulated annealing by cascades: a node takes another choice, neighbours that this forbids follow, and theirs.

A cascade is taken back unless everything is allowed again and its price passes Metropolis' test. Memory is a tree of
maxima over the time points (range add, maximum of all at the root), so that what a cascade does to the peak is known
without a look at the profile; bytes above the limit have a price while searching, and no answer has any.
(Kirkpatrick, Gelatt, Vecchi, Science 220, 1983; cascades are ejection chains: Glover, Discrete Applied Math. 65, 1996.)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autopar.solver.compiled import Flat, compiled, flatten
from autopar.solver.graph import Graph
from autopar.solver.problem import FloatArray, IntArray
from autopar.solver.work import Work

LONGEST_CASCADE = 200
MOST_SECONDS = 0.1
"""Of one temperature."""
OVER_PRICE = 3.0
"""Of a byte above the limit, in sums of the memory prices: what does not fit is to cost more than it can save."""
ROUND_SHARE = 0.06
LONGER = 1.5
"""A round takes this share of the time, and so many times more once every first temperature had its turn."""
HOT_QUANTILES = (0.02, 0.1, 0.3)
"""First temperatures: quantiles of what cascades that cost something cost."""
PRICE_SCALES = (1.0, 0.0, 0.5)
"""How much of the memory prices a round charges: all, to come to what fits well; none, for the cost alone."""
COOLING = 1e-4
"""The last temperature of a round, relative to its first."""
SAMPLES = 20_000
MOVES_A_SECOND = 50_000.0
"""Of wall clock, at first; of work that is counted."""
EAGER = 8
"""Every so many-th cascade takes along neighbours that gain, too."""


class Spans(NamedTuple):
    """Usages: those of node s are `first[s]` to `first[s + 1]`, over points [start, end), bytes at `at[usage] + i`."""

    first: IntArray
    start: IntArray
    end: IntArray
    at: IntArray
    bytes: FloatArray
    leaves: int


class State(NamedTuple):
    """What a search changes. `local`: what each choice would cost where the neighbours are; `top`, `plus`: the tree of
    memory; `moved`: the cascade a node last moved in; `trail_node`, `trail_choice`: how to take a cascade back.
    """

    choice: IntArray
    local: FloatArray
    top: FloatArray
    plus: FloatArray
    moved: IntArray
    trail_node: IntArray
    trail_choice: IntArray
    queue: IntArray
    random: IntArray


@dataclass(frozen=True, slots=True)
class Landscape:
    """A graph to search: costs with a finite price on what is forbidden, more than any answer that is wanted."""

    flat: Flat
    spans: Spans
    costs: FloatArray
    cells: FloatArray
    forbidden: float
    limit: float

    @staticmethod
    def of(graph: Graph, limit: float, known: float) -> Landscape:
        """known: the cost of a choice that fits."""
        flat = flatten(graph.num_choices, graph.edges)
        cells = np.concatenate([e.costs.ravel() for e in graph.edges]) if graph.edges else np.zeros(0)
        costs = np.concatenate(graph.costs)
        forbidden = 4.0 * max(abs(known), 1e-12)
        return Landscape(flat, _spans(graph), costs, np.where(np.isfinite(cells), cells, forbidden), forbidden, limit)


def _spans(graph: Graph) -> Spans:
    usages = [u for node in graph.usages for u in node]
    counts = [len(node) for node in graph.usages]
    sizes = np.array([len(u.bytes) for u in usages], dtype=np.int64)
    leaves = 1
    while leaves < max(graph.num_points, 1):
        leaves *= 2
    return Spans(
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        np.array([u.start for u in usages], dtype=np.int64),
        np.array([u.end for u in usages], dtype=np.int64),
        (np.cumsum(sizes) - sizes).astype(np.int64),
        np.concatenate([u.bytes for u in usages]).astype(np.float64) if usages else np.zeros(0),
        leaves,
    )


@compiled
def _add(top: FloatArray, plus: FloatArray, leaves: int, start: int, end: int, size: float) -> None:
    """Add to [start, end): top[i] is the maximum below node i of the tree, with what was added to all of it."""
    left, right = start + leaves, end + leaves
    low, high = left, right - 1
    while left < right:
        if left & 1:
            top[left] += size
            plus[left] += size
            left += 1
        if right & 1:
            right -= 1
            top[right] += size
            plus[right] += size
        left >>= 1
        right >>= 1
    low >>= 1
    high >>= 1
    while low >= 1:
        top[low] = max(top[2 * low], top[2 * low + 1]) + plus[low]
        if high != low:
            top[high] = max(top[2 * high], top[2 * high + 1]) + plus[high]
        low >>= 1
        high >>= 1


@compiled
def _take(flat: Flat, cells: FloatArray, spans: Spans, state: State, s: int, new: int) -> None:
    """Node s takes the choice `new`: memory, and what the neighbours' choices cost now."""
    choice, local = state.choice, state.local
    old = choice[s]
    for index in range(spans.first[s], spans.first[s + 1]):
        more = float(spans.bytes[spans.at[index] + new] - spans.bytes[spans.at[index] + old])
        if more != 0.0:
            _add(state.top, state.plus, spans.leaves, spans.start[index], spans.end[index], more)
    for position in range(flat.first[s], flat.first[s + 1]):
        e = flat.near[position]
        width = flat.width[e]
        if flat.u[e] == s:
            a, b = flat.u_class[flat.u_at[e] + old], flat.u_class[flat.u_at[e] + new]
            if a != b:
                t, at = flat.v[e], flat.v_at[e]
                was, now = flat.cell[e] + a * width, flat.cell[e] + b * width
                for j in range(flat.base[t + 1] - flat.base[t]):
                    c = flat.v_class[at + j]
                    local[flat.base[t] + j] += cells[now + c] - cells[was + c]
        else:
            a, b = flat.v_class[flat.v_at[e] + old], flat.v_class[flat.v_at[e] + new]
            if a != b:
                t, at = flat.u[e], flat.u_at[e]
                for j in range(flat.base[t + 1] - flat.base[t]):
                    c = flat.cell[e] + flat.u_class[at + j] * width
                    local[flat.base[t] + j] += cells[c + b] - cells[c + a]
    choice[s] = new


@compiled
def _fill(flat: Flat, costs: FloatArray, cells: FloatArray, spans: Spans, state: State) -> float:
    """Work out `local` and the tree for the choice; returns the energy."""
    choice, local = state.choice, state.local
    energy = 0.0
    for i in range(len(costs)):
        local[i] = costs[i]
    for s in range(len(choice)):
        energy += float(costs[flat.base[s] + choice[s]])
    for e in range(len(flat.u)):
        u, v, width = flat.u[e], flat.v[e], flat.width[e]
        a, b = flat.u_class[flat.u_at[e] + choice[u]], flat.v_class[flat.v_at[e] + choice[v]]
        energy += float(cells[flat.cell[e] + a * width + b])
        for i in range(flat.base[u + 1] - flat.base[u]):
            local[flat.base[u] + i] += cells[flat.cell[e] + flat.u_class[flat.u_at[e] + i] * width + b]
        for j in range(flat.base[v + 1] - flat.base[v]):
            local[flat.base[v] + j] += cells[flat.cell[e] + a * width + flat.v_class[flat.v_at[e] + j]]
    state.top[:] = 0.0
    state.plus[:] = 0.0
    leaves = spans.leaves
    for s in range(len(choice)):
        for index in range(spans.first[s], spans.first[s + 1]):
            size = spans.bytes[spans.at[index] + choice[s]]
            state.top[leaves + spans.start[index]] += size
            if spans.end[index] < leaves:
                state.top[leaves + spans.end[index]] -= size
    for t in range(1, leaves):
        state.top[leaves + t] += state.top[leaves + t - 1]
    for node in range(leaves - 1, 0, -1):
        state.top[node] = max(state.top[2 * node], state.top[2 * node + 1])
    return energy


@compiled
def _draw(random: IntArray) -> int:
    """A pseudo-random number of 31 bits (xorshift, in 62 bits)."""
    x = random[0]
    x ^= (x << 13) & 0x3FFFFFFFFFFFFFFF
    x ^= x >> 7
    x ^= (x << 17) & 0x3FFFFFFFFFFFFFFF
    random[0] = x
    return (x >> 20) & 0x7FFFFFFF


@compiled
def _cascade(
    flat: Flat,
    cells: FloatArray,
    spans: Spans,
    state: State,
    seed: int,
    new: int,
    number: int,
    forbidden: float,
    eager: bool,
) -> tuple[int, float]:
    """Move a node, and whoever is then forbidden where it is; returns (moves on the trail, change of energy).

    A node moves once; the change is at least `forbidden` where something stays so.
    """
    choice, local, trail = state.choice, state.local, 0
    change, tail, head = 0.0, 1, 0
    state.queue[0] = seed
    while head < tail:
        s = state.queue[head]
        head += 1
        start, k = flat.base[s], flat.base[s + 1] - flat.base[s]
        best = new
        if head > 1:
            if state.moved[s] == number or (local[start + choice[s]] < forbidden and not eager):
                continue
            best = 0
            for i in range(1, k):
                if local[start + i] < local[start + best]:
                    best = i
            if local[start + best] >= local[start + choice[s]]:
                continue
        if trail == len(state.trail_node):
            return trail, np.inf
        state.moved[s] = number
        state.trail_node[trail], state.trail_choice[trail] = s, choice[s]
        trail += 1
        change += float(local[start + best] - local[start + choice[s]])
        _take(flat, cells, spans, state, s, best)
        for position in range(flat.first[s], flat.first[s + 1]):
            e = flat.near[position]
            t = flat.v[e] if flat.u[e] == s else flat.u[e]
            if state.moved[t] == number:
                continue
            follows = local[flat.base[t] + choice[t]] >= forbidden
            if eager and not follows:
                now = local[flat.base[t] + choice[t]]
                for i in range(flat.base[t], flat.base[t + 1]):
                    if local[i] < now * (1 - 1e-12):
                        follows = True
                        break
            if follows:
                if tail == len(state.queue):
                    return trail, np.inf
                state.queue[tail] = t
                tail += 1
    return trail, change


@compiled
def _undo(flat: Flat, cells: FloatArray, spans: Spans, state: State, trail: int) -> None:
    for index in range(trail - 1, -1, -1):
        _take(flat, cells, spans, state, state.trail_node[index], state.trail_choice[index])


@compiled
def _anneal(
    flat: Flat,
    cells: FloatArray,
    spans: Spans,
    state: State,
    best: IntArray,
    numbers: FloatArray,
    free: IntArray,
    prices: FloatArray,
    moves: int,
    number: int,
    hot: float,
    cold: float,
    forbidden: float,
    limit: float,
    over_price: float,
    out: FloatArray,
) -> int:
    """`moves` cascades at temperatures falling from `hot` to `cold`.

    numbers: [energy (priced), cost of the choice, cost of the best]; best: the cheapest that fits. prices: what the
    energy charges each choice beyond its cost. out: the uphill changes of allowed cascades, as far as there is room.
    """
    choice, local = state.choice, state.local
    seen = 0
    rate = (cold / hot) ** (1.0 / max(moves, 1)) if hot > 0.0 else 1.0
    temperature = hot
    over = max(0.0, state.top[1] - limit)
    for _ in range(moves):
        temperature *= rate
        s = free[_draw(state.random) % len(free)]
        start, k = flat.base[s], flat.base[s + 1] - flat.base[s]
        old = int(choice[s])
        new = _draw(state.random) % (k - 1)
        if new >= old:
            new += 1
        u = (_draw(state.random) + 1) / 2147483648.0
        bar = -temperature * np.log(u)
        if flat.first[s + 1] == flat.first[s] and local[start + new] - local[start + old] > bar + over * over_price:
            continue
        number += 1
        trail, change = _cascade(
            flat, cells, spans, state, s, int(new), number, forbidden, _draw(state.random) % EAGER == 0
        )
        over_now = max(0.0, state.top[1] - limit)
        total = change + (over_now - over) * over_price
        if change < forbidden and total > 0.0 and seen < len(out):
            out[seen] = total
            seen += 1
        if change >= 0.5 * forbidden or total > bar:
            _undo(flat, cells, spans, state, trail)
            continue
        over = over_now
        numbers[0] += change
        for index in range(trail):
            t = state.trail_node[index]
            numbers[1] -= prices[flat.base[t] + choice[t]] - prices[flat.base[t] + state.trail_choice[index]]
        numbers[1] += change
        if over == 0.0 and numbers[1] < numbers[2]:
            numbers[2] = numbers[1]
            best[:] = choice
    out[seen:] = -1.0
    return number


class Annealer:
    """One search of a landscape from its own random numbers; `choice` is the best that fits so far, `cost` its cost."""

    def __init__(self, land: Landscape, seed: int) -> None:
        self.land = land
        flat, leaves = land.flat, land.spans.leaves
        nodes = len(flat.base) - 1
        self.state = State(
            np.zeros(nodes, dtype=np.int64), np.zeros(len(land.costs)), np.zeros(2 * leaves), np.zeros(2 * leaves),
            np.zeros(nodes, dtype=np.int64), np.zeros(LONGEST_CASCADE, dtype=np.int64),
            np.zeros(LONGEST_CASCADE, dtype=np.int64), np.zeros(16 * LONGEST_CASCADE, dtype=np.int64),
            np.array([0x2545F4914F6CDD1D % 2**61 + 7919 * (seed + 1)], dtype=np.int64),
        )  # fmt: skip
        self.free = np.flatnonzero(np.diff(flat.base) > 1).astype(np.int64)
        self.number = 0
        self.rate = MOVES_A_SECOND

    def uphill(self, choice: IntArray, prices: FloatArray, over_price: float) -> FloatArray:
        """How much allowed cascades from `choice` cost, of those that cost something."""
        self.start(choice, prices)
        out, best = np.zeros(SAMPLES), choice.copy()
        self.run(np.zeros(3), best, prices, SAMPLES, 0.0, over_price, out)
        return out[out > 0]

    def round(
        self, choice: IntArray, cost: float, prices: FloatArray, hot: float, over_price: float, seconds: float,
        counts: bool = False,
    ) -> tuple[IntArray, float]:  # fmt: skip
        """Cool down from `hot` in so many seconds; the best choice that fits on the way, and its cost. counts: seconds
        are so many moves.
        """
        best, begun, moved = choice.copy(), time.perf_counter(), 0
        nothing = np.zeros(0)
        energy = self.start(choice, prices)
        priced = float(prices[self.land.flat.base[:-1] + choice].sum())
        numbers = np.array([energy, energy - priced, min(cost, 0.5 * self.land.forbidden)])
        while True:
            now = time.perf_counter()
            share = moved / (MOVES_A_SECOND * seconds) if counts else (now - begun) / seconds
            if share >= 1:
                return best, float(numbers[2]) if numbers[2] < 0.5 * self.land.forbidden else np.inf
            moves = max(100, int(self.rate * min(MOST_SECONDS, 1.1 * (1 - share) * seconds)))
            self.run(numbers, best, prices, moves, hot * COOLING**share, over_price, nothing)
            moved += moves
            if not counts:
                self.rate = moves / max(time.perf_counter() - now, 1e-6)

    def start(self, choice: IntArray, prices: FloatArray) -> float:
        self.state.choice[:] = choice
        return _fill(self.land.flat, self.land.costs + prices, self.land.cells, self.land.spans, self.state)

    def run(
        self, numbers: FloatArray, best: IntArray, prices: FloatArray, moves: int, temperature: float,
        over_price: float, out: FloatArray,
    ) -> None:  # fmt: skip
        land = self.land
        self.number = _anneal(
            land.flat, land.cells, land.spans, self.state, best, numbers, self.free, prices, moves, self.number,
            temperature, temperature, land.forbidden, land.limit, over_price, out,
        )  # fmt: skip


def anneal(
    land: Landscape, choice: IntArray, cost: float, prices: FloatArray, total_price: float, seconds: float,
    offer: Callable[[IntArray, float], None], clock: Work | None = None, *, threads: int = 1,
    seed: int = 0,
) -> IntArray:  # fmt: skip
    """Search from `choice` (which fits, at `cost`) for so many seconds, of wall clock or, where these are counted, of
    moves; `offer` is told what each round comes to that fits.

    prices: what the memory prices charge each choice (flat); total_price: their sum, per byte of the limit.
    """
    if not len(np.flatnonzero(np.diff(land.flat.base) > 1)):
        return choice
    counted = clock if clock is not None and clock.counts else None
    now = time.perf_counter if counted is None else counted
    end = now() + seconds
    over_price = OVER_PRICE * total_price or land.forbidden / max(land.limit, 1.0)
    annealers = [Annealer(land, seed + thread) for thread in range(threads)]
    turn = seed
    with ThreadPoolExecutor(threads) as pool:
        while (left := end - now()) > 0.01 * seconds and left > 0.05:
            charged = prices * PRICE_SCALES[turn % len(PRICE_SCALES)]
            uphill = annealers[0].uphill(choice, charged, over_price)
            if not len(uphill):
                uphill = np.array([abs(cost) * 1e-6 or 1.0])
            length = min(left, max(1.0, ROUND_SHARE * seconds * LONGER ** (turn // len(HOT_QUANTILES))))
            futures = []
            for number, annealer in enumerate(annealers):
                quantile = HOT_QUANTILES[(turn + number) % len(HOT_QUANTILES)]
                hot = float(np.quantile(uphill, quantile))
                futures.append(
                    pool.submit(annealer.round, choice, cost, charged, hot, over_price, length, counted is not None)
                )
            turn += 1
            if counted is not None:
                counted.spend(length)
            for found, value in sorted((future.result() for future in futures), key=lambda each: -each[1]):
                if value < np.inf:
                    offer(found, value)
                if value < cost:
                    choice, cost = found, value
    return choice
