"""Tables that attention reads at the end of its keys, as if all of a cache were written: what they say is of others.

    mask = self.bias[:, :, keys - queries : keys, :keys]      keys: the length of the cache, not how many are written

Of a cache that grows by what is written these are the rows of the new tokens. One of a fixed length has more keys than
are written: a table of a window then shows positions of another token's. A table that is causal and no more hides
nothing that a mask of the cache shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from autopar.base.errors import AutoparError
from autopar.base.huggingface import caches
from autopar.base.huggingface.reuse import places
from autopar.base.torch_compat.distributed import local_tensor
from autopar.ir.nodes import argument, shape_of
from autopar.ir.program import Program
from autopar.passes.emptied import values_of

_SLICE = torch.ops.aten.slice.Tensor


def check_tables(program: Program, model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Raises an AutoparError for a program over a cache that reads a table [..., M, M] so, unless it is known to be
    causal and no more.
    """
    lengths = {places(inputs[name], 0) for name in caches.states_among(inputs)} - {0}
    if not lengths:
        return
    buffers = dict(values_of(model).named_buffers(remove_duplicate=False))
    regions = {region.name: region for region in program.regions}
    for call in program.calls:
        region = regions[call.region]
        made = (node for node in region.graph.nodes if node.op == "placeholder")
        tables = {node: name for node, slot, name in zip(made, region.slots, call.slots, strict=False)
                  if not slot.is_parameter}  # fmt: skip
        for node in region.graph.nodes:
            table = _read_at_the_end(node, lengths) if node.target is _SLICE else None
            if table in tables and not _is_causal(buffers.get(tables[table]), max(lengths)):
                raise AutoparError(
                    f"{type(model).__name__} reads {tables[table]} at the end of its keys: of a cache whose length is "
                    "fixed these are not the rows of the new tokens",
                    where=region.origins.get(node.name) or None,
                    values=f"rows {node.args[2]} to {node.args[3]}, of a cache of {node.args[3]} positions",
                    remedy="generate without a cache: use_cache=False",
                )


def _read_at_the_end(node: fx.Node, lengths: set[int]) -> Any:
    """The square table of which a slice takes the rows that end where a cache does, not from the first on."""
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
