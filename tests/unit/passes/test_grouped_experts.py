"""Experts that multiply slices of sorted tokens are the operator of experts, if they are nothing else."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.passes.capture import capture
from tests.unit.passes.sorted_experts import CHOICES, EXPERTS, INNER, WIDTH, Net, Sequential, compare, tokens_of


class Biased(Sequential):
    """Without a gate, by linear layers with biases, and tokens that are weighed elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) * 0.2)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) * 0.2)
        self.biases = nn.ParameterList([torch.randn(EXPERTS, INNER), torch.randn(EXPERTS, WIDTH)])

    def applied(self, x: Tensor, weight: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
        out, ends = x.new_zeros(len(x), weight.shape[1]), counts.cumsum(0)
        for expert in range(EXPERTS):
            start, end = ends[expert] - counts[expert], ends[expert]
            out[start:end] = F.linear(x[start:end], weight[expert], bias[expert])
        return out

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        indices = self.router(tokens).topk(CHOICES, -1).indices
        counts, order = torch.bincount(indices.flatten(), minlength=EXPERTS), indices.flatten().argsort()
        made = F.gelu(self.applied(tokens[order // CHOICES], self.up, self.biases[0], counts)) * 2
        made = self.applied(made, self.down, self.biases[1], counts)
        return torch.zeros_like(made).index_copy(0, order, made).view(-1, CHOICES, WIDTH).amax(1).view_as(x)


@pytest.mark.sampled(1)
@pytest.mark.moderate
@pytest.mark.parametrize("kind", [Sequential, Biased])
def test_experts_of_slices_are_one_operator(kind: type[nn.Module]) -> None:
    """Breaks if all experts work on all rows, or a row is multiplied by another expert's matrix."""
    torch.manual_seed(0)
    model = Net(kind).double()
    program = capture(model, tokens_of("all"))
    assert str(program).count("experts(") == 2
    assert "where" not in str(program)
    for which in ("all", "one"):
        compare(model, program, tokens_of(which))


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", [Sequential, Biased])
@pytest.mark.parametrize("strategy", ["expert", "tensor", "auto"])
def test_their_strategies(kind: type[nn.Module], strategy: str) -> None:
    """Breaks if tokens are not sent to their experts, or come home to other tokens."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if strategy == "expert" else "ignore")
        plan = autopar.plan(
            Net(kind), autopar.Mesh.parse("x=2", hardware="cpu"), strategy=strategy, example_inputs=tokens_of("all")
        )
    assert ("exchange_experts" in plan.source) == (strategy == "expert") or strategy == "auto"
    assert plan.verify(rtol=1e-9).ok


class ByPlace(Sequential):
    """Each expert's second product is by another one's matrix, said by number."""

    def multiplied(self, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        out = torch.zeros(len(x), weight.shape[-1], dtype=x.dtype)
        ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        for expert in range(EXPERTS):
            start, end = ends[expert], ends[expert + 1]
            out[start:end] = x[start:end] @ weight[EXPERTS - 1 - expert]
        return out


class Few(Sequential):
    """The tokens of one expert are left out."""

    def multiplied(self, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        out = torch.zeros(len(x), weight.shape[-1], dtype=x.dtype)
        ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        for expert in range(EXPERTS - 1):
            start, end = ends[expert], ends[expert + 1]
            out[start:end] = x[start:end] @ weight[expert]
        return out


@pytest.mark.moderate
@pytest.mark.parametrize("kind", [ByPlace, Few])
def test_others_are_what_they_are(kind: type[nn.Module]) -> None:
    """Breaks if experts are read that have other matrices, or that some tokens have not."""
    torch.manual_seed(0)
    model = Net(kind).double()
    program = capture(model, tokens_of("all"))
    assert "experts(" not in str(program)
    compare(model, program, tokens_of("all"))
