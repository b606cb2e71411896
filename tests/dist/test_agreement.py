"""Ranks that stop doing the same are told at the step in which they do, before a number is wrong or one waits."""

from __future__ import annotations

import pytest

from tests.dist import disagreement
from tests.dist.launch import launch


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("habit", "said"),
    [
        ("batch", ["the values of the inputs differ on rank 1", "input_ids", "shard_loader"]),
        ("shape", ["the kinds of the inputs differ on rank 1", "input_ids", "rank 0 (8, 16)", "rank 1 (8, 8)"]),
        ("eval", ["the modes of modules (train, eval) differ on rank 1", "rank 1 0 of"]),
        ("no grad", ["the modes of recording gradients differ on rank 1", "rank 0 True, rank 1 False"]),
        ("freeze", ["the parameters that are trained differ on rank 1", "rank 1 "]),
        ("rate", ["the settings of the optimizer differ on rank 1", "lr=0.1", "lr=0.2"]),
    ],
)
def test_a_rank_with_a_habit_of_its_own(habit: str, said: list[str]) -> None:
    """Breaks if a rank trains on another batch, or with another rate, without a word, or waits for a plan that the
    others do not make.
    """
    for text in launch(disagreement.after_a_step, 2, habit, timeout_s=90.0):
        assert all(part in text for part in said), text


@pytest.mark.parametrize(
    ("habit", "strategy", "said"),
    [
        ("loss", "zero3", ["the gradients of the losses differ on rank 1", "rank 0 1, rank 1 2"]),
        ("step", "zero3", ["the numbers of steps of optimizers differ on rank 1", "rank 0 2, rank 1 1"]),
        ("zero_grad", "zero3", ["which parameters have gradients differ on rank 1", "rank 0 0 of "]),
        ("gradients", "ddp", ["the replicas of ", "more parameters differ on rank 1 from rank 0's"]),
        ("weights", "ddp", ["the replicas of transformer.h.0.mlp.c_fc.weight differ on rank 1", "an element is"]),
        (
            "weights",
            "zero3",
            ["writes into weights between steps differ on rank 1", "none, rank 1 transformer.h.0.mlp"],
        ),
        ("norm", "tensor", ["writes into weights between steps differ on rank 1", "transformer.ln_f.weight"]),
        ("frozen", "ddp", ["the replicas of transformer.wte.weight differ on rank 1"]),
        ("everywhere", "zero3", ["no error"]),
        ("rounding", "ddp", ["no error"]),
        ("nothing", "ddp", ["no error"]),
    ],
)
def test_a_rank_that_does_something_else_between_steps(habit: str, strategy: str, said: list[str]) -> None:
    """Breaks if replicas drift apart, or a rank has a part of its own in what all sum up, without a word."""
    for text in launch(disagreement.between_steps, 2, habit, (2,), strategy, timeout_s=90.0):
        assert all(part in text for part in said), text


def test_parts_of_a_batch_are_no_disagreement() -> None:
    """Breaks if ranks that were each given their rows are taken for ranks with other batches; or if ranks of one
    machine do not find each other, or mix up what they send.
    """
    for first, second, total in launch(disagreement.loaded_in_parts, 2, timeout_s=90.0):
        assert first == second and total == [1, 3, 5]


def test_a_rank_that_does_not_come_is_named() -> None:
    """Breaks if ranks wait for one that never begins the step, or say only that gloo timed out."""
    for rank, (text, seconds) in enumerate(launch(disagreement.without_rank_1, 4, timeout_s=90.0, gives_up=True)):
        if rank != 1:
            assert f"rank {rank} waited 2 s for rank 1 to begin a step" in text and seconds < 6


def test_how_an_optimizer_computes_is_no_setting() -> None:
    """Breaks if ranks that compute the same step in other ways are stopped."""
    first, second = launch(disagreement.steps_in_two_ways, 2, timeout_s=90.0)
    assert first == second
