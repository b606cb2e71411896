"""Checkpoints of several ranks: onto other meshes, and through whatever a rank may run into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist import checkpoints
from tests.dist.launch import ChildError, launch

pytestmark = pytest.mark.dist

FOUR: dict[str, checkpoints.Setting] = {
    "pipeline": ({"pp": 2, "dp": 2}, {"pp": "pipeline(1f1b)", "dp": "zero2"}),
    "tensor": ({"dp": 2, "tp": 2}, {"dp": "zero3", "tp": "tensor"}),
    "zero3": ({"dp": 4}, "zero3"),
    "deep": ({"pp": 4}, {"pp": "pipeline(gpipe)"}),
}
TWO: list[checkpoints.Setting] = [({"tp": 2}, "tensor"), ({"dp": 2}, "ddp")]
"""What a run goes on on."""


@pytest.mark.parametrize(("name", "first"), [("gpt2", "tensor"), ("gpt2", "pipeline"), ("llama", "deep")])
def test_a_run_goes_on_on_any_mesh(name: str, first: str, tmp_path: Path) -> None:
    """Breaks if a piece, stripe, state or tied weight is lost, read from elsewhere, or rounded on the way."""
    ranks = launch(checkpoints.saved, 4, name, FOUR[first], str(tmp_path), timeout_s=120.0)
    whole: dict[str, torch.Tensor] = {}
    for rank, _ in ranks:
        whole |= rank
    settings = [(4, list(FOUR.values())), (2, TWO)]
    for num, some in settings:
        found = launch(checkpoints.resumed, num, name, some, str(tmp_path), timeout_s=250.0)
        for at, setting in enumerate(some):
            names: set[str] = set()
            for rank in found:
                values, losses = rank[at]
                names |= values.keys()
                for each, value in values.items():
                    assert torch.equal(value, whole[each]), (setting, each)
                # Exactly as the uninterrupted run on that mesh; on another one to float32's rounding.
                same = num == 4 and setting == FOUR[first]
                assert losses == (ranks[0][1] if same else pytest.approx(ranks[0][1], rel=1e-4)), setting
            assert names == whole.keys(), setting


def test_what_one_rank_fails_at_is_told_on_all(tmp_path: Path) -> None:
    """Breaks if a rank waits for one that failed, or nobody knows which one it was, and at what."""
    said = launch(checkpoints.failing, 2, str(tmp_path), timeout_s=60.0)
    assert said[0] == said[1]
    assert said[0][0].startswith("rank 1 could not save a checkpoint: loader[1]['at'] cannot be saved: it is a")
    assert "the checkpoint is damaged" in said[0][1] and "state-00001.safetensors" in said[0][1]


@pytest.mark.parametrize(("at", "rank"), [("write_file", 1), ("_check_seen", 0), ("commit", 0), ("prune", 0)])
def test_a_kill_leaves_the_last_whole_step(at: str, rank: int, tmp_path: Path) -> None:
    """Breaks if a kill in the middle of a save leaves nothing that loads, or a step that is half the new one."""
    with pytest.raises(ChildError):
        launch(checkpoints.killed, 2, str(tmp_path), at, rank, timeout_s=60.0, gives_up=True)
    found: list[Any] = launch(checkpoints.survived, 2, str(tmp_path), timeout_s=60.0)
    assert found[0][0] == (2 if at == "prune" else 1)
    other = launch(checkpoints.survived, 2, str(tmp_path), timeout_s=60.0)
    assert found == other
