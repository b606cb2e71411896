"""Before what all ranks must do together outside of steps: they say so through the job's store, and wait for each
other.

A collective that one rank alone begins (`if rank == 0: model.save_pretrained(…)`) waits for ever, or takes the data of
another. Here the rank that came alone is told, with the ranks that did not come.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import job_store

PATIENCE_S = 120.0
"""How long a rank waits for others, where the process group's own patience is not less."""


def meet(what: str, timeout_s: float, remedy: str) -> None:
    """All ranks are about to do `what`. Collective, through the store alone.

    timeout_s: of the process group.

    Raises:
        AutoparError: ranks that did not come in time, or that are about to do something else.
    """
    num, rank = dist.get_world_size(), dist.get_rank()
    if num == 1:
        return
    store, patience_s = job_store(), min(timeout_s, PATIENCE_S)
    number = store.add(f"autopar/meetings of {rank}", 1)
    here = f"autopar/meeting {number}"
    store.set(f"{here}/{rank}", what)
    if store.add(f"{here}/came", 1) == num:
        store.set(f"{here}/all", "")
    try:
        store.wait([f"{here}/all"], timedelta(seconds=patience_s))
    except RuntimeError as error:
        missing = [each for each in range(num) if not store.check([f"{here}/{each}"])]
        raise AutoparError(
            f"rank {rank} came alone to {what}",
            values=f"it waited {patience_s:g} s for {_names(missing)}",
            remedy=remedy,
        ) from error
    others = [store.get(f"{here}/{each}").decode() for each in (0, rank, num - 1)]
    for each, other in zip((0, rank, num - 1), others, strict=True):
        if other != what:
            raise AutoparError(f"rank {rank} came to {what}, rank {each} to {other}", remedy=remedy)


def _names(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
