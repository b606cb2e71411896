"""Batches that vary: one placement, a program a shape, eager's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dist import varying
from tests.dist.launch import launch

LOOPS: list[tuple[str, tuple[str, ...], Any, int | None, int, dict[str, Any]]] = [
    ("bert", ("dp",), "zero3", 3, 1, {}),
    ("gpt2", ("dp",), "ddp", 3, 1, {}),
    ("gpt2", ("tp",), "tensor", 3, 1, {}),
    ("bert", ("pp",), {"pp": "pipeline(1f1b)"}, None, 1, {"microbatches": 2}),
    ("gpt2", ("dp",), "zero3", None, 1, {"microbatches": 2}),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "axes", "strategy", "last", "multiple", "options"), LOOPS)
def test_a_loop_over_random_lengths(
    name: str, axes: tuple[str, ...], strategy: Any, last: int | None, multiple: int, options: dict[str, Any]
) -> None:
    """Breaks if a program of one length runs for another, if rows that were added count, if outputs keep them, or if
    every length is solved for anew, or said.
    """
    work = (name, axes, (2,), strategy, 8, last, multiple, options)
    for rank, found in enumerate(launch(varying.loop, 2, *work, timeout_s=300.0)):
        (losses, sums), (own_losses, own_sums) = found["ours"], found["theirs"]
        if rank == 0 or "pp" not in axes:
            assert losses == pytest.approx(own_losses, rel=1e-9, abs=1e-9)
            assert sums == pytest.approx(own_sums, rel=1e-9)
        if rank == 0:
            assert found["solved"] <= 2, "training, and evaluation"
            assert found["traced"] + found["read"] >= 5
        assert len([text for text in found["said"] if "another shape" in text]) == (rank == 0)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(("axis", "strategy"), [("tp", "tensor+sequence"), ("cp", "ring"), ("cp", "ulysses")])
def test_lengths_that_an_axis_does_not_divide(axis: str, strategy: str) -> None:
    """Breaks if a sequence that cannot be split ends a loop, if what is whole is summed over its ranks, or if lengths
    that divide are solved for again and again, or stay whole.
    """
    work = ("gpt2", (axis,), (2,), strategy, 8, None, 1, {})
    for found in launch(varying.loop, 2, *work, timeout_s=300.0):
        (losses, sums), (own_losses, own_sums) = found["ours"], found["theirs"]
        assert losses == pytest.approx(own_losses, rel=1e-9, abs=1e-9)
        assert sums == pytest.approx(own_sums, rel=1e-9)
        # Training and evaluation: of lengths that divide (dealt zigzag, and not), and twice of others, once in vain.
        assert found["solved"] <= 8
        assert len([text for text in found["said"] if "Each of its ranks computes all" in text]) <= 1


def test_fifty_lengths_are_solved_for_once() -> None:
    """Breaks if a length is solved for again, if programs are traced that follow from others, or if one is wrong."""
    first, second = launch(varying.many, 2, "gpt2", "zero3", 50, timeout_s=400.0)
    assert (first["solved"], second["solved"]) == (1, 0)
    assert first["traced"] <= 3
    assert first["traced"] + first["read"] == 49
    for ours, eager in first["pairs"] + second["pairs"]:
        assert ours == pytest.approx(eager, rel=1e-9)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "sizes", "rows"),
    [
        ("ddp", {"dp": 2}, [4, 3, 4, 5]),
        ("zero3", {"dp": 2}, [3, 4, 3]),
        ("zero1", {"dp": 2, "fsdp": 2}, [8, 6, 3]),
    ],
)
def test_rows_that_would_count_are_whole_on_each_rank(strategy: str, sizes: dict[str, int], rows: list[int]) -> None:
    """Breaks if rows are added to a batch whose loss is a mean over all of them, if gradients of a batch that is whole
    are summed over its ranks, or if batches that divide stay whole behind one that does not.
    """
    for pairs in launch(varying.whole_rows, 2 if len(sizes) == 1 else 4, strategy, sizes, rows, timeout_s=240.0):
        for ours, eager in pairs:
            assert ours == pytest.approx(eager, rel=1e-9, abs=1e-12)


def test_batches_that_divide_are_split_behind_one_that_does_not() -> None:
    """Breaks if every rank computes all of every batch since the first one was whole."""
    for found in launch(varying.split_again, 2):
        assert found == [[False], [True], [True]]


def test_ranks_with_other_shapes_are_told() -> None:
    """Breaks if ranks that bring different shapes wait for each other, or are not named."""
    for text in launch(varying.different_shapes, 2):
        assert "the kinds of the inputs differ on rank 1" in text
        assert "(2, 9)" in text and "(2, 10)" in text


@pytest.mark.parametrize("own_rows", [False, True])
def test_loaders_of_rows(own_rows: bool) -> None:
    """Breaks if a rank's rows are padded to another length than the others', or if own rows are not the whole batch."""
    for found in launch(varying.loaders, 2, own_rows):
        assert found["ours"] == pytest.approx(found["eager"], rel=1e-9)


def test_own_rows_that_two_ranks_have_are_told() -> None:
    """Breaks if a loader that gives every rank the same rows is taken for one that gives each its own."""
    for found in launch(varying.loaders, 2, True, True):
        assert "ranks 0 and 1 have the same rows" in found["error"]


def test_modes_of_modules_inside_are_followed() -> None:
    """Breaks if `model.norm.eval()` behind `compile` goes on with the program of a model that is all in training, or a
    teacher that forward moves stays where it was.
    """
    for pairs in launch(varying.frozen_part, 2):
        for ours, eager in pairs:
            assert ours == pytest.approx(eager, rel=1e-12)


def test_a_batch_that_does_otherwise_than_the_example_gets_a_program_of_its_own() -> None:
    """Breaks if it goes on as if it did not, a rank goes its own way, or each such batch is planned for."""
    for losses, programs in launch(varying.other_than_the_example, 2):
        assert programs == 2
        for ours, eager in losses:
            assert ours == pytest.approx(eager, rel=1e-12)


def test_what_was_granted_is_read_before_weights_get_it() -> None:
    """Breaks if, where nobody waits for the answer, weights or a buffer take the NaN of a batch that was otherwise."""
    for at_step, at_forward, weights_kept, buffer_kept in launch(varying.granted_late, 2):
        assert "takes for granted" in at_step and "takes for granted" in at_forward
        assert weights_kept and buffer_kept


def test_numbers_of_modules_that_change_are_followed() -> None:
    """Breaks if programs go on with a number that forward reads and that is another one behind `compile`, if a copy's
    number is taken for the model's, or if a counter that nobody reads is planned for at every step.
    """
    for texts, pairs, plans in launch(varying.numbers_of_modules, 2, timeout_s=200.0):
        for ours, eager in pairs:
            assert ours == pytest.approx(eager, rel=1e-12)
        assert len(texts) == 1 and "step of the model" in texts[0] and "does not read" in texts[0]
        assert plans <= 9


def test_numbers_that_change_without_end_are_told() -> None:
    """Breaks if a number that is another one at every step fills the memory with programs."""
    for text in launch(varying.numbers_without_end, 2, timeout_s=200.0):
        assert text.startswith("16: scale of the model decides") and "register_buffer" in text


def test_scores_without_labels_of_parameters_in_uneven_pieces() -> None:
    """Breaks if a program without a backward counts the bytes of gradients that nobody makes: parameters that lie in
    uneven pieces had evaluation refused.
    """
    expected = varying.evaluated_without_labels(False)
    for found in launch(varying.evaluated_without_labels, 2, True, timeout_s=120.0):
        assert found[0] == pytest.approx(expected[0], rel=1e-12)
        for one, other in zip(found[1:], expected[1:], strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-12, atol=1e-12)


def test_programs_that_were_planned_ahead() -> None:
    """Breaks if a step plans for a shape that was asked for before, or if ranks get programs of each other's shapes."""
    for losses, before, after, text in launch(varying.ahead, 2, timeout_s=200.0):
        assert (before, after) == (3, 3)
        for ours, eager in losses:
            assert ours == pytest.approx(eager, rel=1e-12)
        assert "plans ahead for other batches than rank" in text and "(4, 12)" in text
