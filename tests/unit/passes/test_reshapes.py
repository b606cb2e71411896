"""simplify_reshapes: what is laid in one dim and taken apart again gives what it gave, without the step in between."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import autopar
from autopar.base.torch_compat import tracing
from autopar.passes.reshapes import simplify_reshapes

Step = tuple[str, list[int]]


def simplified(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, list[tuple[int, ...]]]:
    """What the simplified graph of a function gives, and the shapes of its values."""
    module = tracing.make_fx(function, {}, [x])
    simplify_reshapes(module.graph, {})
    module.recompile()
    shapes = [tuple(node.meta["val"].shape) for node in module.graph.nodes if node.op == "call_function"]
    return module(x), shapes


CASES: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor], list[tuple[int, ...]]]] = {
    "heads beside rows": (
        (12, 8, 32),
        lambda x: x.reshape(12, 32, 8).transpose(0, 1).reshape(8, 4, 12, 8),
        [(12, 8, 4, 8), (8, 4, 12, 8)],
    ),
    "of one row, too": (
        (12, 1, 32),
        lambda x: x.reshape(12, 4, 8).transpose(0, 1).reshape(1, 4, 12, 8),
        [(12, 1, 4, 8), (1, 4, 12, 8)],
    ),
    "and back, beside a dim of one": ((2, 3, 1, 5), lambda x: x.reshape(6, 1, 5).reshape(2, 3, 1, 5), []),
    "and back": ((2, 3, 5), lambda x: x.reshape(6, 5).reshape(2, 3, 5), []),
    "a dim of one": (
        (2, 1, 3, 6),
        lambda x: x.reshape(6, 6).t().reshape(2, 3, 1, 2, 3),
        [(2, 3, 2, 3), (2, 3, 2, 3), (2, 3, 1, 2, 3)],
    ),
    "what stays together stays as it is": ((2, 3, 4), lambda x: x.reshape(6, 4).t(), [(6, 4), (4, 6)]),
    "what is cut unevenly, too": ((4, 3), lambda x: x.reshape(12).reshape(3, 4), [(12,), (3, 4)]),
}


@pytest.mark.parametrize("name", CASES)
def test_it_says_the_same(name: str) -> None:
    """Breaks if dims are taken for others, one that two factors share is left, or what is plain is rewritten."""
    shape, function, expected = CASES[name]
    x = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    found, shapes = simplified(function, x)
    assert torch.equal(found, function(x)) and shapes == expected


@st.composite
def _chains(draw: st.DrawFn) -> tuple[list[int], list[Step]]:
    shape = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4, 6]), min_size=1, max_size=4))
    steps: list[Step] = []
    last = list(shape)
    for _ in range(draw(st.integers(2, 5))):
        if draw(st.booleans()):
            order = draw(st.permutations(range(len(last))))
            steps.append(("permute", order))
            last = [last[dim] for dim in order]
        else:
            new: list[int] = []
            rest = torch.Size(last).numel()
            while rest > 1 and len(new) < 4:
                size = draw(st.sampled_from([each for each in range(1, rest + 1) if rest % each == 0]))
                new.append(size)
                rest //= size
            last = [*new, rest]
            steps.append(("reshape", last))
    return shape, steps


@pytest.mark.moderate
@settings(max_examples=150, deadline=None)
@given(_chains())
def test_any_chain_of_views_says_the_same(drawn: tuple[list[int], list[Step]]) -> None:
    """Breaks if a factor of a dim ends in another place."""
    shape, steps = drawn

    def function(x: Tensor) -> Tensor:
        for name, numbers in steps:
            x = getattr(x, name)(numbers)
        return x

    x = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    assert torch.equal(simplified(function, x)[0], function(x))


class Attends(nn.Module):
    """torch's own layers, whose attention has rows and heads in one dim."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True), 2, enable_nested_tensor=False
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y.square().mean()


@pytest.mark.moderate
def test_attention_of_torch_is_split_beside_the_batch() -> None:
    """Breaks if one axis can split the batch, or another the heads, but not both."""
    torch.manual_seed(0)
    mesh = autopar.Mesh.parse("dp=2,tp=2", hardware="cpu")
    plan = autopar.plan(Attends(), mesh, example_inputs={"x": torch.randn(4, 6, 16)}, strategy="tensor")
    assert not [note for note in plan.notes if "whole on every rank" in note]
    assert plan.verify().ok
