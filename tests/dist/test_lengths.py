"""`lengths=`: batches are padded to a few lengths, and everything that comes back is as in one process without."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist import lengths
from tests.dist.launch import launch

LOOPS: list[tuple[str, str, Any]] = [
    ("gpt2", "dp", "zero3"),
    ("bert", "dp", "ddp"),
    ("gpt2", "tp", "tensor"),
    ("gpt2", "cp", "ring"),
    ("t5", "dp", "zero3"),
]
OF_BATCHES = [5, 9, 16, 12, 30, 31, 7]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "axis", "strategy"), LOOPS)
def test_a_loop_over_few_lengths(name: str, axis: str, strategy: Any) -> None:
    """Breaks if padding is in a loss, a gradient, a norm or an output, if outputs keep it, or if a length has a program
    of its own.
    """
    for rank, found in enumerate(launch(lengths.loop, 2, name, axis, strategy, True, OF_BATCHES, timeout_s=300.0)):
        assert found["ours"] == pytest.approx(found["eager"], rel=1e-9, abs=1e-9)
        told = [text for text in found["said"] if "leaves no trace" in text]
        assert len(told) == (rank == 0)
        # Training of two lengths, of three rows, for a term on the logits, and evaluation of two.
        assert found["programs"] <= (8 if name != "t5" else 10)


def test_what_may_not_be_padded_runs_as_it_is() -> None:
    """Breaks if BERT without a mask, whose tokens all see each other, is padded; or without a word."""
    for rank, found in enumerate(launch(lengths.loop, 2, "bert", "dp", "ddp", False, [5, 9, 16], timeout_s=200.0)):
        assert found["ours"] == pytest.approx(found["eager"], rel=1e-9, abs=1e-9)
        told = [text for text in found["said"] if "is not padded to one of lengths=" in text]
        assert len(told) == (rank == 0)
        assert not any("leaves no trace" in text for text in found["said"])


@pytest.mark.parametrize(("axis", "strategy"), [("dp", "zero3"), ("pp", {"pp": "pipeline(1f1b)"})])
def test_microbatches_and_pipelines(axis: str, strategy: Any) -> None:
    """Breaks if padding counts where a batch is cut in microbatches, or where only the last stage has outputs."""
    for rank, found in enumerate(launch(lengths.in_turn, 2, axis, strategy, [5, 9, 31, 12], timeout_s=200.0)):
        for ours, eager in found["pairs"]:
            assert ours == pytest.approx(eager, rel=1e-9) or (ours is None and axis == "pp" and rank == 0)
        for ours, eager in found["sums"]:
            assert ours == pytest.approx(eager, rel=1e-9)
        assert found["programs"] == 2


def test_with_losses_copies_loaders_and_shapes_ahead() -> None:
    """Breaks if a loss of the script's counts padding, if a copy or a loader leaves it out, or if what was planned
    ahead is planned again.
    """
    for found in launch(lengths.with_loss_and_more, 2, timeout_s=200.0):
        for ours, eager in found["pairs"]:
            assert ours == pytest.approx(eager, rel=1e-12)
        assert (found["planned"], found["programs"]) == (2, 4)


def test_lengths_in_turn_where_no_output_has_one() -> None:
    """Breaks if a batch is padded as the one before, which was of another length."""
    for found in launch(lengths.of_a_loss_alone, 2, [5, 9, 16, 12, 9], timeout_s=200.0):
        for ours, eager in found:
            assert ours == pytest.approx(eager, rel=1e-12)
