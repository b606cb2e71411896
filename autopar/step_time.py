"""How long a step takes whose parameters are gathered and whose gradients are reduced beside the compute.

A rank computes its calls one after the other, forward and then backward; collectives inside a call wait for each other
as operators do. Gathers and reductions travel on lanes, one for links inside a node and one for the network:

- with prefetch, the next call's gathers start when a call starts, and a call starts when its own have come;
- a call's reductions start when its backward is through, in the last microbatch's, or at the end of the step;
- what a lane carries waits while a call's own collectives use the same lane;
- while something travels beside a call, its compute takes longer by a fraction of that time (`slowdown`): collectives
  run on multiprocessors too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Lane = Literal["node", "network"]
Chain = tuple[tuple[Lane, float], ...]
"""The collectives of one bucket, one after the other: on which lane, and seconds."""

REPEATED = 3
"""Microbatches that are simulated; any more of them take as long as the last one but one did."""


@dataclass(frozen=True, slots=True)
class CallTime:
    """Seconds of one call. forward_s, backward_s: operators and the collectives among them, of which `forward_inside`
    and `backward_inside` say the lanes. once: gathers of the first use in a step; gather, again: of each use, in the
    forward and in the backward; reduce: of gradients, once a step.
    """

    forward_s: float
    backward_s: float
    forward_inside: Mapping[Lane, float] = field(default_factory=dict)
    backward_inside: Mapping[Lane, float] = field(default_factory=dict)
    once: tuple[Chain, ...] = ()
    gather: tuple[Chain, ...] = ()
    again: tuple[Chain, ...] = ()
    reduce: tuple[Chain, ...] = ()


@dataclass(slots=True)
class _Phase:
    """One call's forward, or backward."""

    seconds: float
    inside: Mapping[Lane, float]
    before: tuple[Chain, ...]
    after: tuple[Chain, ...]


def step_seconds(
    calls: Sequence[CallTime],
    *,
    microbatches: int,
    prefetch: bool,
    at_end: bool,
    training: bool,
    slowdown: float = 0.0,
) -> float:
    """Seconds of a step of these calls, in order.

    prefetch, at_end: as of `ir.Overlap`. slowdown: as of `Hardware.overlap_slowdown`.
    """
    simulated = min(microbatches, REPEATED)
    counts = range(max(1, simulated - 1), simulated + 1)
    lengths = [_simulated(_phases(calls, each, at_end, training), prefetch, slowdown) for each in counts]
    rest = microbatches - simulated
    return lengths[-1] + (rest * (lengths[-1] - lengths[0]) if rest else 0.0)


def _phases(calls: Sequence[CallTime], microbatches: int, at_end: bool, training: bool) -> list[_Phase]:
    """Every call's forward and backward in order; reductions at the end stand behind the last one."""
    phases: list[_Phase] = []
    for number in range(microbatches):
        first, last = number == 0, number == microbatches - 1
        phases += [_Phase(c.forward_s, c.forward_inside, c.gather + c.once * first, ()) for c in calls]
        for c in reversed(calls) if training else ():
            phases.append(_Phase(c.backward_s, c.backward_inside, c.again, c.reduce * (last and not at_end)))
    if training and at_end and phases:
        reduced = tuple(chain for call in reversed(calls) for chain in call.reduce)
        phases.append(_Phase(0.0, {}, (), reduced))
    return phases


def _simulated(phases: Sequence[_Phase], prefetch: bool, slowdown: float) -> float:
    lanes = _Lanes()
    ready = lanes.send(phases[0].before, 0.0) if phases else 0.0
    now = 0.0
    for place, phase in enumerate(phases):
        begin = max(now, ready)
        following = phases[place + 1].before if place + 1 < len(phases) else ()
        lanes.busy(phase.inside)
        if prefetch:
            ready = lanes.send(following, begin)
        now = begin + phase.seconds + slowdown * lanes.beside(begin, phase)
        if not prefetch:
            ready = lanes.send(following, now)
        done = lanes.send(phase.after, now)
        if not prefetch:
            ready, now = max(ready, done), max(now, done)
    return max(now, lanes.end)


class _Lanes:
    """When each lane is free again."""

    def __init__(self) -> None:
        self.free: dict[Lane, float] = {"node": 0.0, "network": 0.0}
        self.held: Mapping[Lane, float] = {}

    def busy(self, inside: Mapping[Lane, float]) -> None:
        """A call's own collectives use the lanes for so long while it runs."""
        self.held = dict(inside)

    def send(self, chains: Sequence[Chain], start: float) -> float:
        """Send chains from `start` on; when the last one has come."""
        last = start
        for chain in chains:
            at = start
            for lane, seconds in chain:
                at = max(at, self.free[lane]) + seconds + self.held.get(lane, 0.0)
                self.held = {**self.held, lane: 0.0}
                self.free[lane] = at
            last = max(last, at)
        return last

    def beside(self, begin: float, phase: _Phase) -> float:
        """Seconds of a phase in which something travels that is not its own."""
        inside = phase.inside
        taken = (min(free, begin + phase.seconds) - begin - inside.get(lane, 0.0) for lane, free in self.free.items())
        return max(0.0, *taken)

    @property
    def end(self) -> float:
        return max(self.free.values())
