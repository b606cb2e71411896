"""From times to the numbers of a hardware profile. Pure: what is fitted here can be tested without a clock."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.cost.roofline import CollectiveKind, Work, collective_bytes, compute_time_s, num_steps
from autopar.machine.curves import MatmulCurve, Points, interpolate
from autopar.machine.hardware import Hardware

_FLOOR = 0.05
"""At least this part of a time is taken for work, however much of it launching seems to be."""
_SLOWER = 1.08
"""An operator that takes this much longer than the bytes it moves gets a number of its own."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed operator. kind: as in `calibration.cases`."""

    kind: str
    label: str
    work: Work
    seconds: float


@dataclass(frozen=True, slots=True)
class CollectiveSample:
    """One timed collective. section: `node` or `network`; num_bytes: as in `cost.collective_bytes`; n: ranks."""

    section: str
    kind: CollectiveKind
    n: int
    num_bytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Residual:
    """How far predictions are from what was measured: fractions of it, of so many times. where: the worst one."""

    name: str
    median: float
    worst: float
    count: int
    where: str = ""

    def __str__(self) -> str:
        worst = f"{self.worst:.0%} ({self.where})" if self.where else f"{self.worst:.0%}"
        return f"{self.name}: median error {self.median:.0%}, worst {worst}"


def working_s(seconds: float, launch_s: float) -> float:
    """A time without its launch."""
    return max(seconds - launch_s, _FLOOR * seconds)


# ------------------------------------------------------------------------------------------------------------- products


def fit_matmul(samples: Sequence[Sample], launch_s: float, points: Points) -> tuple[float, MatmulCurve]:
    """FLOP/s of large products, and the curve of efficiency 1 over them: least absolute errors of log time.

    points: of the memory; products that it limits are left out.
    """
    kept = [
        s for s in samples
        if s.work.moved_bytes / interpolate(points, s.work.moved_bytes) < 0.8 * working_s(s.seconds, launch_s)
    ] or list(samples)  # fmt: skip
    dims = np.array([s.work.dims for s in kept], dtype=float)
    sizes = np.stack([dims[:, 0], dims[:, 1], dims[:, 2], dims[:, 0] * dims[:, 1] * dims[:, 3]])
    flops, seconds = np.array([s.work.flops for s in kept]), np.array([s.seconds for s in kept])
    least = max(0.0, float(seconds.min()) - launch_s)
    tried = [_fit_matmul(sizes, flops, seconds, launch_s, part * least) for part in (0.0, 0.3, 0.5, 0.7, 0.85, 0.95)]
    _, top, curve = min(tried, key=lambda each: each[0])
    return top, curve


def _fit_matmul(
    sizes: NDArray[np.float64], flops: NDArray[np.float64], seconds: NDArray[np.float64], launch_s: float, own_s: float
) -> tuple[float, float, MatmulCurve]:
    """The mean error, FLOP/s of large products, and the curve, where each call takes own_s beside its launch."""
    speed = np.log(flops / np.maximum(seconds - launch_s - own_s, _FLOOR * seconds))
    halves = min((_descend(start, sizes, speed) for start in _STARTS), key=lambda found: _loss(found, sizes, speed))
    halves[halves < 1e-2 * sizes.min(1)] = 0.0
    slowdown = _log_slowdown(halves, sizes)
    top = float(np.exp(np.median(speed + slowdown)))
    predicted = launch_s + own_s + flops / top * np.exp(slowdown)
    error = float(np.abs(np.log(predicted / seconds)).mean())
    half_m, half_n, half_k, half_area = halves.tolist()
    return error, top, MatmulCurve(1.0, half_m, half_n, half_k, half_area, own_s)


_STARTS = ((1.0, 1.0, 1.0, 1.0), (16.0, 16.0, 16.0, 1.0), (1.0, 1.0, 64.0, 1e4), (64.0, 64.0, 64.0, 1e5))
"""Where the search for (half_m, half_n, half_k, half_area) begins."""


def _loss(halves: NDArray[np.float64], sizes: NDArray[np.float64], speed: NDArray[np.float64]) -> float:
    """The mean error of the log of the time, with the top speed that suits best."""
    top = speed + _log_slowdown(halves, sizes)
    return float(np.abs(top - np.median(top)).mean())


def _descend(start: Sequence[float], sizes: NDArray[np.float64], speed: NDArray[np.float64]) -> NDArray[np.float64]:
    """Levenberg and Marquardt's steps in the logs of the halves, reweighted so that absolute errors count."""
    logs: NDArray[np.float64] = np.log(np.array(start))
    damping = 1e-2
    for _ in range(200):
        tried = _stepped(logs, damping, sizes, speed)
        if _loss(np.exp(tried), sizes, speed) < _loss(np.exp(logs), sizes, speed):
            logs, damping = tried, max(damping / 3, 1e-9)
        else:
            damping *= 4
        if damping > 1e8:
            break
    halves: NDArray[np.float64] = np.exp(logs)
    return halves


def _stepped(
    logs: NDArray[np.float64], damping: float, sizes: NDArray[np.float64], speed: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Where one step leads. In a function of its own: Pyright tries types of a loop over arrays again and again."""
    halves = np.exp(logs)
    top = speed + _log_slowdown(halves, sizes)
    error = top - np.median(top)
    slopes = np.concatenate([halves[:, None] / (sizes + halves[:, None]), -np.ones((1, len(speed)))]).T
    weights = 1.0 / np.maximum(np.abs(error), 3e-3)
    system = slopes.T @ (weights[:, None] * slopes)
    system += damping * np.diag(np.diag(system) + 1e-6)
    step = np.linalg.solve(system, -slopes.T @ (weights * error))[:4]
    tried: NDArray[np.float64] = np.clip(logs + np.clip(step, -1.0, 1.0), np.log(1e-4), np.log(1e9))
    return tried


def _log_slowdown(halves: NDArray[np.float64], sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = np.log1p(halves[:, None] / sizes).sum(0)
    return found


# --------------------------------------------------------------------------------------------------- memory, attention


def fit_memory(samples: Iterable[Sample], launch_s: float) -> Points:
    """(bytes moved, bytes a second), ascending; sizes whose time is mostly launch are left out.

    Caches only help: beyond the fastest size none is slower than a larger one, so a time that something else disturbed
    does no harm.
    """
    found = []
    for sample in sorted(samples, key=lambda s: s.work.moved_bytes):
        if sample.seconds > 1.25 * launch_s:
            moved = sample.work.moved_bytes
            found.append((moved, moved / working_s(sample.seconds, launch_s)))
    if not found:
        raise ValueError("no time is longer than a launch")
    fastest = max(range(len(found)), key=lambda i: found[i][1])
    for i in range(len(found) - 2, fastest, -1):
        found[i] = (found[i][0], max(found[i][1], found[i + 1][1]))
    return tuple(found)


Attention = dict[str, dict[str, dict[int, list[tuple[float, float]]]]]
"""phase, "causal" or "full", head size: (keys seen, fraction of the peak)."""


def fit_attention(samples: Iterable[Sample], launch_s: float, peak: float) -> Attention:
    """The tables of attention: what was measured is what is interpolated."""
    found: Attention = {}
    for sample in samples:
        assert sample.work.dims is not None
        _, seen, head_size, sees_all = sample.work.dims
        phase = "forward" if sample.work.op_class == "attention" else "backward"
        phase += f"_{sample.work.variant}" * bool(sample.work.variant)
        table = found.setdefault(phase, {}).setdefault("full" if sees_all else "causal", {})
        speed = sample.work.flops / working_s(sample.seconds, launch_s)
        table.setdefault(int(head_size), []).append((seen, speed / peak))
    for tables in found.values():
        for sizes in tables.values():
            for rows in sizes.values():
                rows.sort()
    return found


# ------------------------------------------------------------------------------------------------------ other operators


def fit_operators(
    samples: Sequence[Sample], launch_s: float, points: Points
) -> tuple[dict[str, float], dict[str, float]]:
    """Rates and memory shares. A class reaches what its best operator does of the memory; an operator that is slower
    than that has a rate of its own in FLOP/s, or a share of its own where it counts no FLOPs.
    """
    shares: dict[str, float] = {}
    for sample in samples:
        reached = _memory_s(sample, points) / working_s(sample.seconds, launch_s)
        if sample.work.op_class in ("reduction", "gather"):
            shares[sample.work.op_class] = max(shares.get(sample.work.op_class, 0.0), reached)
    rates, own = {}, {}
    for sample in samples:
        taken = working_s(sample.seconds, launch_s)
        expected = _memory_s(sample, points) / shares.get(sample.work.op_class, 1.0)
        if taken > _SLOWER * expected and sample.work.flops:
            rates[sample.work.name] = sample.work.flops / taken
        elif taken > _SLOWER * expected:
            own[sample.work.name] = _memory_s(sample, points) / taken
    return rates, shares | own


def _memory_s(sample: Sample, points: Points) -> float:
    return sample.work.moved_bytes / interpolate(points, sample.work.moved_bytes)


# ---------------------------------------------------------------------------------------------------------- collectives


def fit_collective(samples: Sequence[CollectiveSample], launch_s: float) -> tuple[float, float]:
    """(seconds of a step, bytes a second) of one kind: seconds = launch + steps · latency + bytes sent / bandwidth.

    Least squares of relative errors, in which errors above a tenth count less (Huber); both positive.
    """
    steps: NDArray[np.float64] = np.array([float(num_steps(s.kind, s.n)) for s in samples])
    sent = np.array([collective_bytes(s.kind, s.num_bytes, s.n) for s in samples])
    seconds = np.array([s.seconds for s in samples])
    rest = np.maximum(seconds - launch_s, _FLOOR * seconds)
    weights = np.ones_like(seconds)
    latency, per_byte = 0.0, 0.0
    for _ in range(20):
        scale = np.sqrt(weights) / seconds
        latency, per_byte = _positive(steps * scale, sent * scale, rest * scale)
        error = np.abs(steps * latency + sent * per_byte - rest) / seconds
        weights = 1.0 / np.maximum(error, 0.1)
    least = 1e-9
    return max(latency, least), 1.0 / max(per_byte, 1e-15)


def _positive(a: NDArray[np.float64], b: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float]:
    """x, z ≥ 0 that bring x·a + z·b nearest to y, in the sense of least squares."""
    x, z = np.linalg.lstsq(np.stack([a, b], 1), y, rcond=None)[0]
    if x < 0:
        x, z = 0.0, float(b @ y) / float(b @ b)
    elif z < 0:
        x, z = float(a @ y) / float(a @ a), 0.0
    return float(x), float(z)


# ------------------------------------------------------------------------------------------------------------ residuals


def residuals(samples: Iterable[Sample], hardware: Hardware) -> list[Residual]:
    """How well the profile predicts what it was made from, by kind."""
    errors: dict[str, dict[str, float]] = {}
    for sample in samples:
        predicted = compute_time_s(sample.work, hardware)
        errors.setdefault(sample.kind, {})[sample.label] = abs(predicted / sample.seconds - 1.0)
    return [summary(name, each) for name, each in errors.items()]


def summary(name: str, errors: Mapping[str, float]) -> Residual:
    """The residual of these relative errors, by what they are of."""
    where = max(errors, key=lambda label: errors[label])
    return Residual(name, statistics.median(errors.values()), errors[where], len(errors), where)


def merge_ranks(times: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median over ranks of each time, by label."""
    return {label: statistics.median(each[label] for each in times) for label in times[0]}
