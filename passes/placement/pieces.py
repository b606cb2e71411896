"""Caches in pieces along their length (passes/split_keys.py): which operators and values an axis splits for it."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

from torch import fx

from autopar.base.errors import AutoparError
from autopar.ir.classes import Classes, Key, placeholder_keys, result_keys
from autopar.ir.graphs import caches_of, operands_of
from autopar.ir.op_call import name_of
from autopar.ir.program import Program
from autopar.ir.region import Region
from autopar.machine.mesh import Mesh
from autopar.strategies.axis import AxisStrategy

_KEYS = 2
"""The dim of keys and values [batch, heads, length, dim] that is in pieces."""


def factor_of_pieces(node: fx.Node) -> str | None:
    """The factor of an operator's rule that is split where a cache is in pieces; None for operators that know none."""
    name = name_of(node.target)
    if name.startswith("autopar.attention_pieces"):
        return "p"
    if caches_of(node):
        return "t" if node.kwargs.get("start") is not None else None
    return f"d{node.args[1]}" if name.startswith("autopar.write_piece") else None


def is_of_pieces(node: fx.Node) -> bool:
    """Whether a node gives what is merged over the ranks that have the pieces."""
    return name_of(node.target).startswith(("autopar.attention_pieces", "autopar.pieces_"))


def lengths_in_pieces(program: Program, classes: Classes) -> dict[Key, int]:
    """The classes of values that are in pieces, and along which dim."""
    found: dict[Key, int] = {}
    for region in program.regions:
        dims = dict(_in_pieces(region))
        if not dims:
            continue
        holders = [node for node in region.graph.nodes if node.op == "placeholder"]
        output = next(node for node in region.graph.nodes if node.op == "output")
        for node, key in (*zip(holders, placeholder_keys(region)), *zip(output.args[0], result_keys(region))):
            if node in dims and key in classes.of:
                found[classes.of[key]] = dims[node]
    return found


def _in_pieces(region: Region) -> Iterator[tuple[fx.Node, int]]:
    for node in region.graph.nodes:
        if factor_of_pieces(node) == "p":
            scales = [node.kwargs[name] for name in ("key_scales", "value_scales") if node.kwargs.get(name) is not None]
            yield from ((each, _KEYS) for each in (*operands_of(node)[1:3], *scales))
        elif caches_of(node) and factor_of_pieces(node) is not None:
            own = caches_of(node)
            behind = [user for user in node.users if user.target is operator.getitem]
            yield from ((each, _KEYS) for each in (*own, *behind))
        elif factor_of_pieces(node) is not None:
            dim = node.args[1]
            assert isinstance(dim, int)
            yield from ((node, dim), (operands_of(node)[0], dim))


def require_pieces(program: Program, strategies: Sequence[AxisStrategy], mesh: Mesh) -> None:
    """Whether a strategy that splits the length of caches finds any.

    Raises:
        AutoparError: a program without a cache, or whose caches are not read by attention that was recognized.
    """
    named = zip(mesh.axes, strategies, strict=True)
    asked = [(axis, size, each.name) for (axis, size), each in named if each.attention == "keys" and size > 1]
    nodes = (node for region in program.regions for node in region.graph.nodes)
    if not asked or any(factor_of_pieces(node) == "p" for node in nodes):
        return
    axis, size, name = asked[0]
    if program.training or not program.states:
        raise AutoparError(
            f"{name} on {axis} splits the cache of generate(), and this program has none",
            values=f"planned for {'training' if program.training else 'inference without a cache'}",
            remedy=f'use {{"{axis}": "ring"}}, ulysses or allgather_kv, which split the sequence of a batch',
        )
    missed = [*dict.fromkeys(f"{site.place}: {site.why}" for site in program.attention if not site.fused)]
    raise AutoparError(
        f"{name} on {axis}={size} finds no keys and values to split",
        values="; ".join(missed[:3]) or f"no attention that was recognized reads a cache whose length {size} divides",
        remedy=f"use another strategy for {axis}, such as tensor or ddp, which split what its layers keep otherwise",
    )
