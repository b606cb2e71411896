"""Slices that begin or end where a tensor says, as rows of one expert in tokens that are sorted by experts.

    for e in range(experts):                          mask = (start <= place) & (place < end)
        start, end = ends[e], ends[e + 1]        →
        out[start:end] = x[start:end] @ weight[e]     out[mask] = x[mask] @ weight[e]

How many rows there are values say, so they are rows that a mask chooses (`passes/chosen.py`): all rows stay where they
are, and those outside of the slice count for nothing. A slice is a view, and rows that a mask chooses are not: one that
is written into has to be assigned where it comes from (`x[start:end] *= 2` is that), and none is read once what it is a
part of has been written.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.base.errors import AutoparError
from autopar.base.torch_compat import tracing as compat
from autopar.passes.checks import frame_of_model
from autopar.passes.chosen_operators import FIRST, SPREAD
from autopar.passes.fixed_slices import counted_on, length_of, places
from autopar.passes.no_rows import NoRows, group_trials, number_of
from autopar.passes.read_numbers import Numbers
from autopar.passes.row_counts import has_counts, without_counts
from autopar.passes.said import Said
from autopar.passes.usual import Usual

_READ, _WRITE = Tensor.__getitem__, Tensor.__setitem__
_SPLITS = (torch.split, Tensor.split, torch.split_with_sizes, Tensor.split_with_sizes, torch.functional.split)
_JOINS = (torch.cat, torch.concat, torch.concatenate, torch.vstack)


@dataclass(slots=True)
class _Cut:
    """A slice that was read: its rows, what it is a part of, what its index says, and how often each had been written.
    places: the index of rows whose number is known. pending: the rows were written, and not assigned yet. is_stale:
    what they are a part of was written.
    """

    rows: weakref.ref[Tensor]
    base: Tensor
    said: Hashable
    rows_version: int
    base_version: int
    places: tuple[Any, ...] | None = None
    pending: Tensor | None = None
    is_stale: bool = False


@dataclass(frozen=True, slots=True)
class _Range:
    """Which of as many rows lie in a slice: mask[size], from start to stop."""

    mask: Tensor
    size: int
    start: Any
    stop: Any


class Ragged(TorchFunctionMode):
    """While a model is traced: slices whose ends nobody knows are rows that a mask chooses.

    To be entered in forward (`within`): `torch.export` asks for the ends of slices before modes around it see them.
    """

    def __init__(self, numbers: Numbers, usual: Usual | None = None) -> None:
        super().__init__()
        self._read, self._usual = numbers, usual
        self._cuts: list[_Cut] = []
        self._said = Said()
        self._ranges: dict[int, _Range] = {}
        self._tests = NoRows()

    def within(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A forward in which it is on.

        Raises:
            AutoparError: a slice was written into, and assigned nowhere; too many numbers are handed out.
        """

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                found = forward(*args, **kwargs)
            if any(cut.pending is not None for cut in self._cuts):
                raise _refused("forward() writes into a slice between two tensors")
            line = self._tests.wrong({size: (each.start, each.stop, each.mask) for size, each in self._ranges.items()})
            if line is not None:
                raise AutoparError(
                    "forward() leaves out what is done with rows where there are none, and more comes of it than rows",
                    where=line,
                    remedy="do it for all groups (a slice of no rows gives none), or collect nothing but their rows",
                )
            self._cuts.clear()
            return self._read.handed_out(found)

        return run

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (_READ, _WRITE) and has_counts(args[1]):  # which `torch.export` would slice by itself
            args = (args[0], without_counts(args[1]), *args[2:])
        if func is Tensor.__bool__:
            found = self._tests.asked(args[0], frame_of_model(sys._getframe(1), own=True))
            if found is not None:
                return found
        if func in _SPLITS and (parts := self._parts(*args, **kwargs)) is not None:
            return parts
        if func is torch.arange and (counted := counted_on(args, kwargs)) is not None:
            return counted
        if func in _JOINS and (joined := self._joined(*args, **kwargs)) is not None:
            return joined
        ends = _unknown_ends(args[1]) if func in (_READ, _WRITE) else ()
        assigned = self._assigned(*args) if ends and func is _WRITE else None
        if self._cuts:
            self._check(_tensors((args, kwargs)), assigned)
        fixed = self._by_places(args[0], args[1]) if ends else None
        if fixed is not None:
            found = func(args[0], fixed, *args[2:])
        elif not ends or (index := _by_mask(args[0], args[1])) is None:
            found = func(*args, **kwargs)
        else:
            plain, mask, cut = index
            found = func(args[0] if plain is None else args[0][plain], mask, *args[2:])
            if func is _READ and isinstance(found, Tensor):
                self._note(found, cut)
        if self._cuts:
            self._note_writes(assigned)
        if ends and func is _READ and isinstance(found, Tensor):
            with compat.no_torch_functions():
                self._cuts.append(
                    _Cut(weakref.ref(found), args[0], self._index(args[1]), found._version, args[0]._version, fixed)
                )
        return found

    def _by_places(self, x: Tensor, index: Any) -> tuple[Any, ...] | None:
        """An index with the places of a slice whose length is known, whose ends are not; None of others."""
        parts = index if isinstance(index, tuple) else (index,)
        cut = [dim for dim, each in enumerate(parts) if _unknown_ends(each)]
        whole = all(each == slice(None) for dim, each in enumerate(parts) if dim not in cut)
        if self._usual is None or len(cut) != 1 or not whole:
            return None
        (dim,) = cut
        length = length_of(parts[dim])
        if length is None:
            return None
        line = frame_of_model(sys._getframe(2), own=True)
        taken = functools.partial(self._usual.takes_slice, frame=line)
        return (*parts[:dim], places(parts[dim].start, length, x.shape[dim], taken), *parts[dim + 1 :])

    def _note(self, rows: Tensor, cut: _Range) -> None:
        """Which slice so many rows are."""
        dim = next((dim for dim, size in enumerate(rows.shape) if size >= FIRST), None)
        if dim is not None:
            self._ranges[rows.shape[dim]] = cut

    def _parts(self, x: Tensor, sizes: Any, dim: int = 0) -> tuple[Tensor, ...] | None:
        """`x.split(sizes)`, whose sizes nobody knows; None of others."""
        if not isinstance(sizes, list | tuple) or not any(map(_is_unknown, sizes)) or dim % x.dim():
            return None
        found: list[Tensor] = []
        start: Any = 0
        for size in sizes:
            stop = start + size
            found.append(self.__torch_function__(_READ, (), (x, slice(start, stop))))
            start = stop
        return tuple(found)

    def _joined(self, tensors: Any, dim: int = 0, **named: Any) -> Tensor | None:
        """Slices that lie one behind the other, and are all of what they are slices of, together; None of others."""
        if not isinstance(tensors, list | tuple) or len(tensors) < 2 or dim or named:
            return None
        cuts = [self._ranges.get(each.shape[0]) if each.dim() else None for each in tensors]
        known = [cut for cut in cuts if cut is not None]
        if len(known) < len(cuts) or not self._is_all(known):
            return None
        first = tensors[0]
        out = torch.zeros((known[0].size, *first.shape[1:]), dtype=first.dtype, device=first.device)
        for rows, cut in zip(tensors, known, strict=True):
            place = cut.mask.reshape(-1, *(1,) * (rows.dim() - 1))
            out = torch.where(place, SPREAD(rows, cut.mask), out)
        return out

    def _is_all(self, cuts: Sequence[_Range]) -> bool:
        """Whether slices of as many rows lie one behind the other, from the first row to the last."""
        size, last = cuts[0].size, compat.node_of(cuts[-1].stop) if isinstance(cuts[-1].stop, Tensor) else None
        if any(cut.size != size for cut in cuts) or last is None:
            return False
        pairs = [(0, cuts[0].start), *((one.stop, other.start) for one, other in itertools.pairwise(cuts))]
        trials = list(group_trials(last))
        return bool(trials) and all(
            number_of(one, given) == number_of(other, given)
            for given in trials
            for one, other in [*pairs, (size, cuts[-1].stop)]
        )

    def _index(self, index: Any) -> Hashable:
        """What an index says: the same for ends that are computed in the same way."""
        if isinstance(index, tuple):
            return tuple(map(self._index, index))
        if isinstance(index, slice):
            return tuple(map(self._index, (index.start, index.stop, index.step)))
        node = compat.node_of(index) if isinstance(index, Tensor) else None
        return repr(index) if node is None else self._said(node)

    def _assigned(self, base: Tensor, index: Any, value: Any) -> _Cut | None:
        """The slice whose rows are written where they come from."""
        for cut in self._cuts:
            rows = cut.pending if cut.pending is not None else cut.rows()
            if rows is value and cut.base is base and cut.said == self._index(index):
                return cut
        return None

    def _check(self, given: Sequence[Tensor], assigned: _Cut | None) -> None:
        self._cuts = [cut for cut in self._cuts if cut.pending is not None or cut.rows() is not None]
        for cut in self._cuts:
            rows = cut.rows()
            if cut.is_stale and rows is not None and any(compat.shares_storage(each, rows) for each in given):
                raise _refused("a slice between two tensors is read after what it is a part of was written")
            unassigned = cut.pending is not None and cut is not assigned
            if unassigned and any(compat.shares_storage(each, cut.base) for each in given):
                raise _refused("forward() writes into a slice between two tensors")

    def _note_writes(self, assigned: _Cut | None) -> None:
        with compat.no_torch_functions():
            for cut in self._cuts:
                rows = cut.rows()
                if cut is assigned:
                    cut.pending = None
                elif cut.base._version != cut.base_version:
                    cut.is_stale = True
                elif rows is not None and rows._version != cut.rows_version and cut.places is not None:
                    cut.base[cut.places] = rows
                elif rows is not None and rows._version != cut.rows_version:
                    cut.pending = rows
                cut.base_version = cut.base._version
                cut.rows_version = cut.rows_version if rows is None else rows._version


def _refused(what: str) -> AutoparError:
    frame = frame_of_model(sys._getframe(2), own=True)
    return AutoparError(
        f"{what}, whose rows are marked by a mask, and are no part of it",
        where=None if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}",
        remedy="make new values of what lies in the slice, and assign them: x[start:end] = f(x[start:end])",
    )


def _tensors(tree: Any) -> list[Tensor]:
    leaves, _ = compat.tree_flatten(tree)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _unknown_ends(index: Any) -> tuple[Tensor, ...]:
    """The tensors that say where slices of an index begin and end, whose values nobody knows."""
    parts = index if isinstance(index, tuple) else (index,)
    ends = [end for each in parts if isinstance(each, slice) for end in (each.start, each.stop)]
    return tuple(end for end in ends if _is_unknown(end))


def _is_unknown(end: Any) -> bool:
    if not isinstance(end, Tensor) or end.numel() != 1 or end.is_floating_point() or end.dtype == torch.bool:
        return False
    return compat.node_of(end) is not None and compat.known_value(end) is None


def _by_mask(x: Tensor, index: Any) -> tuple[Any, Any, _Range] | None:
    """The index of an x's part that has all that lies between such ends, None where that is x; the one that takes the
    rest of it, by a mask; and which rows these are. None where more than slices are asked for.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    at = next((place for place, each in enumerate(parts) if each is Ellipsis), None)
    if at is not None:
        parts[at : at + 1] = [slice(None)] * (x.dim() - len(parts) + 1)
    found = [dim for dim, each in enumerate(parts) if _unknown_ends(each)]
    if len(found) != 1 or len(parts) > x.dim() or not all(isinstance(each, slice) for each in parts):
        return None
    (dim,) = found
    cut, others = parts[dim], [slice(None) if place == dim else each for place, each in enumerate(parts)]
    if not (cut.step is None or (isinstance(cut.step, int) and cut.step == 1)):
        return None
    mask = _between(cut.start, cut.stop, x.shape[dim], x.device)
    plain = None if all(each == slice(None) for each in others) else tuple(others)
    size = x.shape[dim]
    rows = _Range(mask, size, 0 if cut.start is None else cut.start, size if cut.stop is None else cut.stop)
    return plain, (*(slice(None),) * dim, mask) if dim else mask, rows


def _between(start: Any, stop: Any, size: int, device: torch.device) -> Tensor:
    """[size], which places lie between two ends, which count from behind where they are negative."""
    places = torch.arange(size, device=device)
    marks = [] if start is None else [places >= _from_front(start, size)]
    marks += [] if stop is None else [places < _from_front(stop, size)]
    return functools.reduce(torch.logical_and, marks)


def _from_front(end: Any, size: int) -> Any:
    if isinstance(end, Tensor):
        end = end.reshape(())
        return torch.where(end < 0, end + size, end)
    return end + size if end < 0 else end
