"""What the doctor says of one thing."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from autopar.runtime.watch.late import ranks_text

State = Literal["ok", "note", "off"]
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Finding:
    """name: of the thing. state: "note" is worth knowing, "off" is to be mended. said: what is so. remedy: what helps,
    where something is off.
    """

    name: str
    state: State
    said: str
    remedy: str = ""


def ok(name: str, said: str) -> Finding:
    """It is as it should be."""
    return Finding(name, "ok", said)


def note(name: str, said: str) -> Finding:
    """It need not be mended."""
    return Finding(name, "note", said)


def off(name: str, said: str, remedy: str) -> Finding:
    """It is to be mended."""
    return Finding(name, "off", said, remedy)


def by_value(each: Sequence[T], value: Callable[[T], K]) -> Mapping[K, list[int]]:
    """Which ranks have which value; what most have comes first."""
    found: dict[K, list[int]] = {}
    for rank, one in enumerate(each):
        found.setdefault(value(one), []).append(rank)
    return dict(sorted(found.items(), key=lambda pair: -len(pair[1])))


def who(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """`rank 3 (node-7)`, or without the machine where all are on one."""
    names = sorted({hosts[rank] for rank in ranks})
    if len(set(hosts)) == 1:
        return ranks_text(ranks)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{ranks_text(ranks)} ({', '.join(names[:3])}{more})"


def are(ranks: Sequence[int]) -> str:
    """The verb for so many."""
    return "is" if len(ranks) == 1 else "are"


def size(num_bytes: float) -> str:
    """In the words of people."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes / 1024:.3g} KiB"
