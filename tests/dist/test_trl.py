"""TRL's own trainers train compiled models, with the numbers and logs of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist import trl_trainers
from tests.dist.launch import launch

pytest.importorskip("trl", reason="TRL is not installed: pip install trl")

EPS, STEPS, RATE, NORM = torch.finfo(torch.float32).eps, 3, 0.1, 0.5
"""Of float32; and of `trl_trainers.run`: SGD, whose gradients are clipped to a norm."""
MOVED = STEPS * RATE * NORM * 16 * EPS
"""Steps of SGD move a parameter by as much as their gradients, of norm `NORM`, are rounded, sums of a few terms."""
REWARDS = 0.1 * 2 * 37 * EPS
"""A reward is beta, 0.1, times the difference of two sums of at most nine log-probabilities of about 4.1."""

CASES: list[tuple[str, dict[str, int], Any, dict[str, Any]]] = [
    ("sft", {"dp": 2}, "zero3", {}),
    ("sft", {"dp": 2, "tp": 2}, {"dp": "zero1", "tp": "tensor"}, {"gradient_accumulation_steps": 2}),
    ("sft", {"tp": 2}, "tensor", {"packing": True}),
    ("dpo", {"dp": 2}, "zero3", {}),
    ("dpo", {"tp": 2}, "tensor", {"loss_type": "ipo"}),
]


@pytest.mark.parametrize(("kind", "sizes", "strategy", "others"), CASES, ids=lambda value: str(value))
def test_a_run_is_that_of_one_process(
    kind: str, sizes: dict[str, int], strategy: Any, others: dict[str, Any], tmp_path: Path
) -> None:
    """Breaks if TRL's forward goes round the program, if its metrics are a rank's own, if rows that fill a batch are
    counted, or if a reference model is trained.
    """
    (expected,) = launch(trl_trainers.run, 1, kind, str(tmp_path / "one"), None, None, others, timeout_s=300.0)
    ranks = torch.Size(sizes.values()).numel()
    work = kind, str(tmp_path / "ranks"), sizes, strategy, others
    for found in launch(trl_trainers.run, ranks, *work, timeout_s=300.0):
        assert len(found["logs"]) == len(expected["logs"])
        for log, wanted in zip(found["logs"], expected["logs"], strict=True):
            assert log == pytest.approx(wanted, rel=16 * EPS, abs=REWARDS)
        for name, value in expected["parameters"].items():
            torch.testing.assert_close(found["parameters"][name], value, rtol=STEPS * EPS, atol=MOVED)


def test_a_model_that_was_compiled_without(tmp_path: Path) -> None:
    """Breaks if what TRL asks for fails inside of it, in words of DTensors."""
    for text in launch(trl_trainers.without_log_probs, 2, str(tmp_path), timeout_s=120.0):
        assert "with_log_probs(model)" in text
