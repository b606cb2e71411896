"""A step's seconds and bytes as formulas over what a search varies, compiled to numpy.

Symbols: p ranks of the pipeline, v stages of each, m microbatches; of the slowest rank and one microbatch, all its
stages together: F forward, B backward, of which I for inputs and W for weights; T the sum of F + B over all ranks' own;
c a message to the next rank; N filling and draining of interleaved stages, (p - 1)/v (F + B) where they are even; X
what a round of p microbatches stands still where they are not; U gathers and reductions once a step, O the optimizer.
Of the memory of rank r: Q all the time, A activations of one microbatch, Z what its input half leaves of them for the
weight half, K what computing one microbatch needs beside them, H what its input half does, with what it makes for the
weight half.

Sources: gpipe 1811.06965; 1f1b and interleaved 2104.04473; zero bubble (ZB-H1) and ZB-V 2401.10241; DualPipeV
2412.19437, whose forwards and backwards run one after the other here, as they do in a plan. Written with one microbatch
filling the pipeline: T through all ranks, then m - 1 times the slowest rank.

What zbv and dualpipev wait depends on which of F, I and W is longest; the literature gives it for F = I = W alone. The
formulas are those of the schedules as torch makes them: zbv's start, or where I or W is long, what it leaves; of
dualpipev the start, which forwards of both directions share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import sympy

p, v, m = sympy.symbols("p v m", integer=True, positive=True)
F, B, I, W, T, c, N, X, U, O = sympy.symbols("F B I W T c N X U O", nonnegative=True)  # noqa: E741 (as in the literature)
r = sympy.symbols("r", integer=True, nonnegative=True)
Q, A, Z, K, H = sympy.symbols("Q A Z K H", nonnegative=True)

_FILL = T + 2 * (p - 1) * c
_TRIPS = (2 * p - 3) / (p - 1)
"""Messages that a microbatch waits for in the steady state of 1f1b: as many as there are in p - 1 round trips."""
_ROUND = sympy.Piecewise((B / v + (2 * v - 1) * c, p < 3), (B + v * c, True))
_EACH: Mapping[str, sympy.Expr] = {
    "1f1b": F + B + _TRIPS * c,
    "interleaved": sympy.Max(F + B, _ROUND),
    "zero_bubble": sympy.Max(F + B, F + I + _TRIPS * c),
    "zbv": sympy.Max(F + I + W, sympy.Max(F, I) + 2 * c),
    "dualpipev": F + I + W + _TRIPS * sympy.Max(c, 2 * c - F / 2),
}
"""Schedule -> seconds that one more microbatch takes: of computing, or of messages where these are slower. The latter
are what simulated schedules take (tests/unit/searching), for all c.
"""
SECONDS: Mapping[str, sympy.Expr] = {
    "1f1b": _FILL + (m - 1) * _EACH["1f1b"] + U + O,
    "interleaved": m * _EACH["interleaved"] + N + 2 * (p * v - 1) * c + (m / p - 1) * X + U + O,
    "zero_bubble": m * _EACH["zero_bubble"] + sympy.Max(0, (p - 1) * (F + I - W)) + 2 * (p - 1) * c + U + O,
    "zbv": m * _EACH["zbv"] + (p - 1) * sympy.Max(F / 2, I / 2, I - W) + (5 * p - 7) * c + U + O,
    "dualpipev": m * _EACH["dualpipev"]
    + sympy.Max((p - 1) * F, (p - 1) * (F + I + sympy.Max(0, F - W)) / 2, (p - 1) * (I + (F - W) / 2) - F / 2)
    + 2 * (p - 1) * c
    + U
    + O,
}
"""Schedule -> seconds of a step."""
_HELD = sympy.Min(m, p - r)
BYTES: Mapping[str, sympy.Expr] = {
    "1f1b": Q + _HELD * A + K,
    "interleaved": Q + sympy.Min(m * v, 2 * (p - r - 1) + (v - 1) * p + 1) * A / v + K,
    # As many microbatches wait for their weight halves as 1f1b holds less than on the first rank.
    "zero_bubble": Q
    + sympy.Max(
        _HELD * A + sympy.Min(m - _HELD, r) * Z + sympy.Max(K, H),
        (_HELD - 1) * A + sympy.Min(m - _HELD + 1, r + 1) * Z + K,
    ),
    # All ranks hold alike: what some hold more of first stages, they hold less of last ones. What waits for its weight
    # half counts where it takes more than activations do (recomputed ones).
    "zbv": Q + sympy.Min(m, p) * A + sympy.Max(0, r * (Z - A) - (p - r) * A / 2) + sympy.Max(K, H),
    "dualpipev": Q
    + sympy.Max((p + sympy.Rational(1, 2)) * A + K, p * A + sympy.Max(0, r * (Z - A) - p * A) / 2 + sympy.Max(K, H)),
}
"""Schedule -> bytes of a rank; of those whose stages go one way the first one holds most microbatches."""
_OF_SECONDS = (p, v, m, F, B, I, W, T, c, N, X, U, O)
_OF_BYTES = (p, v, m, r, Q, A, Z, K, H)


@functools.cache
def compiled(schedule: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(seconds, bytes) of a schedule over numpy arrays, in the order of `_OF_SECONDS` and `_OF_BYTES`."""
    seconds, size = SECONDS[schedule], BYTES[schedule]
    return sympy.lambdify(_OF_SECONDS, seconds, "numpy"), sympy.lambdify(_OF_BYTES, size, "numpy")
