"""What an axis can do by itself: nothing is refused that could be had, and what is refused is not prepared for."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import pipeline
from autopar.base.errors import DoesNotFit
from autopar.ir.placement import Learnt
from autopar.ir.sharding import PARTIAL, REPLICATE, Partial, Shard, redistribution_steps
from autopar.machine.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.place import place
from autopar.passes.placement import least as bounds
from autopar.passes.placement import one_axis
from autopar.passes.placement.least import FREE, Least
from autopar.passes.placement.one_axis import cannot_split, may_become
from autopar.planner import programs as prepared
from autopar.planner.programs import Programs
from autopar.strategies.names import resolve
from autopar.strategies.request import Attempt, Request
from tests.unit.passes.test_learnt import Convolutions

MESH = Mesh({"dp": 2, "tp": 2}, hardware="cpu")
BATCH = {"x": torch.randn(4, 8, 16)}


class Block(nn.Module):
    """Attention, and a product; or sums along the sequence."""

    def __init__(self, sums: bool) -> None:
        super().__init__()
        self.sums, self.up, self.norm = sums, nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(2, (4, 4)).transpose(1, 2)
        x = x + F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
        return self.norm(self.up(x).cumsum(1) if self.sums else self.up(x))


class Blocks(nn.Module):
    def __init__(self, within: str = "") -> None:
        super().__init__()
        self.convolutions = nn.ModuleList([Convolutions() for _ in range(2 * (within == "pixels"))])
        self.layers = nn.ModuleList([Block(within == "sums") for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for each in self.convolutions:
            x = each(x.transpose(1, 2).unflatten(2, (2, 4))).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.moderate
@pytest.mark.parametrize("within", ["", "sums", "pixels"])
def test_what_is_refused_cannot_be_had(within: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if strategies are refused that have a placement, or that are let off what is in their way; or if it is not
    seen of convolutions in a block that no part of the sequence serves them, or told where attention has a part in it.
    """
    request = Request(Blocks(within), BATCH, MESH, resolve("auto", MESH))
    program, _ = pipeline.run(request, (*pipeline.TRACE, *pipeline.RECOMPUTE))
    program, learnt = annotate(program, mesh=MESH), Learnt()
    place(program, strategies=resolve("auto", MESH), learnt=learnt)
    least = Least(program, learnt.facts[FREE], learnt.facts)
    for data, split in (("ddp", "allgather_kv"), ("zero3", "ulysses")):
        strategies = resolve({"dp": data, "tp": split}, MESH)
        outside = False
        try:
            place(program, strategies=strategies, explain=False, reasons=False, learnt=Learnt())
        except DoesNotFit as error:
            outside = error.outside_attention
        assert cannot_split(least, strategies) == outside == (within == "pixels")
    assert not cannot_split(least, resolve("ddp", MESH))
    # What attention has a part in is not told by a program that is prepared for no strategy.
    monkeypatch.setattr(one_axis, "values_of_attention", lambda region: frozenset(region.ops))
    assert not cannot_split(least, strategies)


def test_each_step_of_a_move_counts_for_its_axis_alone() -> None:
    """Breaks if an axis is denied what the moves of two axes together take it through; or if it may do anything."""
    placements = (REPLICATE, Shard(0), Shard(1), PARTIAL, Partial("max"))
    codes = {each: one_axis._without_stripes(each) for each in placements}
    assert codes[Shard(1)] == one_axis._without_stripes(Shard(1, 4, zigzag=True)) != codes[Shard(0)]
    layouts = list(itertools.product(placements, repeat=2))
    for source, target in itertools.product(layouts, repeat=2):
        steps = redistribution_steps(source, target, (2, 2))
        for axis in range(2) if steps is not None else ():
            kinds = frozenset(step.kind for step in steps or () if step.axis == axis)
            assert may_become(np.array(codes[source[axis]]), np.array(codes[target[axis]]), kinds)
    terms, whole, pieces, others = (np.array(codes[each]) for each in (PARTIAL, REPLICATE, Shard(0), Shard(1)))
    assert not may_become(whole, terms, {"all_gather", "all_reduce", "slice", "reduce_scatter", "all_to_all"})
    for have, want, kinds in (
        (pieces, others, {"slice", "all_reduce"}), (pieces, whole, {"all_to_all"}), (whole, pieces, {"all_gather"}),
        (terms, pieces, {"all_reduce"}), (terms, whole, {"reduce_scatter", "slice"}),
    ):  # fmt: skip
        assert not may_become(have, want, kinds)


@pytest.mark.moderate
def test_nothing_is_prepared_for_what_cannot_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a program is annotated anew to tell that strategies cannot be had, or if that is taken for told where
    programs may be dealt zigzag, which differ in more.
    """
    asked = Attempt(Blocks("pixels"), BATCH, MESH, resolve("auto", MESH))
    programs, strategies = Programs.of(asked, pipeline.DEFAULT), resolve({"dp": "ddp", "tp": "allgather_kv"}, MESH)
    programs.placed(asked)
    assert not programs.cannot_split("none", strategies), "so small a problem takes no longer to place"
    monkeypatch.setattr(bounds, "is_long", lambda number: True)
    assert programs.cannot_split("none", strategies)
    assert programs._refused and [*programs._annotated] == [("none", None)]
    monkeypatch.setattr(prepared, "zigzag_axes", lambda *given: frozenset({"tp"}))
    assert not programs.cannot_split("none", strategies)
