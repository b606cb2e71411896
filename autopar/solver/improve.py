"""Primal side of message passing: consistent rounding where plain rounding runs into a wall, and local search."""

from __future__ import annotations

import numpy as np

from autopar.solver.consistency import Network
from autopar.solver.forest import forest_pass, shuffled
from autopar.solver.messages import Messages
from autopar.solver.problem import BoolArray, FloatArray

MAX_SWEEPS = 20
TRIES_PER_NODE = 12


def round_consistently(messages: Messages, network: Network) -> list[int] | None:
    """Like `Messages.round`, forward, but every choice is followed by arc consistency, and retracted if a node empties.

    Without backtracking to earlier nodes: None does not mean that there is no choice.
    """
    alive: list[BoolArray] = [np.ones(len(costs), dtype=bool) for costs in messages.costs]
    choice = [0] * len(messages.nodes)
    for s in range(len(choice)):
        local = np.where(alive[s], messages.costs[s], np.inf)
        inward = messages.inward[s]
        if inward is not None:
            incoming = messages.values[inward]
            for port in messages.ahead[s]:
                local = local + incoming[port.row]
            for port in messages.behind[s]:
                local = local + messages.given(port, choice[port.other])
        for candidate in np.argsort(local, kind="stable")[:TRIES_PER_NODE]:
            if local[candidate] == np.inf:
                return None
            trial = list(alive)
            trial[s] = np.zeros_like(alive[s])
            trial[s][candidate] = True
            domains = network.propagate(trial, network.touching[s], none_empty=True)
            if domains.empty is None:
                alive, choice[s] = domains.alive, int(candidate)
                break
        else:
            return None
    return choice


def descend(messages: Messages, choice: list[int], patience: int, max_passes: int, worth: float) -> list[int]:
    """Local search on the priced costs, from a choice without forbidden pairs.

    Single moves, then, if they come to no more than `worth`, forest moves in ever new orders until `patience` of them
    in a row gain nothing (or `max_passes`).
    """
    best = single_moves(messages, list(choice))
    energy, idle = messages.energy(best), 0
    for seed in range(max_passes):
        if idle == patience or energy > worth:
            break
        moved = forest_pass(messages, best, shuffled(len(best), seed))
        now = messages.energy(moved)
        idle = 0 if now < energy - 1e-9 * abs(energy) else idle + 1
        if now <= energy:
            best, energy = moved, now
    return best


def single_moves(messages: Messages, choice: list[int]) -> list[int]:
    """Move one node at a time to its best choice (in place) until none can gain; equal costs go to the lower index."""
    waiting = set(range(len(choice)))
    for _ in range(MAX_SWEEPS):
        for s in sorted(waiting):
            waiting.discard(s)
            local = _local(messages, s, choice)
            best = int(local.argmin())
            now = choice[s]
            if best != now and (_lower(local[best], local[now]) or (best < now and local[best] == local[now])):
                choice[s] = best
                waiting.update(port.other for port in messages.ahead[s])
                waiting.update(port.other for port in messages.behind[s])
        if not waiting:
            break
    return choice


def _local(messages: Messages, s: int, choice: list[int]) -> FloatArray:
    local = messages.costs[s]
    for ports in (messages.behind[s], messages.ahead[s]):
        for port in ports:
            local = local + messages.given(port, choice[port.other])
    return local


def _lower(new: float, old: float) -> bool:
    return bool(new < old - 1e-12 * abs(old))
