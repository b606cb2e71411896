"""Rows that are sorted and put back stay where they are, if nobody minds their order; else the program sorts."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.passes.capture import capture
from tests.unit.passes.sorted_experts import CHOICES, EXPERTS, WIDTH, Net, Sequential, compare, tokens_of


class Layer(nn.Module):
    """A router, and what `between` does to rows that are sorted by its choices."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        chosen, indices = self.router(tokens).topk(CHOICES, -1)
        return self.mixed(tokens, chosen.softmax(-1), indices).view_as(x)

    def mixed(self, tokens: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        order = indices.flatten().argsort()
        made = self.between(tokens[order // CHOICES], self.ends(indices))
        back = torch.zeros_like(made).index_copy(0, order, made).view(-1, CHOICES, WIDTH)
        return (back * weights[..., None]).sum(1)

    def ends(self, indices: Tensor) -> Tensor:
        """Where each expert's rows end, behind 0."""
        return F.pad(F.one_hot(indices, EXPERTS).sum((0, 1)).cumsum(0), (1, 0))

    def between(self, rows: Tensor, ends: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for expert in range(EXPERTS):
            out[ends[expert] : ends[expert + 1]] = rows[ends[expert] : ends[expert + 1]] @ self.weight[expert]
        return out


class ByMasks(Layer):
    """Masks of their own, and one product of all rows."""

    def between(self, rows: Tensor, ends: Tensor) -> Tensor:
        places = torch.arange(len(rows))
        masks = [(places >= ends[e]) & (places < ends[e + 1]) for e in range(EXPERTS)]
        return sum((mask[:, None] * (rows @ w) for mask, w in zip(masks, self.weight, strict=True)), rows.new_zeros(()))


class BySort(Layer):
    """Both that `sort` gives, and rows that are put back by the order of the order."""

    def mixed(self, tokens: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        values, order = indices.flatten().sort(stable=True)
        rows = tokens.repeat_interleave(CHOICES, 0)[order] * weights.flatten()[order, None]
        made = (rows[:, None] @ self.weight.tanh()[values])[:, 0] + self.between(rows, self.ends(indices))
        return made[order.argsort()].view(-1, CHOICES, WIDTH).sum(1)


class ByAdding(Layer):
    """Rows are added to those of their tokens, and counted over all of them."""

    def mixed(self, tokens: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        order = indices.view(-1).argsort(dim=0)
        made = self.between(tokens.index_select(0, order // CHOICES), self.ends(indices))
        back = torch.empty_like(made)
        back[order] = made
        found = torch.zeros_like(tokens).index_add(0, order // CHOICES, made * weights.view(-1)[order][:, None])
        return found + made.square().sum(0) + back.view(-1, CHOICES, WIDTH).mean(1)


class BySearching(Layer):
    """Where parts end is looked up in what is sorted, which counts for nothing else."""

    def mixed(self, tokens: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        values, order = indices.flatten().sort()
        ends = torch.searchsorted(values, torch.arange(EXPERTS + 1))
        made = self.between(tokens[order // CHOICES], ends) * weights.flatten()[order, None]
        return torch.zeros_like(made).index_copy(0, order, made).view(-1, CHOICES, WIDTH).sum(1)


@pytest.mark.sampled(3)
@pytest.mark.moderate
@pytest.mark.parametrize("kind", [Sequential, Layer, ByMasks, BySort, ByAdding, BySearching])
def test_rows_stay_where_they_are(kind: type[nn.Module]) -> None:
    """Breaks if a row is another expert's, or goes back to another token's place, in the example's batch or others."""
    torch.manual_seed(0)
    model = Net(kind).double()
    program = capture(model, tokens_of("all"))
    assert "sort" not in str(program)
    for which in ("all", "one"):
        compare(model, program, tokens_of(which))


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "strategy"), [(Sequential, "zero3"), (ByAdding, "ddp")])
def test_strategies_that_split_the_batch_gather_no_rows(kind: type[nn.Module], strategy: str) -> None:
    """Breaks if every rank sorts the tokens of all."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = autopar.plan(
            Net(kind), autopar.Mesh.parse("dp=2", hardware="cpu"), strategy=strategy, example_inputs=tokens_of("all")
        )
    assert plan.verify(rtol=1e-9).ok


class Summed(Layer):
    def between(self, rows: Tensor, ends: Tensor) -> Tensor:
        return super().between(rows, ends) + 0.1 * rows.cumsum(0)


class Placed(Layer):
    def between(self, rows: Tensor, ends: Tensor) -> Tensor:
        return super().between(rows, ends) + 0.1 * torch.arange(len(rows))[:, None]


class Triangular(Layer):
    def between(self, rows: Tensor, ends: Tensor) -> Tensor:
        return super().between(rows, ends) + rows.tril(-3)


class Causal(Layer):
    """Each row sees as many keys as its place says."""

    def between(self, rows: Tensor, ends: Tensor) -> Tensor:
        keys = self.weight.flatten(0, 1)[None, None]
        seen = F.scaled_dot_product_attention(rows[None, None], keys, keys, is_causal=True)
        return super().between(rows, ends) + seen[0, 0]


class OtherEnds(Layer):
    """The last row of each expert is left out, as beyond a capacity."""

    def between(self, rows: Tensor, ends: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for expert in range(EXPERTS):
            out[ends[expert] : ends[expert + 1] - 1] = rows[ends[expert] : ends[expert + 1] - 1] @ self.weight[expert]
        return out


class Descending(Layer):
    def mixed(self, tokens: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        order = indices.flatten().argsort(descending=True)
        made = self.between(tokens[order // CHOICES], self.ends(indices))
        return torch.zeros_like(made).index_copy(0, order, made).view(-1, CHOICES, WIDTH).sum(1)


class Elsewhere(Layer):
    """Two rows each are put back in each other's place."""

    def mixed(self, tokens: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        order = indices.flatten().argsort(stable=True)
        made = self.between(tokens[order // CHOICES], self.ends(indices))
        return torch.zeros_like(made).index_copy(0, order ^ 1, made).view(-1, CHOICES, WIDTH).sum(1)


class NeverBack(Layer):
    def mixed(self, tokens: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        order = indices.flatten().argsort(stable=True)
        return self.between(tokens[order // CHOICES], self.ends(indices)).view(-1, CHOICES, WIDTH).sum(1)


class FirstValue(Layer):
    """What is read off what is sorted counts for more."""

    def mixed(self, tokens: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        values, order = indices.flatten().sort()
        ends = torch.searchsorted(values, torch.arange(EXPERTS + 1))
        made = self.between(tokens[order // CHOICES], ends)
        back = torch.zeros_like(made).index_copy(0, order, made).view(-1, CHOICES, WIDTH).sum(1)
        return back * (1 + values[0]) + ends[1]


@pytest.mark.sampled(5)
@pytest.mark.moderate
@pytest.mark.parametrize(
    "kind", [FirstValue, Summed, Placed, Triangular, Causal, OtherEnds, Descending, Elsewhere, NeverBack]
)
def test_an_order_that_matters_stays(kind: type[nn.Module]) -> None:
    """Breaks if rows are left where they are though their order is of account."""
    torch.manual_seed(0)
    model = Net(kind).double()
    program = capture(model, tokens_of("all"))
    assert "sort" in str(program)
    compare(model, program, tokens_of("all"))
