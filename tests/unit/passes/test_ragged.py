"""Slices that begin or end where a tensor says: the program has all rows, and does what eager does for any ends."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.base.errors import AutoparError
from autopar.passes.capture import capture
from tests.unit.passes.sorted_experts import WIDTH, Net, compare, tokens_of

ROWS = 10


@pytest.mark.moderate
def test_experts_that_multiply_slices_of_sortedtokens_of() -> None:
    """Breaks if how many tokens an expert got in the example stays in the program, or one that got none counts."""
    torch.manual_seed(0)
    model = Net().double()
    program = capture(model, tokens_of("all"))
    for kind in ("all", "one"):
        compare(model, program, tokens_of(kind))


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "strategy"), [("dp=2", "zero3"), ("dp=2", "expert"), ("dp=2,tp=2", "tensor"), ("dp=2", "auto")]
)
def test_sorted_experts_are_split(mesh: str, strategy: str) -> None:
    """Breaks if a rank takes the ends of all tokens for those of its own."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = autopar.plan(
            Net(), autopar.Mesh.parse(mesh, hardware="cpu"), strategy=strategy, example_inputs=tokens_of("all")
        )
    assert plan.verify(rtol=1e-9).ok


class Cuts(nn.Module):
    """What `how` makes of x[ROWS, WIDTH] and of ends, which count from behind where they are negative."""

    def __init__(self, how: Callable[[Cuts, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(WIDTH, WIDTH), how

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return self.how(self, x, ends.sum(0).long())


def _one_end(model: Cuts, x: Tensor, ends: Tensor) -> Tensor:
    return model.linear(x[: ends[0]]).sum() + model.linear(x[ends[1] :]).square().sum()


def _both_ends(model: Cuts, x: Tensor, ends: Tensor) -> Tensor:
    return model.linear(x)[ends[0] : ends[1]].square().sum()


def _a_number_and_an_end(model: Cuts, x: Tensor, ends: Tensor) -> Tensor:
    return model.linear(x[-8 : ends[1], ...]).abs().sum() + model.linear(x)[ends[0] : 7].exp().sum()


def _of_another_dim(model: Cuts, x: Tensor, ends: Tensor) -> Tensor:
    return model.linear(x.t()[:, ends[0] : ends[1]].t()).square().sum()


def _with_other_slices(model: Cuts, x: Tensor, ends: Tensor) -> Tensor:
    x = model.linear(x)
    out = torch.zeros_like(x)
    out[ends[0] : ends[1], 2:5] = x[ends[0] : ends[1], :3]
    return out.square().sum() + x[..., 1::2][ends[0] : ends[1]].sum()


def _writes_a_number(model: Cuts, x: Tensor, ends: Tensor) -> Tensor:
    x = model.linear(x)
    x[ends[0] : ends[1]] = 3
    return x.square().sum()


def _changes(model: Cuts, x: Tensor, ends: Tensor) -> Tensor:
    x = model.linear(x).clone()
    x[ends[0] : ends[1]] *= 2
    x[ends[0] : ends[1]] = x[ends[0] : ends[1]].relu()
    rows = x[: ends[1]]
    rows += 1
    x[: ends[1]] = rows
    return x.square().sum()


def _counts(model: Cuts, x: Tensor, ends: Tensor) -> Tensor:
    rows = model.linear(x)[ends[0] : ends[1]]
    return rows.sum() / (rows.shape[0] + 1)


HOW: Mapping[str, Callable[[Cuts, Tensor, Tensor], Tensor]] = {
    "one end": _one_end, "both ends": _both_ends, "a number and an end": _a_number_and_an_end,
    "another dim": _of_another_dim, "other slices": _with_other_slices, "a number is written": _writes_a_number,
    "changes": _changes, "counts": _counts,
}  # fmt: skip


@pytest.mark.moderate
@pytest.mark.parametrize("name", HOW)
def test_a_slice_between_two_tensors(name: str) -> None:
    """Breaks if a row more or less is taken, an end that counts from behind or lies outside is another, or what is
    written into a slice stays beside it.
    """
    torch.manual_seed(0)
    model, x = Cuts(HOW[name]).double(), torch.randn(ROWS, WIDTH, dtype=torch.float64)
    program = capture(model, {"x": x, "ends": torch.tensor([[2.0, 3], [0, 2]])})
    for start, end in ((2, 5), (0, 10), (5, 5), (7, 3), (-8, -3), (-30, 4), (3, 99)):
        compare(model, program, {"x": x, "ends": torch.tensor([[start, end - 1], [0.0, 1]])})


def _writes_into_it(model: Cuts, x: Tensor, ends: Tensor) -> Tensor:
    x = model.linear(x).clone()
    x[ends[0] : ends[1]].mul_(2)
    return x.sum()


def _writes_into_a_part_of_it(model: Cuts, x: Tensor, ends: Tensor) -> Tensor:
    x = model.linear(x).clone()
    x[ends[0] : ends[1]][:, 0] = 1
    return x.sum()


def _writes_it_elsewhere(model: Cuts, x: Tensor, ends: Tensor) -> Tensor:
    x, out = model.linear(x).clone(), torch.zeros_like(x)
    rows = x[ends[0] : ends[1]]
    rows += 1
    out[ends[0] : ends[1]] = rows
    return out.sum() + x.sum()


def _never_assigns_it(model: Cuts, x: Tensor, ends: Tensor) -> Tensor:
    x = model.linear(x).clone()
    rows = x[ends[0] : ends[1]]
    rows += 1
    return rows.sum()


def _reads_it_late(model: Cuts, x: Tensor, ends: Tensor) -> Tensor:
    x = model.linear(x).clone()
    rows = x[ends[0] : ends[1]]
    x.mul_(2)
    return rows.sum()


def _returns(model: Cuts, x: Tensor, ends: Tensor) -> Tensor:
    return model.linear(x)[ends[0] : ends[1]]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (_writes_into_it, "writes into a slice between two tensors.*x.start:end. = f"),
        (_writes_into_a_part_of_it, "writes into a slice between two tensors"),
        (_writes_it_elsewhere, "writes into a slice between two tensors.*test_ragged.py:"),
        (_never_assigns_it, "writes into a slice between two tensors"),
        (_reads_it_late, "is read after what it is a part of was written.*test_ragged.py:"),
        (_returns, "the model returns rows that a mask chooses"),
    ],
)
def test_what_a_slice_shares_with_what_it_is_of_is_refused(how: Callable[..., Tensor], said: str) -> None:
    """Breaks if what is written into a slice is lost, or what is written beside it not seen in it."""
    with pytest.raises(AutoparError, match=said):
        capture(Cuts(how), {"x": torch.randn(ROWS, WIDTH), "ends": torch.tensor([[2.0, 5]])})
