"""Small messages between neighbours: what each rank gets, and what it is told where others do something else."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.runtime import nearby as module
from autopar.runtime.nearby import MOST_BYTES, Apart, Nearby


def neighbours(num: int) -> list[Nearby]:
    """All ranks in this process."""
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(num)]
    for low, high in combinations(range(num), 2):
        sockets[low][high], sockets[high][low] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return [Nearby(rank, own) for rank, own in enumerate(sockets)]


def at_once(ranks: list[Nearby], act: Callable[[Nearby, int], Any]) -> list[Any]:
    """`act` of every rank, in threads of their own."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(act, ranks, range(len(ranks))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_pieces_and_sums_are_those_of_all_ranks_in_order(dtype: torch.dtype) -> None:
    """Breaks if a piece is taken for another rank's, or if ranks add in orders of their own."""
    pieces = [(torch.arange(6.0).reshape(2, 3) * 0.7 + 5 * rank).to(dtype) for rank in range(3)]

    def act(nearby: Nearby, rank: int) -> list[Tensor]:
        among, own = [0, 1, 2], pieces[rank]
        found = [nearby.gather(among, own, 5.0)]
        found += [nearby.reduce(among, own, op, 5.0) for op in ("sum", "max", "min")]
        return found + ([nearby.reduce([0, 2], own, "sum", 5.0)] if rank != 1 else [])

    every = torch.stack(pieces)
    wanted = [every.reshape(3, 6), every.sum(0, dtype=dtype), every.amax(0), every.amin(0), pieces[0] + pieces[2]]
    for rank, found in enumerate(at_once(neighbours(3), act)):
        assert all(x.dtype == dtype and x.equal(y) for x, y in zip(found, wanted, strict=False)), rank


def test_a_rank_writes_although_its_reader_has_not_come() -> None:
    """Breaks if pieces of the largest size fill a socket: both ranks would write, and none read."""
    first, second = neighbours(2)
    x = torch.ones(MOST_BYTES, dtype=torch.uint8)
    assert first.serves([0, 1], x) and not first.serves([0, 1], torch.ones(MOST_BYTES + 1, dtype=torch.uint8))
    assert not first.serves([0, 1, 2], x) and not first.serves([0, 1], torch.ones(0))
    own = x.numpy().data
    for _ in range(2):  # one rank may be one exchange ahead of the other
        first._send(1, own, len(x))
    for number in range(2):
        second._num_exchanged[0] = number + 1
        assert len(second._received(0, len(x), 5.0)) == len(x)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda second, x: second.gather([0, 1], x[:2], 5.0), "rank 1 exchanges 8 bytes, its number 1, where rank 0"),
        (lambda second, x: second.gather([0, 1], torch.cat([x, x]), 5.0), "rank 1 exchanges 32 bytes"),
        (lambda second, x: (second._sockets[0].recv(99), second._sockets[0].close()), "it closed the connection"),
        (lambda second, x: time.sleep(0.15), "timed out waiting for rank 1"),
    ],
    ids=["less", "more", "gone", "late"],
)
def test_a_neighbour_that_does_something_else_is_told(other: Callable[[Nearby, Tensor], Any], said: str) -> None:
    """Breaks if a rank takes what was sent for something else, or waits for one that is gone."""
    patience_s = 0.05 if said.startswith("timed out") else 10.0

    def act(nearby: Nearby, rank: int) -> str:
        try:
            other(nearby, torch.ones(4)) if rank else nearby.gather([0, 1], torch.ones(4), patience_s)
        except Apart as error:
            return str(error)
        return ""

    assert said in at_once(neighbours(2), act)[0]


def test_a_machine_with_small_sockets_has_no_such_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if ranks write into sockets that hold less than two pieces."""
    with ExitStack() as stack:
        assert module._listening(2, stack)[1]
        monkeypatch.setattr(module, "MOST_BYTES", 1 << 30)
        assert module._listening(2, stack) == (None, "")
