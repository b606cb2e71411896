"""Rows that a mask chooses, of which there are as many as its values say: traced by a size that nothing else has.

    F.cross_entropy(logits[labels != -100], labels[labels != -100])
    x[is_image] = self.project(x[is_image])

While `Chosen` is on, what a mask takes out of a tensor is `CHOSEN`, of a prime number of rows that stands for this mask
alone, and what is written where it is set `SPREAD`. `chosen_rows.py` then leaves all rows where they are. Numbers that
Python makes of that size would be in the program: so a model is traced for two such sizes, and has to say the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.base.torch_compat import tracing as compat
from autopar.base.torch_compat.values import lifted
from autopar.passes.chosen_index import Rows, marks_once, seen_along
from autopar.passes.chosen_joined import joined
from autopar.passes.chosen_loops import Loops, Over, looped
from autopar.passes.chosen_operators import CHOSEN, FIRST, SPREAD, prime_after
from autopar.passes.chosen_within import Within, rest_of, sliced_dim
from autopar.passes.said import Said, shape_of

if TYPE_CHECKING:
    from autopar.passes.usual import Usual

MOST_CALLS = 100_000
"""Of torch's functions, once a mask has chosen: what goes through rows one by one would not end."""

_aten = torch.ops.aten


class Choosing(TorchFunctionMode):
    """While a model is traced: masks that nobody knows choose rows. used: whether one did. numbers: whether forward
    returns some of Python's own. usual: takes for granted what makes the traced program right; without it, what needs
    that is refused.
    """

    def __init__(self, first: int = FIRST) -> None:
        super().__init__()
        self.used = self.numbers = False
        self._next = first
        self._calls = 0
        self._said = Said()
        self._known: dict[tuple[int, tuple[int, ...]], tuple[Tensor, int]] = {}
        self._places: dict[int, tuple[Tensor, Tensor, int]] = {}
        self._indices: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._stacked: dict[int, tuple[Tensor, tuple[Tensor, ...]]] = {}
        self.within = Within()
        self.loops = Loops(extra=first != FIRST)
        self.usual: Usual | None = None

    def __enter__(self) -> Self:
        self.loops = Loops(extra=self.loops.extra)  # what failed left its own
        super().__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if error is None:
            self.loops.check()

    def known(self) -> Iterable[tuple[Tensor, int]]:
        """The masks that have chosen, and the number of rows that each is said to choose."""
        return self._known.values()

    def number(self, mask: Any) -> int | None:
        """How many rows a mask is said to choose: the same for all masks that say the same. None of what is not traced,
        and of masks that Python's own numbers say.
        """
        node = compat.node_of(mask) if isinstance(mask, Tensor) and mask.dtype == torch.bool else None
        if node is None or not mask.dim() or not mask.numel() or compat.value_from(mask, {}) is not None:
            return None
        if self.within.outer(mask) is not None:
            return self.number(self.within.narrowed(mask))
        self.used = True
        key = (self._said(node), tuple(mask.shape))
        if key not in self._known:
            self._known[key] = mask, self._next
            self.within.masks[self._next] = mask
            self._next = prime_after(self._next)
        return self._known[key][1]

    def take(self, x: Tensor, mask: Tensor, dim: int = 0) -> Any:
        """The rows of x, along its dims from `dim` on, that a mask chooses; NotImplemented where it has others.

        Which those are is known where Python's own numbers say the mask.
        """
        if tuple(x.shape[dim : dim + mask.dim()]) != tuple(mask.shape):
            return NotImplemented
        places = compat.known_value(mask, _places_of) if mask.dtype == torch.bool and mask.dim() else None
        if places is not None:
            flat = seen_along(x, mask, dim)
            return flat.clone() if len(places) == mask.numel() else flat.index_select(dim, lifted(places))
        rows = self.number(mask)
        if rows is None:
            return NotImplemented
        if self.within.outer(mask) is not None:
            narrow = self.within.narrowed(mask)
            found = self.take(self.within.of_all(x, mask, dim), narrow, dim)
            if id(x) in self._places:
                self._places[id(found)] = found, narrow, self._places[id(x)][2]
            return found
        found = CHOSEN(x, mask, dim, rows)
        if x.dim() == mask.dim() == 1 and x.dtype == torch.int64:
            self._indices[id(found)] = found, x, mask
        return found

    def index(self, x: Any) -> tuple[Tensor, Tensor] | None:
        """The indices that a mask has chosen x of, and the mask; None of other tensors."""
        held = self._indices.get(id(x))
        return None if held is None else held[1:]

    def repeated(self, index: Tensor) -> Tensor | None:
        """The indices, one a row, that all columns of index[S, D] have; None of others."""
        node: Any = compat.node_of(index)
        while node is not None and node.target in _COLUMNS and shape_of(node)[:1] == shape_of(node.args[0])[:1]:
            node = node.args[0]
        held = [each for each, *_ in (*self._indices.values(), *self._places.values()) if compat.node_of(each) is node]
        return held[0] if held and index.dim() == 2 else None

    def write(self, x: Tensor, mask: Tensor, value: Any) -> Any:
        """x with such rows where a mask is set."""
        rest = tuple(x.shape[mask.dim() :])
        if not isinstance(value, Tensor) or tuple(x.shape[: mask.dim()]) != tuple(mask.shape):
            return NotImplemented
        rows = self.number(mask) if tuple(value.shape[1:]) == rest and value.dim() == len(rest) + 1 else None
        if rows is None or value.shape[0] != rows:
            return NotImplemented
        place = mask.reshape(*mask.shape, *(1,) * len(rest))
        return torch.where(place, self.within.spread(value, mask).to(x.dtype), x)

    def write_apart(self, x: Tensor, rows: Rows, value: Any) -> Any:
        """x with such rows where a mask is set that says it once at most along the dims that are not counted."""
        if not isinstance(value, Tensor) or not marks_once(rows.mask, rows.others):
            return NotImplemented
        new = self._spread(x, rows, value)
        if new is None:
            return NotImplemented
        place = rows.summed(rows.mask) if rows.others else rows.summed(rows.mask.to(torch.int64))
        return torch.where((place != 0).reshape(*place.shape, *(1,) * (x.dim() - place.dim())), new, x)

    def add(self, x: Tensor, rows: Rows, value: Tensor) -> Any:
        """x and such rows, each added where it comes from."""
        new = self._spread(x, rows, value) if value.dtype == x.dtype else None
        return NotImplemented if new is None else x + new

    def _spread(self, x: Tensor, rows: Rows, value: Tensor) -> Tensor | None:
        """Such rows where they come from, 0 elsewhere; None where they are others."""
        rest, held = tuple(x.shape[len(rows.dims) :]), tuple(rows.mask.shape[dim] for dim in rows.dims)
        number = self.number(rows.mask)
        if tuple(x.shape[: len(rows.dims)]) != held or number is None or tuple(value.shape) != (number, *rest):
            return None
        place = rows.mask.reshape(*rows.mask.shape, *(1,) * len(rest))
        if self.loops.now is not None and self.loops.now.beyond:
            if not x.is_floating_point():
                raise looped()
            return rows.summed(torch.where(place, math.nan, torch.zeros((*rows.mask.shape, *rest), dtype=x.dtype)))
        return rows.summed(torch.where(place, self.within.spread(value, rows.mask), 0)).to(x.dtype)

    def put(self, x: Tensor, found: Tensor, count: int) -> Tensor:
        """What was found since so many nodes were recorded is what x holds from now on: nothing where a round is one
        that nobody has.
        """
        if self.loops.now is not None and self.loops.now.mark is None:
            return x
        put: Tensor = x.copy_(found)
        self.loops.wrote(count)
        return put

    def places(self, mask: Tensor) -> Any:
        """The indices, one a dim, of where a mask is set."""
        mask = self.loops.narrowed(mask)
        rows, shape = self.number(mask), tuple(mask.shape)
        if rows is None:
            known = compat.known_value(mask, lambda value: value.nonzero(as_tuple=True))
            return NotImplemented if known is None else tuple(map(lifted, known))
        found = []
        for dim, size in enumerate(shape):
            if self.within.outer(mask) is not None:
                index = self.take(self.within.numbers(size), mask)
                self._indices.pop(id(index), None)
            else:
                counted = torch.arange(size, device=mask.device).reshape(-1, *(1,) * (len(shape) - dim - 1))
                index = CHOSEN(counted.expand(shape), mask, 0, rows)
            self._places[id(index)] = index, mask, dim
            found.append(index)
        return tuple(found)

    def stack(self, places: tuple[Tensor, ...]) -> Tensor:
        """These indices side by side, as they are where none asks for a tuple of them."""
        found = torch.stack(places, 1)
        self._stacked[id(found)] = found, places
        return found

    def columns(self, x: Tensor) -> tuple[Tensor, ...]:
        """The indices that a tensor has side by side; none of others."""
        return self._stacked[id(x)][1] if id(x) in self._stacked else ()

    def sliced(self, x: Tensor, index: Any) -> Any:
        """A slice of rows that a mask chooses; NotImplemented of others."""
        found = sliced_dim(x, index, self.within.masks)
        if found is None:
            return NotImplemented
        dim, taken, rest = found
        if taken.step in (None, 1) and (taken.stop is None or type(taken.stop) is int):
            mask = self.within.masks[x.shape[dim]]
            parts = self.within.parts_of(x, mask, dim, (taken.start or 0, taken.stop))
            if parts:
                return rest_of(parts[0] if len(parts) == 1 else self.join(parts, dim), rest)
        narrow = self.within.slice_of(x.shape[dim], taken)
        return NotImplemented if narrow is None else rest_of(self.take(x, narrow, dim), rest)

    def join(self, tensors: Any, dim: int = 0) -> Any:
        """Rows of several masks one behind the other; NotImplemented of other tensors."""
        found = joined(self.known(), SPREAD, tensors, dim)
        if found is None:
            return NotImplemented
        rows = self.take(*found)
        self.within.joined(rows.shape[found[2]], [x.shape[dim] for x in tensors])
        return rows

    def loop(self, x: Tensor) -> Over | None:
        """What goes through the numbers that x is of, the marks of a mask of one dim; None of other tensors."""
        with_dim = len(self.columns(x)) == 1
        held = self._places.get(id(self.columns(x)[0] if with_dim else x))
        return None if held is None else self.loops.over(held[1], with_dim=with_dim)

    def round_number(self, x: Any) -> int | None:
        """In a round, its number: one of Python's, or a tensor of one element that is known; None of others."""
        if self.loops.now is None or type(x) is int:
            return None if self.loops.now is None else x
        if not isinstance(x, Tensor) or x.numel() != 1 or x.dim() > 1 or x.dtype != torch.int64:
            return None
        known = compat.known_value(x, _plain)
        return known if known is None else int(known)

    def rows_in(self, index: Any) -> Rows | None:
        """The rows of an index that one mask chooses; None where rows are not chosen so."""
        parts = list(index) if isinstance(index, tuple) else [index]
        at = next((place for place, each in enumerate(parts) if isinstance(each, Tensor)), None)
        if at is None or any(each is not None and each != slice(None) for each in parts[:at]):
            return None
        first, dims, used = parts[at], None, 1
        if id(first) in self._places:
            held = [self._places.get(id(each)) for each in parts[at:] if isinstance(each, Tensor)]
            if any(each is None or each[1] is not self._places[id(first)][1] for each in held):
                return None
            _, mask, _ = self._places[id(first)]
            used, dims = len(held), [each[2] for each in held if each is not None]
            if len(set(dims)) < used or not all(isinstance(each, Tensor) for each in parts[at : at + used]):
                return None
        else:
            mask = first
        rest = parts[at + used :]
        whole = all(
            each is None or each is Ellipsis or isinstance(each, slice) or (isinstance(each, int) and not at)
            for each in rest
        )
        if not whole or mask.dtype != torch.bool:
            return None
        new = tuple(place for place, each in enumerate(parts[:at]) if each is None)
        rest = rest if any(each not in (Ellipsis, slice(None)) for each in rest) else []
        return Rows(mask, at, tuple(range(mask.dim()) if dims is None else dims), new, tuple(rest))

    def broadcast_of(self, mask: Tensor, rows: int) -> Tensor | None:
        """The mask of so many rows that a mask of elements repeats along the dims behind."""
        node = compat.node_of(mask)
        for (said, _), (known, number) in self._known.items():
            if number == rows and node is not None and said == self._said(node) and known.dim() < mask.dim():
                return known
        return None


_COLUMNS = (
    _aten.expand.default, _aten.repeat.default, _aten.unsqueeze.default, _aten.view.default, _aten.reshape.default,
    _aten.expand_as.default,
)  # fmt: skip
"""What may repeat each row."""


def _plain(value: Tensor) -> int:
    return int(value.flatten()[0])


def _places_of(mask: Tensor) -> Tensor:
    """Where a mask is set, counted over all of its dims."""
    return mask.flatten().nonzero().flatten()
