"""Zigzag pieces: what a rank holds, and how collectives move them, against plain indexing by `positions`."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.ir.interface import ProgramInterface, TensorInterface
from autopar.ir.sharding import REPLICATE, Shard, Sharding, format_sharding
from autopar.operators import positions, starts
from autopar.runtime.comm import RecordingComm
from autopar.runtime.communicator import Communicator
from autopar.runtime.data import batch_sharding
from autopar.runtime.layout import shard
from autopar.runtime.placements import to_dtensor_placements
from autopar.runtime.simulated_comm import SimulatedComm, SimulatedMesh

pytestmark = pytest.mark.unit

FEW = settings(max_examples=60, deadline=None)
Ways = tuple[tuple[int, int, bool], ...]
"""How axes split one dim: (axis size, outer, zigzag) each."""

WAYS = st.sampled_from([(1, False), (2, False), (3, False), (2, True), (4, True), (6, True)])


@st.composite
def splits(draw: st.DrawFn, num_axes: int = 3) -> tuple[int, Ways]:
    """The size of a dim, and how up to `num_axes` axes split it."""
    ways = tuple((draw(st.sampled_from([1, 2, 3, 4])), *draw(WAYS)) for _ in range(draw(st.integers(1, num_axes))))
    size = draw(st.sampled_from([1, 2, 3]))
    for num, outer, _ in reversed(ways):
        size = math.lcm(size, outer) * num
    assume(size <= 2000)
    return size, ways


def plain_positions(size: int, ways: Ways, at: tuple[int, ...]) -> list[int]:
    """The definition: each axis deals the stripes of what is left, those of odd number backwards where it is zigzag."""
    held = list(range(size))
    for (num, outer, zigzag), coordinate in zip(ways, at, strict=True):
        length = len(held) // outer // num
        stripes = [held[k * num * length : (k + 1) * num * length] for k in range(outer)]
        places = [num - 1 - coordinate if zigzag and k % 2 else coordinate for k in range(outer)]
        held = [x for stripe, p in zip(stripes, places, strict=True) for x in stripe[p * length : (p + 1) * length]]
    return held


def names(ways: Ways) -> tuple[str, ...]:
    return tuple(f"a{i}" for i in range(len(ways)))


def sharding_of(ways: Ways, dim: int) -> Sharding:
    return tuple(Shard(dim, outer, zigzag) for _, outer, zigzag in ways)


def test_two_stripes_are_the_chunks_of_context_parallelism() -> None:
    """Breaks if rank i does not hold chunks i and 2n-1-i, in this order."""
    for rank in range(4):
        held = positions(32, (rank, 4, 2, True)).tolist()
        assert held == [*range(4 * rank, 4 * rank + 4), *range(4 * (7 - rank), 4 * (8 - rank))]
        assert starts(32, (rank, 4, 2, True)) == [4 * rank, 4 * (7 - rank)]
    assert starts(32, (3, 4, 1)) == [24]
    assert starts(32, (0, 1, 2, True)) == [0]
    # Chunks 0 and 3, cut once more: each rank of the second axis has one of them.
    assert [starts(32, (0, 2, 2, True), (i, 2, 1)) for i in range(2)] == [[0], [24]]


@FEW
@given(splits())
def test_positions_and_starts_are_the_definition(case: tuple[int, Ways]) -> None:
    """Breaks if masks or dropout see a token at another place than the one that the rank holds."""
    size, ways = case
    text = format_sharding(sharding_of(ways, 0), names(ways))
    sizes = tuple(num for num, _, _ in ways)
    counts = set()
    for rank, at in enumerate(itertools.product(*map(range, sizes))):
        wanted = plain_positions(size, ways, at)
        given_ = [(coordinate, *way) for coordinate, way in zip(at, ways, strict=True)]
        assert positions(size, *given_).tolist() == wanted
        comm = RecordingComm(names(ways), sizes, rank, "cpu")
        assert comm.positions((size,), text)[0].tolist() == wanted
        begins = comm.starts(size, text)
        assert begins == starts(size, *given_)
        assert begins is comm.starts(size, text)
        length = len(wanted) // len(begins)
        assert [begin + i for begin in begins for i in range(length)] == wanted
        counts.add(len(begins))
        if len(ways) == 1:
            assert len(begins) == (ways[0][1] if sizes[0] > 1 else 1)
    assert len(counts) == 1, "ranks with different numbers of runs would run different programs"


@pytest.mark.moderate
@FEW
@given(splits(), st.integers(0, 2))
def test_slices_are_what_positions_say_and_gathers_undo_them(case: tuple[int, Ways], dim: int) -> None:
    """Breaks if a piece lies otherwise than the shape in the program's comments says."""
    size, ways = case
    sizes = tuple(num for num, _, _ in ways)
    assume(math.prod(sizes) <= 12)
    shape = [2, 3, 2]
    shape[dim] = size
    whole = torch.arange(math.prod(shape)).reshape(shape)

    def work(comm: SimulatedComm) -> tuple[Tensor, Tensor]:
        piece = shard(whole, sharding_of(ways, dim), comm)
        back = piece
        for axis, (_, outer, zigzag) in reversed(list(zip(comm.axes, ways, strict=True))):
            back = comm.all_gather(back, axis, dim, outer, zigzag)
        return piece, back

    found = SimulatedMesh(names(ways), sizes).run(work)
    for at, (piece, back) in zip(itertools.product(*map(range, sizes)), found, strict=True):
        index = torch.tensor(plain_positions(size, ways, at))
        assert torch.equal(piece, whole.index_select(dim, index))
        assert piece.is_contiguous()
        assert torch.equal(back, whole)
        assert back.is_contiguous()


@pytest.mark.moderate
@FEW
@given(splits(1), splits(1), st.permutations([0, 1, 2]))
def test_terms_and_pieces_travel_to_where_they_belong(
    to: tuple[int, Ways], origin: tuple[int, Ways], dims: list[int]
) -> None:
    """Breaks if reduce_scatter or all_to_all deal the stripes of a dim otherwise than `slice`."""
    num, outer, zigzag = to[1][0]
    _, from_outer, from_zigzag = origin[1][0]
    dim, from_dim = dims[:2]
    shape = [2, 3, 2]
    shape[dim], shape[from_dim] = outer * num, from_outer * num * 2
    terms = torch.arange(num * math.prod(shape), dtype=torch.float64).reshape(num, *shape) ** 2

    def work(comm: SimulatedComm) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        scattered = comm.reduce_scatter(terms[comm.rank], "a", dim, outer, zigzag=zigzag)
        most = comm.reduce_scatter(terms[comm.rank], "a", dim, outer, "max", zigzag)
        piece = comm.slice(terms[0], "a", from_dim, from_outer, from_zigzag)
        turned = comm.all_to_all(piece, "a", dim, outer, from_dim, from_outer, zigzag, from_zigzag)
        back = comm.all_to_all(turned, "a", from_dim, from_outer, dim, outer, from_zigzag, zigzag)
        assert torch.equal(back, piece)
        assert all(each.is_contiguous() for each in (piece, turned))
        return scattered, most, piece, turned

    for rank, (scattered, most, piece, turned) in enumerate(SimulatedMesh(("a",), (num,)).run(work)):
        index = torch.tensor(plain_positions(shape[dim], ((num, outer, zigzag),), (rank,)))
        own = torch.tensor(plain_positions(shape[from_dim], ((num, from_outer, from_zigzag),), (rank,)))
        assert torch.equal(scattered, terms.sum(0).index_select(dim, index))
        assert torch.equal(most, terms.amax(0).index_select(dim, index))
        assert torch.equal(piece, terms[0].index_select(from_dim, own))
        assert torch.equal(turned, terms[0].index_select(dim, index))


def test_what_cannot_be_said_is_refused() -> None:
    """Breaks if an odd number of stripes is dealt somehow, or a DTensor is made that gathers in the wrong order."""
    comm: Communicator = RecordingComm(("cp",), (2,), 0, "cpu")
    with pytest.raises(AutoparError, match="3 stripes cannot be dealt zigzag.*even number"):
        comm.slice(torch.zeros(12), "cp", 0, 3, True)
    with pytest.raises(AutoparError, match=r"dim 0 of \(6,\) cannot be split over 2 ranks"):
        comm.starts(6, "cp=S(0, outer=2, zigzag)")
    with pytest.raises(AutoparError, match="6 elements cannot be split over 2 ranks"):
        starts(6, (0, 2, 2, True))
    with pytest.raises(AutoparError, match="split zigzag cannot be a DTensor.*redistribute it first"):
        to_dtensor_placements((Shard(0, 2, True), REPLICATE), (8, 4), (2, 2))


def test_a_loader_leaves_zigzag_dims_to_the_program() -> None:
    """Breaks if a DTensor is made of rows that are dealt zigzag, or if a zigzag sequence hides that rows are split."""

    def rows_of(*shardings: Sharding) -> Sharding:
        inputs = tuple(TensorInterface(f"x{i}", (8, 16), "int64", s) for i, s in enumerate(shardings))
        return batch_sharding(ProgramInterface(("dp", "cp"), (2, 2), (), (), inputs, ()))

    zigzag = Shard(1, 2, True)
    assert rows_of((Shard(0), zigzag), (Shard(0), REPLICATE)) == (Shard(0), REPLICATE)
    assert rows_of((Shard(0), Shard(0, 2, True)), (REPLICATE, zigzag)) == (REPLICATE, REPLICATE)
    with pytest.raises(AutoparError, match="first dim is split alike"):
        rows_of((Shard(0), Shard(0, 2, True)), (Shard(0), REPLICATE))
