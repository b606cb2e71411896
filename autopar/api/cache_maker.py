"""The caches of a compiled model's `generate()`: how long they are, and how keys and values are stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.base.codes import check_storage
from autopar.base.errors import AutoparError
from autopar.base.huggingface.caches import new_cache
from autopar.planner.generation import Generation, whole_pieces


@dataclass(frozen=True, slots=True)
class CacheMaker:
    """Makes caches. planned: what was planned for, if anything. storage: of keys and values (`base/codes.py`). model:
    whose, on meta. ways: in how many equal pieces the length of a cache is cut.
    """

    planned: Generation | None
    storage: str | None
    model: nn.Module | None = None
    ways: int = 1

    def __call__(self, batch: int, length: int, device: torch.device, encoded: Any) -> Any:
        """See `caches.new_cache`; of the length that was planned, where that is more."""
        assert self.model is not None
        if self.planned is not None:
            length = max(length, self.planned.positions(behind_encoder=encoded is not None))
        return new_cache(self.model, batch, self.length(length), device, encoded, self.storage)

    def length(self, wanted: int) -> int:
        """The least length from `wanted` on that may be cut."""
        return whole_pieces(wanted, self.ways)


def maker(planned: Generation | None, storage: str | None) -> CacheMaker:
    """Of what a user asked for.

    Raises:
        AutoparError: a storage that is none, or two.
    """
    check_storage(storage, "a cache")
    asked = None if planned is None else planned.cache
    if asked is not None and storage is not None and asked != storage:
        raise AutoparError(
            f"the cache is to be stored as {storage!r}, and planned as {asked!r}",
            remedy="say it once, in compile(cache=…) or in Generation(cache=…)",
        )
    return CacheMaker(planned, storage or asked)
