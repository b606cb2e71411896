"""A problem at another price of gathers and reductions is the one that would be built for it."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopar import pipeline
from autopar.ir.placement import Learnt
from autopar.ir.program import Program
from autopar.machine.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.place import place
from autopar.passes.placement.problem import PlacementProblem, at_price, build_problem, priced_seconds
from autopar.passes.placement.variants import PRICED, Variants
from autopar.solver.solve import solve
from autopar.strategies.names import resolve
from autopar.strategies.request import Request

MESH = Mesh({"dp": 2, "tp": 2}, hardware="cpu")
AUTO = resolve("auto", MESH)


class Tied(nn.Module):
    """Repeated blocks, a weight that two operators read, and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3)])
        self.fixed = nn.Parameter(torch.randn(8, 8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = h + block(h)
        return (h @ self.fixed @ self.embedding.weight.T).square().mean()


@pytest.fixture(scope="module")
def program() -> Program:
    request = Request(Tied(), {"x": torch.randint(0, 12, (4, 6))}, MESH, AUTO)
    traced, _ = pipeline.run(request, (*pipeline.TRACE, *pipeline.RECOMPUTE))
    return annotate(traced, mesh=MESH)


def same(one: PlacementProblem, other: PlacementProblem) -> bool:
    """Whether two problems are, to the last bit."""
    a, b = one.problem, other.problem
    return (
        a.usage_limit == b.usage_limit
        and len(a.nodes) == len(b.nodes)
        and all(np.array_equal(x.costs, y.costs) and x.name == y.name for x, y in zip(a.nodes, b.nodes, strict=True))
        and len(a.edges) == len(b.edges)
        and all((x.u, x.v) == (y.u, y.v) for x, y in zip(a.edges, b.edges, strict=True))
        and all(
            np.array_equal(mine, theirs)
            for x, y in zip(a.edges, b.edges, strict=True)
            for mine, theirs in zip(x[2:], y[2:], strict=True)
        )
    )


@pytest.mark.moderate
@pytest.mark.parametrize("price", [0.05, 1.0, 25.0])
def test_at_another_price_it_is_what_would_be_built(program: Program, price: float) -> None:
    """Breaks if a gather or a reduction keeps its old price, or anything else changes with it."""
    built = build_problem(program, AUTO, (), 1e9, 0.3)
    wanted = build_problem(program, AUTO, (), 5e8, price)
    assert not same(built, wanted)
    assert same(at_price(built, program, AUTO, 5e8, price), wanted)
    assert same(built, build_problem(program, AUTO, (), 1e9, 0.3))


def test_what_a_price_decides_of_a_choice(program: Program) -> None:
    """Breaks if a placement is said to cost the same at every price, and dearer ones are not sought, though its gathers
    and reductions have that price; or if those of the first call, which are waited for, count.
    """
    built = build_problem(program, AUTO, (), None, 0.05)
    choice = solve(built.problem).choice
    priced_s = priced_seconds(built, program, AUTO, choice)
    dearer = at_price(built, program, AUTO, None, 0.45).problem
    assert dearer.evaluate(choice) - built.problem.evaluate(choice) == pytest.approx(0.4 * priced_s, rel=1e-9)
    assert priced_s > 0.0
    placed = place(program, strategies=AUTO, overlap_price=0.05)
    assert placed.result is not None and placed.result.priced_s == pytest.approx(priced_s)


def test_only_the_same_program_is_asked_for_another_price(program: Program) -> None:
    """Breaks if `auto` is built for each price, or a narrowed program is given what was built of the whole."""
    learnt = Learnt()
    place(program, strategies=AUTO, overlap_price=0.05, learnt=learnt)
    first, built = learnt.facts[PRICED]
    assert first is program
    again = Variants(program, AUTO, (), 1.0, learnt.facts).problem(None, (), ())
    assert again.operators is built.operators
    assert same(again, build_problem(program, AUTO, (), None, 1.0))
    named = Variants(program, resolve("ddp", MESH), (), 1.0, learnt.facts).problem(None, (), ())
    assert same(named, build_problem(program, resolve("ddp", MESH), (), None, 1.0))
    other = program.with_regions({})
    assert Variants(other, AUTO, (), 1.0, learnt.facts).problem(None, (), ()).operators is not built.operators
