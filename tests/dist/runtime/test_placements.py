from __future__ import annotations

import itertools
import logging
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from autopar.base.errors import AutoparError
from autopar.ir.sharding import REPLICATE, Shard, Sharding, format_sharding, is_valid
from autopar.runtime.comm import ProcessGroupComm
from autopar.runtime.layout import redistribute, shard
from autopar.runtime.placements import from_dtensor_placements, make_dtensor, to_dtensor_placements
from tests.dist.launch import launch
from tests.dist.runtime.work import make_mesh

pytestmark = pytest.mark.dist

SIZES = (2, 2)
PLACEMENTS = (REPLICATE, Shard(0), Shard(1), Shard(0, 2), Shard(0, 3), Shard(1, 3))
SHARDINGS = [s for s in itertools.product(PLACEMENTS, repeat=2) if is_valid((24, 36), s, SIZES)]


def whole_tensor() -> Tensor:
    return torch.arange(24 * 36, dtype=torch.float64).reshape(24, 36)


def every_sharding() -> list[str]:
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    mesh, whole, wrong = make_mesh({"a": 2, "b": 2}), whole_tensor(), []
    comm = ProcessGroupComm(mesh)
    replicated = [TorchReplicate()] * 2

    def check(sharding: Sharding, what: str, found: Tensor, expected: Tensor) -> None:
        if not torch.equal(found, expected):
            wrong.append(f"{format_sharding(sharding, 'ab')}: {what}")

    for sharding in SHARDINGS:
        x = make_dtensor(shard(whole, sharding, comm), mesh, sharding, whole.shape)
        assert from_dtensor_placements(x.placements) == sharding
        check(sharding, "full_tensor", x.full_tensor(), whole)
        check(sharding, "state made like it", (torch.zeros_like(x) + x).full_tensor(), whole)
        check(sharding, "foreach", torch._foreach_mul([x], 2.0)[0].full_tensor(), whole * 2)
        moved = x.redistribute(placements=[TorchShard(1), TorchReplicate()]).redistribute(placements=replicated)
        check(sharding, "redistribute from", moved.to_local(), whole)
        back = make_dtensor(whole, mesh, (REPLICATE, REPLICATE), whole.shape).redistribute(placements=x.placements)
        check(sharding, "redistribute to", back.to_local(), shard(whole, sharding, comm))
    return wrong


def test_a_dtensor_holds_what_the_sharding_says() -> None:
    """Breaks when DTensor reads a (strided, twice split) placement otherwise than we do: full_tensor would be wrong."""
    assert launch(every_sharding, 4)[0] == []


def checkpoints(folder: str) -> list[str]:
    mesh, whole, wrong = make_mesh({"a": 2, "b": 2}), whole_tensor(), []
    comm = ProcessGroupComm(mesh)

    def placed(sharding: Sharding, value: Tensor) -> DTensor:
        return make_dtensor(shard(value, sharding, comm).clone(), mesh, sharding, whole.shape)

    saved = {format_sharding(sharding, "ab"): placed(sharding, whole) for sharding in SHARDINGS}
    dcp.save(saved, checkpoint_id=folder)
    # Each name is loaded into the sharding of the next: strided to contiguous and back.
    for shift in (0, 1, 5):
        targets = SHARDINGS[shift:] + SHARDINGS[:shift]
        loaded: dict[str, Any] = {name: placed(target, whole * 0) for name, target in zip(saved, targets)}
        dcp.load(loaded, checkpoint_id=folder)
        for (name, value), target in zip(loaded.items(), targets):
            if not torch.equal(value.to_local(), shard(whole, target, comm)):
                wrong.append(f"{name} into {format_sharding(target, 'ab')}")
    return wrong


def test_checkpoints_of_strided_tensors_hold_every_element() -> None:
    """Breaks when torch.distributed.checkpoint takes a strided piece for a contiguous one."""
    with tempfile.TemporaryDirectory() as folder:
        assert launch(checkpoints, 4, folder)[0] == []


def real_collectives() -> list[str]:
    mesh, wrong = make_mesh({"a": 2, "b": 2}), []
    comm = ProcessGroupComm(mesh)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn):
        whole = (torch.arange(24 * 36).reshape(24, 36) % 7).to(torch.float32).to(dtype)
        for source, target in zip(SHARDINGS, SHARDINGS[7:] + SHARDINGS[:7]):
            found = redistribute(shard(whole, source, comm), source, target, comm)
            if found.dtype != dtype or not torch.equal(found.float(), shard(whole, target, comm).float()):
                wrong.append(f"{dtype} {format_sharding(source, 'ab')} to {format_sharding(target, 'ab')}")
    term = torch.arange(24.0).reshape(4, 6) * (comm.rank + 1)
    if not torch.equal(comm.all_reduce(term, "b", "max"), torch.arange(24.0).reshape(4, 6) * (comm.index("a") * 2 + 2)):
        wrong.append("all_reduce max")
    total = torch.arange(24.0).reshape(4, 6) * (comm.index("a") * 4 + 3)
    if not torch.equal(comm.reduce_scatter(term, "b", 1), comm.slice(total, "b", 1)):
        wrong.append("reduce_scatter")
    return wrong


def test_gloo_moves_what_the_simulation_moves() -> None:
    """Breaks when a backend's layout or dtype limits change what a collective returns."""
    assert [wrong for found in launch(real_collectives, 4) for wrong in found] == []


def test_uneven_stripes_are_refused() -> None:
    """Breaks when DTensor is asked to pad stripes, which no program does."""
    with pytest.raises(
        AutoparError, match=r"a tensor \(10,\) cannot be split evenly. axis0=S\(0, outer=2\) over \(4,\) ranks"
    ):
        to_dtensor_placements((Shard(0, 2),), (10,), (4,))
