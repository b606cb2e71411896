"""Products that need another form before they are differentiated: those of rows with rows, and fused ones."""

from __future__ import annotations

import torch
from torch import fx

from autopar.ir.nodes import map_nodes
from autopar.ir.program import Program
from autopar.ir.region import Region
from autopar.operators.rules import OpCall, op_call

aten = torch.ops.aten


def coupled_products(region: Region, batch: int | None) -> frozenset[fx.Node]:
    """Products of a batch's rows with its rows, as contrastive losses compare every text with every image.

    Each rank has its rows of both operands, and needs all rows of one of them.
    """
    if batch is None:
        return frozenset()
    carried = {node for node in region.graph.nodes if node.op == "placeholder"}
    carried -= {node for node, _ in zip(region.graph.nodes, region.slots, strict=False)}
    for node in region.graph.nodes:
        if node.op == "call_function" and any(source in carried for source in node.all_input_nodes):
            carried.add(node)
    products = (aten.matmul.default, aten.mm.default, aten.linear.default)
    return frozenset(
        node
        for node in region.graph.nodes
        if node.target in products
        and len(node.args) == 2
        and all(source in carried and source.meta["val"].dim() == 2 for source in node.args)
        and tuple(node.meta["val"].shape) == (batch, batch)
    )


def fused_linears(region: Region) -> dict[str, dict[str, tuple[tuple[int, int], ...]]]:
    """Linears of a parameter whose result is only cut along its last dim, into unequal pieces: linear -> the operators
    that cut -> (start, length) of their results.
    """
    slots = {node for node, _ in zip(region.graph.nodes, region.slots, strict=False)}
    found: dict[str, dict[str, tuple[tuple[int, int], ...]]] = {}
    for node in region.graph.nodes:
        if node.target is aten.linear.default and node.args[1] in slots:
            cuts = {user.name: _pieces_of(user) for user in node.users}
            lengths = {length for pieces in cuts.values() for _, length in pieces or ()}
            if all(cuts.values()) and len(lengths) > 1:
                found[node.name] = {name: pieces for name, pieces in cuts.items() if pieces}
    return found


def _pieces_of(node: fx.Node) -> tuple[tuple[int, int], ...] | None:
    """(start, length) of what a node cuts out of the last dim of its operand; None for another kind of node."""
    if node.target not in (aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default):
        return None
    call = _op_call_of(node)
    ndim, size = call.operands[0].ndim, call.operands[0].shape[-1]
    if call.arg("dim", 0) % ndim != ndim - 1 or call.arg("step", 1) != 1:
        return None
    lengths = [result.shape[-1] for result in call.results if result is not None]
    first = call.arg("start", 0) or 0
    start = max(0, first + size if first < 0 else first)
    return tuple((start + sum(lengths[:i]), length) for i, length in enumerate(lengths))


def _op_call_of(node: fx.Node) -> OpCall:
    """The call of a captured node."""
    args, kwargs = map_nodes((node.args, node.kwargs), lambda n: n.meta["val"])
    return op_call(node.target, args, kwargs, node.meta["val"])


def batch_size(program: Program) -> int | None:
    """The first dim that all inputs of the program share."""
    sizes = {port.type.shape[0] for port in program.inputs if port.type.shape}
    return sizes.pop() if len(sizes) == 1 else None
