"""Stripe counts that an operator knows reach those far before it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from autopar import pipeline
from autopar.cost.operator_time import exposed_seconds, operator_seconds
from autopar.ir.choices import each_sharding, shardings
from autopar.machine.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.strategies.names import resolve
from autopar.strategies.request import Request

MESH = Mesh({"tp": 2}, hardware="cpu")


class Thirds(nn.Module):
    """A product whose result is cut in three, many operators later."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        for _ in range(4):
            hidden = hidden.sin() + 1
        q, k, v = hidden.chunk(3, -1)
        return (q * k + v).flatten().sin().sum()


@pytest.mark.moderate
def test_stripes_go_back_to_the_weight() -> None:
    """Breaks if what is told of one operator is not told of the one before it (a backward would pass it on)."""
    request = Request(Thirds(), {"x": torch.randn(4, 8)}, MESH, resolve("auto", MESH), training=False)
    program, _ = pipeline.run(request, (*pipeline.TRACE, *pipeline.RECOMPUTE))
    (region,) = annotate(program, mesh=MESH).regions
    holders = [node.name for node in region.graph.nodes if node.op == "placeholder"]
    slots = {slot.name: name for slot, name in zip(region.slots, holders, strict=False)}
    assert 3 in region.hints[slots["up.weight"]]["0"]
    assert 3 in region.hints[slots["up.bias"]]["0"]


@pytest.mark.moderate
@pytest.mark.parametrize("size", [2, 4])
def test_what_is_worked_out_for_all_is_so_for_each(size: int) -> None:
    """Breaks if what an axis makes of an operator is taken from a choice that leaves other sizes, or seconds from one
    that splits another factor, or on axes of other sizes.
    """
    mesh = Mesh({"dp": size, "tp": 2}, hardware="cpu")
    request = Request(Thirds(), {"x": torch.randn(4, 8)}, mesh, resolve("auto", mesh))
    program, _ = pipeline.run(request, (*pipeline.TRACE, *pipeline.RECOMPUTE))
    striped = 0
    for region in annotate(program, mesh=mesh).regions:
        for name, (call, rule) in region.ops.items():
            options = region.options[name]
            offered = [list(dict.fromkeys(each.choices[axis] for each in options.strategies)) for axis in range(2)]
            alone = ((each, shardings(rule, each, mesh.sizes)) for each in itertools.product(*offered))
            assert list(each_sharding(rule, offered, mesh.sizes)) == [pair for pair in alone if pair[1] is not None]
            for each, seconds in zip(options.strategies, options.seconds, strict=True):
                assert seconds == operator_seconds(call, rule, each, mesh) + exposed_seconds(call, rule, each, mesh)
                striped += any(choice.outer > 1 for choice in each.choices)
    assert striped
