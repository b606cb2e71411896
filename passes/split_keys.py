"""split_keys: caches in pieces along their length, and attention to each piece.

Requires: phase `differentiated`, of a program without a backward.
Ensures: the same phase and numbers. Attention whose keys and values are states (caches) of a length that `pieces`
    divides is attention to each of so many pieces and what merges them (autopar/operators/pieces.py), and what is
    written into these states is written piece by piece. So an axis may split the length, as any other dim.

    k' = index_copy(k, 2, at, new)       →  k' = write_piece(k, 2, at, new)
    out, lse = attention(q, k', v', …)   →  packed = attention_pieces(q, k', v', …, count=n)
                                            top = pieces_top(packed); total = pieces_total(packed, top)
                                            out = pieces_merged(total, top, sinks)
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar import operators  # noqa: F401 (defines torch.ops.autopar)
from autopar.ir.classes import Classes, placeholder_keys, result_keys, value_classes
from autopar.ir.graphs import is_attention
from autopar.ir.nodes import NAME, argument, copy_graph, drop_dead, dtype_of, shape_of
from autopar.ir.program import Program
from autopar.ir.region import Region
from autopar.operators.basic import wide_dtype

_aten, _own = torch.ops.aten, torch.ops.autopar
_LENGTH = 2
"""The dim of keys and values [batch, heads, length, dim] that is split."""


def split_keys(program: Program, *, pieces: int) -> Program:
    """pieces: how many ranks share the length of a cache; 1: nothing is changed."""
    named = frozenset[str]() if pieces == 1 or program.training else program.states
    if not named:
        return program
    classes = value_classes(program)
    states = {root for root, keys in classes.members.items() if any(_is_state(key, named) for key in keys)}
    return program.with_regions({r.name: _rewrite(r, classes, states, pieces) for r in program.regions})


def _is_state(key: tuple[str, str, int], states: Collection[str]) -> bool:
    return key[0] == "program" and key[1] in states


def _rewrite(region: Region, classes: Classes, states: Collection[object], pieces: int) -> Region:
    graph, _ = copy_graph(region.graph)
    kept = set(_values_of(replace(region, graph=graph), classes, states))
    added: dict[fx.Node, str] = {}
    for node in list(graph.nodes):
        if node.target is not _own.attention.default or not _may_be_split(node, pieces):
            continue
        keys = [_whole(node, argument(node, place, name)) for place, name in ((1, "k"), (2, "v"))]
        writes = [_writes(each, kept) for each in keys]
        if None in writes:
            continue
        for write in {each for own in writes for each in own or ()}:
            write.target = _own.write_piece.default
            write.args = (write.args[0], write.args[1] % len(shape_of(write)), *write.args[2:])  # type: ignore[operator]
        for made in _split(graph, node, keys, pieces):
            added[made] = node.name
    if not added:
        return region
    drop_dead(graph)
    graph.lint()
    origins = {**region.origins, **{node.name: region.origins.get(source, "") for node, source in added.items()}}
    left = {node.name for node in graph.nodes if node.name in region.forward_nodes or node in added}
    return replace(region, graph=graph, origins=origins, forward_nodes=frozenset(left))


def _values_of(region: Region, classes: Classes, states: Collection[object]) -> Iterator[fx.Node]:
    """The values of a region that are states, as they come in or go out."""
    holders = [node for node in region.graph.nodes if node.op == "placeholder"]
    output = next(node for node in region.graph.nodes if node.op == "output")
    for node, key in (*zip(holders, placeholder_keys(region)), *zip(output.args[0], result_keys(region))):
        if classes.of.get(key) in states:
            yield node


def _may_be_split(node: fx.Node, pieces: int) -> bool:
    """Whether as many pieces divide the keys, nothing is dropped, and nobody reads the log-sum-exp."""
    length = shape_of(_whole(node, argument(node, 1, "k")))[_LENGTH]
    picked = all(user.target is operator.getitem and (user.args[1] == 0 or not user.users) for user in node.users)
    return length % pieces == 0 and not node.kwargs.get("dropout_p") and picked


def _whole(node: fx.Node, keys: fx.Node) -> fx.Node:
    """What a prompt's keys (or values) are the first of, where attention hides the others by itself: those of the cache
    that are behind the last query. Else they themselves.
    """
    others = [node.kwargs.get(name) for name in ("prefix", "query_starts", "key_starts", "key_documents")]
    others += [argument(node, place, name) for place, name in ((3, "bias"), (4, "keys"))]
    right, length, queries = node.kwargs.get("right"), shape_of(keys)[_LENGTH], shape_of(argument(node, 0, "q"))[2]
    hides = isinstance(right, int) and queries + right <= length and not any(others)
    if keys.target is not _aten.slice.Tensor or not hides:
        return keys
    dim, start, step = argument(keys, 1, "dim", 0), argument(keys, 2, "start"), argument(keys, 4, "step", 1)
    source = keys.args[0]
    assert isinstance(source, fx.Node)
    return source if dim % len(shape_of(source)) == _LENGTH and not start and step == 1 else keys


def _writes(keys: fx.Node, kept: Collection[fx.Node]) -> set[fx.Node] | None:
    """What writes into the states of which keys (or values) are made, position by position (also by products: of what
    multi-head latent attention keeps); None where they are made of none.
    """
    length, found, is_kept = shape_of(keys)[_LENGTH], set[fx.Node](), False
    seen, stack = {keys}, [keys]
    while stack:
        node = stack.pop()
        if node.target is _aten.index_copy.default and shape_of(node)[node.args[1]] == length:  # type: ignore[index]
            found.add(node)
        elif node in kept:
            is_kept |= shape_of(node)[_LENGTH : _LENGTH + 1] == (length,)
        elif node.op == "call_function" and not is_attention(node):
            fresh = [each for each in node.all_input_nodes if each not in seen and _has_positions(each, length)]
            seen.update(fresh)
            stack += fresh
    return found if found or is_kept else None


def _has_positions(node: fx.Node, length: int) -> bool:
    """Whether a value has a dim of as many positions, alone or joined with others; several values at once may."""
    several = not isinstance(node.meta.get("val"), torch.Tensor)
    return several or any(size and size % length == 0 for size in shape_of(node))


def _split(graph: fx.Graph, node: fx.Node, keys: Sequence[fx.Node], pieces: int) -> Iterator[fx.Node]:
    """Attention piece by piece in the place of attention; the new nodes. keys: and values."""
    q, v, sinks = argument(node, 0, "q"), keys[1], argument(node, 5, "sinks")
    meta = {name: value for name, value in node.meta.items() if name != NAME}
    wide, *sizes = wide_dtype(dtype_of(q)), *shape_of(q)[:3], shape_of(v)[3]

    def make(name: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: torch.Tensor) -> fx.Node:
        made = graph.create_node("call_function", target, args, kwargs, name=f"{node.name}_{name}")
        made.meta = {**meta, "val": value}
        return made

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=wide, device=node.meta["val"][0].device)

    tensors = [q, *keys, argument(node, 3, "bias"), argument(node, 4, "keys")]
    while tensors[-1] is None:
        tensors.pop()
    options = {name: value for name, value in node.kwargs.items() if name not in ("bias", "keys", "sinks", "seed")}
    batch, heads, queries, size = sizes
    with graph.inserting_before(node):
        packed = make(
            "pieces", _own.attention_pieces.default, tuple(tensors), {**options, "count": pieces},
            empty(pieces, batch, heads, queries, size + 1),
        )  # fmt: skip
        top = make("top", _own.pieces_top.default, (packed,), {}, empty(batch, heads, queries))
        total = make("total", _own.pieces_total.default, (packed, top), {}, empty(batch, heads, queries, size + 1))
        merging = (total, top) if sinks is None else (total, top, sinks)
        made = [
            packed,
            top,
            total,
            make("merged", _own.pieces_merged.default, merging, {}, node.meta["val"][0].to(wide)),
        ]
        if wide != dtype_of(q):
            cast = {"dtype": dtype_of(q)}
            made.append(make("cast", _aten._to_copy.default, (made[-1],), cast, node.meta["val"][0]))
    for pick in list(node.users):
        if pick.args[1] == 0:
            made[-1].meta = {**made[-1].meta, **({NAME: pick.meta[NAME]} if NAME in pick.meta else {})}
            pick.replace_all_uses_with(made[-1])
        graph.erase_node(pick)
    graph.erase_node(node)
    yield from made
