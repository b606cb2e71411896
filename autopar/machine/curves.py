"""Curves of a hardware profile: what fraction of the peak a product, an attention or a copy of some size reaches."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

Points = tuple[tuple[float, float], ...]
"""(x, y), ascending in x, all positive."""


def interpolate(points: Points, x: float) -> float:
    """y at x: linear in log x and log y between points, the nearest point's y outside of them."""
    if x <= points[0][0]:
        return points[0][1]
    if x >= points[-1][0]:
        return points[-1][1]
    right = bisect_right(points, x, key=lambda point: point[0])
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    share = math.log(x / x0) / math.log(x1 / x0)
    return float(y0 ** (1.0 - share) * y1**share)


TILES = (
    (256, 128, 1.0), (128, 256, 1.0), (128, 128, 1.1), (128, 64, 1.35), (64, 128, 1.35), (64, 64, 1.9), (32, 64, 2.3),
    (16, 64, 3.0),
)  # fmt: skip
"""Tiles of cuBLAS's kernels (rows, columns), largest and fastest first (NVIDIA, Matrix Multiplication Background User's
Guide, section 2.3; those of few rows for products of few), and how much longer an element of them takes than one of the
largest: estimates.
"""
FULL_AREA = 2.0
"""Results of fewer `half_area`s leave multiprocessors idle: on an H100 (132, 700,000) those of less than a tile of
128 x 83 each. An estimate; cuBLAS on a B200 does not split 2048 cubed, which is 2.1 of them.
"""
FEW_ROWS = 64
"""Of a product or an attention, which kernels serve that share out the summed dim, or the keys, evenly: one tile's
(FlashAttention, flash_fwd_launch_template.h, split-KV).
"""
SPLIT_SLOWER = 2.0
"""How much longer a product of more rows takes whose summed dim is cut, as parts are written and added up: estimate."""


@dataclass(frozen=True, slots=True)
class MatmulCurve:
    """The time of products [batch, m, k] @ [batch, k, n]: 2·batch·m·n·k FLOPs at peak · efficiency, times
    (1 + half_m/m)·(1 + half_n/n)·(1 + half_k/k)·(1 + half_area/(batch·m·n)).

    launch_s: what each call takes beside a kernel's launch (a library that prepares each product).

    A dim of the size half_d takes twice as long as its FLOPs alone: tiles that it does not fill, a pipeline that it
    does not keep going (k), cores that get no tile (area). Where `multiprocessors` are given, these take one tile each,
    wave by wave, and the last wave takes as long as a full one (the guide's section 3.2): 336 tiles on 108 take four
    waves, not 3.1.

    split_k: where results are so small that not every multiprocessor gets a tile, the summed dim is cut into as many
    parts as give each one (split-K: CUTLASS, Efficient GEMM in CUDA), none shorter than this; 0: never. So a product of
    few rows takes what its weights take to be read.
    """

    efficiency: float
    half_m: float = 0.0
    half_n: float = 0.0
    half_k: float = 0.0
    half_area: float = 0.0
    launch_s: float = 0.0
    multiprocessors: float = 0.0
    split_k: float = 0.0

    def slowdown(self, m: float, n: float, k: float, batch: float) -> float:
        """How much longer than at peak · efficiency; at least 1."""
        fill = (1.0 + self.half_m / m) * (1.0 + self.half_n / n)
        if self.multiprocessors:
            return fill * (1.0 + self.half_k / k) * self._waves(m, n, k, batch)
        return fill * self._parts(m, n, k, batch)

    def _parts(self, m: float, n: float, k: float, batch: float) -> float:
        """How much longer a product takes by its summed dim and its area, in as many parts as suit it best."""
        area = batch * m * n
        alone = (1.0 + self.half_k / k) * (1.0 + self.half_area / area)
        if not self.split_k or area >= FULL_AREA * self.half_area:
            return alone
        most = max(1.0, min(FULL_AREA * self.half_area / area, k / self.split_k))
        tried = (max(1.0, most / by) for by in (1, 2, 4, most))
        least = min((1.0 + self.half_k * p / k) * (1.0 + self.half_area / (area * p)) for p in tried)
        if min(m, n) <= FEW_ROWS:  # shared out evenly, step by step
            least = min(least, (1.0 + self.half_k / self.split_k) * (1.0 + 1.0 / FULL_AREA))
        return least

    def _waves(self, m: float, n: float, k: float, batch: float) -> float:
        """How much longer than if all multiprocessors were busy all the time, with the tiles for which it is least."""
        least = math.inf
        for rows, columns, slower in TILES:
            tiles = math.ceil(m / rows) * math.ceil(n / columns) * batch
            waves: float = math.ceil(tiles / self.multiprocessors)
            if self.split_k:
                shared = max(tiles / self.multiprocessors, self.split_k / k)
                waves = min(waves, shared * (1.0 if min(m, n) <= FEW_ROWS else SPLIT_SLOWER))
            least = min(least, waves * self.multiprocessors * rows * columns * slower)
        return least / (m * n * batch)


@dataclass(frozen=True, slots=True)
class AttentionCurve:
    """The fraction of the peak that attention reaches, by head size and by the keys that a query sees on the average.

    causal, full: by head size, ascending: (keys, fraction); full: where every query sees all keys. half_rows: with so
    many rows (batch · heads · queries) it takes twice as long, as cores get none; not where queries are few and kernels
    cut the keys instead (Dao et al., Flash-Decoding, 2023).
    """

    causal: tuple[tuple[int, Points], ...]
    full: tuple[tuple[int, Points], ...] = ()
    half_rows: float = 0.0

    def fraction(self, rows: float, seen: float, head_size: float, sees_all: bool) -> float:
        """Of the peak. rows: batch · heads · queries, local. seen: keys that a query sees, on the average."""
        tables = self.full if sees_all and self.full else self.causal
        return _between(tables, head_size, seen) / (1.0 + self.half_rows / max(rows, 1.0))


def _between(tables: Sequence[tuple[int, Points]], head_size: float, seen: float) -> float:
    """Between the tables of two head sizes as between two points."""
    at = tuple((float(size), interpolate(points, seen)) for size, points in tables)
    return interpolate(at, head_size)
