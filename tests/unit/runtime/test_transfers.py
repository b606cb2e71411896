from __future__ import annotations

import weakref
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.runtime.comm import RecordingComm
from autopar.runtime.communicator import Communicator
from autopar.runtime.event import Event
from autopar.runtime.pieces import piece_of
from autopar.runtime.simulated_comm import SimulatedComm, SimulatedMesh

pytestmark = pytest.mark.unit

AXES, SIZES = ("a", "b"), (2, 2)

CHAINS = [
    "all_gather a", "all_reduce b", "reduce_scatter a", "all_to_all b", "slice a", "all_gather b, all_gather a",
    "reduce_scatter a, all_reduce b", "all_gather a, all_to_all b", "all_to_all a, reduce_scatter b",
    "slice b, all_gather a",
]  # fmt: skip
dims = st.tuples(st.integers(0, 1), st.sampled_from([1, 2, 3]))
exchanges = st.tuples(st.integers(0, 1), st.sampled_from([1, 2]), st.sampled_from([1, 3])).map(
    lambda found: (found[0], found[1], 1 - found[0], found[2])
)


def local_value(rank: int, number: int, dtype: torch.dtype) -> Tensor:
    """Small integers that differ between ranks: sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randint(0, 2 if dtype == torch.bool else 7, (24, 12), generator=generator).to(dtype)


def alone(comm: Communicator, steps: str, x: Tensor, arguments: tuple[Any, ...]) -> Tensor:
    """The chain by the plain collectives, which carry one tensor each."""
    left = iter(arguments)
    for step in steps.split(", "):
        kind, axis = step.split(" ")
        given_args = () if kind == "all_reduce" else next(left)
        x = getattr(comm, kind)(x, axis, *((given_args,) if isinstance(given_args, int) else given_args))
    return x


@st.composite
def buckets(draw: st.DrawFn) -> tuple[str, list[tuple[Any, ...]], torch.dtype]:
    steps = draw(st.sampled_from(CHAINS))
    kinds = [step.split(" ")[0] for step in steps.split(", ")]
    arguments = [
        tuple(draw(exchanges if kind == "all_to_all" else dims) for kind in kinds if kind != "all_reduce")
        for _ in range(draw(st.integers(1, 4)))
    ]
    return steps, arguments, draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.float64]))


@pytest.mark.moderate
@settings(max_examples=80, deadline=None)
@given(bucket=buckets())
def test_a_bucket_is_each_tensor_alone(bucket: tuple[str, list[tuple[Any, ...]], torch.dtype]) -> None:
    """Breaks when packing into one flat tensor mixes up tensors, ranks, dims or stripes; or sends other bytes."""
    steps, arguments, dtype = bucket

    def work(comm: SimulatedComm) -> None:
        values = [local_value(comm.rank, number, dtype) for number in range(len(arguments))]
        comm.log = []
        expected = [alone(comm, steps, x, given_args) for x, given_args in zip(values, arguments)]
        events, comm.log = comm.log, []
        transfers = comm.transfers()
        transfers.bucket(steps, {str(i): (x, *arguments[i]) if arguments[i] else x for i, x in enumerate(values)})
        found = transfers.wait()
        assert transfers.wait() is found
        assert all(torch.equal(found[str(i)], value) for i, value in enumerate(expected))
        moved = [step for step in steps.split(", ") if not step.startswith("slice")]
        assert [f"{event.kind} {event.axis}" for event in comm.log] == moved
        assert sum(event.bytes_sent for event in comm.log) == sum(event.bytes_sent for event in events)
        assert all(len(event.shape) == 1 for event in comm.log)

    try:
        SimulatedMesh(AXES, SIZES).run(work)
    except AutoparError as error:
        assert "cannot be cut" in str(error) or "stripes" in str(error)  # a chain that does not divide: both refuse


@pytest.mark.parametrize("alone", [True, False])
def test_a_scalar_travels(alone: bool) -> None:
    """Breaks when a parameter without dims, such as CLIP's logit_scale, cannot be reduced in a bucket of its own."""

    def work(comm: SimulatedComm) -> None:
        transfers = comm.transfers()
        others = {} if alone else {"other": torch.ones(3)}
        transfers.bucket("all_reduce a", {"x": torch.tensor(comm.rank + 1.0), **others})
        assert torch.equal(transfers.wait()["x"], torch.tensor(3.0))

    SimulatedMesh(("a",), (2,)).run(work)


@pytest.mark.moderate
@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 11), num=st.integers(2, 5), dim=st.integers(0, 1), more=st.booleans())
def test_pieces_that_do_not_divide_travel_padded(size: int, num: int, dim: int, more: bool) -> None:
    """Breaks when the short or empty pieces of the last ranks get another rank's rows, or padding stays."""
    shape = (size, 3) if dim == 0 else (3, size)
    whole = torch.arange(size * 3.0).reshape(shape)
    other = torch.arange(2.0 * num).reshape(num, 2)

    def work(comm: SimulatedComm) -> None:
        start, length = piece_of(size, num, comm.rank)
        piece = torch.chunk(whole, num, dim)[comm.rank] if length else whole.narrow(dim, 0, 0)
        assert piece.shape[dim] == length
        extra = {"other": (other[comm.rank : comm.rank + 1], 0)} if more else {}
        gather = comm.transfers()
        gather.bucket("all_gather a", {"x": (piece, (dim, 1, size)), **extra})
        found = gather.wait()
        assert torch.equal(found["x"], whole) and found["x"].is_contiguous()
        if more:
            assert torch.equal(found["other"], other)
        reduce = comm.transfers()
        extra = {"other": (other, 0)} if more else {}
        reduce.bucket("reduce_scatter a", {"x": (whole * (comm.rank + 1), (dim, 1, size)), **extra})
        reduce.bucket("slice a", {"y": (whole, (dim, 1, size))})
        found = reduce.wait()
        assert torch.equal(found["x"], piece * (num * (num + 1) // 2)) and torch.equal(found["y"], piece)
        assert start + length <= size
        padded = -(-size // num) * 3 + (2 if more else 0)
        events = [(event.kind, event.shape, event.bytes_sent) for event in comm.log or ()]
        assert events == [
            ("all_gather", (padded,), (num - 1) * padded * 4),
            ("reduce_scatter", (num * padded,), (num - 1) * padded * 4),
        ]

    SimulatedMesh(("a",), (num,)).run(work)


def test_what_is_kept_is_not_gathered_again() -> None:
    """Breaks when `keep` leaves another stage of the chain in `held`, or a second gather sends anything."""

    def work(comm: SimulatedComm) -> list[Event]:
        held: dict[str, Tensor] = {}
        x, y = local_value(comm.rank, 0, torch.float32), local_value(comm.rank, 1, torch.float32)
        results = []
        for _ in range(2):
            transfers = comm.transfers(held, "layer.0.")
            transfers.put("z", x)
            transfers.bucket("all_gather a, all_gather b", {"x": (x, 0, 1), "y": (y, (1, 2), 0)}, keep=1)
            results.append(transfers.wait())
        first, second = results
        assert list(first) == ["z", "x", "y"] and first["z"] is x
        assert set(held) == {"layer.0.x", "layer.0.y"}
        assert torch.equal(held["layer.0.x"], comm.all_gather(x, "a", 0))
        assert all(torch.equal(first[name], second[name]) for name in first)
        log, comm.log = comm.log or [], []
        whole = comm.transfers({}, "")
        whole.bucket("all_gather a", {"x": (x, 0)}, keep=1)
        assert torch.equal(whole.wait()["x"], held["layer.0.x"])
        nothing = comm.transfers()
        nothing.bucket("all_gather a", {"x": (x, 0)}, keep=1)
        nothing.wait()
        return log[:3]

    for events in SimulatedMesh(AXES, SIZES).run(work):
        assert [(event.kind, event.axis) for event in events] == [
            ("all_gather", "a"),
            ("all_gather", "b"),
            ("all_gather", "b"),
        ]


def test_first_steps_go_at_once_and_later_ones_in_order() -> None:
    """Breaks when the log's order depends on more than the program's text, or an event names the wrong place."""
    comm = RecordingComm(AXES, SIZES, 3, "meta")
    x = torch.empty(4, 4, device="meta")
    comm.at("layer 0")
    transfers = comm.transfers()
    transfers.bucket("reduce_scatter a, all_reduce b", {"x": (x, 0), "y": (x, 1)})
    transfers.bucket("all_gather b", {"u": (x, 0)})
    transfers.bucket("slice a, all_gather b, all_gather a", {"v": (x, 0, 0, 1)})
    comm.at("layer 1")
    comm.all_reduce(x, "a")
    shapes = {name: tuple(value.shape) for name, value in transfers.wait().items()}
    assert shapes == {"x": (2, 4), "y": (4, 2), "u": (8, 4), "v": (4, 8)}
    assert [str(event) for event in comm.log or ()] == [
        "reduce_scatter sum over a of float32[32] at layer 0",
        "all_gather over b of float32[16] at layer 0",
        "all_reduce sum over a of float32[4, 4] at layer 1",
        "all_reduce sum over b of float32[16] at layer 0",
        "all_gather over b of float32[8] at layer 0",
        "all_gather over a of float32[16] at layer 0",
    ]
    assert comm.where == "layer 1"


def test_on_cuda_streams_wait_for_each_other() -> None:
    """Breaks when the side stream may read what is not written yet, or the program what has not arrived, or memory
    that crosses streams is freed too early. Streams are written down here, not run.
    """
    said: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = self.cuda_stream = name

        def wait_stream(self, other: Stream) -> None:
            said.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event: Event) -> None:
            said.append(f"{self.name} waits for the event")

        def __enter__(self) -> None:
            said.append(f"enter {self.name}")

        def __exit__(self, *error: object) -> None:
            said.append(f"leave {self.name}")

    class Event:
        def record(self, stream: Stream) -> None:
            said.append(f"event on {stream.name}")

    class Streams:
        def __init__(self) -> None:
            self.now = Stream("main")

        def new(self) -> Stream:
            return Stream("side")

        def current(self) -> Stream:
            return self.now

        def on(self, stream: Stream) -> Stream:
            return stream

        def event(self) -> Event:
            return Event()

    comm, streams = RecordingComm(AXES, SIZES, 0, "cpu"), Streams()
    comm.streams = cast(Any, streams)
    pending, x = comm.transfers({}), torch.ones(3)
    sent = weakref.ref(x)
    pending.bucket("all_gather a, all_gather b", {"x": (x, 0, 0)}, keep=1)
    assert len(comm.log or ()) == 2  # the whole chain at once
    before = ["side waits for main", "enter side", "event on side", "leave side"]
    assert said == before
    del x
    assert sent() is not None  # the side stream may still read it
    found = pending.wait()
    assert found["x"].shape == (12,) and pending.wait() is found
    assert said[len(before) :] == ["main waits for the event"] and sent() is None
    said.clear()
    streams.now = Stream("other")
    comm.transfers().bucket("all_gather a", {"x": (torch.ones(3), 0)})
    # What main reads is memory of the side stream.
    assert said[:3] == ["side waits for other", "side waits for main", "enter side"]


def test_an_axis_of_one_rank_moves_nothing() -> None:
    """Breaks when an axis of size 1 is logged, or copies."""
    comm = RecordingComm(("a", "b"), (1, 1), 0, "cpu")
    x, held = torch.arange(6.0), {}
    transfers = comm.transfers(held)
    transfers.bucket("all_gather a, reduce_scatter b", {"x": (x, (0, 1, 6), 0)}, keep=1)
    assert transfers.wait()["x"] is x and held == {"x": x} and comm.log == []
    comm.streams = cast(Any, object())  # which has none
    assert comm.transfers().bucket("all_gather a", {"x": (x, 0)}).wait()["x"] is x


def test_a_lone_tensor_is_not_copied_into_a_bucket() -> None:
    """Breaks when a single large parameter costs a second copy of itself before it is sent."""

    class Peeking(RecordingComm):
        def _begin(self, x: Tensor, event: Event, owned: bool) -> Any:
            sent.append(x)
            return super()._begin(x, event, owned)

    sent: list[Tensor] = []
    comm, x = Peeking(("a",), (2,), 0, "cpu"), torch.arange(8.0).reshape(4, 2)
    for steps, given_args in (("all_gather a", (0,)), ("reduce_scatter a", (0,)), ("all_reduce a", ())):
        transfers = comm.transfers()
        transfers.bucket(steps, {"x": (x, *given_args) if given_args else x})
        transfers.wait()
    assert [tensor.data_ptr() for tensor in sent] == [x.data_ptr()] * 3


@pytest.mark.parametrize("owned", [False, True])
def test_a_lone_tensor_is_reduced_in_place_where_it_is_owned_alone(owned: bool) -> None:
    """Breaks when a gradient that others read is overwritten by the sum over the ranks, or one that nobody reads is
    copied.
    """
    given = [torch.full((4, 2), float(rank + 1)) for rank in range(2)]

    def reduce(comm: SimulatedComm) -> Tensor:
        transfers = comm.transfers()
        transfers.bucket("all_reduce a", {"x": given[comm.rank]}, owned=owned)
        return transfers.wait()["x"]

    assert all((total == 3.0).all() for total in SimulatedMesh(("a",), (2,)).run(reduce))
    assert [(x == rank + 1).all().item() for rank, x in enumerate(given)] == [not owned] * 2


def test_mistakes_in_a_bucket_are_named() -> None:
    """Breaks when an edited program's bucket goes wrong without the place and the numbers."""
    comm, x = RecordingComm(AXES, SIZES, 0, "cpu"), torch.zeros(6, 5)
    for steps, tensors, message in (
        ("gather a", {"x": (x, 0)}, "'gather a' is no step of a bucket"),
        ("all_gather c", {"x": (x, 0)}, "'all_gather c' is no step of a bucket.*axes a, b"),
        ("all_gather a", {"x": x}, "x comes with 0 arguments, the bucket's steps take 1"),
        ("all_gather a", {"x": (x, (0, 1, 2, 3))}, "takes at most 3 numbers"),
        ("all_reduce a", {"x": x, "y": x.double()}, r"different dtypes \(all_reduce a\)\. x torch.float32, y torch.fl"),
        ("reduce_scatter a", {"x": (x, 1)}, r"dim 1 of a tensor \(6, 5\) cannot be cut into 2 pieces"),
        ("reduce_scatter a", {"x": (x, (1, 1, 7))}, r"dim 1 of a tensor \(6, 5\) should have 7 elements"),
        ("all_gather a", {"x": (x, (1, 2, 7))}, "a dim of 7 elements in 2 stripes cannot be cut into 2 pieces"),
        ("all_to_all a", {"x": (x, (0, 1, 0, 1))}, "from dim 0 to itself"),
    ):
        with pytest.raises(AutoparError, match=message):
            comm.transfers().bucket(steps, tensors)
    with pytest.raises(AutoparError, match=r"the results of 2 steps cannot be kept \(all_gather a\)\. 1 steps"):
        comm.transfers({}).bucket("all_gather a", {"x": (x, 0)}, keep=2)


def test_sums_do_not_write_into_what_they_were_given() -> None:
    """Breaks when adding the next microbatch changes a gradient that something else still holds."""
    comm, sums = RecordingComm(("a",), (2,), 0, "cpu"), {}
    shared = torch.ones(2, dtype=torch.bfloat16)
    for _ in range(3):
        comm.accumulate(sums, {"u": shared, "v": shared}, "layer.", {"v": torch.float32})
    assert torch.equal(shared, torch.ones(2, dtype=torch.bfloat16))
    assert sums["layer.u"].dtype == torch.bfloat16 and sums["layer.v"].dtype == torch.float32
    assert sums["layer.u"].tolist() == sums["layer.v"].tolist() == [3.0, 3.0]
