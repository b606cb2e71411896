"""Rows of rows that a mask chooses: rows that a narrower mask chooses of all.

    rows = x[mask]; rows[rows_mask]                         →  x[mask & rows_mask in its places]
    rows[:4], rows[2:], rows[-4:]                           →  x[mask & (its number among rows < 4)]
    torch.cat([a[m1], b[m2]]).split([len(a[m1]), len(b[m2])])  →  the rows of m1, those of m2

So a capacity (`idx[:capacity]`) drops what eager drops, whatever number of rows there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.passes.chosen_operators import CHOSEN, FIRST, SPREAD


class Within:
    """Masks among the rows of others. masks: number of rows -> the mask that is said to choose so many. unordered:
    numbers of rows that eager has in another order.
    """

    def __init__(self) -> None:
        self.masks: dict[int, Tensor] = {}
        self.unordered: set[int] = set()
        self._of_unordered: list[Tensor] = []
        self._narrowed: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._slices: dict[tuple[int, Any, Any, Any], Tensor] = {}
        self._parts: dict[int, Sequence[tuple[int, Tensor | None]]] = {}

    def outer(self, mask: Tensor) -> Tensor | None:
        """The mask among whose rows another one chooses; None where it chooses among all."""
        return self.masks.get(mask.shape[0]) if mask.dim() == 1 and mask.dtype == torch.bool else None

    def narrowed(self, mask: Tensor) -> Tensor:
        """What chooses of all rows what a mask among rows chooses."""
        outer = self.outer(mask)
        if outer is None:
            return mask
        key = mask.shape[0], id(mask)
        if key not in self._narrowed:
            self._narrowed[key] = mask, outer & SPREAD(mask, outer)
            if mask.shape[0] in self.unordered:
                self._of_unordered.append(self._narrowed[key][1])
        return self._narrowed[key][1]

    def spread(self, rows: Tensor, mask: Tensor) -> Tensor:
        """Rows where a mask is set, among all of those that it chooses from."""
        outer = self.outer(mask)
        if outer is None:
            return SPREAD(rows, mask)
        return CHOSEN(SPREAD(rows, self.narrowed(mask)), outer, 0, mask.shape[0])

    def of_all(self, x: Tensor, mask: Tensor, dim: int) -> Tensor:
        """Rows along a dim, in their places among all of those that their own mask chooses from."""
        outer = self.masks[mask.shape[0]]
        found = SPREAD(x.movedim(dim, 0) if dim else x, outer)
        return found.movedim(tuple(range(outer.dim())), tuple(range(dim, dim + outer.dim()))) if dim else found

    def numbers(self, rows: int) -> Tensor:
        """The number of each row among those that a mask chooses.

        Raises:
            AutoparError: eager has them in another order.
        """
        mask = self.masks[rows]
        if rows in self.unordered or any(each is mask for each in self._of_unordered):
            raise AutoparError(
                "forward() takes steps of packed sequences by their place, and a program has them in another order",
                remedy="take them of what pad_packed_sequence gives, or work on the padded sequence and its lengths",
            )
        flat = mask if mask.dim() == 1 else mask.flatten()
        places = flat.to(torch.int64).cumsum(0) - 1
        return CHOSEN(places if mask.dim() == 1 else places.reshape(mask.shape), mask, 0, rows)

    def slice_of(self, rows: int, index: slice) -> Tensor | None:
        """A mask among rows of what a slice takes; None where its ends are not known so."""
        ends = (index.start, index.stop)
        step = 1 if index.step is None else index.step
        if type(step) is not int or step < 1 or any(each is not None and type(each) is not int for each in ends):
            return None
        if any(each is not None and each >= FIRST and each not in self.masks for each in ends):
            return None
        key = rows, *ends, step
        if key not in self._slices:
            place = self.numbers(rows)
            start, stop = (self._end(rows, each) for each in ends)
            mask = torch.ones_like(place, dtype=torch.bool) if start is None else place >= start
            if stop is not None:
                mask = mask & (place < stop)
            if step > 1:
                first = 0 if start is None else start.clamp(min=0) if isinstance(start, Tensor) else start
                mask = mask & ((place - first) % step == 0)
            self._slices[key] = mask
        return self._slices[key]

    def _end(self, rows: int, end: int | None) -> Any:
        if end is None:
            return None
        if end >= FIRST:
            return self.masks[end].sum()
        return self.masks[rows].sum() + end if end < 0 else end

    def joined(self, rows: int, sizes: Sequence[int]) -> None:
        """So many rows are parts of these sizes, one behind the other."""
        self._parts[rows] = [(size, self.masks.get(size)) for size in sizes]
        if self.unordered & set(sizes):
            self.unordered.add(rows)

    def parts_of(self, x: Tensor, mask: Tensor, dim: int, ends: tuple[int, int | None]) -> list[Tensor]:
        """The parts between two ends of what was joined; none of others.

        mask: of what was joined.
        """
        parts = self._parts.get(x.shape[dim])
        if parts is None:
            return []
        borders = [0]
        for size, _ in parts:
            borders.append(borders[-1] + size)
        stop = borders[-1] if ends[1] in (None, x.shape[dim]) else ends[1]
        if ends[0] not in borders or stop not in borders or borders.index(ends[0]) >= borders.index(stop):
            return []
        full = SPREAD(x.movedim(dim, 0) if dim else x, mask)
        found, at = [], 0
        for number, (size, own) in enumerate(parts):
            length = size if own is None else own.numel()
            piece = full.narrow(0, at, length)
            if own is not None:
                piece = CHOSEN(piece.reshape(*own.shape, *piece.shape[1:]), own, 0, size)
            if borders.index(ends[0]) <= number < borders.index(stop):
                found.append(piece.movedim(0, dim) if dim else piece)
            at += length
        return found


def sliced_dim(x: Tensor, index: Any, known: Mapping[int, Tensor]) -> tuple[int, slice, tuple[Any, ...]] | None:
    """The dim of rows that an index takes a slice of, the slice, and what is left of the index; None of others."""
    given = index if isinstance(index, tuple) else (index,)
    for dim, each in enumerate(given):
        if not isinstance(each, slice) or dim >= x.dim():
            return None
        if each != slice(None):
            if x.shape[dim] not in known or (
                each.start in (None, 0) and each.stop in (None, x.shape[dim]) and each.step in (None, 1)
            ):
                return None
            return dim, each, (*given[:dim], slice(None), *given[dim + 1 :])
    return None


def rest_of(x: Any, index: tuple[Any, ...]) -> Any:
    """What else an index takes of rows; the very tensor where that is all, as it may be known for what it is."""
    return x if x is NotImplemented or all(each == slice(None) for each in index) else x[index]
