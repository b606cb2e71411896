from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from autopar.base.errors import AutoparError
from autopar.ir.sharding import REPLICATE, Shard
from autopar.runtime.comm import ProcessGroupComm
from autopar.runtime.layout import assemble, local_part_shape, shard
from autopar.runtime.placements import make_dtensor, to_dtensor_placements
from tests.dist.launch import launch
from tests.dist.runtime.work import compiled_mlp, full, make_mesh, train, train_eager, uneven_mlp
from tests.unit.runtime.programs import Mlp, make_mlp

pytestmark = pytest.mark.dist

SHAPES = [(7, 6), (5, 3), (3,), (1, 4), (8, 8), (9, 2, 5), (127, 4)]


def as_dtensor_does(sizes: dict[str, int]) -> list[str]:
    mesh, wrong = make_mesh(sizes), []
    comm = ProcessGroupComm(mesh)
    for shape in SHAPES:
        whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        choices = [REPLICATE, *(Shard(dim) for dim in range(len(shape)))]
        shardings: list[Any] = [(a,) for a in choices]
        if len(sizes) == 2:
            shardings = [(a, b) for a in choices for b in choices]
        for sharding in shardings:
            theirs = distribute_tensor(whole, mesh, to_dtensor_placements(sharding, shape, comm.sizes))
            mine = shard(whole, sharding, comm)
            planned = local_part_shape(shape, sharding, comm.sizes, mesh.get_coordinate() or [])
            if tuple(mine.shape) != planned or not torch.equal(mine, theirs.to_local()):
                wrong.append(f"{shape} {sharding}: {tuple(mine.shape)}, DTensor {tuple(theirs.to_local().shape)}")
            x = make_dtensor(mine, mesh, sharding, shape)
            pieces: list[Any] = [None] * mesh.size()
            torch.distributed.all_gather_object(pieces, mine)
            if not torch.equal(x.full_tensor(), whole) or not torch.equal(
                assemble(pieces, sharding, comm.sizes), whole
            ):
                wrong.append(f"{shape} {sharding}: whole")
    return wrong


@pytest.mark.parametrize("sizes", [{"a": 4}, {"a": 2, "b": 2}])
def test_uneven_pieces_are_dtensors(sizes: dict[str, int]) -> None:
    """Breaks when 7 rows over 4 ranks are cut otherwise than torch cuts them: checkpoints would mix up rows."""
    assert [wrong for found in launch(as_dtensor_does, 4, sizes) for wrong in found] == []


def trained(microbatches: int) -> dict[str, Any]:
    model = uneven_mlp(microbatches=microbatches)
    assert tuple(model.up.weight.to_local().shape) == ((16, 2) if torch.distributed.get_rank() < 3 else (16, 0))
    return train(model, "adamw", lambda: model.clip_grad_norm_(0.1))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_training_uneven_parameters_equals_eager(microbatches: int) -> None:
    """Breaks when short or empty pieces are gathered, reduced, clipped or updated otherwise than whole ones."""
    expected = train_eager("adamw")
    for found in launch(trained, 4, microbatches):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-9)
        for name, value in expected["weights"].items():
            torch.testing.assert_close(found["weights"][name], value, rtol=1e-9, atol=1e-12)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Mlp().to(torch.float64)


def weights(folder: str) -> dict[str, dict[str, Tensor]]:
    def state(model: Any) -> dict[str, Tensor]:
        return {name: full(value).clone() for name, value in model.state_dict().items()}

    fresh = uneven_mlp(on_meta())
    fresh.init_weights(3)
    loaded = uneven_mlp(on_meta())
    loaded.load_pretrained(folder)
    # torch.distributed.checkpoint: from uneven to even pieces, and back.
    first, second = folder + "/first", folder + "/second"
    dcp.save(dict(loaded.state_dict()), checkpoint_id=first)
    even = compiled_mlp("zero3+tensor", make_mlp(seed=9))
    into: dict[str, Any] = dict(even.state_dict())
    dcp.load(into, checkpoint_id=first)
    found = {"fresh": state(fresh), "loaded": state(loaded), "even": state(even)}
    dcp.save(into, checkpoint_id=second)
    with torch.no_grad():
        for parameter in loaded.parameters():
            assert isinstance(parameter, DTensor)
            parameter.zero_()
    back: dict[str, Any] = dict(loaded.state_dict())
    dcp.load(back, checkpoint_id=second)
    return {**found, "back": state(loaded)}


def initialized() -> dict[str, Tensor]:
    model = compiled_mlp("zero3", on_meta())
    model.init_weights(3)
    return {name: full(value).clone() for name, value in model.state_dict().items()}


def test_uneven_parameters_are_initialized_saved_and_loaded() -> None:
    """Breaks when a short or empty piece is drawn, read or written in the wrong place."""
    expected = {name: value.clone() for name, value in make_mlp(seed=5).state_dict().items()}
    fresh = launch(initialized, 2)[0]
    with tempfile.TemporaryDirectory() as folder:
        save_file(expected, Path(folder, "model.safetensors"))
        for found in launch(weights, 4, folder):
            for name, value in expected.items():
                assert all(torch.equal(found[kind][name], value) for kind in ("loaded", "even", "back")), name
                assert torch.equal(found["fresh"][name], fresh[name])


def test_what_no_rule_cuts_is_refused() -> None:
    """Breaks when a dim with stripes is cut unevenly: DTensor would hold other rows."""
    for sharding, shape in (
        ((Shard(0, 2), REPLICATE), (6,)),
        ((Shard(0), Shard(0, 2)), (12, 2)),
        ((Shard(0), Shard(0, 3)), (8,)),
    ):
        with pytest.raises(AutoparError, match="cannot be split over 2 ranks"):
            local_part_shape(shape, sharding, (2, 2), (0, 0))
        with pytest.raises(AutoparError, match="cannot be split evenly"):
            to_dtensor_placements(sharding, shape, (2, 2))
    assert local_part_shape((7,), (Shard(0), Shard(0)), (4, 1), (3, 0)) == (1,)
