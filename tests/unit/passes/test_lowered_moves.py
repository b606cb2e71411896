"""Steps from one sharding to another as lowering writes them: what is asked of a rank is what the runtime does."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autopar.ir.choices import Starts
from autopar.ir.sharding import PARTIAL, REPLICATE, Partial, Shard, Sharding, Step, is_valid, redistribution_steps
from autopar.passes.emission import parameters
from autopar.passes.lowering import PhaseBuilder
from autopar.runtime.layout import assemble, shard
from autopar.runtime.simulated_comm import SimulatedComm, SimulatedMesh

pytestmark = pytest.mark.unit
AXES, SIZES = ("a", "b"), (2, 2)
PLACEMENTS = (REPLICATE, PARTIAL, Partial("max"), Shard(0), Shard(1, 3), Shard(0, 2, True))


def builder() -> PhaseBuilder:
    layouts: Any = SimpleNamespace(axes=AXES, region=SimpleNamespace(origins={}))
    return PhaseBuilder(layouts, "forward", [])


@pytest.mark.parametrize("source", list(product(PLACEMENTS, repeat=2)), ids=str)
def test_lowered_steps_move_the_right_elements(source: Sharding) -> None:
    """Breaks if stripes, their order or the operator of a reduction get lost between a plan's steps and their calls."""
    if len({each.op for each in source if isinstance(each, Partial)}) > 1 or not is_valid((24, 36), source, SIZES):
        return
    terms = [torch.randint(-9, 9, (24, 36), generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    op = next((each.op for each in source if isinstance(each, Partial)), "")
    for target in product([each for each in PLACEMENTS if not isinstance(each, Partial)], repeat=2):
        if not is_valid((24, 36), target, SIZES):
            continue
        steps, phase = redistribution_steps(source, target, SIZES), builder()
        assert steps is not None
        x = phase.graph.placeholder("x")
        for number, step in enumerate(steps):
            x = phase._move(x, step, f"x{number}")
        phase.graph.output(x)
        module = fx.GraphModule(nn.Module(), phase.graph)

        def run(comm: SimulatedComm, module: nn.Module = module) -> Tensor:
            # Axes that have no terms hold alike.
            at = sum(
                comm.index(axis) * 2**place for place, axis in enumerate(AXES) if isinstance(source[place], Partial)
            )
            found: Tensor = module(comm, {}, shard(terms[at], source, comm))
            return found

        ranks = [at for at in range(4) if all(not at >> i & 1 or isinstance(source[i], Partial) for i in range(2))]
        stacked = torch.stack([terms[at] for at in ranks])
        whole = stacked.amax(0) if op == "max" else stacked.sum(0)
        assert torch.equal(assemble(SimulatedMesh(AXES, SIZES).run(run), target, SIZES), whole), target


def test_what_any_axis_splits_draws_by_its_place() -> None:
    """Breaks if shards over another axis than the first draw the same numbers."""
    for sharding in ((Shard(0), REPLICATE), (REPLICATE, Shard(1)), (PARTIAL, Shard(0))):
        assert builder()._positions((4, 6), sharding) is not None
    assert builder()._positions((4, 6), (REPLICATE, PARTIAL)) is None


def test_each_operand_is_told_its_own_place() -> None:
    """Breaks if queries and keys that lie differently are told one place."""
    phase = builder()
    one, other = Starts(16, ((0, 2, 1, False),)), Starts(16, ((0, 2, 2, True),))
    nodes = [phase._where(each) for each in (one, other, one)]
    assert nodes[0] is nodes[2] and nodes[0].args[1:] == (16, "a=S(0)")
    assert nodes[1].args[1:] == (16, "a=S(0, outer=2, zigzag)")


@pytest.mark.parametrize("reduced", [Step("reduce_scatter", 0, 0), Step("reduce_scatter", 0, 1)])
def test_a_table_serves_gathers_and_reductions_that_take_the_same(
    monkeypatch: pytest.MonkeyPatch, reduced: Step
) -> None:
    """Breaks if gradients are reduced along the dims of their gathers, though they take others."""

    def entries(step: Step) -> Any:
        found = [(f'"{name}"', f'x["{name}"]', [step], SimpleNamespace(name=name)) for name in ("w", "b")]
        return lambda *_: found

    class Told(Exception):
        """The table would be written."""

    def title(*_: Any) -> str:
        raise Told

    monkeypatch.setattr(parameters, "_gathered", entries(Step("all_gather", 0, 0)))
    monkeypatch.setattr(parameters, "_reduced", entries(reduced))
    names: Any = SimpleNamespace(layout=title)
    region: Any = SimpleNamespace(slots=[SimpleNamespace(name="w"), SimpleNamespace(name="b")])
    bucket: Any = SimpleNamespace(moves=[SimpleNamespace(slot=0), SimpleNamespace(slot=1)], chain=[("x", 0)])
    if reduced.dim:
        assert parameters._table(names, region, "TITLE", bucket, bucket) is None
        return
    with pytest.raises(Told):
        parameters._table(names, region, "TITLE", bucket, bucket)
