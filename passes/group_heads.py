"""group_heads: keys and values that a model repeats for each of their query heads are taken as they are.

Requires: a captured graph (called by `differentiate` on each region).
Ensures: the same numbers; attention reads the key heads themselves, so that the repeated ones are neither made nor kept
    for the backward; another reader of repeated heads reads `autopar.repeat_heads`, one operator that an axis may split
    where it divides the query heads but not the key heads.

    k = reshape(expand(unsqueeze(x, 2), [B, G, R, T, D]), [B, G·R, T, D]); y = attention(q, k, v)
    →  y = attention(q, x, v', enable_gqa=True)
"""

from __future__ import annotations

import torch
from torch import fx

from autopar import operators  # noqa: F401 (defines torch.ops.autopar)
from autopar.ir.nodes import copy_graph, drop_dead, operand_of, shape_of, type_of

aten = torch.ops.aten

_RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
_COPIES = (aten.clone.default, aten.contiguous.default, aten.alias.default, aten.slice.Tensor)


def group_heads(graph: fx.Graph) -> fx.Graph:
    """A copy of the graph without repeated key heads; the graph itself where it repeats none."""
    if not any(repeated(node) for node in graph.nodes):
        return graph
    graph, _ = copy_graph(graph)
    sources: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if (found := repeated(node)) is None:
            continue
        source, group = found
        sources[node] = source
        node.target = torch.ops.autopar.repeat_heads.default
        node.args, node.kwargs = (source, group, node.meta["val"].shape[1]), {}
    for node in graph.nodes:
        if node.target is aten.scaled_dot_product_attention.default and len(node.args) > 2:
            _read_heads_themselves(node, sources)
    drop_dead(graph)
    return graph


def _read_heads_themselves(attention: fx.Node, sources: dict[fx.Node, fx.Node]) -> None:
    """Let attention read the sources of repeated keys and values, if it reads both so and as often."""
    query, key, value, *rest = attention.args
    if key not in sources or value not in sources or key.args[1] != value.args[1]:  # type: ignore[union-attr]
        return
    heads = [shape_of(node)[1] for node in (query, key)]
    if heads[0] == heads[1]:
        attention.args = (query, sources[key], sources[value], *rest)  # type: ignore[index]
        attention.kwargs = {**attention.kwargs, "enable_gqa": True}


def repeated(node: fx.Node) -> tuple[fx.Node, int] | None:
    """Where a value is [B, G, T, D] with each head repeated R > 1 times in a row: that tensor, and R."""
    if node.op != "call_function" or len(shape_of(node)) != 4:
        return None
    if node.target is aten.repeat_interleave.self_int:
        source, repeats, dim = (*node.args, *[None] * 3)[:3]
        dim = node.kwargs.get("dim", dim)
        whole = isinstance(source, fx.Node) and len(shape_of(source)) == 4
        return (source, repeats) if whole and dim in (1, -3) and isinstance(repeats, int) and repeats > 1 else None  # type: ignore[return-value]
    if node.target not in _RESHAPES:
        return None
    expanded = _source(node)
    if expanded is None or expanded.target is not aten.expand.default:
        return None
    before = _source(expanded)
    if before is None or before.target is not aten.unsqueeze.default or before.args[1] not in (2, -3):
        return None
    source = operand_of(before)
    batch, heads, group, *rest = shape_of(expanded)
    fits = shape_of(source) == (batch, heads, *rest) and shape_of(node) == (batch, heads * group, *rest)
    return (source, group) if fits and len(shape_of(expanded)) == 5 and group > 1 else None


def _source(node: fx.Node) -> fx.Node | None:
    """The first operand, beyond what leaves its values as they are."""
    source = node.args[0]
    while isinstance(source, fx.Node) and source.target in _COPIES:
        before = source.args[0]
        if not isinstance(before, fx.Node) or type_of(before) != type_of(source):
            break
        source = before
    return source if isinstance(source, fx.Node) else None
