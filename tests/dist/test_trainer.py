"""transformers' Trainer and accelerate's loop with compiled models: as on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.launch import launch

pytest.importorskip("accelerate")
pytest.importorskip("peft")
from tests.dist import trainer

MESHES = [
    ({"dp": 2}, "zero3"),
    ({"dp": 2, "tp": 2}, {"dp": "zero2", "tp": "tensor+sequence"}),
]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return trainer.of_one(str(tmp_path_factory.mktemp("one")))


def compare(found: Any, wanted: Any, where: str = "") -> None:
    """To the rounding of float32, after steps of AdamW."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for key, value in wanted.items():
            compare(found[key], value, f"{where}.{key}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), where
        for number, value in enumerate(wanted):
            compare(found[number], value, f"{where}[{number}]")
    elif isinstance(wanted, torch.Tensor):
        assert found.shape == wanted.shape, where
        one, other = found.detach().double(), wanted.detach().double()
        assert float((one - other).norm()) <= 1e-4 * float(other.norm()), where
    else:
        assert found == (wanted if isinstance(wanted, str) else pytest.approx(wanted, rel=1e-5)), where


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("sizes", "strategy"), MESHES, ids=["2", "4"])
def test_a_run_is_that_of_one_process(
    sizes: dict[str, int], strategy: Any, expected: dict[str, Any], tmp_path: Path
) -> None:
    """Breaks if ranks get other rows, rows twice or an order of their own, if a loss is divided by a rank's items, or
    multiplied by ranks; if batches that are not full are refused or count more than their rows; if logs, metrics and
    predictions have rows of every rank, or a run that goes on from a checkpoint, or from the best, is another.
    """
    count = 2 ** len(sizes)
    found = launch(trainer.of_ranks, count, str(tmp_path), sizes, strategy, count == 2, timeout_s=240.0)
    for each in found:
        compare(each["run"], expected["run"])
        if count == 2:
            compare(each["continued"], expected["run"]["run"])
            compare(each["best"], expected["best"])
    saved = trainer.LlamaForCausalLM.from_pretrained(tmp_path / "end")
    compare(dict(saved.named_parameters()), expected["run"]["run"]["parameters"])
    compare(trainer.plain_run(trainer.one, str(tmp_path)), expected["run"]["run"])


def test_a_loop_with_accelerate(expected: dict[str, Any], tmp_path: Path) -> None:
    """Breaks if loaders give ranks rows of their own, schedules go as many steps as there are ranks, or what is saved
    of parameters and states is a piece.
    """
    for found in launch(trainer.looped_on_ranks, 2, str(tmp_path), timeout_s=120.0):
        compare(found, expected["looped"])
        compare(found["continued"]["state"], expected["looped"]["whole"]["state"])


def test_random_numbers_go_on(tmp_path: Path) -> None:
    """Breaks if a run that goes on draws other numbers than the one that was not interrupted."""
    for whole, continued in launch(trainer.with_dropout, 2, str(tmp_path), timeout_s=120.0):
        compare(continued, whole)


def test_what_does_not_go_is_told(tmp_path: Path) -> None:
    """Breaks if what cannot work is begun: checkpoints on nodes that hold none, rows of each rank's own, ranks that
    transformers takes for processes alone (each would write), a pipeline.
    """
    for each, rows, alone, loop, pipeline in launch(trainer.told, 2, str(tmp_path), timeout_s=120.0):
        assert "save_on_each_node" in each and "all nodes see" in each
        assert "batch_rebalance" in rows and "use_cpu=True" in alone
        assert "cpu=True" in loop and "train_step" in pipeline


def test_predictions_that_are_generated_have_no_rows_that_fill_a_batch_up() -> None:
    """Breaks if metrics get the rows with which a last batch of two is filled up to four."""
    for predicted, labelled, same in launch(trainer.summed_up, 2, timeout_s=200.0):
        assert (predicted, labelled, same) == (10, 10, True)
