from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.runtime.comm import ProcessGroupComm, RecordingComm
from autopar.runtime.pieces import piece_of
from benchmarks.training.count import CollectiveCounter
from tests.dist.launch import launch
from tests.dist.runtime.work import make_mesh
from tests.unit.runtime.test_transfers import alone

pytestmark = pytest.mark.dist

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool)
# steps, then the arguments of each tensor
CHAINS: list[tuple[str, list[tuple[Any, ...]]]] = [
    ("all_gather a", [(0,), (1,), ((0, 2),), ((1, 3),)]),
    ("all_reduce b", [(), (), ()]),
    ("reduce_scatter a", [(0,), (1,), ((0, 3),)]),
    ("all_to_all b", [((0, 1, 1, 1),), ((1, 2, 0, 3),)]),
    ("slice b", [(0,), ((1, 2),)]),
    ("all_gather b, all_gather a", [(0, 0), (1, 0), ((0, 2), 1)]),
    ("reduce_scatter a, all_reduce b", [(0,), (1,)]),
    ("reduce_scatter b, reduce_scatter a", [(0, 0), (1, (0, 3))]),
    ("slice a, all_to_all b", [(0, (1, 1, 0, 1))]),
]


def value_of(rank: int, number: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    high = 2 if dtype == torch.bool else 7
    return torch.randint(0, high, (24 + 12 * (number % 2), 12), generator=generator).to(dtype)


def every_chain() -> list[str]:
    comm, wrong = ProcessGroupComm(make_mesh({"a": 2, "b": 2})), []
    for dtype in DTYPES:
        # All in flight together: what one bucket's later steps send must not meet another's.
        comm.log = []
        transfers, expected = comm.transfers(), {}
        with CollectiveCounter() as counter:
            for number, (steps, arguments) in enumerate(CHAINS):
                tensors = {f"{number}.{i}": value_of(comm.rank, i, dtype) for i in range(len(arguments))}
                transfers.bucket(
                    steps, {name: (x, *given) if given else x for (name, x), given in zip(tensors.items(), arguments)}
                )
            found = transfers.wait()
        counted, logged = counter.bytes_by_kind(), {}
        for event in comm.log:
            logged[event.kind] = logged.get(event.kind, 0) + event.bytes_sent
        if counted != logged or transfers.wait() is not found:
            wrong.append(f"{dtype}: logged {logged}, sent {counted}")
        for number, (steps, arguments) in enumerate(CHAINS):
            for i, given in enumerate(arguments):
                expected[f"{number}.{i}"] = alone(comm, steps, value_of(comm.rank, i, dtype), given)
        for name, value in expected.items():
            if found[name].dtype != dtype or not torch.equal(found[name], value):
                wrong.append(f"{dtype} {CHAINS[int(name.split('.')[0])][0]}: tensor {name}")
        recorder = RecordingComm(comm.axes, comm.sizes, comm.rank, "meta")
        dry = recorder.transfers()
        for steps, arguments in CHAINS:
            given_tensors = {
                str(i): (value_of(0, i, dtype).to("meta"), *a) if a else value_of(0, i, dtype).to("meta")
                for i, a in enumerate(arguments)
            }
            dry.bucket(steps, given_tensors)
        dry.wait()
        if [str(event) for event in recorder.log or ()] != [
            str(event) for event in comm.log[: len(recorder.log or ())]
        ]:
            wrong.append(f"{dtype}: a dry run foresees other collectives")
    return wrong


def test_buckets_move_what_single_collectives_do() -> None:
    """Breaks when gloo's limits (flat pieces, dtypes), packing, or what is in flight change a value or bytes."""
    assert [wrong for found in launch(every_chain, 4) for wrong in found] == []


def uneven() -> list[str]:
    comm, wrong = ProcessGroupComm(make_mesh({"a": 4})), []
    for size in (7, 5, 3, 1, 8):
        for dim in (0, 1):
            for dtype in (torch.float32, torch.bfloat16, torch.bool):
                shape = (size, 3) if dim == 0 else (3, size)
                whole = (torch.arange(size * 3).reshape(shape) % 2).to(dtype)
                start, length = piece_of(size, 4, comm.rank)
                piece = whole.narrow(dim, start, length).contiguous()
                comm.log = []
                with CollectiveCounter() as counter:
                    gather = comm.transfers()
                    gather.bucket("all_gather a", {"x": (piece, (dim, 1, size))})
                    gather.bucket("all_gather a", {"y": (piece, (dim, 1, size)), "z": (whole[:, :1], 0)} if dim else {})
                    reduce = comm.transfers()
                    reduce.bucket("reduce_scatter a", {"x": (whole, (dim, 1, size)), "y": (whole, (dim, 1, size))})
                    found, reduced = gather.wait(), reduce.wait()
                factor = 1 if dtype == torch.bool else 4
                for name, have, want in (
                    ("gathered", found["x"], whole),
                    ("scattered", reduced["x"], (piece.float() * factor).to(dtype)),
                    ("scattered second", reduced["y"], (piece.float() * factor).to(dtype)),
                ):
                    if have.shape != want.shape or not torch.equal(have, want):
                        wrong.append(f"{name} {size} rows, dim {dim}, {dtype}")
                if sum(event.bytes_sent for event in comm.log) != counter.total_bytes():
                    wrong.append(f"bytes of {size} rows, dim {dim}, {dtype}")
    return wrong


def test_uneven_pieces_travel_and_come_back() -> None:
    """Breaks when 7 rows over 4 ranks (2, 2, 2, 1) or 5 (2, 2, 1, 0) are gathered or scattered with padding."""
    assert [wrong for found in launch(uneven, 4) for wrong in found] == []


def kept() -> tuple[bool, list[str]]:
    comm = ProcessGroupComm(make_mesh({"a": 2}))
    comm.log, held = [], {}
    x = torch.full((2, 2), float(comm.rank))
    results = []
    for _ in range(2):
        pending = comm.transfers(held, "layer.")
        pending.bucket("all_gather a, all_reduce a", {"x": (x, 0), "y": (x, 1)}, keep=1)
        results.append(pending.wait())
    same = all(torch.equal(results[0][name], results[1][name]) for name in ("x", "y"))
    return same and set(held) == {"layer.x", "layer.y"}, [event.kind for event in comm.log]


def test_what_is_held_is_not_sent_again() -> None:
    """Breaks when a second microbatch gathers its parameters anew."""
    for same, kinds in launch(kept, 2):
        assert same and kinds == ["all_gather", "all_reduce", "all_reduce"]
