"""A copy of what is to be written, so that training goes on: what is updated later does not reach it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from autopar.runtime.checkpoint.blocks import Entry

ALIGNMENT = 64
"""Bytes, of where a copy begins: of any dtype, and a line of the cache."""


class Memory:
    """Main memory for copies, pinned where they come from a GPU. Kept from save to save: to fault in pages, or to pin
    them, takes longer than to copy.
    """

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def of(self, key: str, size: int, pinned: bool) -> Tensor:
        """`size` bytes; the ones of before under this key, where they are enough."""
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


def snapshot(entries: Sequence[Entry], memory: Memory, key: str) -> Snapshot:
    """The entries with values of their own. From a GPU they are copied by a stream beside that of the computation, for
    which later kernels wait, and this process does not.
    """
    begins, size = [], 0
    for entry in entries:
        begins.append(size)
        size += -(-entry.bytes // ALIGNMENT) * ALIGNMENT
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
