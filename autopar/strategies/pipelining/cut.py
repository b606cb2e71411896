"""Where a list of calls is cut into the stages of a pipeline, on plain numbers.

The slowest stage sets the pace: `best_cut` finds the contiguous cut whose slowest stage is fastest, exactly, by dynamic
programming over the calls (as PipeDream does, Harlap et al., 1806.03377). `refine` then moves boundaries while a
simulated step becomes shorter: the first and the last stages cost a schedule more than those between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.base.errors import AutoparError, DoesNotFit

Cut = tuple[int, ...]
"""The first call of each stage; 0 first, increasing."""

Fits = Callable[[int, int, int], bool]
"""fits(stage, first, stop): whether calls first … stop-1 fit the memory of the rank that runs this stage. A part
of what fits must fit too.
"""

_SAME = 1e-12
"""Seconds that differ by less than this part are the same: sums of the same numbers in another order."""


def best_cut(
    seconds: Sequence[float], num_stages: int, fits: Fits | None = None, extra: Sequence[float] | None = None
) -> Cut:
    """The cut into stages whose slowest stage is fastest; of those the most even one (the smallest sum of squares),
    of those the one whose stages end first.

    Args:
        seconds: of each call, not negative. extra: seconds that a stage takes longer when it begins at a call (what it
            receives there); the first stage receives nothing.

    Returns:
        The first call of each stage. O(stages · calls²) in numpy: a second for 1000 calls in 128 stages.

    Raises:
        AutoparError: more stages than calls. DoesNotFit: no cut fits.
    """
    if not 1 <= num_stages <= len(seconds):
        raise AutoparError(
            f"{len(seconds)} calls cannot be cut into {num_stages} stages",
            values="each stage runs one call or more; a call is a block of the model, or what lies between blocks",
            remedy=f"use 1 to {len(seconds)} stages: a smaller pipeline axis, or fewer stages a rank",
        )
    times = _stage_seconds(seconds, extra)
    cut = _most_even(times, num_stages, None)
    if fits is None or all(fits(stage, *bounds) for stage, bounds in enumerate(ranges(cut, len(seconds)))):
        return cut
    reach = np.array([_reach(fits, stage, len(seconds)) for stage in range(num_stages)])
    return _most_even(times, num_stages, reach)


def ranges(cut: Sequence[int], num_calls: int) -> Iterator[tuple[int, int]]:
    """(first, stop) of each stage."""
    return zip(cut, (*cut[1:], num_calls), strict=True)


def _stage_seconds(seconds: Sequence[float], extra: Sequence[float] | None) -> NDArray[np.float64]:
    """[first, stop] -> seconds of a stage; infinite where it would be empty."""
    total = np.concatenate([[0.0], np.cumsum(np.asarray(seconds, dtype=np.float64))])
    begin = np.zeros(len(total))
    begin[1:-1] = 0.0 if extra is None else np.asarray(extra, dtype=np.float64)[1:]
    times = total[None, :] - total[:, None] + begin[:, None]
    return np.where(np.tri(len(total), dtype=bool), np.inf, times)


def _reach(fits: Fits, stage: int, num_calls: int) -> list[int]:
    """For each first call, where a stage must stop at the latest; the first call itself where it does not fit alone."""
    found: list[int] = []
    stop = 0
    for first in range(num_calls):
        stop = max(stop, first)
        while stop < num_calls and fits(stage, first, stop + 1):
            stop += 1
        found.append(stop)
    return found


def _most_even(times: NDArray[np.float64], num_stages: int, reach: NDArray[np.int64] | None) -> Cut:
    """The best cut over stages that may stop no later than `reach[stage, first]`."""
    size = len(times)
    stops = np.arange(size)

    def allowed(stage: int, values: NDArray[np.float64]) -> NDArray[np.float64]:
        if reach is None:
            return values
        limits = np.append(reach[stage], size)
        return np.where(stops[None, :] <= limits[:, None], values, np.inf)

    slowest = np.full(size, np.inf)
    slowest[0] = 0.0
    for stage in range(num_stages):
        slowest = np.maximum(slowest[:, None], allowed(stage, times)).min(axis=0)
    if not np.isfinite(slowest[-1]):
        assert reach is not None
        raise _does_not_fit(reach)
    squares = np.where(times <= slowest[-1] * (1 + _SAME), times**2, np.inf)
    # From the end, so that the first choice below is among what still gives the best.
    rest = np.full((num_stages + 1, size), np.inf)
    rest[num_stages, -1] = 0.0
    for stage in reversed(range(num_stages)):
        rest[stage] = (allowed(stage, squares) + rest[stage + 1][None, :]).min(axis=1)
    cut = [0]
    for stage in range(num_stages - 1):
        first = cut[-1]
        sums = allowed(stage, squares)[first] + rest[stage + 1]
        cut.append(int(np.argmax(sums <= rest[stage, first] * (1 + _SAME))))
    return tuple(cut)


def _does_not_fit(reach: NDArray[np.int64]) -> DoesNotFit:
    num_stages, num_calls = reach.shape
    alone = [call for call in range(num_calls) if (reach[:, call] == call).all()]
    most = ", ".join(str(int((row - np.arange(num_calls)).max())) for row in reach[:8])
    values = f"The most calls that fit, stage by stage: {most}{', ...' if num_stages > 8 else ''}"
    if alone:
        values = f"Call {alone[0]} does not fit on any stage, not even alone"
    return DoesNotFit(
        f"no cut of {num_calls} calls into {num_stages} stages fits the memory",
        values=values,
        remedy="split stages over more ranks (tp, dp), use more stages, smaller microbatches, or recompute more",
    )


def refine(cut: Sequence[int], num_calls: int, makespan: Callable[[Cut], float], evaluations: int = 200) -> Cut:
    """Move boundaries while the makespan falls: one by one or two calls, then neighbouring ones together by one call,
    which takes a call from one stage and gives it to another one farther away.

    Args:
        makespan: seconds of a simulated step; infinite for a cut that does not fit. Called at most `evaluations` times,
            once for each cut.
    """
    best = tuple(cut)
    known = {best: makespan(best)}
    improved = True
    while improved:
        improved = False
        for moved in _neighbours(best, num_calls):
            if moved in known:
                continue
            if len(known) >= evaluations:
                return best
            known[moved] = makespan(moved)
            if known[moved] < known[best] * (1 - _SAME):
                best, improved = moved, True
                break
    return best


def _neighbours(cut: Cut, num_calls: int) -> Iterator[Cut]:
    """Cuts that differ by a move, the smallest moves first."""
    places = range(1, len(cut))
    moves = [(place, place, step) for step in (1, -1, 2, -2) for place in places]
    moves += [(first, last, step) for last in places for first in places if first < last for step in (1, -1)]
    for first, last, step in moves:
        moved = tuple(at + step if first <= place <= last else at for place, at in enumerate(cut))
        if all(a < b for a, b in zip(moved, (*moved[1:], num_calls), strict=True)):
            yield moved
