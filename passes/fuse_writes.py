"""fuse_writes: what a token does to a cache before its attention becomes one operator.

Requires: phase `differentiated`.
Ensures: the same phase and numbers. On `cuda`, where its kernel runs (`Hardware.fused_kernels`), queries and keys that
    are rotated by the same tables, the whole of a head or its first part, of at most `FEW_QUERIES` tokens, keys that go
    nowhere but into a cache, and values written at the same positions, are `autopar.rotary_write`; of caches of codes
    with what encodes both.

    q' = rotary(q, cos, sin); k' = rotary(k, cos, sin)     →  q', keys', values' = rotary_write(
    keys' = index_copy(keys, 2, at, k'); values' = …              q, k, v, cos, sin, keys, values, at)
    q' = cat([rotary(q[..., :R], cos, sin), q[..., R:]]); …    →  the same
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from autopar import operators  # noqa: F401 (defines torch.ops.autopar)
from autopar.base.codes import STORAGES
from autopar.base.torch_compat import tracing
from autopar.cost.local_work import FEW_QUERIES
from autopar.ir.nodes import NAME, argument, copy_graph, drop_dead, dtype_of, shape_of
from autopar.ir.program import Program
from autopar.ir.region import Region
from autopar.machine.mesh import Mesh
from autopar.passes.alike import is_alike
from autopar.strategies.axis import AxisStrategy

_aten, _own = torch.ops.aten, torch.ops.autopar
_LENGTH = 2
"""The dim of a cache [batch, heads, length, dim] that is written along."""


def fuse_writes(program: Program, *, mesh: Mesh, strategies: Sequence[AxisStrategy] = ()) -> Program:
    """The program itself where the hardware has no such kernel, or nothing is written so."""
    hardware = mesh.hardware
    if hardware.device != "cuda" or "rotary_write" not in hardware.fused_kernels or program.training:
        return program
    ranks = math.prod(
        size
        for size, each in zip(mesh.sizes, strategies, strict=False)
        if each.inputs != "batch" and each.attention in ("free", "heads")
    )
    return program.with_regions({region.name: _rewrite(region, ranks) for region in program.regions})


@dataclass(frozen=True, slots=True)
class _Put:
    """Keys or values written into a cache. storage: "" where as they are; writes: of the cache, and of its scales;
    between: what else reads the source.
    """

    source: fx.Node
    storage: str
    writes: tuple[fx.Node, ...]
    between: frozenset[fx.Node] = frozenset()

    @property
    def caches(self) -> list[Any]:
        return [write.args[0] for write in self.writes]


@dataclass(frozen=True, slots=True)
class _Turned:
    """Queries or keys that a node gives, x rotated by tables (cos, sin): the whole of each head or its first part."""

    node: fx.Node
    x: Any
    tables: tuple[Any, ...]


def _rewrite(region: Region, ranks: int) -> Region:
    graph, _ = copy_graph(region.graph)
    origins, added = dict(region.origins), set[str]()
    for at in dict.fromkeys(node.args[2] for node in graph.nodes if _is_write(node)):
        found = _match(graph, at, ranks)
        for made in _replace(graph, at, *found) if found is not None else ():
            origins[made.name] = region.origins.get(found[0].node.name, "")  # type: ignore[index]
            added.add(made.name)
    if not added:
        return region
    drop_dead(graph)
    graph.lint()
    left = frozenset(n.name for n in graph.nodes if n.name in region.forward_nodes or n.name in added)
    return replace(region, graph=graph, origins=origins, forward_nodes=left)


def _match(graph: fx.Graph, at: Any, ranks: int) -> tuple[_Turned, _Turned, _Put, _Put] | None:
    """Queries, keys and values of what is written at these positions; None where it is anything else, or where as many
    ranks as may share the heads cannot have equally many of keys: they would split queries alone.
    """
    puts = list(_puts([node for node in graph.nodes if _is_write(node) and node.args[2] is at]))
    turned = [(put, each) for put in puts if (each := _turned(put.source)) is not None]
    if len(puts) != 2 or len(turned) != 1:
        return None
    ((keys, keys_turned),) = turned
    (values,) = (put for put in puts if put is not keys)
    key = keys.source
    others = (_turned(node) for node in graph.nodes if node is not key)
    found = [other for other in others if other is not None and _is_alike(other, keys_turned)]
    queries = [other.node for other in found]
    if len(queries) != 1 or shape_of(key)[_LENGTH] > FEW_QUERIES:
        return None
    fits = (
        shape_of(key)[1] % ranks == 0
        and shape_of(queries[0])[1] % shape_of(key)[1] == 0
        and shape_of(values.source)[:3] == shape_of(key)[:3]
        and values.storage == keys.storage
        and dtype_of(queries[0]) == dtype_of(key) == dtype_of(values.source)
        and set(key.users) <= {*keys.between, *keys.writes}
    )
    return (found[0], keys_turned, keys, values) if fits else None


def _turned(node: fx.Node) -> _Turned | None:
    """What is rotated where a node gives it: x, or x of which a first part is, and the rest as it is."""
    if node.target is _own.rotary.default:
        return _Turned(node, node.args[0], node.args[1:])
    if node.target is not _aten.cat.default or argument(node, 1, "dim", 0) not in (-1, 3) or len(shape_of(node)) != 4:
        return None
    parts: Any = node.args[0]
    if len(parts) != 2 or parts[0].target is not _own.rotary.default:
        return None
    first, rest = parts[0].args[0], parts[1]
    x, wide = first.args[0] if first.target is _aten.slice.Tensor else None, shape_of(first)[-1]
    whole = x is not None and shape_of(x) == shape_of(node) and _is_cut(first, x, 0, wide)
    is_part = whole and wide % 2 == 0 and _is_cut(rest, x, wide, shape_of(node)[-1])
    return _Turned(node, x, parts[0].args[1:]) if is_part else None


def _is_cut(node: fx.Node, x: Any, start: int, stop: int) -> bool:
    """Whether a node is x[..., start:stop] of x with four dims."""
    if node.target is not _aten.slice.Tensor or node.args[0] is not x or argument(node, 1, "dim", 0) not in (-1, 3):
        return False
    end = argument(node, 3, "end")
    end = shape_of(x)[-1] if end is None else min(end, shape_of(x)[-1])
    return ((argument(node, 2, "start") or 0), end, argument(node, 4, "step", 1)) == (start, stop, 1)


def _is_write(node: fx.Node) -> bool:
    if node.target is not _aten.index_copy.default or len(node.args) != 4 or len(shape_of(node)) != 4:
        return False
    return node.args[1] in (_LENGTH, _LENGTH - 4)


def _is_alike(query: _Turned, key: _Turned) -> bool:
    own, others = shape_of(query.node), shape_of(key.node)
    return query.tables == key.tables and own[0] == others[0] and own[2:] == others[2:]


def _puts(writes: Sequence[fx.Node]) -> Iterator[_Put]:
    """What these write: codes with their scales, and what is left as it is."""
    left = dict.fromkeys(writes)
    for write in writes:
        put = next(filter(None, (_coded(storage, write, writes) for storage in STORAGES)), None)
        if put is not None:
            yield put
            for each in put.writes:
                left.pop(each, None)
    for write in left:
        source = write.args[3]
        if isinstance(source, fx.Node) and dtype_of(write) == dtype_of(source):
            yield _Put(source, "", (write,))


def _coded(storage: str, write: fx.Node, writes: Sequence[fx.Node]) -> _Put | None:
    """What is written where these are the codes of something, and one of the writes has their scales."""
    kind, codes = STORAGES[storage], write.args[3]
    if not isinstance(codes, fx.Node) or dtype_of(codes) != kind.dtype:
        return None
    *rows, size = shape_of(codes)
    for other in writes:
        scales = other.args[3]
        if not isinstance(scales, fx.Node) or shape_of(scales) != (*rows, 1):
            continue
        graph = _encoding(storage, (*rows, size * kind.per_byte), dtype_of(scales))
        (x,), (output,) = ([n for n in graph.nodes if n.op == op] for op in ("placeholder", "output"))
        found: dict[fx.Node, fx.Node] = {}
        if all(is_alike(own, node, found) for own, node in zip(output.args[0], (codes, scales), strict=True)):
            made = frozenset(node for own, node in found.items() if own is not x)
            only = all(user in made or user in (write, other) for node in made for user in node.users)
            return _Put(found[x], storage, (write, other), made) if only else None
    return None


@lru_cache(maxsize=64)
def _encoding(storage: str, shape: tuple[int, ...], dtype: torch.dtype) -> fx.Graph:
    """What encodes numbers of this shape and type, as a program has it."""
    numbers = torch.empty(shape, dtype=dtype)
    return tracing.make_fx(lambda x: STORAGES[storage].encode(x), {}, [numbers]).graph


def _replace(graph: fx.Graph, at: Any, queries: _Turned, turned: _Turned, keys: _Put, values: _Put) -> list[fx.Node]:
    """The operator before the first reader of what it gives; nothing where something that it takes comes later."""
    query = queries.node
    caches = [keys.caches[0], values.caches[0], at, *keys.caches[1:], *values.caches[1:]]
    args = (queries.x, turned.x, values.source, *turned.tables, *caches)
    results = [query, keys.writes[0], values.writes[0], *keys.writes[1:], *values.writes[1:]]
    order = {node: place for place, node in enumerate(graph.nodes)}
    first = min((user for node in results for user in node.users), key=order.__getitem__, default=query)
    if any(order[each] >= order[first] for each in args):
        return []
    said: dict[str, Any] = {"storage": keys.storage} if keys.storage else {}
    with graph.inserting_before(first):
        node = graph.call_function(_own.rotary_write.default, args, said)
        node.meta["val"] = [result.meta["val"] for result in results]
        made = [node]
        for place, result in enumerate(results):
            pick = graph.create_node("call_function", operator.getitem, (node, place), name=result.name)
            pick.meta = {name: result.meta[name] for name in ("val", NAME) if name in result.meta}
            made.append(pick)
    for pick, result in zip(made[1:], results, strict=True):
        result.replace_all_uses_with(pick)
        graph.erase_node(result)
    return made
