"""What strategies by name take at least: never more than what they take, and close to it where they leave no choice."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopar import pipeline
from autopar.cost.collectives import collectives
from autopar.ir.placement import Learnt
from autopar.ir.program import Program
from autopar.machine.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.place import place
from autopar.passes.placement import least as bounds
from autopar.passes.placement import variants
from autopar.passes.placement.choices import objective_of
from autopar.passes.placement.least import FREE, LEAST, Least
from autopar.passes.placement.problem import build_problem
from autopar.solver.lower import Lower
from autopar.strategies.names import Strategy, resolve
from autopar.strategies.request import Attempt, Request

MESH = Mesh({"dp": 2, "tp": 2}, hardware="cpu")
NAMES: tuple[Strategy, ...] = (
    "ddp", "zero2", "zero3", "hsdp", "tensor", "tensor+sequence", {"dp": "zero3", "tp": "tensor"},
)  # fmt: skip


class Normed(nn.Module):
    """Statistics over all rows, which every split of them sums; and, where `whole`, an operator that needs them all."""

    def __init__(self, *, whole: bool = False) -> None:
        super().__init__()
        self.whole = whole
        self.convolutions = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(2)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(4, track_running_stats=False) for _ in range(2)])
        self.head = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = torch.relu(norm(convolution(x)))
        x = x.cumsum(0) if self.whole else x
        return self.head(x.mean((2, 3))).square().mean()


def prepared(model: nn.Module, **shapes: tuple[int, ...]) -> tuple[Program, Least]:
    """The annotated program, after a placement for `auto`."""
    batch = {name: torch.randn(shape) for name, shape in (shapes or {"x": (4, 4, 8, 8)}).items()}
    request = Request(model, batch, MESH, resolve("auto", MESH))
    program, _ = pipeline.run(request, (*pipeline.TRACE, *pipeline.RECOMPUTE))
    program, learnt = annotate(program, mesh=MESH), Learnt()
    place(program, strategies=resolve("auto", MESH), learnt=learnt)
    return program, Least(program, learnt.facts[FREE], learnt.facts)


@pytest.fixture(scope="module")
def normed() -> tuple[Program, Least]:
    return prepared(Normed())


def charged(program: Program, placed: Program) -> float:
    """Seconds of a placement with latencies, but of parameters and gradients."""
    free = build_problem(program, resolve("auto", MESH), (), None, 0.0)
    found = objective_of(placed, free)
    assert found is not None
    return found


@pytest.mark.moderate
@pytest.mark.parametrize("name", NAMES, ids=str)
def test_no_placement_costs_less(normed: tuple[Program, Least], name: Strategy) -> None:
    """Breaks if a bound is more than what the strategy's own placement takes: a name that might win is left out."""
    program, least = normed
    strategies = resolve(name, MESH)
    placed = place(program, strategies=strategies, explain=False)
    cost_s = charged(program, placed)
    values_s, transfers_s = least.seconds(strategies, 1.5 * cost_s)
    assert 0.0 < values_s <= cost_s * (1 + 1e-9)
    request = Attempt.of(Request(nn.Linear(1, 1), {}, MESH, strategies))
    lowered, _ = pipeline.run(request, pipeline.LOWER, program=placed)
    moved = [row for row in collectives(lowered) if row.why in ("gather parameter", "reduce gradient")]
    assert 0.0 < transfers_s <= sum(row.seconds for row in moved)
    for part in (0.3, 0.6, 0.9):  # what strategies are let off counts where it is known to do
        assert least.seconds(strategies, part * cost_s)[0] <= cost_s * (1 + 1e-9)
    alike_s = least.seconds(strategies, 1.5 * cost_s, placed)[1]
    assert transfers_s <= alike_s <= sum(row.seconds for row in moved)


def test_what_leaves_no_choice_is_charged_what_it_takes(normed: tuple[Program, Least]) -> None:
    """Breaks if sums that a split of the rows asks for do not count, or if how parameters are kept counts there."""
    program, least = normed
    cost_s = charged(program, place(program, strategies=resolve("ddp", MESH), explain=False))
    bounds = [least.seconds(resolve(name, MESH), 1.5 * cost_s)[0] for name in ("ddp", "zero2", "zero3", "hsdp")]
    assert bounds[0] > 0.9 * cost_s
    assert np.allclose(bounds, bounds[0])


@pytest.mark.moderate
def test_what_may_be_gathered_is_no_reason_to_leave_a_name_out(
    normed: tuple[Program, Least], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks if an operator that no split of the rows serves counts as one that cannot be had: it is gathered for. Or
    if a problem is built with nothing let off, though it is known that this has no placement; or none where it has one.
    """
    program, least = prepared(Normed(whole=True))
    strategies, built = resolve("ddp", MESH), []
    placed = place(program, strategies=strategies, explain=False)
    cost_s = charged(program, placed)
    assert least.seconds(strategies, 1.5 * cost_s)[0] <= cost_s * (1 + 1e-9)
    assert np.isfinite(least.seconds(strategies, 1.5 * cost_s, placed)[1])
    assert least.forbids(strategies)
    assert not any(normed[1].forbids(resolve(name, MESH)) for name in NAMES)
    monkeypatch.setattr(variants, "build_problem", lambda *given: built.append(1) or build_problem(*given))
    found = place(
        program, strategies=strategies, explain=False, reasons=False, learnt=Learnt(facts={LEAST: least})
    )  # fmt: skip
    assert len(built) == 1
    assert (found.placed, found.notes) == (placed.placed, placed.notes)


@pytest.mark.moderate
def test_what_strategies_are_let_off_first_is_all_that_counts_where_it_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if matrices that strategies split may stay whole in what they take at least, though there is a placement
    that splits them; or if they may not, where none is found.
    """
    program, least = prepared(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)), input=(4, 16))
    strategies = resolve("tensor", MESH)
    cost_s = charged(program, place(program, strategies=strategies, explain=False))
    first, _ = least.seconds(strategies, 1.5 * cost_s)
    assert first <= cost_s * (1 + 1e-9)
    for owner, method in ((Lower, "found"), (Least, "_is_allowed")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, method, lambda *given: None)
            assert least.seconds(strategies, 1.5 * cost_s)[0] < 0.999 * first


def test_links_of_a_node_and_the_network_go_side_by_side(
    normed: tuple[Program, Least], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks if what both carry counts one after the other, so that names are left out that might win."""
    _, least = normed
    strategies = resolve("zero3", MESH)
    _, together_s = least.seconds(strategies, 0.0)
    monkeypatch.setattr(bounds, "lane_of", lambda mesh, axis: axis)
    _, apart_s = least.seconds(strategies, 0.0)
    assert 0.45 * together_s < apart_s < 0.75 * together_s


def test_a_narrowed_problem_is_not_kept(normed: tuple[Program, Least]) -> None:
    """Breaks if what is left of a problem to do as another placement passes for all that names may choose from."""
    program, learnt = normed[0], Learnt()
    auto = resolve("auto", MESH)
    placed = place(program, strategies=auto)
    place(program, strategies=auto, alike=placed, reasons=False, learnt=learnt)
    assert FREE not in learnt.facts


def test_bounds_of_small_problems_against_all_choices() -> None:
    """Breaks if a bound is more than the least cost of all choices, or if it is not that of a tree, or if what forbids
    all choices is not infinite.
    """
    rng = np.random.default_rng(0)
    for number in range(40):
        counts = rng.integers(2, 4, size=5).tolist()
        joined = [(0, 1), (1, 2), (2, 3), (3, 4), (0, 4), (1, 3)][: 4 + 2 * (number % 2)]
        ends = [(u, np.arange(counts[u]), v, np.arange(counts[v])) for u, v in joined]
        costs = [rng.uniform(0, 1, count) for count in counts]
        tables = [rng.uniform(0, 1, (counts[u], counts[v])) for u, v in joined]
        tables = [np.where(rng.uniform(size=table.shape) < 0.2, np.inf, table) for table in tables]
        exact = min(
            sum(cost[i] for cost, i in zip(costs, choice, strict=True))
            + sum(table[choice[u], choice[v]] for (u, v), table in zip(joined, tables, strict=True))
            for choice in itertools.product(*map(range, counts))
        )
        lower = Lower(counts, ends)
        cells = np.concatenate([table.ravel() for table in tables])
        alive = np.ones(sum(counts), dtype=bool)
        if lower.narrow(alive, cells):
            assert exact == np.inf
            continue
        found = lower.bound(np.where(alive, np.concatenate(costs), np.inf), cells, min(exact, 1e3) * 1.01)
        assert found <= exact * (1 + 1e-9)
        if len(joined) == 4 and np.isfinite(exact):
            assert found == pytest.approx(exact)
        alive[: counts[0]] = False
        assert lower.narrow(alive, cells)
