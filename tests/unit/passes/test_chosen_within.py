"""Rows of rows that a mask chooses: by another mask, by slices, by parts that were joined; for any number of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.passes.capture import capture
from tests.unit.passes.test_chosen_rows import assert_serves

ROWS, WIDTH = 12, 4


class Rows(nn.Module):
    """Of whose rows `how` makes a loss. weights: a number each."""

    def __init__(self, how: Callable[[Rows, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.how = how

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return self.how(self, x, weights)


def _twice(model: Rows, x: Tensor, weights: Tensor) -> Tensor:
    """As torch_geometric's ChebConv removes loops of edges that it has removed loops of."""
    mask = weights > -1
    rows, of_rows = model.first(x)[mask], weights[mask]
    again = of_rows < 1
    rows, of_rows = rows[again], of_rows[again]
    third = of_rows > 0
    return (rows * of_rows[:, None]).square().sum() + rows[third].log_softmax(-1).sum() / max(len(rows), 1)


def _written_twice(model: Rows, x: Tensor, weights: Tensor) -> Tensor:
    mask = weights > -1
    rows = model.first(x)[mask]
    inner = weights[mask] < 1
    rows[inner] = model.second(rows[inner]).tanh()
    found = torch.zeros_like(x)
    found[mask] = rows
    return found.square().sum() + found[0].sum()


def _places_of_places(model: Rows, x: Tensor, weights: Tensor) -> Tensor:
    index = (weights > -1).nonzero().squeeze(-1)
    inner = (weights[index] < 1).nonzero(as_tuple=True)[0]
    found = torch.zeros_like(x)
    found[index[inner]] = model.first(x[index[inner]])
    return found.square().sum() + x[index][inner].mul(model.second.bias).sum()


def _capacity(model: Rows, x: Tensor, weights: Tensor) -> Tensor:
    """Experts that take a few rows each, the first of those that chose them."""
    found = torch.zeros_like(x)
    for number, expert in enumerate((model.first, model.second)):
        index = torch.where((weights > 0) == bool(number))[0][:3]
        found.index_add_(0, index, expert(x[index]) * weights[index, None])
    return found.square().sum()


def _slices(model: Rows, x: Tensor, weights: Tensor) -> Tensor:
    rows = model.first(x)[weights > 0]
    total = rows[2:].square().sum() + rows[-2:].abs().sum() + rows[1:4, :2].sum() + rows[:-1].exp().sum()
    return total + rows[::2].sum() + rows[1::3].square().sum() + model.second.weight.sum()


def _columns(model: Rows, x: Tensor, weights: Tensor) -> Tensor:
    return model.first(x).T[:, weights > 0][:, :2].square().sum() + model.second.weight.sum()


def _rows_of_a_table(model: Rows, x: Tensor, weights: Tensor) -> Tensor:
    """A mask of two dims."""
    table = model.first(x).tanh()
    chosen = table[table > 0]
    return chosen[:5].sum() + chosen[chosen < 0.5].square().sum() + model.second.weight.sum()


def _parts(model: Rows, x: Tensor, weights: Tensor) -> Tensor:
    """Rows of two masks and a row of all go through a layer together, and on by themselves."""
    one, two, all_of_them = weights > 0, weights < 0.5, x.mean(0, keepdim=True)
    first, second = x[one], model.second(x)[two]
    joined = model.first(torch.cat([first, second, all_of_them]))
    a, b, c = joined.split([len(first), second.shape[0], 1])
    again = joined[: len(first)]
    rest = joined[len(first) :]
    both = joined[: len(first) + len(second)]
    total = (a * first).sum() + b.square().mean() + c.sum() + again.abs().sum() + both.exp().sum()
    return total + rest.square().sum() + (b + second).cos().sum()


HOW = {
    "twice": _twice,
    "written twice": _written_twice,
    "places": _places_of_places,
    "capacity": _capacity,
    "slices": _slices,
    "columns": _columns,
    "a table": _rows_of_a_table,
    "parts": _parts,
}


def _batch(seed: int, shift: float = 0.0) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, WIDTH, generator=made, dtype=torch.float64)
    return {"x": x, "weights": torch.randn(ROWS, generator=made, dtype=torch.float64) * 1.5 + shift}


@pytest.mark.moderate
@pytest.mark.parametrize("name", HOW)
def test_the_program_for_one_batch_serves_others(name: str) -> None:
    """Breaks if rows are others than eager's, of few rows (less than a slice asks for) or of many."""
    model = Rows(HOW[name]).double()
    program = capture(model, _batch(0))
    for seed, shift in ((1, 0.0), (2, 1.0), (3, -1.3)):
        batch = _batch(seed, shift)
        assert_serves(model, program, batch)


@pytest.mark.moderate
@pytest.mark.parametrize("name", ["twice", "capacity", "parts"])
def test_rows_among_rows_are_split_with_the_batch(name: str) -> None:
    """Breaks if a rank counts its own rows alone."""
    plan = autopar.plan(Rows(HOW[name]), autopar.Mesh({"dp": 2}), example_inputs=_batch(0), strategy="zero3")
    assert plan.verify().ok
