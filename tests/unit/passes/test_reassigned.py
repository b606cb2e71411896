"""Buffers that forward assigns anew, in the outermost module and in others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.base.errors import AutoparError
from autopar.passes.capture import capture
from autopar.passes.reassigned import Reassigned


class Layer(nn.Module):
    """A layer with buffers, and what is done with them."""

    mean: Tensor
    last: Tensor
    table: Tensor | None

    def __init__(self, does: Callable[[Layer, Tensor], Tensor]) -> None:
        super().__init__()
        self.does, self.linear = does, nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("last", torch.ones(4))
        self.register_buffer("table", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self, self.linear(x))


class Within(nn.Module):
    """Layers that are not the outermost module."""

    def __init__(self, does: Callable[[Layer, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(does) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _follows(layer: Layer, x: Tensor) -> Tensor:
    layer.mean = 0.9 * layer.mean + 0.1 * x.detach().mean(0)
    return x - layer.mean


def _swaps(layer: Layer, x: Tensor) -> Tensor:
    layer.mean, layer.last = layer.last + x.detach().mean(0), layer.mean
    return x * layer.mean


def _grows(layer: Layer, x: Tensor) -> Tensor:
    layer.mean = torch.cat([layer.mean, x.detach().mean(0)])
    return x


def _drops(layer: Layer, x: Tensor) -> Tensor:
    layer.mean = None  # type: ignore[assignment]
    return x


def _is_parameter(layer: Layer, x: Tensor) -> Tensor:
    layer.mean = layer.linear.bias.detach()
    return x


class Keeps(Layer):
    """Takes off what its first batch has."""

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = x.mean(0)
        return self.linear(x) - self.table


class Tabulates(Layer):
    """Makes a table once, of the shape that a batch has."""

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(x.shape[1]) + x.new_zeros(x.shape[1])
        return self.linear(x) + self.table


class Positions(nn.Module):
    """A table of positions, which is made anew where a batch is longer, or in each step."""

    table: Tensor

    def __init__(self, persistent: bool = False, always: bool = False) -> None:
        super().__init__()
        self.linear, self.always = nn.Linear(4, 4), always
        self.register_buffer("table", self.made(2), persistent=persistent)

    def made(self, length: int) -> Tensor:
        return torch.sin(torch.arange(length)[:, None] / torch.arange(1, 5))

    def forward(self, x: Tensor) -> Tensor:
        if self.always or len(self.table) < x.shape[1]:
            self.table = self.made(len(self.table) + x.shape[1])
        return self.linear(x) + self.table[: x.shape[1]] * len(self.table)


@pytest.mark.moderate
@pytest.mark.parametrize("length", [2, 5])
def test_a_table_is_made_at_the_length_that_a_batch_needs(length: int) -> None:
    """Breaks if a longer one is refused, or if what forward leaves is left on the model."""
    model, batch = nn.Sequential(Positions(), nn.Linear(4, 4)), {"input": torch.randn(4, length, 4)}
    plan = autopar.plan(model, autopar.Mesh.parse("dp=2,tp=2", hardware="cpu"), example_inputs=batch, strategy="zero3")
    assert plan.verify().ok and not plan.interface.updates and len(model[0].table) == 2
    assert any("0.table: made in each step" in note for note in plan.notes) == (length == 5)


def test_what_becomes_longer_in_each_step_is_no_table() -> None:
    """Breaks if the second step of a program is its first where eager has another one, or if checkpoints differ."""
    batch = {"input": torch.randn(4, 5, 4)}
    for positions in (Positions(persistent=True), Positions(always=True)):
        with pytest.raises(AutoparError, match=r"makes 0.table another buffer than it was"):
            capture(nn.Sequential(positions), batch)


@pytest.mark.moderate
@pytest.mark.parametrize("does", [_follows, _swaps])
def test_they_are_written_wherever_the_module_stands(
    does: Callable[[Layer, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks if what is assigned to buffers of inner modules, or read of them afterwards, is what was there before; or
    if the proof says nothing of a buffer that eager changes and the program does not.
    """
    mesh, batch = autopar.Mesh.parse("dp=2", hardware="cpu"), {"x": torch.randn(4, 4)}
    for model, count in ((Within(does), 2), (Layer(does), 1)):
        plan = autopar.plan(model, mesh, example_inputs=batch, strategy="zero3")
        names = {each.name.rpartition(".")[2] for each in plan.interface.updates}
        assert names == ({"mean"} if does is _follows else {"mean", "last"})
        assert len(plan.interface.updates) == count * len(names)
        proof = plan.verify()
        assert proof.ok, str(proof)
    monkeypatch.setattr(Reassigned, "within", lambda self, forward: forward)
    proof = autopar.plan(Within(does), mesh, example_inputs=batch, strategy="zero3").verify()
    assert "buffer layers.0.mean" in [each.name for each in proof.comparisons if not each.ok]


@pytest.mark.parametrize("model", [Within, Layer])
def test_what_no_program_can_keep_is_refused(model: type[Within] | type[Layer]) -> None:
    """Breaks if a buffer of another shape, none at all, or a parameter is taken for the one that there was."""
    batch = {"x": torch.randn(4, 4)}
    for does, words in ((_grows, r"float32 \(4,\) becomes"), (_drops, "becomes None"), (_is_parameter, "a parameter")):
        with pytest.raises(AutoparError, match=rf"makes .*mean.*{words}"):
            capture(model(does), batch)


@pytest.mark.parametrize("wrapped", [False, True])
def test_what_the_first_batch_says_is_no_table(wrapped: bool) -> None:
    """Breaks if what the first batch says is made of each, or if a table that is made once is refused."""
    keeps, tabulates = (nn.Sequential(x) if wrapped else x for x in (Keeps(_drops), Tabulates(_drops)))
    name = "input" if wrapped else "x"
    with pytest.raises(AutoparError, match=r"makes .*table, a buffer that was None.*test_reassigned\.py"):
        capture(keeps, {name: torch.randn(4, 4)})
    assert not capture(tabulates, {name: torch.randn(4, 4)}).updates
