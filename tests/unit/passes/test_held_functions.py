"""Functions that a model's modules hold, and tensors that forward finds elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from autopar.base.copies import copied
from autopar.base.errors import AutoparError
from autopar.passes.capture import capture
from tests.unit.passes.sorted_experts import compare

WIDTH = 4


class Block(nn.Module):
    """A function over its own modules, as an attribute, in a list or a dict, as a part of another, or as a hook."""

    def __init__(self, held: str) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale, self.held = nn.Parameter(torch.full((WIDTH,), 1.5)), held
        inner, outer, scale = self.inner, self.outer, self.scale
        own: Callable[[Tensor], Tensor] = lambda x: outer(inner(x).tanh()) * scale  # noqa: E731
        self.apply_own = own if held == "attribute" else functools.partial(own) if held == "partial" else None
        self.listed, self.named = [own], {"own": own}
        if held == "hook":
            self.inner.register_forward_hook(lambda _, __, y: outer(y.tanh()) * scale)

    def forward(self, x: Tensor) -> Tensor:
        if self.held == "hook":
            return x + self.inner(x)
        if self.apply_own is not None:
            return x + self.apply_own(x)
        return x + (self.listed[0] if self.held == "list" else self.named["own"])(x)


class Net(nn.Module):
    def __init__(self, held: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(held) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("held", ["attribute", "partial", "list", "dict", "hook"])
def test_functions_that_modules_hold_use_the_modules_that_are_traced(held: str) -> None:
    """Breaks if parameters that a function reaches are constants of the program, which nothing trains, or if the second
    block has the first one's.
    """
    torch.manual_seed(0)
    model, batch = Net(held).double(), {"x": torch.randn(3, WIDTH, dtype=torch.float64)}
    program = capture(model, batch)
    assert not program.constants
    compare(model, program, batch)


def test_a_copy_leaves_functions_of_the_model_as_they_are() -> None:
    """Breaks if the user's own model calls its copy."""
    model = Net("list")
    other = copied(model)
    blocks = [cast("Block", next(iter(each.blocks))) for each in (model, other)]
    assert blocks[0].listed[0] is not blocks[1].listed[0]
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    x = torch.randn(3, WIDTH)
    assert torch.equal(other(x), x.square().mean()) and not torch.equal(model(x), x.square().mean())


ELSEWHERE = nn.Linear(WIDTH, WIDTH)


class Outside(nn.Module):
    """Uses a module that is none of its own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(WIDTH, WIDTH), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "trained":
            return ELSEWHERE(self.linear(x)).sum()
        with torch.no_grad():
            target = ELSEWHERE(x)
        return (self.linear(x) - target).square().sum()


@pytest.mark.moderate
def test_what_is_trained_and_no_parameter_is_refused() -> None:
    """Breaks if a script's own module is frozen without a word."""
    batch = {"x": torch.randn(3, WIDTH)}
    with pytest.raises(AutoparError, match=r"no parameter of the model.*test_held_functions.py:.*submodule"):
        capture(Outside("trained"), batch)


def test_what_has_no_gradient_may_lie_anywhere() -> None:
    """Breaks if a teacher that forward() asks under no_grad has to be a submodule."""
    torch.manual_seed(0)
    model, batch = Outside("no gradient").double(), {"x": torch.randn(3, WIDTH, dtype=torch.float64)}
    ELSEWHERE.double()
    compare(model, capture(model, batch), batch)
