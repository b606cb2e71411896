"""Checkpoints are data from elsewhere: what is read is in the folder, is a file, and is there once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import local_tensor
from autopar.ir.sharding import REPLICATE, Shard, Sharding, local_shape
from autopar.runtime.checkpoint.pretrained import INDEX, load_pretrained
from autopar.runtime.comm import RecordingComm
from autopar.runtime.layout import shard
from autopar.runtime.placements import make_dtensor
from autopar.runtime.weights import store
from tests.unit.runtime.peers import rank_of

CPU = torch.device("cpu")


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((2, 3), value), "bias": torch.full((2,), value)}


def folder_with(tmp_path: Path, file: str, *, named: str | None = None) -> Path:
    """A folder with an index that says that `file` has all tensors. named: where they are."""
    folder = tmp_path / "checkpoint"
    folder.mkdir(exist_ok=True)
    save_file(weights(2.0), named or folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(weights(0.0), file)}))
    return folder


def error_of(path: Path) -> str:
    with pytest.raises(AutoparError) as caught:
        load_pretrained(nn.Linear(3, 2), path, CPU)
    return str(caught.value)


@pytest.mark.parametrize("layout", [
    (REPLICATE, Shard(0)), (Shard(1), Shard(0)), (REPLICATE, Shard(0, 3)), (Shard(0, 2), Shard(0)),
    (Shard(0, 3), Shard(1, 2)),
], ids=str)  # fmt: skip
def test_a_rank_reads_its_own_pieces(layout: Sharding, tmp_path: Path) -> None:
    """Breaks if a stripe (of a fused q, k, v) is read from, or written to, another one's place or another rank's."""
    whole, axes, sizes, rank = torch.arange(36.0 * 24).reshape(36, 24), ("dp", "tp"), (2, 3), 5
    save_file({"weight": whole}, tmp_path / "model.safetensors")
    expected = shard(whole, layout, RecordingComm(axes, sizes, rank, "cpu"))
    with rank_of(dict(zip(axes, sizes, strict=True)), rank) as mesh:
        local = torch.full(local_shape(whole.shape, layout, sizes), -1.0)
        model = nn.Module()
        model.weight = nn.Parameter(make_dtensor(local, mesh, layout, whole.shape))
        load_pretrained(model, tmp_path, CPU)
        assert torch.equal(local_tensor(model.weight), expected)
        store(model.weight, whole + 1, RecordingComm(axes, sizes, rank, "cpu"))
        assert torch.equal(local_tensor(model.weight), expected + 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bias": None}, "the checkpoint lacks bias"),
        ({"extra": torch.zeros(1)}, "the checkpoint has names that the model does not have: extra"),
        ({"weight": torch.zeros(4, 3)}, "weight has another shape in the checkpoint"),
        ({"weight": torch.zeros(3, 2)}, "weight has another shape in the checkpoint"),
    ],
    ids=["lacks", "extra", "larger", "turned"],
)
def test_what_is_of_another_model(change: dict[str, torch.Tensor | None], said: str, tmp_path: Path) -> None:
    """Breaks if a checkpoint of another model is loaded as far as it goes."""
    content = {name: value for name, value in (weights(2.0) | change).items() if value is not None}
    save_file(content, tmp_path / "model.safetensors")
    assert error_of(tmp_path).startswith(said)


def test_tied_weights_under_any_of_their_names(tmp_path: Path) -> None:
    """Breaks if a tied weight is only found under its first name: safetensors keeps one of them."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    for name, value in (("0.weight", 2.0), ("1.weight", 3.0)):
        save_file({name: torch.full((3, 3), value)}, tmp_path / "model.safetensors")
        load_pretrained(model, tmp_path, CPU)
        assert (model[0].weight == value).all()


def test_buffers_on_meta_become_real(tmp_path: Path) -> None:
    """Breaks if a persistent buffer of a model that was built on meta stays there, and is never filled."""
    model = nn.BatchNorm1d(3)
    state = {name: torch.full_like(value, 2) for name, value in model.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    for name, buffer in model.named_buffers():
        model._buffers[name] = buffer.to("meta")
    load_pretrained(model, tmp_path, CPU)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("kind", ["above", "absolute", "inside", "empty"])
def test_an_index_names_files_of_its_folder(kind: str, tmp_path: Path) -> None:
    """Breaks if an index makes the rank read a file that lies outside of the checkpoint's folder."""
    secret = tmp_path / "secret.safetensors"
    file = {
        "above": "../secret.safetensors",
        "absolute": str(secret),
        "inside": "x/../../secret.safetensors",
        "empty": "",
    }
    folder = folder_with(tmp_path, file[kind], named=str(secret))
    assert "names a file outside of its folder" in error_of(folder)


def test_links_as_in_a_cache(tmp_path: Path) -> None:
    """Breaks if a cache, whose folders and files are links to `blobs`, is not read any more."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots" / "abc").mkdir(parents=True)
    (tmp_path / "refs").symlink_to(tmp_path / "snapshots" / "abc")
    save_file(weights(2.0), tmp_path / "blobs" / "123")
    index = json.dumps({"weight_map": dict.fromkeys(weights(0.0), "model-00001-of-00001.safetensors")})
    (tmp_path / "blobs" / "456").write_text(index)
    (tmp_path / "refs" / "model-00001-of-00001.safetensors").symlink_to("../../blobs/123")
    for with_index in (False, True):
        if with_index:
            (tmp_path / "refs" / INDEX).symlink_to("../../blobs/456")
        model = nn.Linear(3, 2)
        load_pretrained(model, tmp_path / "refs", CPU)
        assert (model.weight == 2.0).all() and (model.bias == 2.0).all()


def test_pipes_and_devices(tmp_path: Path) -> None:
    """Breaks if a pipe in the place of a file, or of the index, is waited for."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    os.mkfifo(folder / "model.safetensors")
    assert "a pipe, a socket or a device" in error_of(folder)
    assert "a pipe, a socket or a device" in error_of(folder / "model.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(weights(0.0), "model.safetensors")}))
    assert "a pipe, a socket or a device" in error_of(folder)
    (folder / INDEX).unlink()
    os.mkfifo(folder / INDEX)
    assert "a pipe, a socket or a device" in error_of(folder)
    assert "is a folder" in error_of(folder_of_folders(tmp_path))


def folder_of_folders(tmp_path: Path) -> Path:
    (tmp_path / "other" / "model.safetensors").mkdir(parents=True)
    return tmp_path / "other"


def test_one_tensor_in_two_files(tmp_path: Path) -> None:
    """Breaks if the last of two files wins, and which one that is depends on their names."""
    save_file(weights(1.0), tmp_path / "a.safetensors")
    save_file({"bias": torch.zeros(2)}, tmp_path / "b.safetensors")
    message = error_of(tmp_path)
    assert message.startswith("two files of the checkpoint have the tensor bias")
    assert "a.safetensors and b.safetensors" in message


@pytest.mark.parametrize(
    "text",
    ["[]", "{", '{"weight_map": []}', '{"weight_map": {"a": 3}}', "[" * 9999, '{"weight_map": {"a": "x", "a": "y"}}'],
    ids=range(6),
)
def test_damaged_indices(text: str, tmp_path: Path) -> None:
    """Breaks if an index that is none is a KeyError, a TypeError or a RecursionError."""
    (tmp_path / INDEX).write_text(text)
    assert "checkpoint" in error_of(tmp_path)


def test_damaged_files(tmp_path: Path) -> None:
    """Breaks if files that are no safetensors, or lack what the index says, are errors of somebody else's."""
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    assert "the checkpoint is damaged" in error_of(tmp_path)
    folder = folder_with(tmp_path, "model.safetensors")
    save_file({"weight": torch.zeros(2, 3)}, folder / "model.safetensors")
    assert "the index says that it has bias, which it has not" in error_of(folder)
