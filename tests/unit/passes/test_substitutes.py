"""Functions and layers of torch.nn that are traced as something else give what torch gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.base.errors import AutoparError
from autopar.passes import substitutes
from autopar.passes.checks import ChecksPass

X, IDS = torch.randn(8, 6, dtype=torch.float64), torch.randint(0, 5, (8, 4))
TABLE, WEIGHTS = torch.randn(5, 3, dtype=torch.float64), torch.rand(8, 4, dtype=torch.float64)
SHARES = torch.tensor([0.0, 0.4, 1.0], dtype=torch.float64)
HOLES = torch.where(IDS[:, :1] + torch.arange(6) == 4, torch.nan, X)
SAME: dict[str, Callable[[], Tensor]] = {
    "cov": lambda: torch.cov(X.T),
    "cov of one": lambda: torch.cov(X[:, 0], correction=0),
    "cov, counted": lambda: X.T.cov(fweights=IDS[:, 0]),
    "cov, weighted": lambda: X.T.cov(aweights=WEIGHTS[:, 0]),
    "cov, both": lambda: X.T.cov(fweights=IDS[:, 0] + 1, aweights=WEIGHTS[:, 0], correction=2),
    "cov, complex": lambda: torch.cov(torch.complex(X, X.sin()).T),
    "corrcoef": lambda: torch.corrcoef(X.T),
    "rrelu, eval": lambda: F.rrelu(X),
    **{
        f"quantile, {how}, {dim}, {kept}": lambda h=how, d=dim, k=kept: X.quantile(0.3, d, k, interpolation=h)
        for how in ("linear", "lower", "higher", "midpoint", "nearest")
        for dim in (None, 0, -1) for kept in (True, False)
    },
    **{
        f"{name}, {dim}, {kept}": lambda f=function, d=dim, k=kept: f(HOLES, SHARES, d, k).nan_to_num(nan=7.0)
        for name, function in (("quantiles", torch.quantile), ("nanquantiles", torch.nanquantile))
        for dim in (None, 0, 1) for kept in (True, False)
    },
    "quantiles of a number": lambda: torch.stack([X[0, 0].quantile(0.5), X[0, 0].quantile(SHARES, keepdim=True)[1]]),
    **{
        f"bags, {mode}, {padding}": lambda m=mode, p=padding: F.embedding_bag(IDS, TABLE, mode=m, padding_idx=p)
        for mode in ("sum", "mean", "max") for padding in (None, 0)
    },
    "bags, weighted": lambda: F.embedding_bag(IDS, TABLE, mode="sum", per_sample_weights=WEIGHTS),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_functions_give_what_torch_gives(name: str) -> None:
    """Breaks if a function that is traced as something else is not that function."""
    expected = SAME[name]()
    with ChecksPass():
        torch.testing.assert_close(SAME[name](), expected)


@pytest.mark.parametrize("wrong", [1.5, -0.1])
def test_a_share_that_is_none_is_refused_as_torch_refuses_it(wrong: float) -> None:
    """Breaks if a quantile beyond 0 to 1 is computed."""
    with ChecksPass(), pytest.raises(RuntimeError, match="range"):
        X.float().quantile(wrong)


class Median(nn.Module):
    """Whose rows are centred by a share of them, given as a number or made of numbers."""

    def __init__(self, made: bool) -> None:
        super().__init__()
        self.linear, self.made = nn.Linear(6, 6), made

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        share = torch.tensor([0.25, 0.5], dtype=y.dtype) if self.made else 0.5
        return (y - y.quantile(share, dim=1, keepdim=True).mean(0)).square().mean()


@pytest.mark.moderate
@pytest.mark.parametrize("made", [False, True])
def test_quantiles_are_traced(made: bool) -> None:
    """Breaks if torch's look at shares, whether they lie between 0 and 1, is traced (torch 2.11 asks of a tensor)."""
    mesh = autopar.Mesh.parse("dp=2", hardware="cpu")
    autopar.plan(Median(made), mesh, example_inputs={"x": torch.randn(8, 6)}).verify().raise_on_failure()


def test_an_adaptive_softmax_is_torchs() -> None:
    """Breaks if a label's cluster, or its place in it, is another, or a row alone is not taken."""
    layer, labels = nn.AdaptiveLogSoftmaxWithLoss(6, 10, [3, 6], div_value=2.0).double(), torch.arange(8) + 1
    expected, alone = layer(X, labels), layer(X[0], labels[0])
    substitutes.layers(layer)
    torch.testing.assert_close(layer(X, labels), expected)
    torch.testing.assert_close(layer(X[0], labels[0]), alone)


class Layer(nn.Module):
    def __init__(self, layer: nn.Module, *size: int) -> None:
        super().__init__()
        self.linear, self.layer, self.size = nn.Linear(6, 6), layer, size

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(self.linear(x).view(x.shape[0], *self.size))
        return y.square().mean()


def plan(layer: nn.Module, *size: int) -> autopar.Plan:
    mesh = autopar.Mesh.parse("dp=2,tp=2", hardware="cpu")
    return autopar.plan(Layer(layer, *size), mesh, example_inputs={"x": torch.randn(8, 6)}, strategy="ddp")


LAYERS: dict[str, Any] = {
    "RReLU draws what the program draws": (nn.RReLU(), 6),
    "RReLU in place": (nn.RReLU(inplace=True), 6),
    "statistics of an instance norm move": (nn.InstanceNorm1d(2, track_running_stats=True), 2, 3),
    "an affine one too": (nn.InstanceNorm1d(2, affine=True, momentum=0.3, track_running_stats=True), 2, 3),
}


@pytest.mark.moderate
@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_split_by_rows(name: str) -> None:
    """Breaks if what the layer draws, or the statistics that it moves, differ from eager."""
    plan(*LAYERS[name]).verify().raise_on_failure()


@pytest.mark.moderate
def test_a_layer_whose_gradients_are_wrong_is_refused() -> None:
    """Breaks if torch's CrossMapLRN2d, whose gradient is not its result's, is traced or fails without a word."""
    with pytest.raises(AutoparError, match="LocalResponseNorm"):
        plan(nn.CrossMapLRN2d(3), 2, 3, 1)
