from __future__ import annotations

import traceback

import pytest
import torch

from autopar.base.errors import AutoparError
from autopar.runtime.loader import load_program
from autopar.runtime.simulate import simulate
from tests.unit.runtime.programs import PLANS, make_batch, make_mlp, mlp_interface, mlp_source

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("plan", PLANS)
def test_all_ranks_together_compute_what_eager_does(plan: str) -> None:
    """Breaks when state or inputs are cut, or outputs and gradients put together, otherwise than planned."""
    sizes, zero3 = PLANS[plan]
    model, batch = make_mlp(), make_batch()
    expected = model(**batch)
    expected["loss"].backward()
    result = simulate(mlp_interface(sizes, zero3), mlp_source(sizes, zero3), model.state_dict(), batch)
    for found, name in zip(result.outputs, ("loss", "logits"), strict=True):
        torch.testing.assert_close(found, expected[name].detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(result.gradients[name], parameter.grad)


def test_gradients_of_other_outputs_can_be_given() -> None:
    """Breaks when the gradient of a sharded output is not cut like the output."""
    sizes, zero3 = PLANS["zero3+tensor"]
    model, batch = make_mlp(), make_batch()
    weights = torch.randn(8, 4, dtype=torch.float64)
    (model(**batch)["logits"] * weights).sum().backward()
    result = simulate(
        mlp_interface(sizes, zero3), mlp_source(sizes, zero3), model.state_dict(), batch, grads=(None, weights)
    )
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(result.gradients[name], parameter.grad)


def test_events_add_up_to_the_literature() -> None:
    """Breaks when ddp moves other than 2Ψ(n-1)/n or zero3 other than 3Ψ(n-1)/n bytes per rank, Ψ in parameter bytes."""
    model, batch = make_mlp(), make_batch()
    size_bytes = sum(parameter.nbytes for parameter in model.parameters())
    for plan, factor in (("ddp", 2), ("zero3", 3)):
        sizes, zero3 = PLANS[plan]
        result = simulate(mlp_interface(sizes, zero3), mlp_source(sizes, zero3), model.state_dict(), batch)
        events = [event for event in result.events[0] if event.shape]  # all but the loss
        assert sum(event.bytes_sent for event in events) == factor * size_bytes / 2
        assert {event.where for event in result.events[0][: result.num_forward_events]} == {"mlp forward"}


def test_replicas_that_differ_are_an_error() -> None:
    """Breaks when a forgotten all-reduce of a replicated gradient goes unseen."""
    sizes, zero3 = PLANS["ddp"]
    source = mlp_source(sizes).replace('        "up.bias": g["up.bias"],\n', "")
    source = source.replace("    return r\n", '    r.put("up.bias", g["up.bias"])\n    return r\n')
    with pytest.raises(AutoparError, match=r"the gradient up\.bias does not fit together: replicas differ"):
        simulate(mlp_interface(sizes, zero3), source, make_mlp().state_dict(), make_batch())


def test_a_gradient_that_is_missing_is_named() -> None:
    """Breaks when a trainable parameter may silently go without a gradient."""
    sizes = {"dp": 2}
    source = mlp_source(sizes).replace('"up.bias": g[', '"up.other": g[')
    with pytest.raises(AutoparError, match=r"no gradient for up\.bias"):
        simulate(mlp_interface(sizes), source, make_mlp().state_dict(), make_batch())


def test_tracebacks_show_the_generated_line() -> None:
    """Breaks when the text is not registered with linecache, so that a user debugs blind."""
    source = mlp_source({"dp": 2}).replace("error = logits - y", "error = logits - z")
    with pytest.raises(NameError) as caught:
        simulate(mlp_interface({"dp": 2}), source, make_mlp().state_dict(), make_batch(), filename="<mlp program>")
    shown = "".join(traceback.format_exception(caught.value))
    assert "error = logits - z" in shown and '"<mlp program>"' in shown


def test_text_that_is_no_program_is_refused() -> None:
    """Breaks when an edited file with a typo fails far from where it was edited."""
    with pytest.raises(AutoparError, match=r"not valid Python: .*\(mine\.py:2\).*the line is 'def forward\(:'"):
        load_program("import torch\ndef forward(:\n", "mine.py")
    with pytest.raises(AutoparError, match=r"does not define split_inputs, backward \(mine\.py\)"):
        load_program("def forward(comm, state, inputs, seed): ...\n", "mine.py")
