"""What one placement tells of the next: what strategies are let off, what cannot be had, where a search begins."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import pipeline
from autopar.base.errors import DoesNotFit
from autopar.ir.placement import Conceded, Learnt
from autopar.ir.program import Program
from autopar.ir.region import Region
from autopar.machine.mesh import Mesh
from autopar.passes import place as placing
from autopar.passes.annotate import annotate
from autopar.passes.place import place
from autopar.passes.placement import conceding, unsplit, variants
from autopar.passes.placement.problem import _Builder as ProblemBuilder
from autopar.passes.placement.problem import build_problem
from autopar.passes.placement.timeline import Timeline
from autopar.passes.placement.variants import Variants
from autopar.solver.consistency import propagate
from autopar.solver.problem import AssignmentProblem, Edge, Node
from autopar.strategies.context import family_of
from autopar.strategies.names import Strategy, resolve
from autopar.strategies.request import Request

MESH = Mesh({"dp": 2, "tp": 2}, hardware="cpu")


class Block(nn.Module):
    """An MLP, which splits, a matrix that does not, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.odd = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(2, (4, 4)).transpose(1, 2)
        x = x + F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
        x = x + self.down(F.gelu(self.up(x)))
        return x + self.odd(x).softmax(-1).cumsum(-1)


class Convolutions(nn.Module):
    """Channels are mixed and normed: neither they nor rows of pixels can be in pieces between two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(16, 16, 3, padding=1), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Blocks(nn.Module):
    def __init__(self, *, pixels: bool = False) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList([Convolutions() for _ in range(2 * pixels)])
        self.layers = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        rows = x.cumsum(0) * 0.1  # needs all rows of the batch
        for each in self.convolutions:
            rows = each(rows.transpose(1, 2).unflatten(2, (2, 4))).flatten(2).transpose(1, 2)
        for layer in self.layers:
            rows = layer(rows)
        return rows.square().mean()


def annotated(model: nn.Module) -> Program:
    request = Request(model, {"x": torch.randn(4, 8, 16)}, MESH, resolve("auto", MESH))
    program, _ = pipeline.run(request, (*pipeline.TRACE, *pipeline.RECOMPUTE))
    return annotate(program, mesh=MESH)


@pytest.fixture(scope="module")
def program() -> Program:
    return annotated(Blocks())


def put(program: Program, strategy: Strategy, learnt: Learnt | None, **given: Any) -> Program:
    return place(
        program, strategies=resolve(strategy, MESH), explain=False, reasons=False, learnt=learnt,
        memory_limit_bytes=None, **given,
    )  # fmt: skip


@pytest.mark.moderate
def test_a_family_is_let_off_the_same(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if what must be gathered and stay whole is sought again for each way to keep parameters, or if what is
    found so is another placement, or says less.
    """
    learnt, strategy = Learnt(), {"dp": "zero2", "tp": "tensor"}
    put(program, {"dp": "ddp", "tp": "tensor"}, learnt)
    (conceded,) = learnt.conceded.values()
    assert conceded.gathered
    assert conceded.whole
    plain = put(program, strategy, None)
    asked = []
    monkeypatch.setattr(conceding, "unsplit_weights", lambda *given: asked.append(given))
    found = put(program, strategy, learnt)
    assert not asked
    assert found.placed == plain.placed
    assert found.notes == plain.notes
    assert len(found.notes) > len(program.notes)


def test_what_differs_in_matrices_that_stay_whole_is_built_once(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks if a problem is built for each set of matrices that may stay whole, or if what such a one allows is not
    what it would allow by itself.
    """
    strategies, built = resolve({"dp": "zero3", "tp": "tensor"}, MESH), []
    monkeypatch.setattr(variants, "build_problem", lambda *given: built.append(1) or build_problem(*given))
    shared = Variants(program, strategies, ())
    allowed = set()
    for excused in ((), (("layers.0.odd.weight", 1),)):
        own = build_problem(program, strategies, (), 1e9, 1.0, (), excused)
        found = shared.problem(1e9, (), excused)
        assert found.problem.usage_limit == 1e9
        assert [node.name for node in found.problem.nodes] == [node.name for node in own.problem.nodes]
        for root, slot in own.slots.items():
            choices, costs = found.slots[root].choices, found.problem.nodes[found.slots[root].node].costs
            assert [c for c, cost in zip(choices, costs, strict=True) if np.isfinite(cost)] == slot.choices
            assert np.array_equal(costs[np.isfinite(costs)], own.problem.nodes[slot.node].costs)
        allowed.add(sum(int(np.isfinite(node.costs).sum()) for node in found.problem.nodes))
    assert len(built) == 1
    assert len(allowed) == 2


def test_what_problems_of_a_program_have_alike_is_found_out_once(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks if when values are held is worked out for each problem, or hangs on the strategies that asked first."""
    facts: dict[tuple[str, ...], Any] = {}
    build_problem(program, resolve("zero3", MESH), (), None, facts=facts)
    asked = resolve({"dp": "ddp", "tp": "tensor"}, MESH)
    with monkeypatch.context() as alone:
        alone.setattr(ProblemBuilder, "_fact", lambda self, name, make: make())
        own = build_problem(program, asked, (), None).problem
    monkeypatch.setattr(Timeline, "lifetime", None)
    monkeypatch.setattr(Timeline, "of", None)
    monkeypatch.setattr(ProblemBuilder, "_relay_usages", lambda *given: [])
    found = build_problem(program, asked, (), None, facts=facts).problem
    for node, other in zip(found.nodes, own.nodes, strict=True):
        assert node.name == other.name
        assert np.array_equal(node.costs, other.costs)
        if not node.name.startswith("relay:"):
            assert [usage[:2] for usage in node.usages] == [usage[:2] for usage in other.usages]
            assert all(np.array_equal(usage[2], same[2]) for usage, same in zip(node.usages, other.usages, strict=True))


@pytest.mark.moderate
def test_who_was_let_off_nothing_is_asked_for_nothing(program: Program) -> None:
    """Breaks if another family's concessions are taken, or if they are where a user asked by name."""
    learnt = Learnt()
    learnt.conceded[family_of(resolve({"dp": "ddp", "tp": "tensor"}, MESH))] = Conceded((), (), ("told",))
    found, plain = put(program, "zero2", learnt), put(program, "zero2", None)
    assert "told" not in found.notes
    assert found.placed == plain.placed
    others = Learnt()
    put(program, {"dp": "ddp", "tp": "tensor"}, others)
    found = put(program, "zero2", others)
    assert (found.placed, found.notes) == (plain.placed, plain.notes)
    named = place(program, strategies=resolve({"dp": "zero3", "tp": "tensor"}, MESH), learnt=learnt)
    assert learnt.conceded[family_of(resolve("zero2", MESH))].gathered
    assert any("whole" in note for note in named.notes)


@pytest.mark.moderate
def test_what_was_too_little_is_found_out(program: Program) -> None:
    """Breaks if what another was let off has to do."""
    learnt = Learnt()
    strategy = {"dp": "zero2", "tp": "tensor"}
    learnt.conceded[family_of(resolve(strategy, MESH))] = Conceded((), (("layers.0.odd.weight", 1),))
    assert put(program, strategy, learnt).placed == put(program, strategy, None).placed


@pytest.mark.moderate
def test_what_must_stay_whole_is_sought_where_neighbours_do_not_tell(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks if matrices stay whole that need not, if those that must are a problem of their own where neighbours tell,
    or if what neighbours tell is taken for all that there is.
    """
    sought, strategy = [], {"dp": "ddp", "tp": "tensor"}
    real = unsplit.solve
    monkeypatch.setattr(unsplit, "solve", lambda *given, **more: sought.append(1) or real(*given, **more))
    told = put(program, strategy, None)
    assert not sought
    monkeypatch.setattr(unsplit, "_forced", lambda *given: [])
    found = put(program, strategy, None)
    assert sought
    assert (found.placed, found.notes) == (told.placed, told.notes)


@pytest.mark.moderate
def test_what_splits_the_sequence_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if each strategy of its kind is let off one thing after the other before it is refused."""
    program, learnt, built = annotated(Blocks(pixels=True)), Learnt(), []
    for module in (variants, conceding):
        real = module.build_problem
        monkeypatch.setattr(
            module, "build_problem", lambda *given, real=real, **more: built.append(1) or real(*given, **more)
        )
    for strategy, most in (({"dp": "ddp", "tp": "allgather_kv"}, 1), ({"dp": "ddp", "tp": "ring"}, 1)):
        built.clear()
        with pytest.raises(DoesNotFit) as caught:
            put(program, strategy, learnt)
        assert caught.value.excluded
        assert len(built) == most
    assert len(learnt.refused) == 2
    built.clear()
    put(program, "ddp", learnt)
    assert built


@pytest.mark.moderate
def test_whether_attention_takes_part_in_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if other ways to meet in attention are given up though attention has a part in why one cannot be had, or
    if they are tried where convolutions alone forbid it.
    """
    program, found = annotated(Blocks(pixels=True)), []

    def refused() -> bool:
        with pytest.raises(DoesNotFit) as caught:
            put(program, {"dp": "ddp", "tp": "ring"}, Learnt())
        assert caught.value.excluded
        return caught.value.outside_attention

    assert refused()
    names = {region.name: frozenset(region.ops) for region in program.regions}
    for layer in ("convolutions.", "layers."):

        def near(region: Region, layer: str = layer) -> frozenset[str]:
            return names[region.name] if region.module.startswith(layer) else frozenset()

        monkeypatch.setattr(conceding, "values_of_attention", near)
        found.append(refused())
    assert found == [False, True]


@pytest.mark.parametrize("needed", [False, True])
def test_attention_is_blamed_for_what_it_is_needed_for(needed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if attention is blamed for a refusal that would be one without it, because its edges were met on the way;
    or if it is not where nothing else leaves so little.
    """
    monkeypatch.setattr(conceding, "values_of_attention", lambda region: frozenset({"attention"}))
    nodes = tuple(Node(name, np.zeros(2)) for name in ("attention", "next", "after", "norm", "conv"))
    both = np.arange(2)
    pairs = [
        (0, 1, [[0, np.inf], [0, np.inf]]),  # attention leaves the next one its first choice alone
        (1, 2, [[0, np.inf], [np.inf, 0]]),
        (2, 4, [[np.inf, np.inf], [0, 0]]),  # a convolution leaves the one after it the second
        *([] if needed else [(3, 1, [[0, np.inf], [0, np.inf]])]),  # as a norm does
    ]
    edges = tuple(Edge(u, v, both, both, np.array(costs, dtype=float)) for u, v, costs in pairs)
    problem = AssignmentProblem(nodes, edges)
    built: Any = SimpleNamespace(
        problem=problem, relays={}, operators={("layer", node.name): (i, ()) for i, node in enumerate(nodes)}
    )
    layer: Any = SimpleNamespace(regions=(SimpleNamespace(name="layer", module="layers.*"),))
    domains = propagate([np.ones(2, dtype=bool)] * len(nodes), edges)
    assert domains.empty is not None
    assert conceding._is_at_attention(layer, built, domains) is needed


@pytest.mark.moderate
@pytest.mark.parametrize("tensor", [False, True])
def test_parameters_alone_are_placed_for_less(tensor: bool, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if strategies that only keep parameters otherwise are another placement where operators do as the first's
    do, if what they are let off is sought again, or if less is not what is searched.
    """
    learnt, built = Learnt(), []
    first = put(program, {"dp": "ddp", "tp": "tensor"} if tensor else "ddp", learnt)
    strategy: Strategy = {"dp": "zero3", "tp": "tensor"} if tensor else "zero3"
    real = variants.build_problem
    monkeypatch.setattr(variants, "build_problem", lambda *given: built.append(real(*given)) or built[-1])
    found = put(program, strategy, learnt, alike=first)
    (own,) = built
    built.clear()
    plain = put(program, strategy, learnt)
    cells = [sum(edge.costs.size for edge in each.problem.edges) for each in (own, *built)]
    assert cells[0] < 0.5 * cells[1]
    assert found.placed == plain.placed
    assert found.notes == plain.notes
    assert all(found.region(each.name).options == each.options for each in program.regions)


@pytest.mark.moderate
def test_a_sequence_that_splits_is_had_though_others_were_refused(program: Program) -> None:
    """Breaks if one refusal refuses all."""
    strategy = {"dp": "ddp", "tp": "allgather_kv"}
    found = put(program, strategy, Learnt(refused=[("",)]))
    assert found.placed == put(program, strategy, None).placed


@pytest.mark.moderate
def test_other_prices_are_searched_from_what_was_chosen(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a search that takes all its time begins anew for other prices, if it begins from what another problem
    chose, or if one that closed the gap is ended early by what it is given.
    """
    starts: list[Any] = []
    real, gap = placing.solve, 0.0

    def solve(*given: Any, **more: Any) -> Any:
        starts.append(more["warm_starts"])
        return replace(real(*given, **more), gap=gap)

    monkeypatch.setattr(placing, "solve", solve)
    learnt = Learnt()
    put(program, "auto", learnt)
    put(program, "auto", learnt, overlap_price=0.05)
    assert starts == [(), ()]
    gap = 0.5
    put(program, "auto", learnt)
    again = put(program, "auto", learnt, overlap_price=0.05).result
    assert len(starts[-1]) == 1
    starts.clear()
    put(program, "zero3", learnt)
    alone = put(program, "auto", None, overlap_price=0.05).result
    assert not any(starts)
    assert again is not None
    assert alone is not None
    assert again.num_nodes == alone.num_nodes
    assert again.cost_s <= alone.cost_s * (1 + 8e-3)
