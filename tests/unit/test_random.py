"""Random numbers that a model draws: torch's distributions, one draw on every mesh, none that differs by rank."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

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


@pytest.mark.moderate
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


REJECTING = {
    "Gamma": lambda x: x * torch.distributions.Gamma(x.exp(), x.exp() + 1).rsample(),
    "StudentT": lambda x: x * torch.distributions.StudentT(x.exp() + 2).rsample(),
    "Beta": lambda x: x * torch.distributions.Beta(x.exp(), 2.0).rsample(),
    "Dirichlet": lambda x: x * torch.distributions.Dirichlet(x.exp()).rsample(),
    "Binomial": lambda x: x * torch.distributions.Binomial(5, x.sigmoid()).sample(),
}


@pytest.mark.parametrize("name", REJECTING)
def test_what_draws_until_a_number_will_do_is_refused(name: str) -> None:
    """Breaks if such a draw is refused with words of views, writes or shapes, or differs from rank to rank."""
    with pytest.raises(AutoparError, match=f"draws from a .*{name}.* distribution in forward") as caught:
        plan(REJECTING[name], {"dp": 2}, "ddp")
    assert "test_random.py" in str(caught.value) and "outside of forward()" in str(caught.value)


def test_what_each_rank_would_draw_for_itself_is_refused() -> None:
    """Breaks if an operator that draws from the process's generator is planned: replicas would drift apart."""
    with pytest.raises(AutoparError, match="poisson") as caught:
        plan(lambda x: x + torch.poisson(x.detach().exp()), {"dp": 2}, "ddp")
    assert "test_random.py" in str(caught.value) and "torch.rand" in str(caught.value)


OWN = random.Random(0)


class Drawing(nn.Module):
    """draw: called with the model and its numbers."""

    def __init__(self, draw: Callable[[Drawing, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(WIDTH, WIDTH), draw
        self.numbers, self.generator = np.random.default_rng(0), torch.Generator()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": (x + self.draw(self, self.linear(x))).pow(2).mean()}


class DrawingByGlobal(Drawing):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.linear(x) * OWN.random()).mean()}


def plan_of(model: nn.Module) -> autopar.Plan:
    mesh = autopar.Mesh({"dp": 2}, hardware="h100")
    return autopar.plan(model, mesh, strategy="ddp", example_inputs={"x": torch.ones(8, WIDTH)})


def seeded(_: Drawing, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return torch.randn_like(x)


def seeded_apart(_: Drawing, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return functional.dropout(x)


def seeded_after(_: Drawing, x: Tensor) -> Tensor:
    noise = torch.randn_like(x)
    torch.manual_seed(0)
    return noise


def apart(_: Drawing, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return torch.randn_like(x)


def restored(_: Drawing, x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    first = torch.rand_like(x)
    torch.set_rng_state(state)
    return first - torch.rand_like(x)


def seeds_all(_: Drawing, x: Tensor) -> Tensor:
    torch.cuda.manual_seed_all(0)
    torch.manual_seed(0)
    return torch.randn_like(x)


def seeds_devices(_: Drawing, x: Tensor) -> Tensor:
    torch.cuda.manual_seed(0)
    return torch.randn_like(x)


def seeds_every_device(_: Drawing, x: Tensor) -> Tensor:
    torch.cuda.manual_seed_all(0)
    return torch.randn_like(x)


def apart_on_no_device(_: Drawing, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        return torch.randn_like(x)


def seeded_by_its_generator(_: Drawing, x: Tensor) -> Tensor:
    torch.default_generator.manual_seed(3)
    return torch.randn_like(x)


@pytest.mark.parametrize(
    ("draw", "does"),
    [
        (seeds_all, r"seeds torch's generator in forward\(\)"),
        (seeds_devices, r"seeds torch's generator in forward\(\)"),
        (seeds_every_device, r"seeds torch's generator in forward\(\)"),
        (apart_on_no_device, r"puts torch's generator back in forward\(\) after it draws"),
        (seeded_by_its_generator, r"seeds torch's generator in forward\(\) before it draws \(randn_like\)"),
        (seeded, r"seeds torch's generator in forward\(\) before it draws \(randn_like\)"),
        (seeded_apart, r"seeds torch's generator in forward\(\) before it draws \(dropout\)"),
        (seeded_after, r"seeds torch's generator in forward\(\) after it draws"),
        (apart, r"puts torch's generator back in forward\(\) after it draws"),
        (restored, r"puts torch's generator back in forward\(\) before it draws \(rand_like\)"),
        (lambda model, x: torch.randn(x.shape, generator=model.generator), r"torch\.Generator of its own.*\(randn\)"),
        (lambda model, x: x.detach().clone().normal_(generator=model.generator), r"Generator of its own.*\(normal_\)"),
    ],
)
def test_a_forward_that_seeds_is_refused(draw: Callable[[Drawing, Tensor], Tensor], does: str) -> None:
    """Breaks if a forward whose numbers are the same in every step, or twice in one, gets others without a word, or if
    tracing leaves the caller's generator elsewhere.
    """
    model, state = Drawing(draw), torch.get_rng_state()
    with pytest.raises(AutoparError, match=rf"{does}(.|\n)*test_random\.py:\d+(.|\n)*(once|leave)"):
        plan_of(model)
    assert torch.equal(torch.get_rng_state(), state)


class Seeding(Block):
    """A block that seeds, or is called after its model does; that checkpoints, or does not."""

    def __init__(self, seed: int | None, checkpointed: bool) -> None:
        super().__init__(functional.dropout)
        self.seed, self.checkpointed = seed, checkpointed

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=False) if self.checkpointed else self.run(x)

    def run(self, x: Tensor) -> Tensor:
        if self.seed is not None:
            torch.manual_seed(self.seed)
        return super().forward(x)


class SeededOutside(Model):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for number, block in enumerate(self.blocks):
            with torch.random.fork_rng() if number else nullcontext():
                if number:
                    torch.manual_seed(number)
                x = block(x)
        return {"loss": x.pow(2).mean()}


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("seeds", [(None, 5, None), (1, 1, 1), (1, 2, 3)])
def test_a_block_that_seeds_is_refused(seeds: tuple[int | None, ...], checkpointed: bool) -> None:
    """Breaks if a block that stands for others, or is to be computed again, hides that it seeds."""
    model = Model(functional.dropout)
    model.blocks = nn.ModuleList(Seeding(seed, checkpointed) for seed in seeds)
    with pytest.raises(AutoparError, match="seeds torch's generator"):
        plan_of(model)


def test_a_model_that_seeds_between_repeated_blocks_is_refused() -> None:
    """Breaks if nobody looks at the generator where a block stands for one that is not traced."""
    with pytest.raises(AutoparError, match=r"seeds torch's generator"):
        plan_of(SeededOutside(functional.dropout))


def test_a_hook_that_seeds_is_refused() -> None:
    """Breaks if what a hook does to the generator is not seen."""
    model = Drawing(noise_of_default)
    model.linear.register_forward_pre_hook(lambda module, args: torch.manual_seed(1) and None)
    with pytest.raises(AutoparError, match="seeds torch's generator"):
        plan_of(model)


def noise_of_default(_: Drawing, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(1)  # nothing draws from it
    torch.set_rng_state(torch.get_rng_state())
    return torch.randn(x.shape, generator=torch.default_generator)


def seeded_without_a_draw(_: Drawing, x: Tensor) -> Tensor:
    torch.manual_seed(1)
    return functional.dropout(x, training=False)


@pytest.mark.parametrize("draw", [noise_of_default, seeded_without_a_draw])
def test_seeds_that_no_number_follows_from_are_not_refused(draw: Callable[[Drawing, Tensor], Tensor]) -> None:
    """Breaks if a generator that is put back before a draw, the default one by name, or a dropout that is off is taken
    for numbers that a program has not.
    """
    report = plan_of(Drawing(draw)).verify()
    assert report, report


@pytest.mark.parametrize("checkpointed", [False, True])
def test_blocks_that_draw_without_seeding_are_planned(checkpointed: bool) -> None:
    """Breaks if what a checkpoint keeps of the generator, or a block that is not traced, is taken for seeding."""
    model = Model(functional.dropout)
    model.blocks = nn.ModuleList(Seeding(None, checkpointed) for _ in range(4))
    report = plan_of(model).verify()
    assert report, report


@pytest.mark.parametrize(("draw", "name"), [(random.random, "Python"), (np.random.rand, "NumPy")])
def test_generators_that_are_not_torchs_are_refused(draw: Callable[[], float], name: str) -> None:
    """Breaks if one draw of Python's or NumPy's, made while the model was traced, is every step's."""
    with pytest.raises(AutoparError, match=f"draws from {name}'s.* generator"):
        plan(lambda x: x * float(draw()), {"dp": 2}, "ddp", blocks=1)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (Drawing(lambda model, x: x * float(model.numbers.random())), "the generator numbers"),
        (DrawingByGlobal(lambda model, x: x), "the generator OWN"),
    ],
)
def test_generators_of_ones_own_are_refused(model: nn.Module, name: str) -> None:
    """Breaks if a number of a generator that the model holds, or that its class names, is every step's."""
    before = OWN.getstate()
    with pytest.raises(AutoparError, match=f"draws from {name} in forward"):
        plan_of(model)
    assert OWN.getstate() == before
