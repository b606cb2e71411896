"""Rounds of a loop that a trace spells out, and no operator stands for (fold_loops), have one decision, whose price is
what all of them take.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopar import pipeline
from autopar.ir.program import Program
from autopar.machine.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.place import read_solution
from autopar.passes.placement.choices import choice_of
from autopar.passes.placement.problem import build_problem
from autopar.solver.solve import solve
from autopar.strategies.names import resolve
from autopar.strategies.request import Request

MESH = Mesh({"dp": 2, "tp": 2}, hardware="cpu")
ROUNDS = 7


class Balanced(nn.Module):
    """Scores whose rows and columns sum to one in turn (Sinkhorn), between two products; at the end
    by what wants its rows whole.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 64), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.first(x).view(x.shape[0], 8, 8).exp()
        for _ in range(ROUNDS):
            scores = scores / scores.sum(-1, keepdim=True)
            scores = scores / scores.sum(-2, keepdim=True)
        return self.last(scores.cumsum(-1) * scores.sort(-1).values).square().mean()


def annotated(model: nn.Module, x: Tensor) -> Program:
    request = Request(model, {"x": x}, MESH, resolve("auto", MESH))
    spelled_out = [each for each in (*pipeline.TRACE, *pipeline.RECOMPUTE) if each.name != "fold_loops"]
    traced, _ = pipeline.run(request, spelled_out)
    return annotate(traced, mesh=MESH)


def each_by_itself(program: Program) -> Program:
    """The same program, in which no round is known as one."""
    regions = {
        each.name: replace(each, annotated=replace(each.annotated, rounds={}))  # type: ignore[type-var]
        for each in program.regions
    }
    return program.with_regions(regions)


@pytest.fixture(scope="module")
def program() -> Program:
    return annotated(Balanced(), torch.randn(8, 8))


@pytest.mark.moderate
@pytest.mark.parametrize("strategy", ["auto", "ddp", "zero3", {"dp": "ddp", "tp": "tensor"}])
def test_what_is_decided_at_once_costs_and_holds_what_it_does_one_by_one(program: Program, strategy: object) -> None:
    """Breaks if a round is counted too often or not at all, in what operators compute, in what is moved between rounds
    and out of them, or in what is kept for the backward; or if the decision of one does not serve all.
    """
    strategies = resolve(strategy, MESH)  # type: ignore[arg-type]
    together = build_problem(program, strategies, (), None)
    apart = build_problem(each_by_itself(program), strategies, (), None)
    assert len(together.problem.nodes) < len(apart.problem.nodes) / 2
    found = solve(together.problem)
    placed = read_solution(program, together, found)
    choice = choice_of(placed, apart)
    assert choice is not None
    assert apart.problem.evaluate(choice) == pytest.approx(together.problem.evaluate(found.choice), rel=1e-9)
    assert apart.problem.peak(choice)[1] == pytest.approx(together.problem.peak(found.choice)[1], rel=1e-9)
    assert found.cost == pytest.approx(solve(apart.problem).cost, rel=8e-3)


def test_any_decision_costs_what_it_does_one_by_one(program: Program) -> None:
    """Breaks if what is moved between rounds, where it is free to move nothing, is not counted as often as it is: of
    decisions that nobody would take.
    """
    strategies = resolve("auto", MESH)
    together = build_problem(program, strategies, (), None)
    apart = build_problem(each_by_itself(program), strategies, (), None)
    generator = np.random.default_rng(0)
    for _ in range(6):
        nodes = tuple(
            replace(node, costs=node.costs + generator.random(len(node.costs))) for node in together.problem.nodes
        )
        choice = solve(replace(together.problem, nodes=nodes), gap=0.5).choice
        own = apart.problem.evaluate(_spread(together, apart, choice))
        assert np.isfinite(own) and together.problem.evaluate(choice) == pytest.approx(own, rel=1e-9)


def _spread(together, apart, choice):  # type: ignore[no-untyped-def]
    """The choice of one problem, in another of the same program."""
    found = [0] * len(apart.problem.nodes)
    pairs = [
        *((apart.operators[key][0], index) for key, (index, _) in together.operators.items()),
        *((apart.relays[key][0], index) for key, (index, _) in together.relays.items()),
        *((apart.classes[key][0], index) for key, (index, _) in together.classes.items()),
        *((apart.slots[key].node, slot.node) for key, slot in together.slots.items()),
        *((apart.slots[key].gradient, slot.gradient) for key, slot in together.slots.items() if slot.gradient >= 0),
    ]
    assert {own for own, _ in pairs} == set(range(len(found)))
    for own, index in pairs:
        found[own] = choice[index]
    return found


def _few(x: Tensor) -> Tensor:
    for _ in range(3):
        x = x / x.sum(-1, keepdim=True)
    return x


def _side_by_side(x: Tensor) -> Tensor:
    parts = [each / each.sum(-1, keepdim=True) for each in x.unbind(1)]
    return torch.stack(parts, 1)


def _one_after_the_other(x: Tensor) -> Tensor:
    found = [x[:, 0]]
    for number in range(1, 8):
        found.append((found[-1] + x[:, number]).tanh())
    return torch.stack(found, 1)


class Apply(nn.Module):
    """Something done between two layers, or a layer of its own for each round."""

    def __init__(self, function: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(8, 8), nn.Linear(8, 8), function
        weights = [] if function else [nn.Parameter(torch.randn(8, 8)) for _ in range(8)]
        self.weights = nn.ParameterList(weights)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.function(x) if self.function else x
        for weight in self.weights:
            x = (x @ weight).tanh()
        return self.last(x).square().mean()


@pytest.mark.parametrize(("function", "rounds"), [(_few, 0), (_side_by_side, 0), (_one_after_the_other, 5), (None, 0)])
def test_what_is_a_loop(function: Callable[[Tensor], Tensor] | None, rounds: int) -> None:
    """Breaks if three equal operators, branches side by side, or layers with weights of their own are taken for rounds
    of a loop; or if a recurrence is not.
    """
    found = annotated(Apply(function), torch.randn(4, 8, 8))
    tied = [name for region in found.regions for name in region.rounds]
    assert len(tied) >= rounds and bool(tied) == bool(rounds)
