"""What optimizers that nobody knows do with pieces is found by letting them step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autopar.runtime.optimizer_trial import tried
from autopar.runtime.optimizers import SUPPORT
from tests.dist import script_optimizers

OF_TORCH = {name: each for name, each in SUPPORT.items() if each.elementwise or each.gathers}


def parameters(*dims: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones([2] * n)) for n in dims]


@pytest.mark.parametrize("name", [name for name in OF_TORCH if name != "Rprop"])
def test_torchs_own_are_found_to_be_what_is_known_of_them(name: str) -> None:
    """Breaks if an elementwise update is taken for another, or another for it. (Rprop's is elementwise, too.)"""
    optimizer = getattr(torch.optim, name)(parameters(2) if name == "Muon" else parameters(1, 2, 4), lr=0.1)
    assert tried(optimizer) == ("elements" if OF_TORCH[name].elementwise else "tensors")


class Clipping(torch.optim.SGD):
    """Looks at the norm of all tensors together, where that is large."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            norm = float(torch.stack([p.grad.norm() for p in group["params"]]).norm())
            for p in group["params"]:
                p.data.sub_(p.grad * group["lr"] / max(1.0, norm))


@pytest.mark.parametrize(
    ("cls", "found"),
    [
        (script_optimizers.Blocks, "tensors"),
        (script_optimizers.Averaging, "elements"),
        (script_optimizers.Lamb, "tensors"),
        (Clipping, "tensors"),
    ],
)
def test_those_of_users(cls: Any, found: str) -> None:
    """Breaks if a norm, a mean of rows, blocks of elements or several tensors together go unseen."""
    assert tried(cls(parameters(1, 2), lr=0.1)) == found


def test_a_schedule_that_begins_with_nothing() -> None:
    """Breaks if an optimizer is taken to be elementwise because it has not moved yet."""
    assert tried(script_optimizers.Lamb(parameters(2), lr=0.0)) == "tensors"
    assert tried(torch.optim.AdamW(parameters(2), lr=0.0)) == "elements"


def test_what_cannot_step_is_unclear_and_nothing_is_changed() -> None:
    """Breaks if a trial raises what a stranger's code raises, draws from the user's generator, or writes to the user's
    optimizer.
    """
    assert tried(torch.optim.LBFGS(parameters(2), lr=0.1)) == "unclear"
    optimizer = script_optimizers.Averaging([{"params": parameters(2)}, {"params": parameters(1)}], lr=0.1)
    before = torch.get_rng_state()
    assert tried(optimizer) == "elements"
    assert torch.equal(before, torch.get_rng_state())
    assert not optimizer.state and optimizer.steps == 0 and optimizer.param_groups[0]["k"] == 0
    assert tried(script_optimizers.Lamb([{"params": parameters(2)}, {"params": []}], lr=0.1)) == "tensors"
    assert all(bool((p == 1).all()) and p.grad is None for p in optimizer.param_groups[0]["params"])


class Begun(torch.optim.SGD):
    """Makes its states in its constructor, as Adagrad does in torch 2.11."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            for x in group["params"]:
                self.state[x] = {"step": torch.tensor(0.0), "sum": torch.full_like(x, 0.1)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for x in group["params"]:
                state = self.state[x]
                state["step"] += 1
                state["sum"].addcmul_(x.grad, x.grad)
                x.addcdiv_(x.grad, state["sum"].sqrt(), value=-group["lr"])


def test_states_that_a_constructor_makes_are_made_for_the_trial() -> None:
    """Breaks if an optimizer that reads a state at its first step finds none, or if its own states are changed."""
    optimizer = Begun(parameters(1, 2), lr=0.1)
    assert tried(optimizer) == "elements"
    assert all(float(state["step"]) == 0 and bool((state["sum"] == 0.1).all()) for state in optimizer.state.values())
