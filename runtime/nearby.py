"""Small messages between CPU ranks of one machine, over sockets of their own.

gloo hands every collective to a thread of its own, which hands it to another one: four times somebody is woken up
before a rank goes on, 0.3 to 0.7 ms of CPU time a rank, whatever the message. A token of a small model sends a handful
of messages of a few hundred bytes, and these are most of its time. Here a rank writes its piece to each of the others
and reads theirs, in the thread that waits for them: 0.03 ms.

    rank 0  ── header, piece 0 ──►  rank 1        [piece 0, piece 1] on both; a sum adds them in this order
            ◄── header, piece 1 ──

Each message stands alone (a socket keeps them apart), and says its number between these two ranks and its size: ranks
that are not about to exchange the same are told so. Who waits too long, or finds the other end closed, is told, too.

All ranks decide together whether there is such a way (`connect`): Linux, one machine, few ranks.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import struct
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.base import environment

MOST_RANKS = 16
"""Each sends to all others itself."""
MOST_BYTES = 1 << 15
"""Of a piece: two of them wait in a socket while its reader has not come, so no writer ever waits. Linux gives sockets
212,992 bytes, of which it counts its own notes, too; where a machine gives less than four pieces there is no such way.
"""
PATIENCE_S = 60.0
"""For a neighbour that is connected already to be let in."""
_HEADER = struct.Struct("<qq")


class Apart(RuntimeError):
    """A neighbour did not come in time, is gone, or is about to exchange something else."""


class Nearby:
    """Sockets to other ranks of this machine. rank: this one's. sockets: by the other rank."""

    def __init__(self, rank: int, sockets: Mapping[int, socket.socket]) -> None:
        self._rank, self._sockets = rank, dict(sockets)
        self._num_exchanged = dict.fromkeys(sockets, 0)
        self._timeouts_s: dict[int, float] = {}
        weakref.finalize(self, _close, list(sockets.values()))

    def serves(self, ranks: Sequence[int], x: Tensor) -> bool:
        """Whether pieces like x go this way between these ranks. The same on each of them."""
        others = sum(rank in self._sockets for rank in ranks)
        return x.is_cpu and 0 < x.nbytes <= MOST_BYTES and others == len(ranks) - 1

    def gather(self, ranks: Sequence[int], x: Tensor, timeout_s: float) -> Tensor:
        """The pieces [n, numel] of these ranks, in their order. Collective.

        x: contiguous, this rank's piece, as many bytes on each. ranks: this one too. timeout_s: for each of the others.

        Raises:
            Apart: see there.
        """
        return torch.stack(self._pieces(ranks, x, timeout_s))

    def reduce(self, ranks: Sequence[int], x: Tensor, op: str, timeout_s: float) -> Tensor:
        """`op` ("sum", "max", "min") over these ranks, in their order: the same bits on each. As `gather`."""
        pieces = self._pieces(ranks, x, timeout_s)
        if op == "sum" and len(pieces) == 2:
            found = pieces[0] + pieces[1]
        elif op == "sum":  # of half precision rounded once
            found = torch.stack(pieces).sum(0, dtype=x.dtype)
        else:
            found = torch.stack(pieces).amax(0) if op == "max" else torch.stack(pieces).amin(0)
        return found.view(x.shape)

    def _pieces(self, ranks: Sequence[int], x: Tensor, timeout_s: float) -> list[Tensor]:
        flat = x.detach().view(-1)
        own, size = flat.view(torch.uint8).numpy().data, flat.nbytes
        for rank in ranks:
            if rank != self._rank:
                self._send(rank, own, size)
        pieces = []
        for rank in ranks:
            if rank == self._rank:
                pieces.append(flat)
            else:
                pieces.append(torch.frombuffer(self._received(rank, size, timeout_s), dtype=x.dtype))
        return pieces

    def _send(self, rank: int, piece: memoryview, size: int) -> None:
        self._num_exchanged[rank] += 1
        try:
            self._sockets[rank].sendmsg([_HEADER.pack(self._num_exchanged[rank], size), piece])
        except OSError as error:
            raise Apart(f"rank {rank} is gone: {error}") from error

    def _received(self, rank: int, size: int, timeout_s: float) -> bytearray:
        """The piece of another rank, in memory of its own."""
        wanted, header, piece = (self._num_exchanged[rank], size), bytearray(_HEADER.size), bytearray(size)
        if self._timeouts_s.get(rank) != timeout_s:
            whole_s = int(timeout_s)
            wait = struct.pack("@ll", whole_s, max(int(1e6 * (timeout_s - whole_s)), 1))
            self._sockets[rank].setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
            self._timeouts_s[rank] = timeout_s
        try:
            length, *_ = self._sockets[rank].recvmsg_into([header, piece])
        except BlockingIOError as error:
            raise Apart(f"timed out waiting for rank {rank}") from error
        except OSError as error:
            raise Apart(f"rank {rank} is gone: {error}") from error
        if length == 0:
            raise Apart(f"rank {rank} is gone: it closed the connection")
        found = _HEADER.unpack(header)
        if found != wanted or length != _HEADER.size + size:
            raise Apart(
                f"rank {rank} exchanges {found[1]} bytes, its number {found[0]}, where rank {self._rank} exchanges "
                f"{wanted[1]}, its number {wanted[0]}"
            )
        return piece


def connect() -> Nearby | None:
    """Sockets between all ranks of the job; None on several machines, of many ranks, or where it fails. Collective."""
    rank, num = dist.get_rank(), dist.get_world_size()
    if not 1 < num <= MOST_RANKS:
        return None
    with contextlib.ExitStack() as stack:
        listener, address = _listening(num, stack) if environment.nearby() else (None, "")
        addresses = _from_all((_machine(), address))
        if any(not there or machine != addresses[0][0] for machine, there in addresses):
            return None
        sockets = {other: _called(addresses[other][1], rank) for other in range(rank)}
        are_open = all(each is not None for each in sockets.values())
        found = {other: each for other, each in sockets.items() if each is not None}
        if not all(_from_all(are_open)):  # as of ranks that see other folders
            _close(list(found.values()))
            return None
        assert listener is not None
        listener.settimeout(PATIENCE_S)
        for _ in range(rank + 1, num):
            let_in, _ = listener.accept()
            let_in.settimeout(None)
            found[struct.unpack("<q", let_in.recv(8))[0]] = let_in
        return Nearby(rank, found)


def _from_all(mine: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _machine() -> str:
    """The same on ranks of one machine, until it is started anew."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _listening(num: int, stack: contextlib.ExitStack) -> tuple[socket.socket | None, str]:
    """A socket that others of this user can call, and where; "" where there is none."""
    if sys.platform != "linux" or not _machine():
        return None, ""
    try:
        folder = tempfile.mkdtemp(prefix="autopar-")  # nobody else's
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        if listener.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < 4 * MOST_BYTES:
            return None, ""
        listener.bind(address := str(Path(folder, "rank")))
        listener.listen(num)
    except OSError:
        return None, ""
    return listener, address


def _called(address: str, rank: int) -> socket.socket | None:
    """Connected to who listens there, who is told who calls; None where that fails."""
    calling = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        calling.settimeout(PATIENCE_S)
        calling.connect(address)
        calling.settimeout(None)
        calling.send(struct.pack("<q", rank))
    except OSError:
        calling.close()
        return None
    return calling


def _close(sockets: Sequence[socket.socket]) -> None:
    for each in sockets:
        each.close()
