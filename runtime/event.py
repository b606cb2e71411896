"""What a communicator notes of each transfer, and messages under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Event:
    """One collective, or one tensor sent to or received from a peer, as one rank issued it.

    shape, dtype: of the local tensor handed in (of an exchange, the rows of all ranks together). bytes_sent: what a
    ring (all_to_all: a direct exchange) sends per rank; 0 for what is received. op: of a reduction, else
    "". where: the place in the program that `Communicator.where` named, or the action of a schedule. peer: the place of
    the other rank along the axis, of `send` and `receive`; tag: what is sent, the same on both sides.
    """

    kind: str
    axis: str
    shape: tuple[int, ...]
    dtype: str
    bytes_sent: int | float
    where: str = ""
    op: str = ""
    peer: int = -1
    tag: str = ""

    def __str__(self) -> str:
        if self.peer >= 0:
            way = "to" if self.kind == "send" else "from"
            what = f"{self.tag} ({self.dtype}{list(self.shape)})"
            return f"{self.kind} of {what} {way} place {self.peer} of {self.axis} at {self.where}"
        op = f" {self.op}" if self.op else ""
        where = f" at {self.where}" if self.where else ""
        return f"{self.kind}{op} over {self.axis} of {self.dtype}{list(self.shape)}{where}"

    def agrees_with(self, other: Event) -> bool:
        """Whether two ranks of a group may issue these two together."""
        return (self.kind, self.axis, self.shape, self.dtype, self.op) == (
            other.kind,
            other.axis,
            other.shape,
            other.dtype,
            other.op,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """One tensor for the rank at place `peer` of the axis, or from it: then `tensor` is None."""

    event: Event
    peer: int
    tensor: Tensor | None
    dtype: torch.dtype


class Pending:
    """Messages on their way. waits: one for each message, called once; what is received comes out of them.

    when_waited: called when they have been waited for.
    """

    def __init__(
        self, waits: Sequence[Callable[[], Tensor | None]], have_left: Sequence[Callable[[], bool]] = ()
    ) -> None:
        self._waits: Sequence[Callable[[], Tensor | None]] | None = waits
        self._have_left = have_left
        self._received: list[Tensor] = []
        self.when_waited: Callable[[], None] | None = None

    def wait(self) -> list[Tensor]:
        """Until all sent tensors have left and all others have come; these, in the order asked for.

        Raises:
            AutoparError: the peer did not take part in time, or is gone; names the action and both ranks.
        """
        if self._waits is not None:
            waits, self._waits = self._waits, None
            found = [wait() for wait in waits]
            self._received = [x for x in found if x is not None]
            if self.when_waited is not None:
                self.when_waited()
        return self._received

    def has_left(self) -> bool:
        """Whether all that was sent is known to have left: then `wait` returns at once. Not where nothing tells."""
        return self._waits is None or (bool(self._have_left) and all(left() for left in self._have_left))


class Notes(Protocol):
    """Who writes down when everything ran (`recording.Recorder`)."""

    def mark(self, where: str) -> None: ...

    def now(self) -> Any: ...

    def messages(self, events: Sequence[Event], start: Any) -> Any: ...

    def collective(self, event: Event, start: Any, work: Any) -> Any: ...
