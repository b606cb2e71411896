"""A copy of what is to be written, so that training goes on: what is updated later does not reach it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from autopar.runtime.checkpoint.blocks import Entry

ALIGNMENT = 64
"""Bytes, of where a copy begins: of any dtype, and a line of the cache."""
_TOUCHED_AT_ONCE = 1 << 22
"""Bytes: a thread of little weight, beside the one that trains."""


class Memory:
    """Main memory for copies, pinned where they come from a GPU. Kept from save to save: to fault in pages, or to pin
    them, takes longer than to copy.
    """

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}
        self._getting: threading.Thread | None = None

    def reserve(self, sizes: Mapping[str, int], pinned: bool) -> None:
        """Get so many bytes for each key, while training goes on."""

        def get() -> None:
            for key, size in sizes.items():
                room = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
                for begin in range(0, 0 if pinned else size, _TOUCHED_AT_ONCE):  # the machine gives pages when written
                    room[begin : begin + _TOUCHED_AT_ONCE].zero_()
                self._held.setdefault(key, room)

        # A daemon: nothing is lost with it.
        self._getting = threading.Thread(target=get, name="autopar-memory", daemon=True)
        self._getting.start()

    def of(self, key: str, size: int, pinned: bool) -> Tensor:
        """`size` bytes; the ones of before under this key, where they are enough."""
        if self._getting is not None:
            self._getting.join()
            self._getting = None
        held = self._held.get(key)
        if held is None or held.numel() < size or held.is_pinned() != pinned:
            self._held.pop(key, None)
            held = self._held[key] = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return held[:size]


class Snapshot(NamedTuple):
    """entries: of the copy. copied: of a GPU, when it is done; it may be waited for in any thread."""

    entries: list[Entry]
    copied: torch.cuda.Event | None

    def wait(self) -> None:
        """Until the copy is there."""
        if self.copied is not None:
            self.copied.synchronize()


def room_of(entries: Iterable[Entry]) -> int:
    """Bytes that a copy of them takes."""
    return sum(map(_room_of, entries))


def _room_of(entry: Entry) -> int:
    return -(-entry.bytes // ALIGNMENT) * ALIGNMENT


def snapshot(entries: Sequence[Entry], memory: Memory, key: str) -> Snapshot:
    """The entries with values of their own. From a GPU they are copied by a stream beside that of the computation, for
    which later kernels wait, and this process does not.
    """
    begins = [0, *accumulate(_room_of(entry) for entry in entries)]
    size = begins.pop()
    parts = [entry.part() for entry in entries]
    device = next((part.device for part in parts if part.device.type == "cuda"), None)
    buffer = memory.of(key, size, device is not None)
    copies = [
        buffer[begin : begin + entry.bytes].view(entry.dtype).view(entry.sizes) for entry, begin in zip(entries, begins)
    ]
    copied: torch.cuda.Event | None = None
    with torch.no_grad():
        if device is None:
            for copy, part in zip(copies, parts):
                copy.copy_(part)
        else:
            computing, beside = torch.cuda.current_stream(device), torch.cuda.Stream(device)
            beside.wait_stream(computing)
            with torch.cuda.stream(beside):
                for copy, part in zip(copies, parts):
                    copy.copy_(part, non_blocking=part.device.type == "cuda")
                copied = torch.cuda.Event()
                copied.record(beside)
            computing.wait_stream(beside)
    return Snapshot([entry._replace(part=copy.detach) for entry, copy in zip(entries, copies)], copied)
