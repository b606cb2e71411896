"""A run that is watched: what goes wrong on one rank is found, named, and acted upon alike on all ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
from tests.dist import watching
from tests.dist.launch import launch

pytestmark = pytest.mark.dist

ZERO = ({"dp": 2, "tp": 2}, {"dp": "zero3", "tp": "tensor"})
PIPELINE = ({"pp": 2, "dp": 2}, {"pp": "pipeline(1f1b)", "dp": "ddp"})


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("num", "setting", "of", "rank", "said"),
    [
        (2, ({"dp": 2}, "ddp"), "transformer.h.1.mlp.c_fc.weight", 1, "ranks 0, 1 hold different bits of"),
        (4, ({"dp": 4}, "ddp"), "transformer.h.1.mlp.c_fc.weight", 2, "rank 2 holds other bits of"),
        (4, ZERO, "transformer.h.0.ln_1.weight", 3, "ranks 2, 3 hold different bits of"),
        (4, PIPELINE, "transformer.wte.weight", 1, "rank 1 holds other bits of"),
    ],
)
def test_a_flipped_bit(num: int, setting: Any, of: str, rank: int, said: str) -> None:
    """Breaks if a bit that flips on one rank goes unseen, another rank or parameter is named, or pieces that differ by
    plan are taken for replicas. What the bit made of other tensors by then is named, too.
    """
    for text in launch(watching.flipped, num, "gpt2", setting, of, rank, timeout_s=120.0):
        assert said in text and "found at step 4; they were equal at step 2" in text, text
        assert "more tensors" in text or of in text


def test_a_flipped_bit_of_an_optimizer() -> None:
    """Breaks if states of optimizers, which make parameters differ later, are not looked at."""
    setting, of = ({"dp": 4}, "ddp"), "transformer.h.1.mlp.c_fc.bias"
    for text in launch(watching.flipped, 4, "gpt2", setting, of, 3, "exp_avg_sq", timeout_s=120.0):
        assert f"rank 3 holds other bits of exp_avg_sq of {of} than ranks 0, 1, 2" in text, text


@pytest.mark.sampled(1)
@pytest.mark.parametrize("planted", ["nan", "inf", "spike"])
def test_a_skipped_step_changes_nothing(planted: str) -> None:
    """Breaks if ranks decide differently (they would wait for ever), or a skipped step changes a bit."""
    for said, skipped, is_same in launch(watching.with_values, 4, ZERO, "skip", planted, timeout_s=120.0):
        assert (said, skipped, is_same) == ("no error", [25], True)


def test_a_step_that_stops_the_run() -> None:
    """Breaks if a rank goes on alone, or nobody is told where the number that is none lies."""
    for said, _, _ in launch(watching.with_values, 4, PIPELINE, "stop", "nan", 2, timeout_s=120.0):
        assert said.startswith("the gradients' norm is nan at step 25 (the gradient of transformer."), said
        assert "on rank 2" in said


def test_a_warning_takes_the_step() -> None:
    """Breaks if "warn" leaves out what it only tells of."""
    for said, skipped, is_same in launch(watching.with_values, 2, ({"dp": 2}, "zero2"), "warn", "spike"):
        assert (said, skipped, is_same) == ("no error", [], False)


def test_not_all_steps_are_skipped() -> None:
    """Breaks if a run of which nothing comes any more goes on skipping."""
    for said, skipped in launch(watching.always_bad, 2):
        assert "10 steps in a row were skipped" in said and skipped == list(range(10))


def test_in_a_trainer(tmp_path: Path) -> None:
    """Breaks if transformers' loop takes a step that is to be skipped."""
    for skipped, steps, is_finite in launch(watching.in_a_trainer, 2, str(tmp_path), timeout_s=120.0):
        assert (skipped, steps, is_finite) == ([2], 5, True)


@pytest.mark.parametrize(("num", "setting"), [(2, ({"dp": 2}, "zero3")), (4, PIPELINE)], ids=["zero3", "pipeline"])
def test_what_is_written_of_each_step(num: int, setting: Any, tmp_path: Path) -> None:
    """Breaks if a step has no line, or not its loss, norm or tokens; a save's stall or a skipped step is not in it; or
    another rank writes, too.
    """
    losses, norms, tokens = launch(watching.written, num, setting, str(tmp_path), 2, timeout_s=120.0)[0]
    rows = [json.loads(line) for line in (tmp_path / "metrics" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(10, 16)) and {row["tokens"] for row in rows} == {tokens}
    for row, loss, norm in zip(rows, losses, norms, strict=True):
        if row["step"] == 14:
            assert row["skipped"] and row["norm"] is None and row["said"] == "the gradients' norm is nan"
        else:
            assert row["loss"] == pytest.approx(loss, rel=1e-6) and row["norm"] == pytest.approx(norm, rel=1e-6)
            assert not row["skipped"] and row["said"] == ""
        assert row["memory_bytes"] > 1 << 20 and row["tokens_per_s"] == pytest.approx(tokens / row["step_s"])
        assert (row["saves_s"] > 0) == (row["step"] == 13) and row["saves_s"] <= row["step_s"]
    assert rows[-1]["num_skipped"] == 1
    assert "autopar_skipped_steps_total" in (tmp_path / "metrics" / "metrics.prom").read_text()
