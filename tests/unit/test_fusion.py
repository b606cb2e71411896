"""Which operators become one kernel, and what it moves: by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar.cost import fusion
from autopar.cost.operator_time import operator_seconds, region_seconds
from autopar.ir.program import Program
from autopar.ir.region import Region
from autopar.machine import profiles
from autopar.machine.mesh import Mesh

pytestmark = pytest.mark.unit


class Chain(nn.Module):
    """A product, three elementwise operators, a product, and one that reads what stands before the product."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64, bias=False)
        self.second = nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        z = torch.exp(y * y) + y
        return (self.second(z) + z).sum()


def planned(compiled: bool) -> Program:
    profile = replace(profiles.load("h100"), compiled=compiled, launch_overhead_s=1e-9)
    mesh = Mesh({"dp": 2}, hardware=profile)
    plan = autopar.plan(Chain(), mesh, example_inputs={"x": torch.zeros(128, 64)}, strategy="ddp")
    assert plan.program is not None
    return plan.program


def only(program: Program) -> Region:
    (region,) = program.regions
    return region


def test_a_chain_is_one_kernel_and_stops_at_products() -> None:
    """Breaks if operators on both sides of a product are put into one kernel, which could not be run."""
    region = only(planned(True))
    groups = fusion.groups(region)
    forward = [group for group in groups if set(group) <= region.forward_nodes]
    names = [{region.ops[name][0].name.split(".")[1] for name in group} for group in forward]
    assert names == [{"mul", "exp", "add"}, {"add", "sum"}]
    assert not any(set(group) & region.forward_nodes for group in groups if group not in forward)


def test_a_kernel_reads_and_writes_once() -> None:
    """64 rows of 64 floats: y read once, z written, and the exponential, which the backward reads; not the square."""
    program = planned(True)
    region, mesh = only(program), program.mesh
    first = fusion.groups(region)[0]
    work = fusion.group_work(region, first, {name: _work(region, name, mesh) for name in first}, mesh.sizes)
    assert work.moved_bytes == 3 * 64 * 64 * 4
    seconds = region_seconds(region, mesh)
    assert sum(seconds[name] for name in first) == pytest.approx(1e-9 + 3 * 64 * 64 * 4 / (3.35e12 * 0.9))


@pytest.mark.moderate
def test_nothing_is_fused_where_nothing_is_compiled() -> None:
    program = planned(False)
    region, mesh = only(program), program.mesh
    assert mesh is not None
    alone = {name: operator_seconds(*region.ops[name], each, mesh) for name, each in region.strategies.items()}
    assert region_seconds(region, mesh) == alone
    compiled = planned(True)
    assert compiled.mesh is not None
    assert sum(region_seconds(only(compiled), compiled.mesh).values()) < sum(alone.values())


def test_seconds_are_of_the_mesh_that_is_asked() -> None:
    """Breaks if what several ask of one placement is kept for another device, or changes for who asks twice."""
    program = planned(False)
    region, mesh = only(program), program.on_mesh
    other = Mesh(dict(mesh.axes), hardware="cpu")

    def alone(on: Mesh) -> dict[str, float]:
        return {name: operator_seconds(*region.ops[name], each, on) for name, each in region.strategies.items()}

    region_seconds(region, mesh).clear()
    for on in (mesh, other, mesh):
        assert region_seconds(region, on) == alone(on)
    assert alone(mesh) != alone(other)


def _work(region: Region, name: str, mesh: Mesh) -> fusion.Work:
    from autopar.cost.local_work import local_work

    call, rule = region.ops[name]
    return local_work(call, rule, region.strategies[name], mesh.sizes)(rule.flops / mesh.sizes[0])
