"""rematerialize: what the backward of a repeated block computes again instead of keeping it from the forward.

Requires: phase `differentiated`.
Ensures: the same phase and numbers; in every repeated region, values that the mode names are made again in the backward
    from what is still kept; fewer bytes cross from forward to backward, more operators run.

    mode `full`: nothing but the block's inputs crosses, and statistics that collectives made (Chen et al., 1604.06174).
    mode `selective`: products and attention are kept, everything else is made again (Korthikanti et al., 2205.05198).
    mode `none`: as differentiated.

    h = linear(x, w); y = relu(h) | g = threshold_backward(dy, y)
    →  … | h' = linear(x, w); y' = relu(h'); g = …(dy, y')

It stands before `annotate`, so that `place` weighs memory and time of what is really computed; which mode a plan takes
is decided by trying them, cheapest first, until the memory limit holds (`autopar.api.plan`).
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from autopar.ir.graphs import Recompute, is_view
from autopar.ir.nodes import copy_graph, drop_dead
from autopar.ir.program import Mode, Program
from autopar.ir.region import Region

_KEPT = (
    "autopar.linear", "autopar.attention", "autopar.matmul", "autopar.experts", "aten.mm", "aten.bmm",
    "aten.convolution", "aten.addmm",
)  # fmt: skip

_STATISTICS = ("autopar.channel_sum", "autopar.centred_squares")
"""Kept in every mode: a number per channel, which only collectives could make again."""


def rematerialize(program: Program, *, mode: Mode = "none") -> Program:
    """Recompute in the backward of every repeated region as `mode` says."""
    if mode == "none" or not program.training:
        return program
    regions = {region.name: _recompute(region, mode) for region in program.regions if region.module}
    return program.with_regions(regions)


def _recompute(region: Region, mode: Mode) -> Region:
    graph, _ = copy_graph(region.graph)
    names = region.forward_nodes
    forward = {node for node in graph.nodes if node.name in names}
    origins = dict(region.origins)

    def is_free(node: fx.Node) -> bool:
        if str(node.target).startswith(_STATISTICS):
            return False
        return mode == "full" or is_view(node) or not str(node.target).startswith(_KEPT)

    again = Recompute(graph, forward, is_free)
    for node in list(graph.nodes):
        if node.op != "call_function" or node in forward:
            continue
        again.rewire(node)
    for original, copy in again.copies.items():
        origins[copy.name] = origins.get(original.name, "")
    drop_dead(graph)
    graph.lint()
    kept = frozenset(node.name for node in graph.nodes if node in forward)
    return replace(region, graph=graph, forward_nodes=kept, origins=origins)
