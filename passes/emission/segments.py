"""Consecutive calls that the step's functions write as one loop."""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from autopar.ir.program import Program
from autopar.ir.region import Call


@dataclass(frozen=True, slots=True)
class Blocks:
    """The elements of a module list that a segment runs, and how the text writes their numbers.

    prefix: of their paths. parameter: the range that holds them, which the functions of a pipeline stage get; empty
    where the text says the numbers itself. offset: how many of that range come before. is_end: whether it ends here.
    """

    prefix: str
    first: int
    count: int
    parameter: str = ""
    offset: int = 0
    is_end: bool = True

    @property
    def numbers(self) -> str:
        """All of them, as Python text: `range(8)`, `layers`, `layers[1:]`."""
        if not self.parameter:
            return f"range({self.count})" if not self.first else f"range({self.first}, {self.first + self.count})"
        if self.is_end and not self.offset:
            return self.parameter
        return f"{self.parameter}[{self.offset or ''}:{'' if self.is_end else self.offset + self.count}]"

    @property
    def first_number(self) -> str:
        return f"{self.parameter}[{self.offset}]" if self.parameter else str(self.first)

    @property
    def last_number(self) -> str:
        if not self.parameter:
            return str(self.first + self.count - 1)
        return f"{self.parameter}[{-1 if self.is_end else self.offset + self.count - 1}]"


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive calls of one region, written as one call or as one loop.

    carried: input position -> result position that the next call reads there. blocks: of a loop, and of a call whose
    number is a parameter of the functions.
    """

    first: int
    count: int
    carried: dict[int, int] = field(default_factory=dict)
    blocks: Blocks | None = None
    is_loop: bool = False

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
        found.append(_as_loop(program, segment) if segment.count > 1 else Segment(start, 1))
        start += segment.count
    return found


def stage_segments(
    program: Program, calls: Sequence[int], loops: Sequence[Segment]
) -> tuple[list[Segment], dict[str, range]]:
    """The calls of one pipeline stage as runs: the pieces of the program's loops, each a loop however short.

    Args:
        loops: `segments` of the program.

    Returns:
        The segments, and the ranges that their blocks' numbers are taken from, by the names of these parameters. Only
        calls of a region that occurs once say their numbers themselves, so that the text serves other stages too.
    """
    pieces: list[Segment] = []
    wanted = set(calls)
    for whole in loops:
        inside = [number for number in range(whole.first, whole.last + 1) if number in wanted]
        for first, count in _runs(inside):
            piece = replace(whole, first=first, count=count)
            is_numbered = whole.is_loop or program.num_calls(program.calls[first].region) > 1
            pieces.append(_as_loop(program, piece, whole.is_loop) if is_numbered else piece)
    ranges: dict[str, range] = {}
    return [each for run in _block_runs(pieces) for each in _parametrized(program, run, ranges)], ranges


def _as_loop(program: Program, segment: Segment, is_loop: bool = True) -> Segment:
    numbers = numbers_of(program.calls[segment.first : segment.last + 1])
    blocks = Blocks(*numbers, segment.count) if numbers else None
    return replace(segment, blocks=blocks, is_loop=is_loop)


def _runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """(first, count) of each run of consecutive numbers."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == sum(found[-1]):
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((number, 1))
    return found


def _block_runs(pieces: Sequence[Segment]) -> list[list[Segment]]:
    """Segments that run consecutive elements of one module list, together."""
    found: list[list[Segment]] = []
    for piece in pieces:
        before = found[-1][-1].blocks if found else None
        blocks = piece.blocks
        follows = blocks and before and (before.prefix, before.first + before.count) == (blocks.prefix, blocks.first)
        if follows and found[-1][-1].last + 1 == piece.first:
            found[-1].append(piece)
        else:
            found.append([piece])
    return found


def _parametrized(program: Program, run: Sequence[Segment], ranges: dict[str, range]) -> list[Segment]:
    """The segments with the numbers of their blocks out of one new range."""
    if run[0].blocks is None:
        return list(run)
    first, count = run[0].blocks.first, sum(each.count for each in run)
    region = program.calls[run[0].first].region
    stem, _, number = region.rpartition("_")
    wanted = name = f"{stem if number.isdigit() else region}s"
    while name in ranges or name in _TAKEN or keyword.iskeyword(name):
        name = f"{wanted}_{len(ranges) + 1}"
    ranges[name] = range(first, first + count)
    found: list[Segment] = []
    for each in run:
        assert each.blocks is not None
        offset = each.blocks.first - first
        is_end = offset + each.count == count
        found.append(replace(each, blocks=replace(each.blocks, parameter=name, offset=offset, is_end=is_end)))
    return found


_TAKEN = frozenset({"sums", "inputs", "grads", "roots", "updates", "gradients", "outputs", "ops"})
"""Plurals that the functions of a stage use for something else."""


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
