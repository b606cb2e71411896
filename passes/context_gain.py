"""What splitting the sequence is worth at best, before anything is placed: which ways deserve to be tried."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autopar.estimate import operator_seconds
from autopar.ir import NodeStrategy, Program, Region
from autopar.mesh import Mesh
from autopar.passes.annotate import op_call
from autopar.passes.placement.context import is_attention
from autopar.rules.attention_cost import share_of_slowest
from autopar.rules.registry import OpCall, rule_for
from autopar.rules.strategies import NONE, Choice
from autopar.sharding import replicated

LEAST = 0.01
"""The part of a step's computing that equal work has to save before stripes are dealt zigzag."""


def zigzag_axes(program: Program, mesh: Mesh, axes: Sequence[str]) -> frozenset[str]:
    """Those of `axes` on which zigzag could save enough to be offered to the solver. The program is differentiated."""
    if not axes or not any(_is_one_sided(node) for region in program.regions for node in region.graph.nodes):
        return frozenset()
    computing = _seconds(program, mesh)
    return frozenset(axis for axis in axes if _saved(program, mesh, mesh.size(axis)) > LEAST * computing)


def _is_one_sided(node: fx.Node) -> bool:
    """Whether attention lets queries see fewer keys on one side than on the other."""
    return is_attention(node) and node.kwargs.get("left") != node.kwargs.get("right")


def _saved(program: Program, mesh: Mesh, size: int) -> float:
    """Seconds that all ranks together would compute less, if none had more to do than others, times the ranks."""
    saved = 0.0
    for region in program.regions:
        for node in region.graph.nodes:
            if region.module and _is_one_sided(node):
                call = op_call(node)
                rule = rule_for(call)
                if rule.sizes["s"] % (2 * size) == 0:
                    shares = [share_of_slowest(call, rule, [choice], [size]) for choice in _CHOICES]
                    unsplit = _unsplit_seconds(call, mesh)
                    saved += max(0.0, shares[0] - shares[1]) * size * unsplit * program.num_calls(region.name)
    return saved


_CHOICES = (Choice("factor", "s"), Choice("factor", "s", 2, zigzag=True))


def _seconds(program: Program, mesh: Mesh) -> float:
    """What one rank would compute alone."""
    return sum(_region_seconds(region, mesh) * program.num_calls(region.name) for region in program.regions)


def _region_seconds(region: Region, mesh: Mesh) -> float:
    nodes = [node for node in region.graph.nodes if node.op == "call_function" and "getitem" not in str(node.target)]
    return sum(_unsplit_seconds(op_call(node), mesh) for node in nodes)


def _unsplit_seconds(call: OpCall, mesh: Mesh) -> float:
    rule = rule_for(call)
    whole = replicated(len(mesh.sizes))
    results = tuple(None if result is None else whole for result in call.results)
    alone = NodeStrategy((NONE,) * len(mesh.sizes), (whole,) * len(call.operands), results)
    return operator_seconds(call, rule, alone, mesh)
