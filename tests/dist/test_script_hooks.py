"""Hooks, autocast, casts: as eager does it, or told by name."""

from __future__ import annotations

import pytest

from tests.dist import script_hooks
from tests.dist.launch import launch
from tests.dist.test_loss_terms import FLOAT32, check


def test_hooks_of_parameters_run_and_others_are_named() -> None:
    """Breaks if a hook is lost where parameters are replaced, or cut at the first batch, if one that was made for plain
    gradients gets a rank's piece, if a removed one runs, or if a hook that cannot run is passed over in silence, or
    named at every step.
    """
    for found in launch(script_hooks.hooked, 2, timeout_s=180.0):
        assert not found["wrong"] and not found["removed"] and found["calls"] == ["model", "model"]
        traced, unrun = sorted(found["texts"], key=lambda text: "does not run" in text)
        assert "transformer.h.1 ran while the model was traced" in traced
        assert "backward hook double of transformer.h.0.mlp does not run" in unrun


@pytest.mark.parametrize("strategy", ["zero3", "tensor"])
def test_hooks_that_look_are_called_on_every_rank(strategy: str) -> None:
    """Breaks if a hook that gives nothing back is called on the rank alone that traces, with a tensor of the trace,
    with rows that were added, or without a gradient.
    """
    expected = script_hooks.looked_at(False)
    for found in launch(script_hooks.looked_at, 2, True, strategy, timeout_s=180.0):
        assert found["shapes"] == expected["shapes"] and len(expected["log"]) == 8
        for name in ("losses", "log", "weights"):
            assert found[name] == pytest.approx(expected[name], rel=1e-9)


def test_hooks_of_the_model_itself() -> None:
    """Breaks if torch's hook of a backward, which makes plain zeros of a gradient that never came, ends in an error of
    DTensors or has a program planned for them, or what a forward hook returns is not what is differentiated.
    """
    loss, norm, calls, _ = script_hooks.hooks_of_the_model(False)
    for found in launch(script_hooks.hooks_of_the_model, 2, True, timeout_s=120.0):
        assert found[:2] == pytest.approx((loss, norm), rel=1e-6)
        assert found[2] == calls == 1 and not found[3]


def test_autocast_and_casts_are_told_or_the_precision() -> None:
    """Breaks if a program runs in other types than the user asked for by autocast, without a word or with one that
    does not name precision, or if an old weight_norm is another function.
    """
    for found in launch(script_hooks.autocasts, 2, timeout_s=180.0):
        assert "torch.autocast(bfloat16)" in found["around"] and 'precision="bf16"' in found["around"]
        assert found["same"] == pytest.approx(found["plain"], rel=1e-6)
        plain, inside = found["around backward"]
        assert plain == inside
        assert found["island"][0] == found["island"][1] > 0
        assert "in forward()" in found["inside"] and "script_hooks.py" in found["inside"] and "bf16" in found["inside"]
        assert "cannot change its dtype" in found["moved"]
        loss, gradient, expected, expected_gradient = found["normed"]
        assert (loss, gradient) == pytest.approx((expected, expected_gradient), rel=1e-5)


def test_a_forward_that_is_another_function_is_in_the_program() -> None:
    """Breaks if a function in the place of a forward goes round the program, or calls the user's model from a trace:
    parameters that it reads would be constants, without gradients.
    """
    expected = script_hooks.replaced_forwards(compiled=False)
    for found in launch(script_hooks.replaced_forwards, 2, True, timeout_s=180.0):
        check(found, expected, FLOAT32)
