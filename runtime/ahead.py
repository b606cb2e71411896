"""Programs for batches that are still to come, on request: no step waits for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.tracing import tree_leaves_with_path
from autopar.runtime.checks import gather_objects
from autopar.runtime.engine import Engine

Batch = Mapping[str, Any] | Sequence[Any] | Tensor


def plan_ahead(model: nn.Module, engine: Engine, batches: Sequence[Batch]) -> None:
    """See `CompiledModule.plan_ahead`. Ranks compare what they ask for before rank 0 plans for all of them."""
    calls = [_call_of(batch) for batch in batches]
    modes = tuple(module.training for module in model.modules())
    mine = ([_shapes_of(*call) for call in calls], modes, torch.is_grad_enabled())
    for rank, other in enumerate(gather_objects(mine)):
        if other != mine:
            raise AutoparError(
                f"rank {rank} plans ahead for other batches than rank {dist.get_rank()}, or in another mode",
                values=f"{other[0]} and {mine[0]}"[:400],
                remedy="Ask for the same shapes, in the same mode, on every rank",
            )
    for args, kwargs in calls:
        engine.ahead(args, kwargs)


def _call_of(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return ((batch,) if isinstance(batch, Tensor) else tuple(batch)), {}


def _shapes_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, ...]]:
    leaves = tree_leaves_with_path({**{f"argument {i}": x for i, x in enumerate(args)}, **kwargs})
    return [(path, tuple(x.shape), str(x.dtype)) if isinstance(x, Tensor) else (path, repr(x)) for path, x in leaves]
