"""fuse_writes: what a token does to a cache before its attention becomes one operator.

Requires: phase `differentiated`.
Ensures: the same phase and numbers. On `cuda`, where its kernel runs (`Hardware.fused_kernels`), queries and keys that
    are rotated alike (`rotations.py`), the whole of a head or its first part, of at most `FEW_QUERIES` tokens, keys
    that go nowhere but into a cache, and values written at the same positions, are `autopar.rotary_write`; keys and
    values of which that is not so `autopar.cache_write`, and those that are written into pieces of a cache; of caches
    of codes with what encodes both.

    q' = rotary(q, cos, sin); k' = rotary(k, cos, sin)     →  q', keys', values' = rotary_write(
    keys' = index_copy(keys, 2, at, k'); values' = …              q, k, v, cos, sin, keys, values, at)
    q' = cat([rotary(q[..., :R], cos, sin), q[..., R:]]); …    →  the same
    keys' = index_copy(keys, 2, at, k); values' = …        →  keys', values' = cache_write(k, v, keys, values, at)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from autopar import operators  # noqa: F401 (defines torch.ops.autopar)
from autopar.base.codes import STORAGES
from autopar.base.torch_compat import tracing
from autopar.cost.local_work import FEW_QUERIES
from autopar.ir.nodes import NAME, copy_graph, drop_dead, dtype_of, shape_of
from autopar.ir.program import Program
from autopar.ir.region import Region
from autopar.machine.mesh import Mesh
from autopar.passes.alike import is_alike
from autopar.passes.rotations import Rotation, Rows
from autopar.strategies.axis import AxisStrategy

_aten, _own = torch.ops.aten, torch.ops.autopar
_WAYS = ("interleaved", "half_tables", "in_float32")
"""How rows are rotated, as `Rotation` and the operator call it."""
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
    """Queries that a node gives, and how they and the keys are rotated."""

    node: fx.Node
    queries: Rotation
    keys: Rotation


def _rewrite(region: Region, ranks: int) -> Region:
    graph, _ = copy_graph(region.graph)
    origins, added = dict(region.origins), set[str]()
    for at in dict.fromkeys(node.args[2] for node in graph.nodes if _is_write(node)):
        found = _match(graph, at, ranks)
        if found is None:
            continue
        keys, values, turned = found
        for made in _replace(graph, at, keys, values, turned) or _replace(graph, at, keys, values, None):
            origins[made.name] = region.origins.get(keys.source.name, "")
            added.add(made.name)
    if not added:
        return region
    drop_dead(graph)
    graph.lint()
    left = frozenset(n.name for n in graph.nodes if n.name in region.forward_nodes or n.name in added)
    return replace(region, graph=graph, origins=origins, forward_nodes=left)


def _match(graph: fx.Graph, at: Any, ranks: int) -> tuple[_Put, _Put, _Turned | None] | None:
    """Keys and values that are written at these positions, and queries and keys as they are rotated, where one operator
    does that, too: not where as many ranks as may share the heads cannot have equally many of keys, as they would split
    queries alone. None where it is anything else.
    """
    writes = [node for node in graph.nodes if _is_write(node) and node.args[2] is at]
    puts = list(_puts(writes))
    if len(puts) != 2 or len({write.target for write in writes}) != 1:
        return None
    rows, whole = Rows(), writes[0].target is _aten.index_copy.default
    divides = all(len(shape_of(put.source)) == 4 and shape_of(put.source)[1] % ranks == 0 for put in puts)
    turned = [(put, each) for put in puts if whole and divides and (each := _turned(graph, put, rows)) is not None]
    keys = turned[0][0] if len(turned) == 1 else puts[0]
    (values,) = (put for put in puts if put is not keys)
    own, others = shape_of(keys.source), shape_of(values.source)
    fits = (
        len(own) == len(others) == 4
        and own[_LENGTH] <= FEW_QUERIES
        and own[:3] == others[:3]
        and values.storage == keys.storage
        and dtype_of(keys.source) == dtype_of(values.source)
    )
    return (keys, values, turned[0][1] if len(turned) == 1 else None) if fits else None


def _turned(graph: fx.Graph, put: _Put, rows: Rows) -> _Turned | None:
    """How keys are rotated that only go into a cache, and the one node whose rows are rotated alike, queries."""
    key, shape = put.source, shape_of(put.source)
    if len(shape) != 4 or shape[_LENGTH] > FEW_QUERIES or not set(key.users) <= {*put.between, *put.writes}:
        return None
    turned = rows.rotation(key)
    if turned is None or not _are_tables(turned, shape):
        return None
    found: dict[fx.Node, Rotation] = {}
    for node in graph.nodes:
        own = shape_of(node)
        if node is key or len(own) != 4 or (own[0], *own[2:]) != (shape[0], *shape[2:]) or own[1] % shape[1]:
            continue
        other = rows.rotation(node) if dtype_of(node) == dtype_of(key) else None
        if other is not None and (other.kind, other.turned) == (turned.kind, turned.turned):
            found[node] = other
    last = [node for node in found if not any(user in found or user is key for user in node.users)]
    return _Turned(last[0], found[last[0]], turned) if len(last) == 1 else None


def _are_tables(turned: Rotation, shape: Sequence[int]) -> bool:
    """Whether tables are those of all heads [B, H, S, D], of each row of the batch or of all."""
    head = _LENGTH if turned.turned else 1
    for table in (turned.cos, turned.sin):
        rows = list(shape_of(table)[:-1])
        if len(rows) == 3 and rows.pop(head) != 1:
            return False
        if len(rows) != 2 or rows[0] not in (1, shape[0]) or rows[1] != shape[_LENGTH]:
            return False
    return True


def _is_write(node: fx.Node) -> bool:
    is_write = node.target in (_aten.index_copy.default, _own.write_piece.default) and len(node.args) == 4
    return is_write and not node.kwargs and len(shape_of(node)) == 4 and node.args[1] in (_LENGTH, _LENGTH - 4)


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


def _replace(graph: fx.Graph, at: Any, keys: _Put, values: _Put, turned: _Turned | None) -> list[fx.Node]:
    """The operator before the first reader of what it gives; nothing where what it takes cannot come before that."""
    caches = [keys.caches[0], values.caches[0], at, *keys.caches[1:], *values.caches[1:]]
    results = [keys.writes[0], values.writes[0], *keys.writes[1:], *values.writes[1:]]
    taken = [values.source, *caches]
    taken += [keys.source] if turned is None else [turned.queries.x, turned.keys.x, turned.keys.cos, turned.keys.sin]
    results = results if turned is None else [turned.node, *results]
    order = {node: place for place, node in enumerate(graph.nodes)}
    first = min((user for node in results for user in node.users), key=order.__getitem__, default=results[0])
    if not _brought_before(first, taken, results, order):
        return []
    said: dict[str, Any] = {"storage": keys.storage} if keys.storage else {}
    if keys.writes[0].target is _own.write_piece.default:
        said["start"] = 0
    made: list[fx.Node] = []
    with graph.inserting_before(first):
        if turned is None:
            args, target = (keys.source, values.source, *caches), _own.cache_write.default
        else:
            args, target = (*_rotated(graph, turned, values.source, made), *caches), _own.rotary_write.default
            said |= {name: True for name in _WAYS if getattr(turned.keys, name)}
        node = graph.call_function(target, args, said)
        node.meta["val"] = [result.meta["val"] for result in results]
        made.append(node)
        picked = []
        for place, result in enumerate(results):
            pick = graph.create_node("call_function", operator.getitem, (node, place), name=result.name)
            pick.meta = {name: result.meta[name] for name in ("val", NAME) if name in result.meta}
            picked.append(pick)
    for pick, result in zip(picked, results, strict=True):
        result.replace_all_uses_with(pick)
        graph.erase_node(result)
    return [*made, *picked]


def _brought_before(
    first: fx.Node, taken: Sequence[fx.Node], results: Sequence[fx.Node], order: Mapping[fx.Node, int]
) -> bool:
    """Move what is taken, and what that is made of, before this node: positions that are counted behind queries that
    are scaled by them. False, and nothing is moved, where it depends on a result or draws numbers.
    """
    later: set[fx.Node] = set()
    left = [node for node in taken if order[node] >= order[first]]
    while left:
        node = left.pop()
        if node in later:
            continue
        tags = getattr(node.target, "tags", ())
        if node in results or node.op != "call_function" or torch.Tag.nondeterministic_seeded in tags:
            return False
        later.add(node)
        left += [each for each in node.all_input_nodes if each in results or order[each] >= order[first]]
    for node in sorted(later, key=order.__getitem__):
        first.prepend(node)
    return True


def _rotated(graph: fx.Graph, turned: _Turned, values: fx.Node, made: list[fx.Node]) -> Iterator[fx.Node]:
    """Queries, keys, values, and the tables without a dim for heads, behind whatever that takes (`made`)."""
    head = _LENGTH if turned.keys.turned else 1

    def view(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta["val"] = target(args[0].meta["val"], *args[1:])
        made.append(node)
        return node

    for each in (turned.queries, turned.keys):
        yield view(_aten.transpose.int, each.x, 1, 2) if each.turned else each.x
    yield values
    for table in (turned.keys.cos, turned.keys.sin):
        if len(shape_of(table)) == 3:
            yield table
        elif table.target is _aten.unsqueeze.default and table.args[1] in (head, head - 4):
            yield table.args[0]  # type: ignore[misc]
        else:
            yield view(_aten.squeeze.dim, table, head)
