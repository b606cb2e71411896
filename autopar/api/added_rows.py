"""Whether a batch may get rows for the axes to divide it, and which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.base.errors import AutoparError
from autopar.base.huggingface.caches import states_among
from autopar.base.torch_compat import tracing
from autopar.ir.hooked import HOOK
from autopar.ir.interface import ProgramInterface
from autopar.ir.sharding import REPLICATE, Shard, num_pieces
from autopar.passes.batching import rows_to_add
from autopar.passes.capture import capture
from autopar.planner.inputs import kind_of
from autopar.runtime.added import Added, Grown


def rows_of(inputs: Mapping[str, Any]) -> int:
    """How many rows a batch has: what most inputs but caches agree on; 0 where they are in pieces already."""
    states = states_among(inputs)
    own = {name: x for name, x in inputs.items() if name not in states}
    tensors = [x for _, x in tracing.tree_leaves_with_path(own) if isinstance(x, Tensor)]
    sizes = [x.shape[0] for x in tensors if x.dim()]
    return 0 if any(isinstance(x, DTensor) for x in tensors) else max(set(sizes), key=sizes.count, default=0)


def pieces_of(interface: ProgramInterface) -> int:
    """In how many pieces a program's batch is cut; 1 where that is not one axis's doing."""
    if interface.microbatches > 1 or interface.pipeline is not None:
        return 1
    found = 1
    for entry in interface.inputs:
        own = [p for p in entry.sharding if isinstance(p, Shard) and p.dim == 0]
        if len(own) > 1 or any(p.outer > 1 or p.zigzag for p in own):
            return 1
        split = tuple(p if p in own else REPLICATE for p in entry.sharding)
        found = max(found, num_pieces(split, interface.sizes))
    return found


def rows_added(
    model: nn.Module, inputs: Mapping[str, Any], pieces: int, *, precision: torch.dtype | None, training: bool
) -> Added:
    """The fewest rows with which `pieces` divides the batch, and what they are for them to have no part in anything.

    Raises:
        AutoparError: they would have; says in what.
    """
    rows = rows_of(inputs)
    more = -rows % pieces
    names = _by_rows(inputs, rows)
    captured = [
        capture(
            model, _with_rows(names, rows, num, {}).pad_tree(inputs), precision=precision, training=training,
            tells_ways=True,
        )
        for num in (rows + more, 2 * (rows + more))
    ]  # fmt: skip
    if any(x.updates or x.by_value or x.granted or x.branches or x.told is not None for x in captured):
        raise AutoparError("the model keeps statistics of the rows of a batch, or does what their values say")
    if any(each.kind != HOOK for x in captured for each in x.carried):
        raise AutoparError("the model keeps numbers of a batch on its modules")
    outputs, fill = rows_to_add(captured[0], captured[1])
    if set(fill) - set(names):
        raise AutoparError("labels are not by rows")
    if any(each.combine == "mean" for each in outputs):
        raise AutoparError("a mean over all rows counts those that were added")
    cut = tuple(((each.batch_dim or 0, rows),) if each.combine == "concat" else () for each in outputs)
    return _with_rows(names, rows, rows + more, fill, cut)


def even(inputs: Mapping[str, Any], pieces: int) -> dict[str, Any] | None:
    """A batch of as many rows as `pieces` divides, the fewest from those on that a batch has, to plan for alone; None
    where it divides them.
    """
    rows = rows_of(inputs)
    grown = _with_rows(_by_rows(inputs, rows), rows, rows + -rows % pieces, {})
    return grown.pad_tree(kind_of(inputs)) if rows % pieces else None


def _by_rows(inputs: Mapping[str, Any], rows: int) -> tuple[str, ...]:
    leaves = tracing.tree_leaves_with_path(dict(inputs))
    return tuple(name for name, x in leaves if isinstance(x, Tensor) and x.dim() and x.shape[0] == rows)


def _with_rows(
    names: Sequence[str], given: int, padded: int, fill: Mapping[str, int], outputs: tuple[Any, ...] = ()
) -> Added:
    return Added({name: (Grown(0, given, padded, fill.get(name)),) for name in names}, outputs)
