"""Products of experts in float64: torch's grouped product knows narrower types alone, transformers' own knows all."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def wide() -> Iterator[None]:
    """For the duration, transformers multiplies float64 by its own fallback. Nothing where it is not loaded, or has no
    such choice.
    """
    module: Any = sys.modules.get("transformers.integrations.moe")
    before = getattr(module, "_can_use_grouped_mm", None)
    if before is None:
        yield
        return

    def can_use(input: torch.Tensor, weight: torch.Tensor, *rest: Any, **options: Any) -> bool:
        return weight.dtype != torch.float64 and before(input, weight, *rest, **options)

    module._can_use_grouped_mm = can_use
    try:
        yield
    finally:
        module._can_use_grouped_mm = before
