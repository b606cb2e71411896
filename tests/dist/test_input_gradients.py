"""A batch that requires a gradient gets the one that eager gives it: models in a row, prompts, attacks, pictures."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.dist import input_gradients as work
from tests.dist.launch import launch

PLAIN = ("gan", "attack", "both ways", "changed", "adam", "lbfgs")
FLOAT32 = 64 * 2.0**-23
FLOAT64 = 64 * 2.0**-52


@cache
def eager(kind: str) -> dict[str, Any]:
    return work.scripts(kind, lambda model: model)


def check(kind: str, found: dict[str, Any], tolerance: float) -> None:
    expected = eager(kind)
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        want, have = torch.as_tensor(want), torch.as_tensor(found[name])
        assert float((have - want).norm()) <= tolerance * max(float(want.norm()), 1e-3), f"{name} of {kind}"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("axes", "sizes", "strategy", "options"),
    [
        (("dp",), (2,), "ddp", {}),
        (("dp",), (2,), "zero3", {}),
        (("tp",), (2,), "tensor", {}),
        (("dp",), (2,), "auto", {}),
        (("dp", "tp"), (2, 2), {"dp": "zero2", "tp": "tensor"}, {}),
    ],
    ids=str,
)
def test_scripts_of_plain_models(axes: tuple[str, ...], sizes: tuple[int, ...], strategy: Any, options: Any) -> None:
    """Breaks if a gradient of an input is a rank's rows alone, is summed or averaged over ranks once more, counts in
    another order of rows, is lost behind a retained graph or beside a frozen model, does not go on into the model
    before, or if what a script changes of an output in place does not reach the next model.
    """
    for rank in launch(work.compiled, 2 ** len(sizes), list(PLAIN), axes, sizes, strategy, options, timeout_s=240.0):
        for kind, found in zip(PLAIN, rank, strict=True):
            # LBFGS divides by differences of gradients: what it makes of rounding is measured, of eager alone.
            check(kind, found, max(FLOAT64, 16 * work.rounding(kind)) if kind == "lbfgs" else FLOAT64)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("axes", "strategy", "options"),
    [
        (("dp",), "ddp", {}),
        (("dp",), "zero3", {"microbatches": 2}),
        (("tp",), "tensor", {}),
        (("dp",), "auto", {}),
    ],
    ids=str,
)
def test_embeddings_outside_of_the_model(axes: tuple[str, ...], strategy: Any, options: Any) -> None:
    """Breaks if what a table, or a prompt, outside of the model learns is another than in eager; if rows of another
    microbatch get a microbatch's gradient; or the model's own table, called by the script, gets none.
    """
    kinds = ["prompted", "own table"]
    for rank in launch(work.compiled, 2, kinds, axes, (2,), strategy, options, timeout_s=240.0):
        for kind, found in zip(kinds, rank, strict=True):  # Llama's norms and its loss are in float32 in any model
            check(kind, found, FLOAT32)


def test_microbatches_have_rows_of_their_own() -> None:
    """Breaks if gradients of microbatches are put together in another order than their rows, or an input that all of
    them have gets the last one's alone.
    """
    kinds = ["attack", "adam"]
    for rank in launch(work.compiled, 2, kinds, ("dp",), (2,), "zero3", {"microbatches": 2}, timeout_s=240.0):
        for kind, found in zip(kinds, rank, strict=True):
            check(kind, found, FLOAT64)


def test_pieces_get_pieces() -> None:
    """Breaks if a batch of a loader's, in pieces, gets its gradient whole, or another rank's."""
    for plain, *others in launch(work.in_pieces, 2, timeout_s=120.0):
        for other in others:
            torch.testing.assert_close(other, plain, rtol=1e-12, atol=1e-14)


def test_the_gradient_is_of_the_inputs_dtype() -> None:
    """Breaks if a program in bf16 hands autograd a gradient of another dtype, or computes in the input's."""
    for found in launch(work.narrow, 2, timeout_s=120.0):
        assert found == ["torch.float32", "True"]


def test_what_cannot_be_is_told() -> None:
    """Breaks if a penalty on a gradient is silently none, ranks wait for each other of which one wants a gradient, one
    goes to parameters as they were before they were cut.
    """
    for told in launch(work.refused, 2, timeout_s=120.0):
        assert "differentiated again (create_graph=True)" in told["penalty"]
        assert "the kinds of the inputs" in told["differ"] and "requires_grad" in told["differ"]
        assert "was computed from 0.weight before the first batch" in told["before"]


def test_stages_of_a_pipeline() -> None:
    """Breaks if what a batch is made of, or a prompt that all stages read, gets no gradient on some rank, or stages are
    clipped each by a norm of its own.
    """
    for said in launch(work.staged, 2, timeout_s=120.0):
        assert "compiled.clip_grad_norm_(max_norm) takes the norm over all stages" in said
