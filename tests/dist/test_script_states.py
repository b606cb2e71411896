"""Saving and loading in the words of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist import script_states
from tests.dist.launch import launch


def test_a_checkpoint_of_torch_save_goes_on_anywhere(tmp_path: Path) -> None:
    """Breaks if a rank writes its pieces for the whole, if tied weights or the optimizer's states are lost on the way,
    or if a plain model, another compiled one, or transformers goes on from other numbers.
    """
    for found in launch(script_states.continued, 2, str(tmp_path), timeout_s=180.0):
        assert found["kinds"] == {"Tensor"} and found["tied"]
        assert found["on"] == pytest.approx(found["plain"], rel=1e-7)
        assert found["on"] == pytest.approx(found["again"], rel=1e-12)
        assert found["read"] == pytest.approx(found["on"][0], rel=1e-7)
        assert found["copied"] == pytest.approx(found["now"], rel=1e-7)
        assert found["first"][0] > found["on"][0] > found["now"]
        assert found["files"] == [
            "checkpoint-0.pt", "checkpoint-1.pt", "saved", "config.json", "generation_config.json", "model.safetensors",
        ]  # fmt: skip


def test_torchs_own_tools_still_see_dtensors(tmp_path: Path) -> None:
    """Breaks if distributed checkpoints, full or broadcast states, or a copy of a state load other numbers."""
    for first, *others in launch(script_states.loaded_by_torch, 2, str(tmp_path), timeout_s=180.0):
        assert others == pytest.approx([first] * 3, rel=1e-12)


def test_rank_0_alone_is_told_and_nothing_is_written(tmp_path: Path) -> None:
    """Breaks if saving on one rank waits for ever, or leaves a folder without weights."""
    (saves, looks, files), other = launch(script_states.saved_by_one, 2, str(tmp_path), timeout_s=120.0)
    assert "rank 0 came alone to save_pretrained" in saves and "on every rank" in saves
    assert "rank 0 came alone to gather the state" in looks
    assert not files and other[0] == "not asked"


def test_a_pipeline_saves_all_its_stages(tmp_path: Path) -> None:
    """Breaks if only the stages of rank 0 are written."""
    for loss, read in launch(script_states.saved_stages, 2, str(tmp_path / "saved"), timeout_s=180.0):
        assert read == pytest.approx(loss, rel=1e-6)


def test_what_is_written_through_states_is_written() -> None:
    """Breaks if a tensor of `state_dict()` that lies in pieces is written to in a copy that nobody keeps: as one of a
    list (averages of timm), as `out=`, or one that two names have, in which each writes.
    """
    expected = script_states.written_through_states(compiled=False)
    for found in launch(script_states.written_through_states, 2, True, timeout_s=120.0):
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            assert found[name] == pytest.approx(values, rel=1e-12), name
