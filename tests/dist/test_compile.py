"""autopar.compile as users meet it, on real gloo processes."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist import training
from tests.dist.launch import launch


def test_another_batch_shape_plans_again() -> None:
    """A cached program run on other shapes, or parameters cut twice, would give another loss."""
    model, batch = training.model_and_batch("llama", torch.float32, 0.0)
    short = {key: value[:, :8].contiguous() for key, value in batch.items()}
    expected = [float(model(**each).loss.detach()) for each in (batch, short, batch)]
    for losses in launch(training.other_shape, 2, timeout_s=120.0):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_ranks_with_different_batches_are_told() -> None:
    """Each rank would take its part of another batch, and the loss would merely be wrong."""
    for text in launch(training.different_batches, 2, timeout_s=120.0):
        assert "input_ids" in text and "differ" in text


def test_an_optimizer_on_the_old_parameters_is_told() -> None:
    """It would update tensors that no longer belong to the model."""
    for text in launch(training.old_optimizer, 2, timeout_s=120.0):
        assert "optimizer" in text


def test_a_world_of_another_size_is_told() -> None:
    """torchrun with 4 processes for a mesh of 2 would leave two ranks out, or hang."""
    for text in launch(training.wrong_world, 4, timeout_s=120.0):
        assert "2" in text and "4" in text and text != "no error"


def test_eval_without_gradients() -> None:
    """no_grad must run the forward alone; the split logits must stay split."""
    for train_loss, eval_loss, placements in launch(training.evaluation, 2, timeout_s=120.0):
        assert eval_loss == pytest.approx(train_loss, rel=1e-5)
        assert len(placements) == 1


def test_a_loss_of_the_users_own() -> None:
    """Gradients that reach the program through its logits must give eager's gradients."""
    model, batch = training.model_and_batch("llama", torch.float32, 0.0)
    batch.pop("labels")
    loss = model(**batch).logits.float().pow(2).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    for own_loss, own_norm in launch(training.own_loss, 2, timeout_s=120.0):
        assert own_loss == pytest.approx(float(loss.detach()), rel=1e-5)
        assert own_norm == pytest.approx(float(norm), rel=1e-4)


def test_an_edited_program_is_what_runs(tmp_path: Path) -> None:
    """The runtime must run the file it is given, not something beside it."""
    for plain, edited in launch(training.edited_program, 2, str(tmp_path / "mine.py"), timeout_s=120.0):
        assert edited == pytest.approx(2 * plain, rel=1e-6)


def test_a_saved_plan_runs_without_solving(tmp_path: Path) -> None:
    """A plan file holds decisions only; written onto the model again they must give the same program."""
    for first, again in launch(training.saved_plan, 4, str(tmp_path / "plan.json"), timeout_s=180.0):
        assert again == pytest.approx(first, rel=1e-6)


def test_an_error_while_planning_reaches_every_rank() -> None:
    """Rank 0 plans; the others would wait for a plan that never comes."""
    texts = launch(training.infeasible_everywhere, 2, timeout_s=120.0)
    assert all("smallest limit that would do" in text for text in texts)


def test_initialization_does_not_depend_on_the_mesh() -> None:
    """The same seed must give the same model on 2 and on 4 ranks."""
    two = launch(training.from_meta, 2, timeout_s=120.0)
    four = launch(training.from_meta, 4, timeout_s=120.0)
    assert two + four == pytest.approx([two[0]] * 6, rel=1e-5)


def test_auto_within_a_tight_limit() -> None:
    """With little memory `auto` must shard, still follow one process, and stay within the limit it was given."""
    name, axes, sizes = "gpt2", ("dp", "tp"), (2, 2)
    model, batch = training.model_and_batch(name, torch.float32, 0.0)
    losses, _ = training.train(model, batch, training.STEPS)
    limit = 1.5e6
    whole = sum(4 * parameter.numel() * parameter.element_size() for parameter in model.parameters())
    assert limit < whole, "parameters, gradients and states fit without being cut"
    results = launch(
        training.train_compiled, 4, name, axes, sizes, "auto", torch.float32, False, limit, timeout_s=240.0
    )
    for result in results:
        assert result["losses"] == pytest.approx(losses, rel=2e-4)
        assert result["sent"] == pytest.approx(result["predicted"], rel=1e-9) and result["sent"] > 0
        assert result["parameter_bytes"] + result["gradient_bytes"] + result["state_bytes"] <= limit
        assert result["peak_bytes"] <= limit


@cache
def without_a_compiler(strategy: str) -> list[dict[str, Any]]:
    return launch(training.regions_compiled, 2, strategy, None, timeout_s=120.0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("strategy", "backend"),
    [("zero3", "aot_eager"), ("tensor", "aot_eager"), pytest.param("tensor", True, marks=pytest.mark.slow)],
)
def test_compiled_regions_train_the_same(strategy: str, backend: bool | str) -> None:
    """Breaks if compiling changes a loss, a collective or its place, the plan, or compiles a layer or a step anew."""
    if backend is True and shutil.which("g++") is None:
        pytest.skip("no C++ compiler for inductor")
    expected = without_a_compiler(strategy)
    results = launch(training.regions_compiled, 2, strategy, backend, timeout_s=300.0)
    # Twice the layers, where the compiler is fast.
    deeper = results if backend is True else launch(training.regions_compiled, 2, strategy, backend, 4, timeout_s=300.0)
    for plain, compiled, deep in zip(expected, results, deeper, strict=True):
        assert compiled["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert compiled["events"] == plain["events"] and plain["events"]
        assert compiled["source"] == plain["source"]
        assert compiled["regions"] == [("prologue", 1), ("layer", 2), ("epilogue", 1)]
        # A graph for each piece between two collectives of a region: more layers are no more of them.
        assert plain["graphs"] == [0, 0, 0]
        assert compiled["graphs"] == deep["graphs"] == [compiled["graphs"][0]] * 3 and compiled["graphs"][0] >= 6
        assert not compiled["recompiles"] and not deep["recompiles"]
