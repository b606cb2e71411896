from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.base.errors import AutoparError
from autopar.ir.sharding import PARTIAL, REPLICATE, Partial, Shard, Sharding, format_sharding, is_valid, local_shape
from autopar.runtime import comm as comm_module
from autopar.runtime.comm import ProcessGroupComm, RecordingComm
from autopar.runtime.event import Event
from autopar.runtime.layout import assemble, redistribute, shard
from autopar.runtime.simulated_comm import SimulatedComm, SimulatedMesh
from tests.unit.runtime.peers import rank_of

pytestmark = pytest.mark.unit

AXES = ("a", "b")
placements = st.sampled_from(
    [REPLICATE, Shard(0), Shard(1), Shard(0, 2), Shard(1, 3), Shard(0, 2, True), Shard(1, 6, True)]
)
shardings = st.tuples(placements, placements)


@pytest.mark.moderate
@settings(max_examples=60, deadline=None)
@given(source=shardings, target=shardings)
def test_redistribution_moves_every_element_to_its_place(source: Sharding, target: Sharding) -> None:
    """Breaks when a collective's layout (stripes, the order of pieces) differs from what `slice` defines."""
    sizes = (2, 2)
    whole = torch.arange(24 * 36).reshape(24, 36)
    if not (is_valid(whole.shape, source, sizes) and is_valid(whole.shape, target, sizes)):
        return
    pieces = SimulatedMesh(AXES, sizes).run(lambda comm: redistribute(shard(whole, source, comm), source, target, comm))
    assert all(piece.is_contiguous() for piece in pieces)
    assert torch.equal(assemble(pieces, target, sizes), whole)


@settings(max_examples=30, deadline=None)
@given(target=shardings)
def test_terms_are_summed_into_every_sharding(target: Sharding) -> None:
    """Breaks when reduce_scatter's pieces are not those of `slice`, or a term is counted twice."""
    sizes = (2, 3)
    shape = (24, 36)
    if not is_valid(shape, target, sizes):
        return
    terms = [torch.full(shape, float(10**rank)) + torch.arange(24.0).unsqueeze(1) for rank in range(6)]
    source = (PARTIAL, PARTIAL)
    mesh = SimulatedMesh(AXES, sizes)
    pieces = mesh.run(lambda comm: redistribute(terms[comm.rank], source, target, comm))
    assert torch.equal(assemble(pieces, target, sizes), torch.stack(terms).sum(0))


@pytest.mark.parametrize("target", [(REPLICATE, REPLICATE), (Shard(0), REPLICATE), (Shard(0, 2), Shard(1))])
def test_the_largest_of_terms_into_every_sharding(target: Sharding) -> None:
    """Breaks when maxima are added up, or one term stands for all."""
    sizes, shape = (2, 2), (8, 4)
    terms = [torch.arange(32.0).view(shape).roll(5 * rank) - 10 for rank in range(4)]
    source = (Partial("max"), Partial("max"))
    mesh = SimulatedMesh(AXES, sizes)
    pieces = mesh.run(lambda comm: redistribute(terms[comm.rank], source, target, comm))
    assert torch.equal(assemble(pieces, target, sizes), torch.stack(terms).amax(0))


@settings(max_examples=40, deadline=None)
@given(sharding=shardings)
def test_positions_name_the_elements_a_rank_holds(sharding: Sharding) -> None:
    """Breaks when positions and slices disagree: dropout would then draw different numbers than eager's layout."""
    sizes, whole = (2, 2), torch.arange(24 * 36).reshape(24, 36)
    if not is_valid(whole.shape, sharding, sizes):
        return
    text = format_sharding(sharding, AXES)
    for rank in range(4):
        comm = RecordingComm(AXES, sizes, rank, "cpu")
        rows, columns = comm.positions(whole.shape, text)
        assert torch.equal(whole[rows][:, columns], shard(whole, sharding, comm))
        assert comm.positions(whole.shape, text) is comm.positions(whole.shape, text)


def test_events_count_the_bytes_of_a_ring() -> None:
    """Breaks when a formula of the literature (all-reduce 2(n-1)/n b, others (n-1)/n b) is changed."""
    x = torch.zeros(8, 6)

    def work(comm: SimulatedComm) -> list[Event] | None:
        comm.at("here")
        comm.all_reduce(x, "a")
        comm.all_gather(x, "a", 0)
        comm.reduce_scatter(x, "a", 0, op="max")
        comm.all_to_all(x, "a", 0, from_dim=1)
        comm.all_reduce(x, "b")
        return comm.log

    b = 8 * 6 * 4
    events = SimulatedMesh(AXES, (4, 1)).run(work)[3]
    assert [(event.kind, event.bytes_sent) for event in events] == [
        ("all_reduce", b * 3 // 2),
        ("all_gather", b * 3),
        ("reduce_scatter", b * 3 // 4),
        ("all_to_all", b * 3 // 4),
    ]
    assert {event.where for event in events} == {"here"}
    assert str(events[2]) == "reduce_scatter max over a of float32[8, 6] at here"


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_recording_returns_the_right_shapes_without_peers(device: str) -> None:
    """Breaks when a dry run and a real run disagree about shapes or about the list of collectives."""
    x = torch.zeros(12, 6, device=device)
    comm = RecordingComm(AXES, (2, 3), 4, device)
    assert comm.all_gather(x, "b", 1).shape == (12, 18)
    assert comm.reduce_scatter(x, "b", 0, 2).shape == (4, 6)
    assert comm.all_to_all(x, "a", 0, from_dim=1).shape == (6, 12)
    assert comm.all_reduce(x, "a").shape == (12, 6)
    assert comm.slice(x, "a", 1).shape == local_shape((12, 6), (Shard(1), REPLICATE), (2, 3))
    assert [event.kind for event in comm.log or ()] == ["all_gather", "reduce_scatter", "all_to_all", "all_reduce"]


def test_a_collective_leaves_its_operand_as_it_was() -> None:
    """Breaks when a sum is made in the caller's own tensor, which other operators, or autograd, still read."""
    mesh = SimulatedMesh(("a",), (2,))
    given = [torch.full((4, 2), float(rank + 1)) for rank in range(2)]
    for result in mesh.run(lambda comm: comm.all_reduce(given[comm.rank], "a").mul_(5.0)):
        assert (result == 15.0).all()
    assert [float(x.sum()) for x in given] == [8.0, 16.0]
    recorded, x = RecordingComm(("a",), (2,), 0, "cpu"), torch.ones(4, 2)
    recorded.all_reduce(x, "a").fill_(5.0)
    assert (x == 1.0).all()
    with rank_of({"a": 2}, 1) as device_mesh:
        comm = ProcessGroupComm(device_mesh)
        results = (
            comm.all_reduce(x, "a"),
            comm.all_reduce(x, "a", "max"),
            comm.reduce_scatter(x, "a", 0),
            comm.all_to_all(x, "a", 0, from_dim=1),
            comm.begin("all_reduce", "a", x.view(-1))(),
        )
        for result in results:
            result.fill_(5.0)
        assert (x == 1.0).all()
        assert comm.begin("all_reduce", "a", x, owned=True)().data_ptr() == x.data_ptr()


@pytest.mark.parametrize(
    ("op", "dtype", "asked"),
    [
        ("sum", torch.float32, "SUM"),
        ("max", torch.float32, "MAX"),
        ("min", torch.float32, "MIN"),
        ("sum", torch.bool, "MAX"),
        ("max", torch.bool, "MAX"),
    ],
)
def test_processes_are_asked_for_the_reduction(
    op: str, dtype: torch.dtype, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks when maxima are added, or 256 times yes, which is 0 in a byte, is no."""
    seen = []
    for name, place in (("all_reduce", comm_module.dist), ("reduce_scatter_single", comm_module)):
        monkeypatch.setattr(place, name, lambda *_, op, **options: seen.append(op))
    with rank_of({"a": 2}, 1) as device_mesh:
        comm, x = ProcessGroupComm(device_mesh), torch.ones(4, 2).to(dtype)
        comm.all_reduce(x, "a", op)
        comm.reduce_scatter(x, "a", 0, op=op)
    assert seen == [getattr(torch.distributed.ReduceOp, asked)] * 2


def test_gradients_are_added_to_nobody_elses() -> None:
    """Breaks if a microbatch's gradient, which may be that of two parameters, or a view, is added to in place."""
    comm, sums = RecordingComm(("a",), (2,), 0, "cpu"), dict[str, torch.Tensor]()
    whole = torch.ones(2, 3)
    for _ in range(3):
        comm.accumulate(sums, {"x": whole, "y": whole, "row": whole[0]}, "layer.", {"row": torch.float64})
    assert (whole == 1).all()
    assert [float(sums[f"layer.{name}"].sum()) for name in ("x", "y", "row")] == [18.0, 18.0, 9.0]
    assert sums["layer.row"].dtype == torch.float64


def test_ranks_that_issue_different_collectives_are_named() -> None:
    """Breaks when the simulation lets through what makes real processes hang."""

    def work(comm: SimulatedComm) -> None:
        comm.at(f"layer {comm.rank}")
        if comm.index("a"):
            comm.all_reduce(torch.zeros(4), "a")
        else:
            comm.all_gather(torch.zeros(4), "a", 0)

    with pytest.raises(AutoparError, match=r"ranks \d and \d .*different collectives over axis a") as caught:
        SimulatedMesh(AXES, (2, 1)).run(work)
    assert "all_reduce sum over a of float32[4] at layer 1" in str(caught.value)
    assert "all_gather over a of float32[4] at layer 0" in str(caught.value)


def test_a_rank_that_never_comes_is_named_at_once() -> None:
    """Breaks when a missing call is only found by a timeout, or not at all."""

    def work(comm: SimulatedComm) -> None:
        comm.at("the loss")
        if comm.rank != 1:
            comm.all_reduce(torch.zeros(4), "a")

    with pytest.raises(AutoparError, match=r"rank 0 waits over axis a for rank 1, which has ended \(the loss\)"):
        SimulatedMesh(("a",), (3,)).run(work)


def test_ranks_that_wait_for_each_other_in_two_groups_are_a_deadlock() -> None:
    """Breaks when a cycle through two axes (each rank waits, none has ended) is not seen."""

    def work(comm: SimulatedComm) -> None:
        for axis in ("a", "b") if comm.index("a") == comm.index("b") else ("b", "a"):
            comm.all_reduce(torch.zeros(4), axis)

    with pytest.raises(AutoparError, match="waits in all_reduce sum over b"):
        SimulatedMesh(AXES, (2, 2)).run(work)


def test_the_first_error_of_a_rank_stops_the_others() -> None:
    """Breaks when an ordinary exception in one rank leaves the others waiting, or is hidden by theirs."""

    def work(comm: SimulatedComm) -> None:
        if comm.rank == 2:
            raise ZeroDivisionError("rank 2")
        comm.all_reduce(torch.zeros(4), "a")

    with pytest.raises(ZeroDivisionError, match="rank 2"):
        SimulatedMesh(("a",), (4,)).run(work)


def test_cutting_what_does_not_divide_says_the_numbers() -> None:
    """Breaks when an uneven dim is cut silently."""
    with pytest.raises(AutoparError, match=r"dim 0 of a tensor \(10,\) cannot be cut into 4 pieces. 10 elements"):
        RecordingComm(("a",), (4,), 0).slice(torch.zeros(10), "a", 0)
    with pytest.raises(AutoparError, match="unknown reduction 'avg'"):
        SimulatedMesh(("a",), (2,)).run(lambda comm: comm.all_reduce(torch.zeros(2), "a", "avg"))
