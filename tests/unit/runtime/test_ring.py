"""Ring attention on simulated ranks against attention to everything at once, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.operators import positions, starts
from autopar.operators.attention_options import AttentionOptions
from autopar.runtime.comm import RecordingComm
from autopar.runtime.event import Event
from autopar.runtime.order import digests, first_difference
from autopar.runtime.simulated_comm import SimulatedComm, SimulatedMesh
from autopar.runtime.tiles import tiles_of
from tests.unit.runtime.ring_cases import LENGTH, SEEN, WAYS, Case


def events(case: Case, num: int, **how: Any) -> list[list[Event]]:
    """What each rank sends and receives, forward and backward."""

    def run(comm: SimulatedComm) -> list[Event]:
        case.on(comm, **how)
        return list(comm.log or ())

    return SimulatedMesh(("cp",), (num,)).run(run)


def check(case: Case, num: int, way: str, visits: tuple[int, ...] = ()) -> None:
    """Ring on `num` ranks, put together, is the whole."""
    outer, zigzag = WAYS[way]
    pieces = SimulatedMesh(("cp",), (num,)).run(lambda comm: case.on(comm, outer=outer, zigzag=zigzag, visits=visits))
    expected = case.whole()
    order = torch.cat([positions(LENGTH, (rank, num, outer, zigzag)) for rank in range(num)]).argsort()
    names = ("out", "lse", "dq", "dk", "dv", "dbias")
    tolerance = 1e-12 if case.dtype == torch.float64 else 2e-2
    for index, (name, wanted) in enumerate(zip(names, expected)):
        parts = [piece[index] for piece in pieces]
        assert all(part.dtype == wanted.dtype for part in parts), name
        if name == "dbias" and wanted.shape[2] == 1:
            found = torch.stack(parts).sum(0)
        else:
            found = torch.cat(parts, 2)[:, :, order]
        assert not found.isnan().any(), name
        assert torch.allclose(found, wanted, rtol=tolerance, atol=tolerance), name


@pytest.mark.parametrize("num", [1, 2, 4])
@pytest.mark.parametrize("way", ["contiguous", "zigzag"])
@pytest.mark.parametrize("seen", SEEN)
def test_is_attention_to_everything(num: int, way: str, seen: str) -> None:
    check(Case(SEEN[seen]), num, way)


@pytest.mark.parametrize("way", ["stripes", "zigzag of 4"])
@pytest.mark.parametrize("seen", ["causal", "prefix and window"])
def test_in_other_stripes(way: str, seen: str) -> None:
    check(Case(SEEN[seen]), 2, way)


@pytest.mark.parametrize("shape", [(1, 1, 16, 16), (2, 4, 16, 16), (1, 4, 1, 16), (2, 1, 16, 1), (1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("seen", ["full", "causal"])
def test_bias_and_its_gradient(shape: tuple[int, ...], seen: str) -> None:
    check(Case(SEEN[seen], bias_shape=shape), 2, "zigzag")


@pytest.mark.parametrize("way", ["contiguous", "zigzag"])
def test_padding_hides_keys_and_whole_queries(way: str) -> None:
    check(Case(SEEN["causal"], with_keys=True), 4, way)


@pytest.mark.parametrize("seen", ["full", "causal", "window"])
def test_documents_are_those_of_all_keys(seen: str) -> None:
    """Breaks if a tile compares its queries with the documents of other keys."""
    check(Case(SEEN[seen], with_documents=True), 4, "zigzag")
    check(Case(SEEN[seen], with_documents=True, bias_shape=(1, 1, 16, 16)), 2, "contiguous")


@pytest.mark.parametrize("seen", ["causal", "window", "shifted"])
def test_sinks_count_once(seen: str) -> None:
    check(Case(SEEN[seen], with_sinks=True, with_keys=True), 4, "zigzag")


@pytest.mark.parametrize("seen", ["full", "window", "prefix"])
def test_dropout_is_that_of_the_place(seen: str) -> None:
    check(Case(SEEN[seen], dropout_p=0.4), 4, "zigzag")
    check(Case(SEEN[seen], dropout_p=0.4, says_positions=False), 2, "zigzag")


def test_softcap() -> None:
    check(Case(SEEN["causal"], softcap=1.5), 2, "zigzag")


def test_grouped_heads_and_another_size_of_values() -> None:
    check(Case(SEEN["causal"], num_key_heads=2), 2, "zigzag")
    check(Case(SEEN["window"], num_key_heads=1, value_size=4), 4, "contiguous")


def test_half_types_are_summed_in_float32() -> None:
    check(Case(SEEN["causal"], dtype=torch.bfloat16, with_sinks=True), 4, "zigzag")


@pytest.mark.parametrize(("visits", "seen", "way"), [
    ((0, 1), {"left": 3, "right": 0}, "contiguous"),
    ((0, 1, 3), {"left": 1, "right": 0}, "zigzag"),
    ((0,), {"left": 0, "right": 0}, "contiguous"),
])  # fmt: skip
def test_blocks_visit_only_those_who_read_them(visits: tuple[int, ...], seen: dict[str, Any], way: str) -> None:
    check(Case(seen), 4, way, visits)


@pytest.mark.parametrize("num", [2, 4])
def test_bytes_sent(num: int) -> None:
    case = Case(SEEN["full"], num_key_heads=2, dtype=torch.bfloat16)
    block = (case.k.nbytes + case.v.nbytes) // num
    logs = SimulatedMesh(("cp",), (num,)).run(
        lambda comm: (case.on(comm, outer=1, zigzag=False), list(comm.log or ()))[1]
    )
    for log in logs:
        blocks = sum(event.bytes_sent for event in log if not event.tag.startswith("gradients"))
        gradients = sum(event.bytes_sent for event in log if event.tag.startswith("gradients"))
        assert blocks == 2 * (num - 1) * block  # forward, and again backward
        assert gradients == 2 * num * block  # in float32, and home
        assert {event.axis for event in log} == {"cp"}
        assert all(event.kind in ("send", "receive") and event.tag for event in log)


def test_a_window_sends_less() -> None:
    case = Case({"left": 3, "right": 0})
    block = (case.k.nbytes + case.v.nbytes) // 4
    logs = events(case, 4, outer=1, zigzag=False, visits=(0, 1))
    assert [sum(event.bytes_sent for event in log) for log in logs] == [(1 + 1 + 2) * block] * 4


def test_a_dry_run_writes_down_the_same() -> None:
    case = Case(SEEN["causal"], bias_shape=(1, 1, 16, 16), dropout_p=0.1, with_sinks=True, with_keys=True)
    logs = events(case, 4, outer=2, zigzag=True)
    dry = []
    for rank in range(4):
        comm = RecordingComm(("cp",), (4,), rank)
        on_meta = Case(SEEN["causal"], bias_shape=(1, 1, 16, 16), dropout_p=0.1, with_sinks=True, with_keys=True)
        for name in ("q", "k", "v", "g", "bias", "keys", "sinks", "seed"):
            setattr(on_meta, name, getattr(case, name).to("meta"))
        with torch.device("meta"):
            on_meta.on(comm, outer=2, zigzag=True)
        dry.append(list(comm.log or ()))
    assert [list(map(str, log)) for log in dry] == [list(map(str, log)) for log in logs]
    comm = RecordingComm(("cp",), (4,), 0)
    assert first_difference(comm, "", [digests(log) for log in dry]) is None
    dry[2].pop(3)
    assert first_difference(comm, "", [digests(log) for log in dry]) is not None


def _tiles(num: int, rank: int, place: int, way: str, seen: str) -> list[tuple[tuple[int, int], tuple[int, int], bool]]:
    outer, zigzag = WAYS[way]
    options = AttentionOptions(1.0, **SEEN[seen], query_starts=starts(LENGTH, (rank, num, outer, zigzag)))
    begins = starts(LENGTH, (place, num, outer, zigzag))
    runs = [(start, LENGTH // num // outer) for start in begins]
    return [
        ((t.queries.start, t.queries.stop), (t.keys.start, t.keys.stop), t.options.sees_all)
        for t in tiles_of(options, LENGTH // num, runs)
    ]


def test_what_nobody_sees_is_not_computed() -> None:
    assert _tiles(4, 0, 1, "contiguous", "causal") == []
    assert _tiles(4, 3, 1, "contiguous", "causal") == [((0, 4), (0, 4), True)]
    assert _tiles(4, 3, 0, "contiguous", "window") == []


def test_zigzag_has_the_same_work_in_every_step() -> None:
    assert _tiles(4, 2, 1, "zigzag", "causal") == [((0, 4), (0, 2), True)]
    assert _tiles(4, 1, 2, "zigzag", "causal") == [((2, 4), (0, 4), True)]
    assert _tiles(4, 1, 1, "zigzag", "causal") == [
        ((0, 2), (0, 2), False), ((2, 4), (0, 2), True), ((2, 4), (2, 4), False),
    ]  # fmt: skip


def test_diagonal_tiles_are_plainly_causal() -> None:
    options = AttentionOptions(1.0, left=7, right=0, query_starts=(8,))
    (tile,) = tiles_of(options, 4, [(8, 4)])
    assert tile.options.kwargs() == {"scale": 1.0, "right": 0}
