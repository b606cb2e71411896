"""Checkpoints of several ranks: onto other meshes, and through whatever a rank may run into."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist import checkpoints
from tests.dist.launch import ChildError, launch

pytestmark = pytest.mark.dist

EXAMPLES = Path(__file__).parents[2] / "examples"
FOUR: dict[str, checkpoints.Setting] = {
    "pipeline": ({"pp": 2, "dp": 2}, {"pp": "pipeline(1f1b)", "dp": "zero2"}),
    "tensor": ({"dp": 2, "tp": 2}, {"dp": "zero3", "tp": "tensor"}),
    "zero3": ({"dp": 4}, "zero3"),
    "deep": ({"pp": 4}, {"pp": "pipeline(gpipe)"}),
}
TWO: list[checkpoints.Setting] = [({"tp": 2}, "tensor"), ({"dp": 2}, "ddp")]
"""What a run goes on on."""


@pytest.mark.sampled(1)
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


RING: checkpoints.Setting = ({"dp": 2, "cp": 2}, {"dp": "zero3", "cp": "ring"})


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "first", "then"), [("t5", FOUR["pipeline"], FOUR["tensor"]), ("gpt2", RING, FOUR["pipeline"])]
)
def test_two_stacks_and_split_sequences(name: str, first: Any, then: Any, tmp_path: Path) -> None:
    """Breaks if what a pipeline of two stacks, or ranks of a ring, hold is lost (all: benchmarks/training)."""
    ranks = launch(checkpoints.saved, 4, name, first, str(tmp_path), timeout_s=120.0)
    whole: dict[str, torch.Tensor] = {}
    for rank, _ in ranks:
        whole |= rank
    found = launch(checkpoints.resumed_from, 4, name, then, [str(tmp_path)], timeout_s=120.0)
    names: set[str] = set()
    for [(values, losses)] in found:
        names |= values.keys()
        assert all(torch.equal(value, whole[each]) for each, value in values.items())
        assert losses == pytest.approx(ranks[0][1], rel=1e-4)
    assert names == whole.keys()


def test_kills_at_random_moments() -> None:
    """Breaks if a kill loses a step, or damage is loaded: a few of benchmarks/training/kills.py, which fails then."""
    command = [sys.executable, "benchmarks/training/kills.py", "--kills", "2", "--damages", "12", "--ranks", "2"]
    done = subprocess.run(command, cwd=EXAMPLES.parent, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "12 damages: 12 refused by name, 0 not." in done.stdout


def test_what_one_rank_fails_at_is_told_on_all(tmp_path: Path) -> None:
    """Breaks if a rank waits for one that failed, or nobody knows which one it was, and at what."""
    said = launch(checkpoints.failing, 2, str(tmp_path), timeout_s=60.0)
    assert said[0] == said[1]
    assert said[0][0].startswith("rank 1 could not save a checkpoint: loader[1]['at'] cannot be saved: it is a")
    assert "the checkpoint is damaged" in said[0][1] and "state-00001.safetensors" in said[0][1]


def test_steps_are_saved_while_the_next_ones_run(tmp_path: Path) -> None:
    """Breaks if a step that is saved meanwhile has numbers of the next one, or ranks differ in what failed, or when."""
    found = launch(checkpoints.meanwhile, 2, str(tmp_path), timeout_s=100.0)
    assert found[0] == found[1]
    losses, again = found[0]
    assert again == losses[1:5]  # each step, once more from the checkpoint before it
    assert losses[5].startswith("rank 1 could not write step 5: OSError: [Errno 28] No space left on device")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("at", "rank"), [("write_file", 1), ("_check_seen", 0), ("commit", 0), ("prune", 0)])
def test_a_kill_leaves_the_last_whole_step(at: str, rank: int, tmp_path: Path) -> None:
    """Breaks if a kill in the middle of a save leaves nothing that loads, or a step that is half the new one."""
    with pytest.raises(ChildError):
        launch(checkpoints.killed, 2, str(tmp_path), at, rank, timeout_s=60.0, gives_up=True)
    found: list[Any] = launch(checkpoints.survived, 2, str(tmp_path), timeout_s=120.0)
    assert found[0][0] == (2 if at == "prune" else 1)
    other = launch(checkpoints.survived, 2, str(tmp_path), timeout_s=120.0)
    assert found == other


def test_a_run_ends_when_one_rank_is_asked_to_and_goes_on(tmp_path: Path) -> None:
    """Breaks if ranks end after different steps, a signal is lost, or a damaged step is taken for a fresh start."""
    found = launch(checkpoints.asked_to_end, 2, str(tmp_path), timeout_s=60.0)
    assert found[0] == found[1]
    kinds = [each if not isinstance(each, float) else "step" for each in found[0]]
    first = ["start", (0, None), "step", "step", "step"]
    assert kinds == [*first, (3, 2), "step", (3, 2), "step"]
    assert found[0][6] == found[0][8]


def test_the_same_script_comes_back_after_a_crash(tmp_path: Path) -> None:
    """Breaks if torchrun's next attempt begins anew, or does other steps than a run that was not interrupted; or if the
    script does not go on where a machine stays away, on fewer ranks, with the same data.
    """
    script = str(EXAMPLES / "train_for_weeks.py")
    at = {name: ["--folder", str(tmp_path / name)] for name in ("crashed", "whole")}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", script, "--mesh", "dp=2", "--steps", "14", *at["crashed"], "--crash-at", "8"]
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    crashed = checkpoints.steps_of(done.stdout)
    assert (tmp_path / "crashed" / "crashed").exists()
    # The others as torchrun would start them, in processes that have imported torch.
    options = ["--mesh", "dp=2", "--steps", "18", *at["whole"]]
    whole, _ = launch(checkpoints.ran, 2, script, options, timeout_s=120.0)
    assert crashed == {step: whole[step] for step in range(1, 15)}
    options = ["--mesh", "dp=1", "--steps", "18", *at["crashed"]]
    (fewer,) = launch(checkpoints.ran, 1, script, options, timeout_s=120.0)
    assert {step: float(loss) for step, loss in fewer.items()} == pytest.approx(
        {step: float(whole[step]) for step in range(15, 19)}, rel=1e-4
    )


@pytest.mark.parametrize("own", [True, False], ids=["own generator", "torch's generator"])
def test_the_data_goes_on_with_other_numbers_of_ranks(own: bool, tmp_path: Path) -> None:
    """Breaks if a shuffled loader's place in its round is lost on fewer or more ranks, is refused there, or the next
    round has another order.
    """
    first, *_ = launch(checkpoints.fed, 2, ({"dp": 2}, "zero3"), str(tmp_path), False, own)
    assert len(first) == 7 and sorted(row for batch in first[1:] for row in batch) == list(range(24))
    for num in (1, 4):
        for found in launch(checkpoints.fed, num, ({"dp": num}, "zero1"), str(tmp_path), True, own):
            assert found == first
