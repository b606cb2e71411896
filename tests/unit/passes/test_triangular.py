"""A substitution that is written row by row is a triangular solve where it is one, and stays what it is elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.passes.capture import capture

SOLVE = "aten.linalg_solve_triangular.default"
SIZE = 6


class Chunked(nn.Module):
    """Rows that are made of those before them; `how` says what is done otherwise."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(4, 4), how

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        a = 0.3 * (y @ y.transpose(-1, -2))
        if self.how == "masked":
            a = a.masked_fill(torch.ones(SIZE, SIZE, dtype=torch.bool).triu(), 0)
        elif self.how == "masked above":
            a = a.masked_fill(torch.ones(SIZE, SIZE, dtype=torch.bool).triu(1), 0)
        else:
            a = -a.tril(0 if self.how == "diagonal" else -1)
        before = a.clone()
        for i in range(1, SIZE):
            a = self._row(a, i, before)
        return (a @ y).square().mean()

    def _row(self, a: Tensor, i: int, before: Tensor) -> Tensor:
        a = a.clone()
        row, above = a[..., i, :i].clone(), a[..., :i, :i].clone()
        if self.how == "product":
            a[..., i, :i] = row + (row[..., None, :] @ above)[..., 0, :]
        elif self.how == "whole rows":
            a[..., i, :i] = row + (a[..., i, :, None].clone() * a[..., :, :i].clone()).sum(-2)
        elif self.how == "difference":
            a[..., i, :i] = row - (row.unsqueeze(-1) * above).sum(-2)
        elif self.how == "first power":
            a[..., i, :i] = row + (row.unsqueeze(-1) * before[..., :i, :i]).sum(-2)
        elif self.how == "across the batch":
            a[..., i, :i] = row + (row.unsqueeze(-1) * above.flip(0)).sum(-2)
        elif self.how != "a row less" or i != SIZE - 2:
            a[..., i, :i] = row + (row.unsqueeze(-1) * above).sum(-2)
        return a


@pytest.mark.moderate
@pytest.mark.parametrize("how", ["rows", "masked", "product", "whole rows"])
def test_a_substitution_is_one_solve(how: str) -> None:
    """Breaks if a loop over rows is not seen, so that a program has eight operators a row, or is another function."""
    batch = {"x": torch.randn(4, SIZE, 4)}
    names = [str(node.target) for node in capture(Chunked(how), batch).regions[0].graph.nodes]
    assert SOLVE in names and not any("scatter" in name for name in names)
    plan = autopar.plan(Chunked(how), autopar.Mesh({"dp": 2}, hardware="cpu"), example_inputs=batch, strategy="ddp")
    assert plan.verify().ok and not plan.notes


OTHERS = ["masked above", "diagonal", "difference", "first power", "across the batch", "a row less"]


@pytest.mark.moderate
@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", OTHERS)
def test_what_is_no_solve_stays(how: str) -> None:
    """Breaks if a loop is taken for a solve by how it looks, not by what it computes."""
    batch = {"x": torch.randn(4, SIZE, 4)}
    names = {str(node.target) for node in capture(Chunked(how), batch).regions[0].graph.nodes}
    assert SOLVE not in names
    plan = autopar.plan(Chunked(how), autopar.Mesh({"dp": 1}, hardware="cpu"), example_inputs=batch, strategy="ddp")
    assert plan.verify().ok


@pytest.mark.moderate
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_dtype_without_a_solve_keeps_its_rows(dtype: torch.dtype) -> None:
    """Breaks if a program solves in a dtype for which torch has no triangular solve."""
    program = capture(Chunked("rows").to(dtype), {"x": torch.randn(4, SIZE, 4, dtype=dtype)})
    assert SOLVE not in {str(node.target) for node in program.regions[0].graph.nodes}
