"""Consecutive calls that the step's functions write as one loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.ir import Call, Program


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive calls of one region, written as one call or as one loop.

    carried: input position -> result position that the next call reads there.
    """

    first: int
    count: int
    carried: dict[int, int] = field(default_factory=dict)

    @property
    def last(self) -> int:
        return self.first + self.count - 1


def segments(program: Program) -> list[Segment]:
    """The calls as runs: the longest loops that mean the same."""
    found: list[Segment] = []
    start = 0
    while start < len(program.calls):
        segment = Segment(start, 1)
        for count in range(2, len(program.calls) - start + 1):
            carried = _carried(program, start, count)
            if carried is None:
                break
            segment = Segment(start, count, carried)
        while segment.count > 1 and not _is_closed(program, segment):
            segment = Segment(start, segment.count - 1, segment.carried)
        found.append(segment if segment.count > 1 else Segment(start, 1))
        start += segment.count
    return found


def _carried(program: Program, start: int, count: int) -> dict[int, int] | None:
    """What one call hands to the next, if `count` calls from `start` are one loop."""
    calls = program.calls[start : start + count]
    first = calls[0]
    region = program.region(first.region)
    if any(call.region != first.region for call in calls) or not region.module or numbers_of(calls) is None:
        return None
    carried: dict[int, int] = {}
    for position in range(len(first.arguments)):
        refs = [call.arguments[position] for call in calls]
        steps = {ref.index for i, ref in enumerate(refs[1:]) if ref.call == start + i}
        if all(ref.call == start + i for i, ref in enumerate(refs[1:])) and len(steps) == 1:
            carried[position] = steps.pop()
        elif any(ref != refs[0] for ref in refs):
            return None
    for i, slot in enumerate(region.slots):
        names = [call.slots[i] for call in calls]
        if (
            any(name != f"{call.path}.{slot.name}" for name, call in zip(names, calls, strict=True))
            and len(set(names)) > 1
        ):
            return None
    return carried if set(region.tangents) <= set(carried.values()) or not region.tangents else None


def numbers_of(calls: Sequence[Call]) -> tuple[str, int] | None:
    """The common prefix and the first number, when paths are `prefix.n`, `prefix.n+1`, …"""
    parts = [call.path.rsplit(".", 1) for call in calls]
    if any(len(part) != 2 or not part[1].isdigit() for part in parts) or len({part[0] for part in parts}) > 1:
        return None
    first = int(parts[0][1])
    return (parts[0][0], first) if all(int(part[1]) == first + i for i, part in enumerate(parts)) else None


def _is_closed(program: Program, segment: Segment) -> bool:
    """Whether nothing outside the loop reads a result of any call but the last."""
    inner = range(segment.first, segment.last)
    inside = range(segment.first, segment.first + segment.count)
    readers = [(i, ref) for i, call in enumerate(program.calls) for ref in call.arguments]
    readers += [(-1, ref) for ref in program.outputs]
    if updates_alike(program, segment) is None:
        return False
    for reader, ref in readers:
        if ref.call in inner and (reader not in inside or ref.index not in segment.carried.values()):
            return False
    return True


def updates_alike(program: Program, segment: Segment) -> list[tuple[int, str]] | None:
    """Result positions and the buffers that they replace, below the block's path; None where the calls do not agree."""
    calls = range(segment.first, segment.first + segment.count)
    found: dict[tuple[int, str], int] = {}
    for name, ref in program.updates:
        if ref.call in calls:
            path = f"{program.calls[ref.call].path}."
            if not name.startswith(path):
                return None
            key = (ref.index, name.removeprefix(path))
            found[key] = found.get(key, 0) + 1
    return list(found) if all(count == segment.count for count in found.values()) else None
