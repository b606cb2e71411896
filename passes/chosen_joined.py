"""Rows that a mask chooses with others, or those of another mask, behind them: rows that a longer mask chooses.

    torch.cat([edges[:, edges[0] != edges[1]], loops], 1)   →   torch.cat([edges, loops], 1)[:, cat([mask, ones])]

So what is done with all of them has one number of rows, as what is done with those that one mask chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def joined(
    known: Iterable[tuple[Tensor, int]],
    spread: Callable[[Tensor, Tensor], Tensor],
    tensors: Any,
    dim: int = 0,
) -> tuple[Tensor, Tensor, int] | None:
    """What a mask chooses along a dim of one tensor in place of what `torch.cat` puts together: the tensor, the mask,
    the dim. None where there are not both rows that a mask chooses and others, if rows of another mask. What is all of
    one tensor together (`ragged.py`) does not come here.

    known: masks and the number of rows that each is said to choose. spread: puts rows where a mask is set.
    """
    masks = {rows: mask for mask, rows in known}
    if not isinstance(tensors, Sequence) or not tensors or not all(isinstance(x, Tensor) for x in tensors):
        return None
    dims = {x.dim() for x in tensors}
    if len(dims) != 1 or not all(dims):
        return None
    chosen = [x.shape[dim] in masks for x in tensors]
    others = any(x.shape[dim] for x, of_mask in zip(tensors, chosen, strict=True) if not of_mask)
    if not any(chosen) or not (others or sum(chosen) > 1):
        return None
    dim %= tensors[0].dim()
    parts, marks = list[Tensor](), list[Tensor]()
    for x in tensors:
        mask = masks.get(x.shape[dim])
        if mask is None:
            parts.append(x)
            marks.append(torch.ones(x.shape[dim], dtype=torch.bool, device=x.device))
        else:
            rows, places = spread(x.movedim(dim, 0) if dim else x, mask), mask
            if mask.dim() > 1:  # what gives itself would have another name from here on
                rows, places = rows.flatten(0, mask.dim() - 1), mask.flatten()
            parts.append(rows.movedim(0, dim) if dim else rows)
            marks.append(places)
    return torch.cat(parts, dim), torch.cat(marks), dim
