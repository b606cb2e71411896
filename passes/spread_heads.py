"""spread_heads: what attention reads and gives, where it will be moved for attention's sake.

Requires: phase `differentiated`.
Ensures: the same phase and numbers. In repeated blocks, where `ranks` do not divide the key heads, keys and values are
    repeated to the least number of heads that they divide (and that divides the query heads), so that each rank is sent
    the heads it reads and no others: of G key heads on n ranks, lcm(G, n)/n of them, not G. Where the backward would
    read attention's operands, or with `ranks` its result, through views of its own, it reads the forward's: what was
    moved stands behind the view, and is not moved again.

    out = attention(q, k[B, 2, T, D], v)      →  k' = repeat_heads(k, 2, 4); out = attention(q, k'[B, 4, T, D], v')
    dw = linear_grad_weight(g, view(out))     →  the forward's own view(out)

It stands behind `rematerialize`: what is computed again is treated like the first time.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import fx

from autopar import operators  # noqa: F401 (defines torch.ops.autopar)
from autopar.ir.graphs import is_view
from autopar.ir.nodes import copy_graph, drop_dead, frozen, map_nodes, operand_of, shape_of
from autopar.ir.program import Program
from autopar.ir.region import Region


def spread_heads(program: Program, *, ranks: int, moves: bool) -> Program:
    """ranks: how many share the heads of attention. moves: whether what attention reads lies otherwise than what it is
    made of; where it does not, nothing is changed.
    """
    if not moves:
        return program
    return program.with_regions({r.name: _rewrite(r, ranks, program.training) for r in program.regions if r.module})


def _rewrite(region: Region, ranks: int, training: bool) -> Region:
    graph, _ = copy_graph(region.graph)
    copied = replace(region, graph=graph)
    if training:
        _keep_views(copied, results=ranks > 1)
    added = _repeat_keys(copied, ranks)
    graph.lint()
    origins = {**region.origins, **{node.name: region.origins.get(source, "") for node, source in added.items()}}
    forward = {node.name for node, source in added.items() if source in region.forward_nodes}
    kept = {node.name for node in graph.nodes if node.name in region.forward_nodes} | forward
    return replace(copied, forward_nodes=frozenset(kept), origins=origins)


# ------------------------------------------------------------------------------------------------------ key heads


def _repeat_keys(region: Region, ranks: int) -> dict[fx.Node, str]:
    """Repeat keys and values before attention, sum their gradients behind it. New nodes, and whom each serves."""
    added: dict[fx.Node, str] = {}
    repeated: dict[tuple[fx.Node, int], fx.Node] = {}
    for node in list(region.graph.nodes):
        if node.op != "call_function" or not _reads(node):
            continue
        first = 1 if node.target is torch.ops.autopar.attention.default else 2
        heads, own = (shape_of(node.args[i])[1] for i in (first - 1, first))
        wanted = math.lcm(own, ranks)
        if wanted == own or heads % wanted:
            continue
        for i in (first, first + 1):
            source = operand_of(node, i)
            key = (source, wanted // own)
            if key not in repeated:
                repeated[key] = _after(region, *key)
                added[repeated[key]] = source.name if source.name in region.forward_nodes else node.name
            node.update_arg(i, repeated[key])
        if "group" in node.kwargs:
            node.kwargs = {**node.kwargs, "group": heads // wanted}
        if first == 2:
            for sums in _sum_gradients(region.graph, node, own, wanted):
                added[sums] = node.name
    return added


def _after(region: Region, source: fx.Node, group: int) -> fx.Node:
    """The heads of `source`, each `group` times, made right behind it."""
    shape = source.meta["val"].shape
    holders = [node for node in region.graph.nodes if node.op == "placeholder"]
    with region.graph.inserting_after(source if source.op != "placeholder" else holders[-1]):
        made = region.graph.call_function(torch.ops.autopar.repeat_heads.default, (source, group, shape[1] * group), {})
    made.meta = {**source.meta, "val": _resized(source.meta["val"], shape[1] * group)}
    return made


def _sum_gradients(graph: fx.Graph, node: fx.Node, own: int, wanted: int) -> Iterator[fx.Node]:
    """Gradients to keys and values, of the heads that the model has."""
    gradients = list(node.meta["val"])
    for index in (1, 2):
        gradients[index] = _resized(gradients[index], wanted)
    node.meta = {**node.meta, "val": type(node.meta["val"])(gradients)}
    for pick in [user for user in node.users if user.target is operator.getitem and user.args[1] in (1, 2)]:
        with graph.inserting_after(pick):
            made = graph.call_function(torch.ops.autopar.repeat_heads_grad.default, (pick, own, wanted // own))
        made.meta = dict(pick.meta)
        pick.replace_all_uses_with(made, partial(operator.is_not, made))
        pick.meta = {**pick.meta, "val": _resized(pick.meta["val"], wanted)}
        yield made


def _resized(value: torch.Tensor, heads: int) -> torch.Tensor:
    batch, _, *rest = value.shape
    return torch.empty((batch, heads, *rest), dtype=value.dtype, device=value.device)


# ------------------------------------------------------------------------------------------------ what is kept


def _keep_views(region: Region, *, results: bool) -> None:
    """Let the backward read the forward's views of what attention reads, in place of its own. results: and gives."""
    known: dict[object, fx.Node] = {}
    twin: dict[fx.Node, fx.Node] = {}
    for node in list(region.graph.nodes):
        if node.op != "call_function" or not is_view(node):
            continue
        args = map_nodes(node.args, lambda n: twin.get(n, n))
        key: object = (node.target, frozen(args), frozen(node.kwargs))
        if node.name in region.forward_nodes:
            known.setdefault(key, node)
        twin[node] = known.get(key) or node
    for node, forward in twin.items():
        if node is forward or node.target is operator.getitem or forward.name not in region.forward_nodes:
            continue
        given = results and _of_attention(node)
        for user in list(node.users):
            if twin.get(user, user) is user and (given or _reads(user)):  # no view that the forward has, too
                user.replace_input_with(node, forward)
    drop_dead(region.graph)


def _reads(node: fx.Node) -> bool:
    return str(node.target).startswith("autopar.attention")


def _of_attention(node: fx.Node) -> bool:
    """Whether a view is one of attention's result."""
    while is_view(node):
        source = node.args[0]
        if not isinstance(source, fx.Node):
            return False
        node = source
    return node.target is torch.ops.autopar.attention.default
