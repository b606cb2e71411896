"""Gradients that a forward takes itself: plans equal eager, whatever is differentiated, and how often."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import grad
from torch.func import functional_call, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap

import autopar

Loss = Callable[["Model", Tensor, Tensor], Tensor]


class Model(nn.Module):
    """A loss of 8 points (8, 3) and targets (8, 3)."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 1))
        self.field = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 3))
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(self, x, y)}


def forces(m: Model, x: Tensor, y: Tensor) -> Tensor:
    x.requires_grad_(True)
    energy = m.net(x).sum(-1)
    return F.mse_loss(-grad(energy.sum(), x, create_graph=True)[0], y) + energy.mean()


def laplacian(m: Model, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    u = m.net(x)
    first = grad(u, x, grad_outputs=torch.ones_like(u), create_graph=True)[0]
    second = [grad(first[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(3)]
    return (torch.stack(second).sum(0) - y[:, 0]).pow(2).mean()


def penalty(m: Model, x: Tensor, y: Tensor) -> Tensor:
    between = (0.5 * (x + y)).detach().requires_grad_(True)
    scores = m.net(F.dropout(m.field(between), 0.3))
    (found,) = grad(scores.sum(), [between], create_graph=True)
    return m.net(x).mean() - m.net(y).mean() + (found.norm(dim=1) - 1).pow(2).mean()


def an_alias_is_another(m: Model, x: Tensor, y: Tensor) -> Tensor:
    z = x.clone().requires_grad_()
    (found,) = grad((m.net(z) * m.net(x)).sum(), z, create_graph=True)
    return found.pow(2).mean()


def through_an_alias(m: Model, x: Tensor, y: Tensor) -> Tensor:
    x = x.requires_grad_()
    z = (x * 1.5).clone()
    (inner,) = grad(m.net(z).sum(), z, create_graph=True)
    (outer,) = grad((inner * m.field(z)).sum(), x, create_graph=True)
    return outer.pow(2).mean()


def constants(m: Model, x: Tensor, y: Tensor) -> Tensor:
    x = x.requires_grad_()
    found, none = grad(m.net(x).sum(), (x, y.requires_grad_()), allow_unused=True)  # no create_graph
    assert none is None
    return (m.field(x) * found).sum(1).mean()


def detached(m: Model, x: Tensor, y: Tensor) -> Tensor:
    x = x.requires_grad_()
    with torch.no_grad():
        scale = m.field(x).abs()
    h = m.field(x) * scale
    h += x
    return grad((m.net(h) * h.detach()).sum(), x, create_graph=True)[0].sub(y).pow(2).mean()


def one_step(m: Model, x: Tensor, y: Tensor) -> Tensor:
    names, weights = zip(*m.net.named_parameters(), strict=True)
    found = grad(m.net(x).pow(2).mean(), weights, create_graph=True)
    fast = {name: w - 0.1 * g for name, w, g in zip(names, weights, found, strict=True)}
    return (functional_call(m.net, fast, (x,)) - y[:, :1]).pow(2).mean()


def each_row(m: Model, x: Tensor, y: Tensor) -> Tensor:
    return vmap(lambda row: m.field(row) @ row)(x).sub(y[:, 0]).pow(2).mean()


def each_row_s_gradient(m: Model, x: Tensor, y: Tensor) -> Tensor:
    return vmap(torch.func.grad(lambda row: m.net(row).sum()))(x).sub(y).pow(2).mean()


def jacobians(m: Model, x: Tensor, y: Tensor) -> Tensor:
    return (vmap(jacrev(m.field))(x) + vmap(jacfwd(m.field))(x)).pow(2).mean()


def hessians(m: Model, x: Tensor, y: Tensor) -> Tensor:
    return vmap(hessian(lambda row: m.net(row).sum()))(x).pow(2).mean()


def products(m: Model, x: Tensor, y: Tensor) -> Tensor:
    value, pulled_back, *_ = vjp(m.field, x)
    return pulled_back(y)[0].pow(2).mean() + value.mean() + jvp(m.field, (x,), (y,))[1].pow(2).mean()


def chosen_arguments(m: Model, x: Tensor, y: Tensor) -> Tensor:
    def both(parts: dict[str, Tensor], other: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        value = m.net(parts["x"]) * m.field(other) * scale
        return value.sum(), value.detach()

    (of_other, of_parts), (value, kept) = grad_and_value(both, argnums=(1, 0), has_aux=True)({"x": x}, y, scale=0.5)
    pulled: Any = vjp(lambda a, b: (a * m.field(b), b * 2), x, y, has_aux=True)
    _, pulled_back, more = pulled
    first, second = pulled_back(m.field(x))
    rows = vmap(jacrev(lambda a, b: a * m.field(b), argnums=1))(x, y)
    total = (of_other * 3 + of_parts["x"]).pow(2).mean() + value + kept.mean()
    return total + (first + 2 * second + more).pow(2).mean() + rows.pow(2).sum((1, 2)).mul(y[:, 0]).mean()


FORCES = (forces, laplacian, penalty, an_alias_is_another, through_an_alias, constants, detached, one_step)
MESHES = (("ddp", "dp=2"), ("zero3", "dp=2"), ("tensor", "tp=2"))
TRANSFORMS = (each_row, each_row_s_gradient, jacobians, hessians, products, chosen_arguments)


def planned(loss: Loss, strategy: str, mesh: str, **options: Any) -> autopar.Plan:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 3), "y": torch.randn(8, 3)}
    return autopar.plan(Model(loss), autopar.Mesh.parse(mesh), strategy=strategy, example_inputs=batch, **options)


@pytest.mark.moderate
@pytest.mark.sampled(14)
@pytest.mark.filterwarnings("ignore:autopar:UserWarning")
@pytest.mark.parametrize(
    ("loss", "strategy", "mesh"),
    [(loss, *where) for loss, where in zip((*FORCES, *TRANSFORMS), itertools.cycle(MESHES))],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_plans_equal_eager(loss: Loss, strategy: str, mesh: str) -> None:
    found = planned(loss, strategy, mesh).verify()
    assert found.ok, found


@pytest.mark.moderate
def test_forces_without_training() -> None:
    def predicted(m: Model, x: Tensor, y: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return -grad(m.net(x).sum(), x)[0]

    with torch.no_grad():
        found = planned(predicted, "ddp", "dp=2", inference=True).verify()
    assert found.ok, found


@pytest.mark.moderate
def test_blocks_that_repeat_are_gone_through() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            x = h = x.requires_grad_()
            for block in self.blocks:
                h = h + block(h)
            return grad(h.sum(), x, create_graph=True)[0].pow(2).mean()

    plan = autopar.plan(Deep(), autopar.Mesh.parse("dp=2"), strategy="ddp", example_inputs={"x": torch.randn(4, 4)})
    assert plan.verify().ok


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda m, x, y: m.net(x.requires_grad_()).sum().backward() or x.sum(), "calls backward()"),
        (lambda m, x, y: vmap(lambda r: F.dropout(m.net(r), 0.5), randomness="different")(x).mean(), "draws random"),
        (lambda m, x, y: grad(m.net(y).sum(), x.requires_grad_())[0].sum(), "not have been used"),
        (
            lambda m, x, y: grad(m.field(x), x.requires_grad_(), torch.ones(2, 8, 3), is_grads_batched=True)[0].sum(),
            "is_grads_batched",
        ),
    ],
    ids=["backward", "draws", "unused", "batched"],
)
def test_refusals_name_the_line(loss: Loss, words: str) -> None:
    with pytest.raises(autopar.AutoparError, match=r"test_inner_gradients\.py") as caught:
        planned(loss, "ddp", "dp=2")
    assert words in str(caught.value)
