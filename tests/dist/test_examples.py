"""The examples run as they are, on fewer steps."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import pytest

from tests.dist.launch import launch

pytest.importorskip("accelerate")
pytest.importorskip("peft")
from tests.dist import trainer

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, options: list[str]) -> None:
    """As torchrun starts it."""
    trainer.as_under_torchrun()
    sys.argv = [name, *options]
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_the_trainer_on_a_mesh(tmp_path: Path) -> None:
    """Breaks if the example for the Trainer does not run, or does not go on from its checkpoint."""
    options = ["--output", str(tmp_path), "--tokens", "32", "--steps"]
    launch(run, 4, "finetune_trainer.py", [*options, "10"], timeout_s=180.0)
    first = json.loads((tmp_path / "all_results.json").read_text())
    launch(run, 4, "finetune_trainer.py", [*options, "20", "--resume"], timeout_s=180.0)
    assert json.loads((tmp_path / "all_results.json").read_text())["perplexity"] < first["perplexity"] < 256
    assert (tmp_path / "model.safetensors").exists()


def test_adapters_on_a_mesh(tmp_path: Path) -> None:
    """Breaks if the example for LoRA does not run, or leaves no adapters and no merged model."""
    options = ["--output", str(tmp_path), "--tokens", "32", "--steps", "4"]
    launch(run, 4, "finetune_lora.py", options, timeout_s=180.0)
    assert {"adapter_model.safetensors", "merged"} <= set(os.listdir(tmp_path))
    assert (tmp_path / "merged" / "model.safetensors").exists()


def rewards(options: list[str]) -> list[float]:
    """What the example for reinforcement earns at each step."""
    sys.argv = ["grpo.py", "--dtype", "float64", "--steps", "3", *options]
    found: list[float] = runpy.run_path(str(EXAMPLES / "grpo.py"), run_name="grpo")["main"]()
    return found


@pytest.mark.slow
def test_samples_and_updates_of_one_object_are_those_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a rank draws other tokens, an update is not seen by the next samples, or generation leaves parameters
    otherwise than training has them.
    """
    monkeypatch.setattr(sys, "argv", sys.argv)
    want = rewards(["--plain"])
    assert len(set(want)) == 3
    for found in launch(rewards, 4, [], timeout_s=240.0):
        assert found == want


@pytest.mark.parametrize("name", ["finetune_trainer.py", "finetune_lora.py", "grpo.py"])
def test_help(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Breaks if an example needs ranks to say what it does, or marks more lines than it may."""
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert ended.value.code == 0 and "torchrun --nproc-per-node 4" in capsys.readouterr().out
    marked = [line for line in (EXAMPLES / name).read_text().splitlines() if line.split("#")[-1].startswith(" (")]
    assert 0 < len(marked) <= 5
