"""Tables that attention reads at the end of its keys, as if all of a cache were written: what they say is of others.

    mask = self.bias[:, :, keys - queries : keys, :keys]      keys: the length of the cache, not how many are written

Of a cache that grows by what is written these are the rows of the new tokens. One of a fixed length has more keys than
are written: a table of a window would then show positions of another token's. So the rows are taken by the positions at
which the new tokens are written:

    slice(bias, 2, keys - queries, keys)   →  index_select(bias, 2, at)          at: of index_copy(keys, 2, at, new)

A table that is known to be causal and no more hides nothing that a mask of the cache shows, and stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from autopar.base.errors import AutoparError
from autopar.base.huggingface import caches
from autopar.base.huggingface.reuse import places
from autopar.base.torch_compat.distributed import local_tensor
from autopar.ir.nodes import argument, copy_graph, drop_dead, shape_of
from autopar.ir.program import Program
from autopar.ir.region import Region
from autopar.passes.emptied import values_of

_aten = torch.ops.aten
_LENGTH = 2
"""The dim of positions of what is written, [batch, heads, length, dim]."""


def by_positions(program: Program, model: nn.Module, inputs: Mapping[str, Any]) -> Program:
    """A captured program over a cache, with the rows of tables [..., M, M] that it reads at the end of its keys taken
    by the positions of the new tokens, unless a table is known to be causal and no more.

    Raises:
        AutoparError: it writes into no cache before, so that nothing says which positions these are.
    """
    lengths = {places(inputs[name], 0) for name in caches.states_among(inputs)} - {0}
    if not lengths:
        return program
    buffers = dict(values_of(model).named_buffers(remove_duplicate=False))
    regions = {region.name: region for region in program.regions}
    changed: dict[str, Region] = {}
    for call in program.calls:
        region = regions[call.region]
        made = (node for node in region.graph.nodes if node.op == "placeholder")
        tables = {node: name for node, slot, name in zip(made, region.slots, call.slots, strict=False)
                  if not slot.is_parameter}  # fmt: skip
        read = [
            node.name for node in region.graph.nodes
            if (table := _read_at_the_end(node, lengths)) in tables
            and not _is_causal(buffers.get(tables[table]), max(lengths))
        ]  # fmt: skip
        if read and region.name not in changed:
            changed[region.name] = _rewritten(region, read, type(model).__name__)
    return program.with_regions(changed) if changed else program


def _rewritten(region: Region, read: list[str], model: str) -> Region:
    """read: names of the slices."""
    graph, _ = copy_graph(region.graph)
    origins = dict(region.origins)
    at: fx.Node | None = None
    for node in list(graph.nodes):
        if _is_write(node):
            at = node.args[2]
        if node.name not in read:
            continue
        table, start, stop = node.args[0], node.args[2], node.args[3]
        if at is None or shape_of(at) != (stop - start,):
            raise AutoparError(
                f"{model} reads a table at the end of its keys: of a cache whose length is fixed these are not the "
                "rows of the new tokens",
                where=region.origins.get(node.name) or None,
                values=f"rows {start} to {stop}, of a cache of {stop} positions",
                remedy="generate without a cache: use_cache=False",
            )
        with graph.inserting_before(node):
            rows = graph.call_function(_aten.index_select.default, (table, argument(node, 1, "dim", 0), at))
        rows.meta = dict(node.meta)
        origins[rows.name] = origins.get(node.name, "")
        node.replace_all_uses_with(rows)
    drop_dead(graph)
    return replace(region, graph=graph, origins=origins)


def _is_write(node: fx.Node) -> bool:
    """Whether new tokens are written into a cache there."""
    is_copy = node.target is _aten.index_copy.default and len(shape_of(node)) == _LENGTH + 2
    return is_copy and argument(node, 1, "dim") in (_LENGTH, -2)


def _read_at_the_end(node: fx.Node, lengths: set[int]) -> Any:
    """The square table of which a slice takes the rows that end where a cache does, not from the first on."""
    if node.target is not _aten.slice.Tensor:
        return None
    table = node.args[0]
    shape = shape_of(table) if isinstance(table, fx.Node) else ()
    if len(shape) < 2 or shape[-1] != shape[-2] or argument(node, 1, "dim", 0) % len(shape) != len(shape) - 2:
        return None
    start, stop = argument(node, 2, "start"), argument(node, 3, "end")
    return table if isinstance(start, int) and start > 0 and stop in lengths else None


def _is_causal(table: Tensor | None, length: int) -> bool:
    """Whether as much of a table as a cache is long shows each row what is not behind it."""
    if table is None or table.is_meta:
        return False
    own = (local_tensor(table) if isinstance(table, DTensor) else table)[..., :length, :length] != 0
    return bool((own == torch.ones_like(own).tril()).all())
