"""What an exchange may have beside it, before anything is placed: what of its time other operators can hide.

Where statements come is decided once a program is lowered (passes/interleave.py), and only then what is hidden is known
(under_way.py). A placement that counted exchanges as if they always waited would choose them too rarely. So their
seconds are taken for what they are beside all that neither makes what they read nor reads what they make, in the same
phase of the region, as far as it takes when every axis splits it as suits it best: it may be all hidden, and where an
axis splits less of it, or it is hidden by one of two exchanges, the plan that comes of it is walked all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from autopar.cost.exchanges import exchange_axis
from autopar.cost.fusion import fuses
from autopar.cost.operator_time import ways_of
from autopar.ir.graphs import ancestors, users_of
from autopar.ir.program import Program
from autopar.ir.region import NodeStrategy, Options, Region
from autopar.machine.mesh import Mesh


def with_work_beside(program: Program) -> Program:
    """An annotated program whose operators that exchange take so much less of the time that something may run beside
    them; itself where there is nothing of both.
    """
    regions = {}
    for region in program.regions:
        options = _with_work_beside(region, program.on_mesh)
        if options is not region.options:
            regions[region.name] = region.with_options(options)
    return program.with_regions(regions) if regions else program


def _with_work_beside(region: Region, mesh: Mesh) -> Mapping[str, Options]:
    found = region.options
    for node in region.graph.nodes:
        own = region.options.get(node.name)
        if own is None or not any(map(_exchanges, own.strategies)):
            continue
        beside_s = _seconds_beside(region, node, mesh)
        if beside_s > 0.0:
            hidden = [_hidden_s(region, node.name, each, mesh, beside_s) for each in own.strategies]
            less = tuple(seconds - each for seconds, each in zip(own.seconds, hidden, strict=True))
            found = {**found, node.name: replace(own, seconds=less)}
    return found


def _exchanges(strategy: NodeStrategy) -> bool:
    return exchange_axis(strategy.choices) is not None


def _hidden_s(region: Region, name: str, strategy: NodeStrategy, mesh: Mesh, beside_s: float) -> float:
    """Seconds of an exchange that are saved, less what the others take longer beside it. Numbers of rows are waited
    for.
    """
    if not _exchanges(strategy):
        return 0.0
    ways, hardware = ways_of(*region.ops[name], strategy, mesh), mesh.hardware
    gained = (1.0 - hardware.overlap_slowdown) * (1.0 - hardware.collective_busy)
    return gained * min(beside_s, ways.there_s + ways.back_s)


def _seconds_beside(region: Region, exchange: fx.Node, mesh: Mesh) -> float:
    """Of the operators of the same phase that are independent of an exchange; but for those that a compiler fuses."""
    options = region.options
    forward = exchange.name in region.forward_nodes
    tied = ancestors([exchange]) | users_of([exchange])
    return sum(
        min(options[node.name].seconds, default=0.0)
        for node in region.graph.nodes
        if node.name in options and node not in tied and not region.ops[node.name][1].alias
        and (node.name in region.forward_nodes) == forward
        and not (mesh.hardware.compiled and fuses(*region.ops[node.name]))
        and not any(_exchanges(each) for each in options[node.name].strategies)
    )  # fmt: skip
