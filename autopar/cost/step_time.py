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
from typing import Literal, NamedTuple

from autopar.cost.collectives import Collective

Lane = Literal["node", "network"]


class Message(NamedTuple):
    """One collective of a bucket: on which lane, and seconds. row: what it is; None where nobody asks."""

    lane: Lane
    seconds: float
    row: Collective | None = None


Chain = tuple[Message, ...]
"""The collectives of one bucket, one after the other."""

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
class Phase:
    """One call's forward, or backward; or the reductions at the end of a step. call: its number, -1 at the end."""

    name: Literal["forward", "backward", "reduce"]
    call: int
    microbatch: int
    seconds: float
    inside: Mapping[Lane, float]
    before: tuple[Chain, ...]
    after: tuple[Chain, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """What one walk over the phases saw: a phase that computes, or what travels for it (`message`, before or after it).

    Seconds from the step's start. A phase's end has in it what it takes longer beside what travels (`slowdown`).
    """

    phase: Phase
    start_s: float
    end_s: float
    message: Message | None = None


@dataclass(frozen=True, slots=True)
class Walk:
    """A step as it was simulated. seconds: of all microbatches. events: of the `simulated` ones; `repeated` more,
    `period_s` each, come before the last of them.
    """

    seconds: float
    events: tuple[Event, ...]
    simulated: int
    repeated: int
    period_s: float


def step_walk(
    calls: Sequence[CallTime],
    *,
    microbatches: int,
    prefetch: bool,
    at_end: bool,
    training: bool,
    slowdown: float = 0.0,
    events: bool = True,
) -> Walk:
    """A step of these calls, in order.

    prefetch, at_end: as of `ir.Overlap`. slowdown: as of `Hardware.overlap_slowdown`. events: False for the seconds
    alone.
    """
    seen: list[Event] | None = [] if events else None
    simulated = min(microbatches, REPEATED)
    rest = microbatches - simulated
    last = _simulated(_phases(calls, simulated, at_end, training), prefetch, slowdown, seen)
    period = 0.0
    if rest:
        period = last - _simulated(_phases(calls, simulated - 1, at_end, training), prefetch, slowdown, None)
    return Walk(last + rest * period, tuple(seen or ()), simulated, rest, period)


def _phases(calls: Sequence[CallTime], microbatches: int, at_end: bool, training: bool) -> list[Phase]:
    """Every call's forward and backward in order; reductions at the end stand behind the last one."""
    phases: list[Phase] = []
    for number in range(microbatches):
        first, last = number == 0, number == microbatches - 1
        phases += [
            Phase("forward", i, number, c.forward_s, c.forward_inside, c.gather + c.once * first, ())
            for i, c in enumerate(calls)
        ]
        for i in range(len(calls) - 1, -1, -1) if training else ():
            c = calls[i]
            after = c.reduce if last and not at_end else ()
            phases.append(Phase("backward", i, number, c.backward_s, c.backward_inside, c.again, after))
    if training and at_end and phases:
        reduced = tuple(chain for call in reversed(calls) for chain in call.reduce)
        phases.append(Phase("reduce", -1, microbatches - 1, 0.0, {}, (), reduced))
    return phases


def _simulated(phases: Sequence[Phase], prefetch: bool, slowdown: float, seen: list[Event] | None) -> float:
    """Seconds until everything is through. seen: gets all that happens, unless it is None."""
    lanes = _Lanes(seen)
    ready = lanes.send(phases[0], phases[0].before, 0.0) if phases else 0.0
    now = 0.0
    for place, phase in enumerate(phases):
        begin = max(now, ready)
        following = phases[place + 1] if place + 1 < len(phases) else None
        lanes.busy(phase.inside)
        if prefetch and following is not None:
            ready = lanes.send(following, following.before, begin)
        now = begin + phase.seconds + slowdown * lanes.beside(begin, phase)
        if seen is not None and phase.call >= 0:
            seen.append(Event(phase, begin, now))
        if not prefetch and following is not None:
            ready = lanes.send(following, following.before, now)
        done = lanes.send(phase, phase.after, now)
        if not prefetch:
            ready, now = max(ready, done), max(now, done)
    return max(now, lanes.end)


class _Lanes:
    """When each lane is free again. seen: as of `_simulated`."""

    def __init__(self, seen: list[Event] | None) -> None:
        self.free: dict[Lane, float] = {"node": 0.0, "network": 0.0}
        self.held: dict[Lane, float] = {}
        self.seen = seen

    def busy(self, inside: Mapping[Lane, float]) -> None:
        """A call's own collectives use the lanes for so long while it runs."""
        self.held = dict(inside)

    def send(self, phase: Phase, chains: Sequence[Chain], start: float) -> float:
        """Send a phase's chains from `start` on; when the last one has come."""
        last = start
        free, held, seen = self.free, self.held, self.seen
        for chain in chains:
            at = start
            for message in chain:
                lane, seconds, _ = message
                if free[lane] > at:
                    at = free[lane]
                at += seconds
                if lane in held:
                    at += held.pop(lane)
                free[lane] = at
                if seen is not None:
                    seen.append(Event(phase, at - seconds, at, message))
            if at > last:
                last = at
        return last

    def beside(self, begin: float, phase: Phase) -> float:
        """Seconds of a phase in which something travels that is not its own."""
        inside = phase.inside
        taken = (min(free, begin + phase.seconds) - begin - inside.get(lane, 0.0) for lane, free in self.free.items())
        return max(0.0, *taken)

    @property
    def end(self) -> float:
        return max(self.free.values())
