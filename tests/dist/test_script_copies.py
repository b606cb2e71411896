"""Copies of a compiled model, and what is wrapped around one."""

from __future__ import annotations

import pytest
import torch

from tests.dist import script_copies, training
from tests.dist.launch import launch


def test_copies_and_averages_are_as_in_one_process() -> None:
    """Breaks if a copy shares parameters, programs or plans with the model in a way that either notices, if averages
    are a rank's own, if tied weights come apart, or torch.compile around it, or around the optimizer's step, runs
    something else; if a copy that was made before the first batch is stored otherwise than the model.
    """
    expected = script_copies.averaged(lambda: training.model_and_batch("gpt2", torch.float64, 0.0))
    for at_once, later, wrapped, text, before in launch(script_copies.copied, 2, timeout_s=180.0):
        for found in (at_once, later):
            assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
            assert found["keys"] == expected["keys"] and found["tied"]
        assert wrapped[:3] == pytest.approx(expected["losses"][:3], rel=1e-6)
        assert wrapped[3] == wrapped[4], "the copy evaluates, the model trains"
        assert before == pytest.approx([before[0]] * 3)
        assert "compiled already" in text and "0 of this Sequential" in text
