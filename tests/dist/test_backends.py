"""torch.compile(model, backend=autopar.backend(mesh)) on real gloo processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dist import backends
from tests.dist.launch import launch

RUNS = [
    ("mlp", ("dp",), (2,), "ddp", "SGD"),
    ("mlp", ("dp", "tp"), (2, 2), {"dp": "ddp", "tp": "auto"}, "AdamW"),
    ("cnn", ("dp",), (2,), "ddp", "AdamW"),
    ("cnn", ("dp",), (4,), "auto", "SGD"),
    ("llama", ("dp",), (2,), "ddp", "SGD"),
    ("llama", ("dp", "tp"), (2, 2), "tensor", "AdamW"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "axes", "sizes", "strategy", "optimizer"), RUNS)
def test_training_follows_one_process(
    name: str, axes: tuple[str, ...], sizes: tuple[int, ...], strategy: Any, optimizer: str
) -> None:
    """Breaks if a gradient is not whole or reduced twice, a parameter is taken for another, or layers are not found."""
    model, batch = backends.prepared(name)
    losses, gradients = backends.steps(model, list(model.parameters()), batch, optimizer)
    num_ranks = torch.Size(sizes).numel()
    results = launch(backends.train, num_ranks, name, axes, sizes, strategy, optimizer, timeout_s=240.0)
    for result in results:
        # Llama's loss and norms are float32 whatever the model is.
        assert result["losses"] == pytest.approx(losses, rel=1e-5 if name == "llama" else 1e-10)
        assert len(result["gradients"]) == len(gradients)
        for own, expected in zip(result["gradients"], gradients, strict=True):
            scale = float(expected.abs().max())
            torch.testing.assert_close(own, expected, rtol=0, atol=scale * (1e-5 if name == "llama" else 1e-10))
        assert result["num_plans"] == 1
        assert result["events"] == results[0]["events"]
        assert result["events"] or strategy == "auto"
        assert set(result["parameters"]) <= {name for name, _ in model.named_parameters()}
    if name == "llama":
        assert ("model.layers.*", 2) in results[0]["regions"][0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("strategy", "sizes"), [("ddp", (2,)), ("auto", (2,)), ("tensor", (2, 2))])
def test_graph_breaks_buffers_and_several_outputs(strategy: str, sizes: tuple[int, ...]) -> None:
    """Breaks if what passes between two graphs loses its gradient, a scalar is taken for the only root, a buffer is
    not written back, or no_grad plans a backward.
    """
    model, batch = backends.broken()
    expected = backends.broken_steps(model, model, batch)
    for found, plans in launch(backends.train_broken, torch.Size(sizes).numel(), strategy, sizes, timeout_s=240.0):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
        assert [training for training, _ in plans] == [True, True, False, False]
        # The input requires a gradient, and so does what the first graph hands to the second.
        assert "x" in plans[0][1] and any("." not in name for name in plans[1][1])
        assert "head.bias" not in plans[1][1] and "head.weight" in plans[1][1]


def test_dropout_does_not_depend_on_the_mesh() -> None:
    """Breaks if ranks draw alike, or another number of ranks draws otherwise, or every step the same."""
    one, two = launch(backends.one_rank_or_two, 1, 0.5, timeout_s=120.0), launch(backends.one_rank_or_two, 2, 0.5)
    assert len(set(one[0])) == 3
    for losses in two:
        assert losses == pytest.approx(one[0], rel=1e-10)


def test_shapes_plan_once_each() -> None:
    """Breaks if sizes that Dynamo made symbols reach the program, or a known shape is planned again."""
    for eager, own, num_plans in launch(backends.shapes, 2, timeout_s=120.0):
        assert own == pytest.approx(eager, rel=1e-10)
        assert 3 <= num_plans <= 4  # the graph with symbols may plan 8 rows again


def test_functions_of_all_kinds() -> None:
    """Breaks if an output without gradient gets one, an alias is lost, or checkpoints, in-place or no_grad go wrong."""
    for found in launch(backends.functions, 2, timeout_s=120.0):
        assert [name for name, *well in found if not all(well)] == [] and len(found) == 7


def test_ranks_that_trace_different_graphs_are_told() -> None:
    """Breaks if rank 0's program is run with another rank's tensors."""
    for text in launch(backends.branching, 2):
        assert "the traced graphs differ on rank 1" in text


@pytest.mark.parametrize(
    ("habit", "said"),
    [
        ("batch", "the values of the inputs differ on rank 1 from rank 0's (x)"),
        ("shape", "the kinds of the inputs differ on rank 1 from rank 0's (x, y)"),
        ("eval", "the traced graphs differ on rank 1 from rank 0's"),
    ],
)
def test_every_call_is_compared(habit: str, said: str) -> None:
    """Breaks if only the first call of a graph is compared: another batch would train on, another shape would wait."""
    for num_plans, text in launch(backends.other_from_the_second_call_on, 2, habit, timeout_s=120.0):
        assert num_plans == 1 and said in text, text


def test_what_cannot_be_done_is_said() -> None:
    """Breaks if a strategy that stores pieces is taken, or an error does not say what to do."""
    for zero1, zero3, nothing, mesh, uneven, autocast, different in launch(backends.refusals, 2, timeout_s=120.0):
        assert "zero1" in zero1 and "autopar.compile" in zero1
        assert "zero3" in zero3 and "autopar.compile" in zero3
        assert "known: auto" in nothing
        assert "DeviceMesh" in mesh
        assert "batch of 5 cannot split over dp=2" in uneven
        assert "autocast is not known" in autocast
        assert "the values of the inputs differ on rank 1 from rank 0's (x)" in different


def test_functions_keep_the_gradients_that_they_say() -> None:
    """Breaks if the gradient of the operators inside is taken for it: none, of a rounding."""
    for pairs in launch(backends.own_gradients, 2, timeout_s=120.0):
        assert all(eager > 0 and ours == pytest.approx(eager, rel=1e-9) for ours, eager in pairs), pairs
