"""Simulated ranks with a computing stream and a side stream each: nothing is read before it is there.

The streams are those of racing.py, so that it is shown without a GPU; on one, benchmarks/first_light has the device's.
"""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from autopar.runtime import transfers
from autopar.runtime.simulated_comm import SimulatedComm, SimulatedMesh
from autopar.runtime.streams import Streams
from tests.unit.runtime.racing import RacingEvent, RacingStream, RacingStreams


def run(streams: RacingStreams, early: bool = False) -> list[Tensor]:
    """A gather beside a computation, a reduction of what both make, twice."""

    def work(comm: SimulatedComm) -> Tensor:
        x = torch.full((4,), float(comm.rank + 1))
        for _ in range(2):
            gather = comm.transfers().bucket("all_gather a", {"x": (x, 0)})
            beside = x * 2
            whole = gather.wait()["x"].sum() + beside
            x = comm.transfers().bucket("reduce_scatter a", {"y": (whole.repeat(2), 0)}, owned=True).wait()["y"][:4] + 0
        return comm.all_reduce(x, "a")

    mesh = SimulatedMesh(("a",), (2,), device="cpu", streams=cast(Streams, streams), late_s=1e-3)
    return mesh.run(work)


def test_transfers_race_with_nothing() -> None:
    """Breaks if a wait between streams, or between ranks, is missing; or if other numbers come."""
    streams = RacingStreams()
    found = run(streams)
    assert streams.races == []
    plain = SimulatedMesh(("a",), (2,))

    def work(comm: SimulatedComm) -> Tensor:
        x = torch.full((4,), float(comm.rank + 1))
        for _ in range(2):
            whole = comm.all_gather(x, "a", 0).sum() + x * 2
            x = comm.reduce_scatter(whole.repeat(2), "a", 0)
        return comm.all_reduce(x, "a")

    assert all(torch.equal(a, b) for a, b in zip(found, plain.run(work), strict=True))


def test_a_missing_wait_for_what_arrives_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if what finds races would not find the fault that matters most: results read before they are there."""
    streams = RacingStreams()
    waits = RacingStream.wait_event

    def forgets(stream: RacingStream, event: RacingEvent) -> None:
        # Transfers.wait is the one that waits on a rank's computing stream for an event of its side stream.
        if not isinstance(getattr(event, "of_side", None), bool):
            waits(stream, event)

    class Marked(RacingEvent):
        pass

    def queue(self: Any, bucket: Any, own: Any) -> None:
        original(self, bucket, own)
        self._queued[-1][0].of_side = True

    original = transfers.Transfers._queue
    monkeypatch.setattr(transfers.Transfers, "_queue", queue)
    monkeypatch.setattr(RacingStream, "wait_event", forgets)
    run(streams)
    assert any("reads what" in race for race in streams.races)


def test_a_side_stream_that_starts_too_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a side stream that does not wait for what it sends goes unseen."""
    streams = RacingStreams()
    monkeypatch.setattr(RacingStream, "wait_stream", lambda self, other: None)
    run(streams)
    assert any("reads what" in race for race in streams.races)
