"""Loops that a trace spells out become one operator, where one can do what their rounds do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.base.errors import AutoparError
from autopar.ir.op_call import op_call
from autopar.operators.iterated import iterate, parsed
from autopar.operators.rules import rule_for
from autopar.operators.rules.verify import verify_rule
from autopar.passes.fold_loops import MOST_TOGETHER, loops

WIDTH, ROUNDS = 4, 6
EPS = 1e-6


class Mixed(nn.Module):
    """Scores [B, S, N, N] of each token's streams, a function of them, and a loss that reads both."""

    def __init__(self, function: Callable[..., Tensor], *, width: int = WIDTH) -> None:
        super().__init__()
        self.scores, self.gates = nn.Linear(8, width * width), nn.Linear(8, width)
        self.weight, self.width, self.function = nn.Parameter(torch.rand(width) + 0.5), width, function

    def forward(self, x: Tensor) -> Tensor:
        scores = self.scores(x).unflatten(-1, (self.width, self.width)).softmax(-1) + EPS
        gates = self.gates(x).sigmoid().unsqueeze(-1)
        found = self.function(scores, gates, self.weight)
        return (found * torch.arange(1.0, self.width + 1)).square().mean()


def sinkhorn(c: Tensor, gates: Tensor, weight: Tensor) -> Tensor:
    for _ in range(ROUNDS):
        c = c / (c.sum(-1, keepdim=True) + EPS)
        c = c / (c.sum(-2, keepdim=True) + EPS)
    return c


def in_logarithms(c: Tensor, gates: Tensor, weight: Tensor) -> Tensor:
    c = c.log()
    for _ in range(ROUNDS):
        c = c - torch.logsumexp(c, -1, keepdim=True)
        c = c - torch.logsumexp(c, -2, keepdim=True)
    return c.exp()


def gated(c: Tensor, gates: Tensor, weight: Tensor) -> Tensor:
    for _ in range(ROUNDS):
        c = (c * gates + 0.1).sqrt() / (c.amax(-1, keepdim=True) + weight)
    return c


def entered_between(c: Tensor, gates: Tensor, weight: Tensor) -> Tensor:
    """Half a round before the loop."""
    c = c / (c.sum(-2, keepdim=True) + EPS)
    return sinkhorn(c, gates, weight)


def turned(c: Tensor, gates: Tensor, weight: Tensor) -> Tensor:
    """What comes out lies otherwise in memory than what went in."""
    for _ in range(ROUNDS + 1):
        c = (c.transpose(-1, -2) * weight).softmax(-1)
    return c.flatten(-2).unflatten(-1, (WIDTH, WIDTH))


def with_constants(c: Tensor, gates: Tensor, weight: Tensor) -> Tensor:
    """Sums without a gradient, of which each round divides what has one."""
    for _ in range(ROUNDS):
        with torch.no_grad():
            total = c.sum(-1, keepdim=True)
        c = c / total + gates * c.sum(-2, keepdim=True).detach()
    return c


def without_a_gradient(c: Tensor, gates: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        found = sinkhorn(c, gates, weight)
    return found * c


FOLDED = [sinkhorn, in_logarithms, gated, entered_between, turned]


def planned(function: Callable[..., Tensor], strategy: Any = "ddp", mesh: str = "dp=2", **options: Any) -> autopar.Plan:
    torch.manual_seed(0)
    model, x = Mixed(function, width=options.pop("width", WIDTH)), torch.randn(4, 6, 8)
    return autopar.plan(
        model, autopar.Mesh.parse(mesh, hardware="cpu"), example_inputs={"x": x}, strategy=strategy, **options
    )


@pytest.mark.parametrize("function", FOLDED)
def test_a_loop_is_one_operator_that_equals_eager(function: Callable[..., Tensor]) -> None:
    """Breaks if rounds are counted wrongly, the loop starts with another value, or a gradient is left out: of what
    it is given, or of what all rounds read.
    """
    plan = planned(function)
    forward = [line for line in plan.source.splitlines() if "ops.iterate(" in line]
    assert len(forward) == 1 and f", {ROUNDS + (function is turned)})" in forward[0]
    assert plan.verify().ok


@pytest.mark.moderate
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [
        ("dp=2", "zero3"),
        ("dp=2,tp=2", "auto"),
        ("dp=2,tp=2", {"dp": "ddp", "tp": "tensor"}),
        ("tp=2", "tensor+sequence"),
    ],
)
@pytest.mark.parametrize("function", FOLDED)
def test_strategies(function: Callable[..., Tensor], mesh: str, strategy: Any) -> None:
    assert planned(function, strategy, mesh).verify().ok


@pytest.mark.parametrize("function", [with_constants, without_a_gradient])
def test_parts_without_a_gradient(function: Callable[..., Tensor]) -> None:
    """Breaks if what a loop makes under no_grad gets a gradient."""
    assert planned(function).verify().ok


def test_microbatches() -> None:
    assert planned(gated, "ddp", microbatches=2).verify().ok


def _read_in_between(c: Tensor, gates: Tensor, weight: Tensor) -> Tensor:
    seen = []
    for _ in range(ROUNDS):
        c = c / (c.sum(-1, keepdim=True) + EPS)
        seen.append(c)
        c = c / (c.sum(-2, keepdim=True) + EPS)
    return torch.stack(seen).mean(0) + c


def _two_values(c: Tensor, gates: Tensor, weight: Tensor) -> Tensor:
    before = c
    for _ in range(ROUNDS):
        c, before = (c + before).tanh(), c
    return c


def _another_number(c: Tensor, gates: Tensor, weight: Tensor) -> Tensor:
    for number in range(ROUNDS):
        c = c / (c.sum(-1, keepdim=True) + number)
    return c


def _another_dim(c: Tensor, gates: Tensor, weight: Tensor) -> Tensor:
    for number in range(ROUNDS):
        c = c / (c.sum(-1 - number % 3, keepdim=True) + EPS)
    return c


def _along_the_batch(c: Tensor, gates: Tensor, weight: Tensor) -> Tensor:
    for _ in range(ROUNDS):
        c = c / c.sum((0, 1), keepdim=True)
        c = c / c.sum(-1, keepdim=True)
    return c


def _with_noise(c: Tensor, gates: Tensor, weight: Tensor) -> Tensor:
    for _ in range(ROUNDS):
        c = nn.functional.dropout(c, 0.1) + EPS
    return c


def _with_products(c: Tensor, gates: Tensor, weight: Tensor) -> Tensor:
    for _ in range(ROUNDS):
        c = (c @ c).tanh()
    return c


def _with_sizes(c: Tensor, gates: Tensor, weight: Tensor) -> Tensor:
    for _ in range(ROUNDS):
        c = c.view(4, 6, -1).softmax(-1).view(4, 6, WIDTH, WIDTH)
    return c


def _side_by_side(c: Tensor, gates: Tensor, weight: Tensor) -> Tensor:
    return torch.stack([(c * gates).sum(-1, keepdim=True).tanh() for _ in range(ROUNDS)]).mean(0) * c


OTHERS = [
    _read_in_between, _two_values, _another_number, _along_the_batch, _with_noise, _with_products, _with_sizes,
    _side_by_side,
]  # fmt: skip


@pytest.mark.parametrize("function", OTHERS)
def test_what_stays_spelled_out(function: Callable[..., Tensor]) -> None:
    """Breaks if what is read of a round in between, or a number of the round's own, is lost; if numbers are drawn by
    each rank; if a loop is folded along which the batch could not be split any more.
    """
    plan = planned(function)
    assert "iterate" not in plan.source
    assert plan.verify().ok


def test_rounds_of_a_few_kinds_are_one_round() -> None:
    plan = planned(_another_dim)
    assert "ops.iterate(" not in plan.source  # three dims in turn, of which one is the tokens': twice three rounds
    assert plan.verify().ok


def test_large_rounds_stay_spelled_out() -> None:
    """What an axis could split in each round is not made whole for the sake of the text."""
    width = int(MOST_TOGETHER**0.5)
    assert "ops.iterate(" in planned(sinkhorn, width=width).source
    assert "ops.iterate(" not in planned(sinkhorn, width=width + 1).source


def test_few_rounds_stay_spelled_out() -> None:
    def thrice(c: Tensor, gates: Tensor, weight: Tensor) -> Tensor:
        for _ in range(3):
            c = c / (c.sum(-1, keepdim=True) + EPS)
        return c

    assert "iterate" not in planned(thrice).source


def test_a_batch_of_one_is_folded_as_others_are() -> None:
    plan = autopar.plan(
        Mixed(sinkhorn), autopar.Mesh.parse("tp=2", hardware="cpu"), example_inputs={"x": torch.randn(1, 1, 8)}
    )
    assert "ops.iterate(" in plan.source
    assert plan.verify().ok


@pytest.mark.parametrize(
    "body",
    [
        "from_file('x')", "add_(x, 1)", "x.sum()", "__import__('os')", "rand_like(x)", "t0 = x", "x = add(x, 1); x",
        "mul(x, z)", "[x for x in y]", "sum(x, [-1], True); import os", "resize_(x, [4])", "", "a" * 5000,
        "as_strided(x, [4], [1])", "dropout(x, 0.5, True)",
    ],
)  # fmt: skip
def test_text_that_is_no_round(body: str) -> None:
    """Breaks if text may call anything but what computes numbers of numbers."""
    with pytest.raises(AutoparError, match="is no round of a loop"):
        iterate(torch.rand(2, 2), [], body, 1)
    with pytest.raises(AutoparError):
        parsed(body)


class Capsules(nn.Module):
    """Routing by agreement: logits [B, N, C, 1], made of votes [B, N, C, D] that all rounds read."""

    def __init__(self) -> None:
        super().__init__()
        self.votes, self.last = nn.Linear(6, 3 * 4), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        votes = self.votes(x).unflatten(-1, (3, 4))
        logits = torch.zeros_like(votes[..., :1])
        for _ in range(4):
            found = (logits.softmax(2) * votes).sum(1, keepdim=True)
            found = found / (1 + found.square().sum(-1, keepdim=True).sqrt())
            logits = logits + (found * votes).sum(-1, keepdim=True)
        return self.last((logits * votes).sum(1).flatten(1)).square().mean()


def test_a_dim_of_one_beside_others_that_are_longer() -> None:
    """Breaks if what goes round is asked for its dims as if it were longer where it meets what is."""
    torch.manual_seed(0)
    plan = autopar.plan(
        Capsules(), autopar.Mesh.parse("dp=2", hardware="cpu"), example_inputs={"x": torch.randn(4, 5, 6)}
    )
    assert "ops.iterate(" in plan.source and plan.verify().ok


def test_loops_lie_apart() -> None:
    """Two loops, one behind the other, each with its own text."""
    graph = torch.fx.Graph()
    value = graph.placeholder("x")
    value.meta["val"] = torch.empty(4, 3, device="meta")
    for target in (torch.ops.aten.tanh.default, torch.ops.aten.sigmoid.default):
        for _ in range(8):
            value = graph.call_function(target, (value,))
            value.meta["val"] = torch.empty(4, 3, device="meta")
    graph.output((value,))
    found = sorted((loop.body, loop.times) for loop in loops(graph))
    assert found == [("sigmoid(x)", 8), ("tanh(x)", 8)]


@pytest.mark.parametrize(
    ("body", "split"),
    [("tanh(transpose(x, -1, -2))", [True, False, False]), ("div(x, sum(x, [-1], True))", [True, True, False])],
)
def test_what_rounds_turn_or_sum_is_not_split(body: str, split: list[bool]) -> None:
    """Breaks if what comes out along a dim is taken for what went in along it, or if sums are of what a rank has."""
    target, args = torch.ops.autopar.iterate.default, (torch.rand(4, 6, 6).double(), [], body, 3)
    rule = rule_for(op_call(target, args, {}, target(*args)))
    assert [factor.split for factor in rule.factors] == split
    assert not verify_rule(target, args, {}, rule)


def test_all_rounds_are_priced_and_held() -> None:
    """Breaks if a plan counts the kernels of one round, or not what the gradient makes again of all of them."""

    def rounds(times: int) -> autopar.Plan:
        def function(c: Tensor, gates: Tensor, weight: Tensor) -> Tensor:
            for _ in range(times):
                c = c / (c.sum(-1, keepdim=True) + EPS)
            return c

        return planned(function)

    few, many = rounds(5), rounds(105)
    assert many.cost.compute_s > 5 * few.cost.compute_s
    held = 100 * 2 * 6 * WIDTH * WIDTH * 4  # what each round is given, of half of the rows
    assert many.cost.memory.peak - few.cost.memory.peak == pytest.approx(held, rel=1e-3)
