"""Folders of torch.distributed.checkpoint are data: loading one runs nothing of what is in it."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import autopar
from autopar.base.errors import AutoparError
from autopar.runtime.checkpoint.pretrained import load_pretrained


class Runs:
    """Writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    own, others = get_state_dict(model, optimizer)
    return {"model": own, "optimizer": others, "step": 3, "about": {"name": "x", "sizes": [1, 2]}}


def metadata_of(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def error_of(state: dict[str, Any], folder: Path) -> str:
    with pytest.raises(AutoparError) as caught:
        autopar.load_checkpoint(state, folder)
    return str(caught.value)


def test_a_checkpoint_comes_back(tmp_path: Path) -> None:
    """Breaks if tensors, an optimizer's state, or numbers beside them are not loaded as torch loads them."""
    saved = state_of(*trained())
    dcp.save(saved, checkpoint_id=tmp_path)
    into = state_of(*trained())
    into |= {"step": 0, "about": {"name": "", "sizes": [0, 0]}}
    autopar.load_checkpoint(into, tmp_path)
    assert (into["step"], into["about"]) == (3, saved["about"])
    torch.testing.assert_close(into["model"], saved["model"])
    torch.testing.assert_close(into["optimizer"]["state"], saved["optimizer"]["state"])
    assert into["optimizer"]["param_groups"] == saved["optimizer"]["param_groups"]


def test_metadata_that_runs(tmp_path: Path) -> None:
    """Breaks if what a folder's metadata names is called; torch's own reader does so."""
    mark, state = tmp_path / "ran", {"weight": torch.zeros(2)}
    dcp.save(state, checkpoint_id=tmp_path / "own")
    (tmp_path / "own" / ".metadata").write_bytes(pickle.dumps(Runs(mark)))
    assert "somebody may want to run code here" in error_of(state, tmp_path / "own")
    with pytest.raises(AutoparError, match="no checkpoint to load"):
        load_pretrained(nn.Linear(3, 2), tmp_path / "own", torch.device("cpu"))
    assert not mark.exists()


def test_values_that_run(tmp_path: Path) -> None:
    """Breaks if a value beside the tensors is unpickled whatever it is; torch's own planner does so."""
    mark, folder = tmp_path / "ran", tmp_path / "own"
    dcp.save({"step": 3}, checkpoint_id=folder)
    (info,) = metadata_of(folder).storage_data.values()
    content = io.BytesIO()
    torch.save(Runs(mark), content)
    (folder / info.relative_path).write_bytes(content.getvalue())
    whole = metadata_of(folder)
    next(iter(whole.storage_data.values())).length = len(content.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(whole))
    assert "step of the checkpoint is no plain data" in error_of({"step": 0}, folder)
    assert not mark.exists()


def test_damaged_folders(tmp_path: Path) -> None:
    """Breaks if a folder that names files elsewhere is read, a pipe waited for, or damage is somebody else's error."""
    state, folder = {"weight": torch.zeros(2)}, tmp_path / "own"
    dcp.save(state, checkpoint_id=folder)
    whole = metadata_of(folder)
    for name in ("../x.distcp", "/etc/passwd", 3):
        next(iter(whole.storage_data.values())).relative_path = name
        (folder / ".metadata").write_bytes(pickle.dumps(whole))
        assert "which is not in the folder" in error_of(state, folder)
    for content in (b"", b"\x80", b"garbage", pickle.dumps({}), pickle.dumps(whole)[:-9]):
        (folder / ".metadata").write_bytes(content)
        assert "the checkpoint is damaged" in error_of(state, folder)
    (folder / ".metadata").unlink()
    assert "cannot read the checkpoint's metadata" in error_of(state, folder)
    os.mkfifo(folder / ".metadata")
    assert "a pipe, a socket or a device" in error_of(state, folder)
    dcp.save({"other": torch.zeros(2)}, checkpoint_id=tmp_path / "less")
    assert "the checkpoint cannot be loaded" in error_of(state, tmp_path / "less")
