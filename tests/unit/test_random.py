"""Random numbers that a model draws: torch's distributions, one draw on every mesh, none that differs by rank."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar import operators
from autopar.api import interpret
from autopar.base.errors import AutoparError

WIDTH = 8
Draw = Callable[[Tensor], Tensor]


class Block(nn.Module):
    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(WIDTH, WIDTH), draw

    def forward(self, x: Tensor) -> Tensor:
        return x + self.draw(self.linear(x))


class Model(nn.Module):
    def __init__(self, draw: Draw, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(draw) for _ in range(blocks))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x)
        return {"loss": x.pow(2).mean(), "hidden": x}


def stochastic_depth(x: Tensor) -> Tensor:
    return x * x.new_empty(x.shape[0], 1).bernoulli_(0.5).div_(0.5)


def noisy(x: Tensor) -> Tensor:
    return x + torch.randn_like(x)


def gumbel(x: Tensor) -> Tensor:
    return functional.gumbel_softmax(x, hard=True)


def timesteps(x: Tensor) -> Tensor:
    return x * torch.randint(1, 1000, (x.shape[0], 1), device=x.device)


def sampled(x: Tensor) -> Tensor:
    return x * torch.multinomial(x.detach().softmax(-1), 2).sum(-1, keepdim=True).to(x.dtype)


def shuffled(x: Tensor) -> Tensor:
    return x[:, torch.randperm(WIDTH, device=x.device)]


def masked(x: Tensor) -> Tensor:
    return x * torch.bernoulli(x.detach().sigmoid()) + torch.rand(x.shape, device=x.device)


def of_channels(x: Tensor) -> Tensor:
    return functional.dropout1d(x.view(len(x), 4, -1), 0.5).flatten(1)


def self_normalizing(x: Tensor) -> Tensor:
    return functional.alpha_dropout(x, 0.3, training=True)


DRAWS = (stochastic_depth, noisy, gumbel, timesteps, sampled, shuffled, masked, of_channels, self_normalizing)


def plan(draw: Draw, mesh: dict[str, int], strategy: str, blocks: int = 3) -> autopar.Plan:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, WIDTH)}
    return autopar.plan(
        Model(draw, blocks), autopar.Mesh(mesh, hardware="cpu"), example_inputs=batch, strategy=strategy
    )


@pytest.mark.parametrize("draw", DRAWS, ids=lambda draw: draw.__name__)
def test_shards_draw_what_one_device_draws(draw: Draw) -> None:
    """Breaks if ranks draw numbers of their own, replicas other ones, or the backward others than the forward."""
    plan(draw, {"dp": 4}, "zero2").verify().raise_on_failure()


def test_blocks_and_seeds_draw_apart() -> None:
    """Breaks if two blocks, or two steps, draw the same numbers."""
    program = plan(lambda x: x * 0 + torch.rand_like(x), {"dp": 2}, "ddp", blocks=2).program
    assert program is not None
    state = interpret.state_of(Model(noisy, 2), program)

    def hidden(seed: int) -> Tensor:
        return interpret.run(program, state, {"x": torch.zeros(8, WIDTH)}, seed=seed)[0][1]

    first, again, other = hidden(1), hidden(1), hidden(2)
    assert torch.equal(first, again) and not torch.equal(first, other)
    one = plan(lambda x: x * 0 + torch.rand_like(x), {"dp": 2}, "ddp", blocks=1).program
    assert one is not None
    (_, alone), _ = interpret.run(one, state, {"x": torch.zeros(8, WIDTH)}, seed=1)
    assert not torch.allclose(first - alone, alone)


def drawn(draw: Callable[[], Tensor], seed: int = 3) -> Tensor:
    """What a traced program draws, on whole tensors."""
    with operators.tracing_seed(torch.tensor(seed)):
        return draw()


N = 2**16


@pytest.mark.parametrize(
    ("target", "arguments", "mean", "variance"),
    [
        ("rand.default", ([N],), 0.5, 1 / 12),
        ("randn.default", ([N],), 0.0, 1.0),
        ("uniform.default", (torch.zeros(N), -1.0, 3.0), 1.0, 16 / 12),
        ("normal_functional.default", (torch.zeros(N), 2.0, 0.5), 2.0, 0.25),
        ("bernoulli.p", (torch.zeros(N), 0.3), 0.3, 0.21),
        ("bernoulli.default", (torch.full((N,), 0.8),), 0.8, 0.16),
        ("exponential.default", (torch.zeros(N), 2.0), 0.5, 0.25),
        ("geometric.default", (torch.zeros(N), 0.25), 4.0, 12.0),
        ("log_normal.default", (torch.zeros(N), 0.0, 0.5), math.exp(0.125), (math.exp(0.25) - 1) * math.exp(0.25)),
        ("randint.low", (-2, 8, [N]), 2.5, 99 / 12),
    ],
)
def test_distributions_are_torchs(target: str, arguments: tuple[object, ...], mean: float, variance: float) -> None:
    """Breaks if a draw has another mean or variance than torch documents, beyond five standard errors."""
    name, overload = target.split(".")
    found = drawn(lambda: operators.RANDOM[getattr(getattr(torch.ops.aten, name), overload)](*arguments)).double()
    assert abs(float(found.mean()) - mean) < 5 * math.sqrt(variance / N)
    assert float(found.var()) == pytest.approx(variance, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_uniform_numbers_stay_below_one(dtype: torch.dtype) -> None:
    """Breaks if rounding makes a 1 of a number below it (a floor of it would be another category), or logs infinite."""
    x = torch.zeros(N, dtype=dtype)
    uniform = operators.random(x, "uniform", torch.tensor(1), 0, [], [N])
    inside = operators.random(x, "open", torch.tensor(1), 0, [], [N])
    assert uniform.dtype == dtype and float(uniform.min()) >= 0 and float(uniform.max()) < 1
    assert bool(inside.log().isfinite().all()) and float(inside.max()) < 1 and float(inside.min()) > 0


def test_multinomial_without_replacement_draws_by_weight() -> None:
    """Breaks if a category comes twice, or one without weight at all, or the first not by its weight."""
    weights = torch.tensor([1.0, 3.0, 0.0, 6.0]).expand(N, 4)
    found = drawn(lambda: operators.RANDOM[torch.ops.aten.multinomial.default](weights, 2))
    assert bool((found[:, 0] != found[:, 1]).all()) and not bool((found == 2).any())
    shares = torch.bincount(found[:, 0], minlength=4) / N
    torch.testing.assert_close(shares, torch.tensor([0.1, 0.3, 0.0, 0.6]), atol=0.01, rtol=0)


def test_neighbours_are_not_correlated() -> None:
    """Breaks if rows, columns, salts or seeds that are next to each other draw alike."""

    def normal(seed: int, salt: int) -> Tensor:
        x = torch.zeros(256, 256)
        return operators.random(x, "normal", torch.tensor(seed), salt, [], [256, 256])

    first = normal(1, 0)
    pairs = [(first[1:], first[:-1]), (first[:, 1:], first[:, :-1]), (first, normal(1, 1)), (first, normal(2, 0))]
    for one, other in pairs:
        assert abs(float((one * other).mean())) < 5 / 256


def test_what_each_rank_would_draw_for_itself_is_refused() -> None:
    """Breaks if an operator that draws from the process's generator is planned: replicas would drift apart."""
    with pytest.raises(AutoparError, match="poisson") as caught:
        plan(lambda x: x + torch.poisson(x.detach().exp()), {"dp": 2}, "ddp")
    assert "test_random.py" in str(caught.value) and "torch.rand" in str(caught.value)
