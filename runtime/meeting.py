"""Before what all ranks must do together outside of steps: they say so through the job's store, and wait for each
other.

A collective that one rank alone begins (`if rank == 0: model.save_pretrained(…)`) waits for ever, or takes the data of
another. Here the rank that came alone is told, with the ranks that did not come.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import job_store

T = TypeVar("T")

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


def together(what: str, act: Callable[[], T]) -> T:
    """`act()` on every rank, which waits for nobody in it. What one rank fails at is told on all. Collective.

    Raises:
        AutoparError: what the first rank that failed said; the same on every rank. Or a rank is gone.
    """
    tried = _tried(act)
    said = gathered(what, tried.said)
    _raise_any(what, {rank: each for rank, each in enumerate(said) if each is not None}, tried.cause)
    found: T = tried.found
    return found


def told(what: str, act: Callable[[], T]) -> T:
    """`act()` on rank 0; what it gives, or fails at, on every rank. Collective.

    Raises:
        AutoparError: what rank 0 said. Or a rank is gone.
    """
    tried = _tried(act) if dist.get_rank() == 0 else _Tried()
    box: list[Any] = [tried.said, tried.found]
    with_all(what, lambda: dist.broadcast_object_list(box, src=0))
    _raise_any(what, {} if box[0] is None else {0: box[0]}, tried.cause)
    found: T = box[1]
    return found


_Said = tuple[type[AutoparError], str, str | None, str | None, str | None]


class _Tried(NamedTuple):
    found: Any = None
    cause: Exception | None = None
    said: _Said | None = None


def _tried(act: Callable[[], Any]) -> _Tried:
    try:
        return _Tried(act())
    except AutoparError as error:
        return _Tried(None, error, (type(error), error.what, error.where, error.values, error.remedy))
    except Exception as error:  # such as a full disk
        return _Tried(None, error, (AutoparError, f"{type(error).__name__}: {error}"[:1000], None, None, None))


def _raise_any(what: str, problems: dict[int, _Said], cause: Exception | None) -> None:
    if not problems:
        return
    kind, first, where, values, remedy = next(iter(problems.values()))
    if len(problems) < dist.get_world_size() or not isinstance(cause, AutoparError):
        first = f"{_names(list(problems))} could not {what}: {first}"
    raise kind(first, where=where, values=values, remedy=remedy) from cause


def gathered(what: str, mine: T) -> list[T]:
    """Every rank's, in rank order. Collective.

    Raises:
        AutoparError: a rank is gone, or did not come in time.
    """
    found: list[Any] = [None] * dist.get_world_size()
    with_all(what, lambda: dist.all_gather_object(found, mine))
    return found


def with_all(what: str, act: Callable[[], object]) -> None:
    """`act()`, which waits for all ranks.

    Raises:
        AutoparError: a rank is gone, or did not come in time.
    """
    try:
        act()
    except RuntimeError as error:
        raise AutoparError(
            f"rank {dist.get_rank()} lost another one, with which it was to {what}",
            values=str(error).splitlines()[0][:300],
            remedy="See what ended it",
        ) from error
