"""Whether what the ranks are about to send fits together: the same collectives, and of each pair the same messages."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from autopar.base.errors import AutoparError
from autopar.runtime.communicator import Communicator
from autopar.runtime.event import Event
from autopar.runtime.pieces import coordinates

Key = tuple[str, int, str]
"""A sequence that must agree with another rank's: all collectives ("", -1, ""), those over one axis (axis, -1, ""), the
messages to or from a place of an axis (axis, place, "send" or "receive").
"""
_ALL: Key = ("", -1, "")


def sequences(events: Sequence[Event]) -> dict[Key, list[tuple[str, str]]]:
    """Each sequence of a rank's events: what the other rank must say too, and the event in words."""
    found: dict[Key, list[tuple[str, str]]] = {}
    for event in events:
        if event.peer >= 0:
            # A message is called the same on both sides, its action is not.
            entry = (f"{event.tag} {event.dtype} {event.shape}", str(event))
            found.setdefault((event.axis, event.peer, event.kind), []).append(entry)
        else:
            found.setdefault(_ALL, []).append((str(event), str(event)))
            found.setdefault((event.axis, -1, ""), []).append((str(event), str(event)))
    return found


def digests(events: Sequence[Event]) -> dict[Key, str]:
    """A short text for each sequence; equal where they agree."""
    return {
        key: hashlib.sha256("\n".join(said for said, _ in found).encode()).hexdigest()
        for key, found in sequences(events).items()
    }


def first_difference(
    comm: Communicator, axis: str, orders: Sequence[Mapping[Key, str]]
) -> tuple[int, Key, int, Key] | None:
    """Two ranks, and of each the sequence that does not agree with the other's. axis: the pipeline's, or "".

    Ranks of one stage issue the same collectives, all ranks the same over the pipeline's axis; what one sends to
    another, over whichever axis, that one receives in this order.
    """
    places = [dict(zip(comm.axes, coordinates(rank, comm.sizes), strict=True)) for rank in range(len(orders))]
    first_of: dict[int, int] = {}
    for rank, place in enumerate(places):
        first = first_of.setdefault(place.get(axis, 0), rank)
        pairs = [(first, _ALL, rank, _ALL), (0, (axis, -1, ""), rank, (axis, -1, ""))]
        stride = len(orders)
        for other_axis, size in zip(comm.axes, comm.sizes, strict=True):
            stride, here = stride // size, place[other_axis]
            for peer in range(size):
                other = rank + (peer - here) * stride
                pairs.append((rank, (other_axis, peer, "send"), other, (other_axis, here, "receive")))
        for one, key, other, other_key in pairs:
            if orders[one].get(key) != orders[other].get(other_key):
                return one, key, other, other_key
    return None


def report_difference(
    difference: tuple[int, Key, int, Key], found: Sequence[Mapping[Key, Sequence[tuple[str, str]]]]
) -> None:
    """The first place where two ranks' sequences differ.

    Raises:
        AutoparError: always; names both ranks and what each is about to do.
    """
    rank, key, other, other_key = difference
    nothing = ("nothing", "nothing")
    both = zip_longest(found[rank].get(key, ()), found[other].get(other_key, ()), fillvalue=nothing)
    place, (mine, theirs) = next((i, pair) for i, pair in enumerate(both) if pair[0][0] != pair[1][0])
    does, what = ("exchange", "message") if key[1] >= 0 else ("issue", "collective")
    raise AutoparError(
        f"ranks {rank} and {other} would {does} different {what}s",
        where=f"{what} {place} of the step",
        values=f"rank {rank}: {mine[1]}; rank {other}: {theirs[1]}",
        remedy="Give every rank the same program and schedule; a program must not branch on the rank",
    )
