"""What eager differentiates is differentiated: terms on outputs beside the loss, and instead of it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.dist import loss_terms
from tests.dist.launch import launch

FLOAT32 = 2.0**-23
TERMS = ["loss", "loss + z", "loss"]


@cache
def eager(name: str, *terms: str) -> list[Any]:
    return loss_terms.eager_steps(name, list(terms))


def check(found: list[Any], expected: list[Any], rounding: float = 2.0**-52) -> None:
    """Losses and gradients within some roundings; HuggingFace's own losses are computed in float32 in any model."""
    for (loss, gradients), (expected_loss, expected_gradients) in zip(found, expected, strict=True):
        assert loss == pytest.approx(expected_loss, rel=8 * rounding)
        assert gradients.keys() == expected_gradients.keys()
        for name, gradient in gradients.items():
            wanted = expected_gradients[name]
            assert float((gradient - wanted).norm()) <= 64 * rounding * float(wanted.norm()), name


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("axes", "sizes", "strategy", "options"),
    [
        (("dp",), (2,), "ddp", {}),
        (("dp",), (2,), "zero3", {"microbatches": 2}),
        (("tp",), (2,), "tensor", {}),
        (("dp", "tp"), (2, 2), {"dp": "zero2", "tp": "tensor+sequence"}, {}),
        (("dp", "tp"), (2, 2), "auto", {}),
    ],
    ids=lambda value: str(value),
)
def test_a_term_on_the_logits_beside_the_loss(
    axes: tuple[str, ...], sizes: tuple[int, ...], strategy: Any, options: dict[str, Any]
) -> None:
    """Breaks if a gradient that comes for the logits is dropped (the loss would be right, its gradient would not), if
    the program is planned anew at each step, or if a step of the loss alone is another afterwards.
    """
    ranks = launch(
        loss_terms.compiled_steps, len(sizes) * 2, "llama", axes, sizes, strategy, TERMS, options, timeout_s=180.0
    )
    for found, _ in ranks:
        check(found, eager("llama", *TERMS), FLOAT32)
    (text,) = ranks[0][1]
    assert "logits" in text and "roots=" in text


@pytest.mark.parametrize("term", ["smooth", "loss, then z"])
def test_other_losses_on_the_logits(term: str) -> None:
    """Breaks if a loss that goes round the model's own gets the model's gradient added, or none; or if a second
    backward through a retained graph finds nothing.
    """
    terms = [term, term]
    for found, _ in launch(loss_terms.compiled_steps, 2, "gpt2", ("dp",), (2,), "zero2", terms, {}, timeout_s=180.0):
        check(found, eager("gpt2", *terms), 2.0**-52 if term == "smooth" else FLOAT32)


def test_with_dropout_the_second_program_draws_the_same_masks() -> None:
    """Breaks if the forward that is run once more, for the gradients' sake, is not that of the user's outputs."""
    options: dict[str, Any] = {"dropout": 0.2}
    later = launch(loss_terms.compiled_steps, 2, "gpt2", ("dp",), (2,), "ddp", ["loss + z"], options, timeout_s=180.0)
    at_once = launch(
        loss_terms.compiled_steps, 2, "gpt2", ("dp",), (2,), "ddp", ["loss + z"],
        {**options, "roots": ("loss", "logits")}, timeout_s=180.0,
    )  # fmt: skip
    assert later[0][1] and not at_once[0][1]
    check(later[0][0], at_once[0][0])


@pytest.mark.parametrize("options", [{"strategy": "zero3"}, {"strategy": "ddp", "microbatches": 4}], ids=str)
def test_parameters_that_a_loss_does_not_go_through_have_no_gradient(options: dict[str, Any]) -> None:
    """Breaks if a head that the loss leaves out has a gradient of zeros, with which AdamW's decay changes it; if it has
    none once a loss goes through it; or if a gradient that comes for some of what a program differentiates, or in a
    microbatch without labels, is lost or no number.
    """
    losses = ["loss", "both", "probe", "loss"]
    expected = loss_terms.probed(lambda model, batch: model, losses)
    for found in launch(loss_terms.probed_in_pieces, 2, losses, options, timeout_s=180.0):
        for (loss, tensors), (expected_loss, wanted) in zip(found, expected, strict=True):
            assert loss == pytest.approx(expected_loss, rel=1e-12)
            for name, tensor in tensors.items():
                other = wanted[name]
                assert (tensor is None) == (other is None), name
                if tensor is not None and other is not None:
                    assert float((tensor - other).norm()) <= 1e-12 * float(other.norm()), name


@pytest.mark.parametrize(
    ("axis", "options"),
    [("dp", {"strategy": "zero2", "microbatches": 2}), ("pp", {"strategy": {"pp": "1f1b"}, "microbatches": 2})],
)
def test_a_step_in_turn_leaves_out_what_the_loss_does_not_go_through(axis: str, options: dict[str, Any]) -> None:
    """Breaks if `train_step` gives a gradient of zeros to what has none in eager."""
    found = {name for names in launch(loss_terms.probed_in_turn, 2, axis, options, timeout_s=180.0) for name in names}
    assert found == {"probe.weight", "probe.bias", "spare.weight", "spare.bias"}


def test_an_auxiliary_output_through_the_backend() -> None:
    """Breaks if torch.compile with our backend drops a gradient that it takes with its own."""
    model, x, y = loss_terms.head_and_batch()
    expected = [loss_terms.auxiliary(model, model, x, y) for _ in range(2)]
    for found in launch(loss_terms.through_backend, 2, timeout_s=180.0):
        check(found, expected)


def test_a_root_that_is_none_is_named() -> None:
    """Breaks if a misspelt output is planned without a word."""
    for text in launch(loss_terms.unknown_root, 2, timeout_s=120.0):
        assert "hidden" in text and "logits" in text
