"""Who is served when: requests in the order in which they come, lanes of prompts, slots of tokens. Knows no tensors.

lane 0   |aaaaabbb|bbbccccc|          of a chunk of 8 columns: the prompts a, b, c one behind the other
lane 1   |ddd.....|........|          e waits: there is no slot for it yet
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class Work:
    """A request under way. number: in the order in which requests came. limit: of new tokens. asked: what it is, for
    whoever chooses its tokens.

    slot: its row. begin: the column of its lane where its prompt begins; read: how many tokens of it went through the
    model. tokens: the new ones.
    """

    number: int
    prompt: Sequence[int]
    limit: int
    asked: Any = None
    slot: int = -1
    begin: int = 0
    read: int = 0
    tokens: list[int] = field(default_factory=list)

    @property
    def written(self) -> int:
        """Positions in the row of its slot: the newest token is not."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def places(self) -> int:
        """Positions that it needs at most."""
        return len(self.prompt) + self.limit - 1


@dataclass(frozen=True, slots=True)
class Piece:
    """Of a chunk: `count` tokens of a prompt, from the one at `start`, at column `at` of the chunk in a lane."""

    work: Work
    lane: int
    at: int
    start: int
    count: int

    @property
    def ends(self) -> bool:
        """Whether the prompt does."""
        return self.start + self.count == len(self.work.prompt)


class Schedule:
    """See the module's text. slots: rows, of which the first `slots / lanes` are the first lane's, and so on.

    room: columns of a lane, a multiple of `chunk` that no prompt exceeds.
    """

    def __init__(self, requests: Iterator[Work], slots: int, lanes: int, chunk: int, room: int) -> None:
        assert slots % lanes == 0 and room % chunk == 0
        self.chunk, self.room = chunk, room
        self.cursor = 0
        self._requests = requests
        self._next: Work | None = None
        self._per_lane = slots // lanes
        self._free = [list(range(lane * self._per_lane, (lane + 1) * self._per_lane)) for lane in range(lanes)]
        self._begun: dict[int, Work] = {}

    @property
    def is_fresh(self) -> bool:
        """Whether nothing that stands in the lanes is read any more: the next chunk may begin at their front."""
        return not self._begun

    def next_chunk(self) -> list[Piece]:
        """What goes through the model next, the first come first; empty where nothing can."""
        if self.is_fresh:
            self.cursor = 0
        used = [0] * len(self._free)
        pieces = [self._piece(work, lane, used) for lane, work in self._begun.items()]
        while (work := self._peek()) is not None:
            lane = self._lane_for(work, used)
            if lane is None:
                break  # nor does one who came later overtake it
            self._next = None
            work.slot, work.begin = self._free[lane].pop(0), self.cursor + used[lane]
            pieces.append(self._piece(work, lane, used))
        self._begun = {piece.lane: piece.work for piece in pieces if not piece.ends}
        if pieces:
            self.cursor += self.chunk
        return pieces

    def give_back(self, work: Work) -> None:
        """Its slot is free."""
        self._free[work.slot // self._per_lane].append(work.slot)

    def drop(self, work: Work) -> None:
        """No more of a request that is not done: its slot is free, and what stands in its columns is nobody's."""
        if work is self._next:
            self._next = None
        elif work.slot >= 0:
            self._begun = {lane: each for lane, each in self._begun.items() if each is not work}
            self.give_back(work)

    def is_done(self) -> bool:
        """Whether no request is waiting, or begun."""
        return self.is_fresh and self._peek() is None

    def _peek(self) -> Work | None:
        if self._next is None:
            self._next = next(self._requests, None)
        return self._next

    def _lane_for(self, work: Work, used: list[int]) -> int | None:
        """The lane with a free slot and most columns left in the chunk, in which the prompt has room to its end."""
        able = [
            lane
            for lane, free in enumerate(self._free)
            if free and used[lane] < self.chunk and self.cursor + used[lane] + len(work.prompt) <= self.room
        ]
        return min(able, key=lambda lane: used[lane], default=None)

    def _piece(self, work: Work, lane: int, used: list[int]) -> Piece:
        count = min(self.chunk - used[lane], len(work.prompt) - work.read)
        piece = Piece(work, lane, used[lane], work.read, count)
        used[lane] += count
        work.read += count
        return piece
