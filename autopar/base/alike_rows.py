"""Examples of large inputs whose rows are alike, in the memory of one row.

A mask of every query and position of 256 sequences is gigabytes, of which plans keep one for each phase that they were
made for; where prompts are not padded, each sequence has the same.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

LARGE = 2**22
"""Elements: smaller examples stay as they are."""


def with_alike_rows(value: Any) -> Any:
    """An example whose rows (dim 0) are known to be equal: of a large tensor, also in a dict, one is kept, and seen
    once for each, [1, …] expanded. Anything else stays as it is, and so does a tensor whose last row is another.
    """
    if type(value) is dict:
        return {name: with_alike_rows(each) for name, each in value.items()}
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[0] < 2 or value.numel() < LARGE:
        return value
    if value.is_meta or not value[-1].equal(value[0]):
        return value
    return value[:1].clone().expand(value.shape)
