"""What functions of torch do with rows that a mask chooses, while `Chosen` is on: NotImplemented, as they always do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.base.torch_compat import tracing as compat
from autopar.passes.chosen import MOST_CALLS, Choosing
from autopar.passes.chosen_apart import one_of, runs_of, seen_apart, unflattened
from autopar.passes.chosen_loops import looped
from autopar.passes.chosen_operators import SPREAD


def _one_by_one(chosen: Choosing, x: Tensor, dim: int = 0) -> Any:
    """A loop over what a mask marks, if it is one.

    Raises:
        AutoparError: there are as many as a mask chooses, and each is more than a number.
    """
    if not x.dim() or not any(x.shape[dim] == rows for _, rows in chosen.known()):
        return NotImplemented
    found = None if dim else chosen.loop(x)
    if found is None:
        raise looped()
    return found


def _number_of(chosen: Choosing, x: Tensor) -> Any:
    """What Python reads of the number of a round."""
    known = chosen.round_number(x)
    return NotImplemented if known is None else known


def _formatted(chosen: Choosing, x: Tensor, spec: str) -> Any:
    known = None if x.dim() else chosen.round_number(x)
    return NotImplemented if known is None else format(known, spec)


def _getitem(chosen: Choosing, x: Tensor, index: Any) -> Any:
    columns = chosen.columns(x)
    if columns and isinstance(index, tuple) and index[0] == slice(None) and isinstance(index[-1], int):
        return columns[index[-1]]
    if (sliced := chosen.sliced(x, index)) is not NotImplemented:
        return sliced
    if (row := one_of(chosen, x, index)) is not NotImplemented:
        return row
    number = chosen.round_number(index)
    if number is not None and x.dim():
        return chosen.loops.item(x, number, with_dim=isinstance(index, Tensor) and index.dim() == 1)
    if x.dim() and (known := chosen.index(index)) is not None:
        return chosen.take(x[known[0]], known[1])
    rows = chosen.rows_in(index)
    if rows is None or (seen := rows.seen(x)) is None:
        return NotImplemented
    found = chosen.take(seen, rows.mask, rows.at)
    if not rows.rest or found is NotImplemented:
        return found
    return found[(*(slice(None),) * (rows.at + 1), *rows.rest)]


def _setitem(chosen: Choosing, x: Tensor, index: Any, value: Any) -> Any:
    rows = chosen.rows_in(index)
    if rows is None or rows.at or rows.new or rows.rest:
        return NotImplemented
    count = compat.count_recorded()
    found = chosen.write(x, rows.mask, value) if rows.is_plain else chosen.write_apart(x, rows, value)
    return found if found is NotImplemented else chosen.put(x, found, count)


def _index_add(chosen: Choosing, x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Any:
    if not dim and (known := chosen.index(index)) is not None and source.shape[:1] == index.shape:
        mask = known[1].reshape(-1, *(1,) * (source.dim() - 1))
        return x.index_add(0, known[0], torch.where(mask, SPREAD(source, known[1]), 0).to(source.dtype), alpha=alpha)
    rows = None if dim % max(1, x.dim()) else chosen.rows_in(index)
    return NotImplemented if rows is None else chosen.add(x, rows, source if alpha == 1 else source * alpha)


def _index_add_(chosen: Choosing, x: Tensor, *given: Any, **named: Any) -> Any:
    count = compat.count_recorded()
    found = _index_add(chosen, x, *given, **named)
    return found if found is NotImplemented else chosen.put(x, found, count)


def _scatter_add(chosen: Choosing, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Any:
    """Rows that are added by indices that all of a row have."""
    rows = chosen.repeated(index) if not dim and index.shape == source.shape else None
    return NotImplemented if rows is None else _index_add(chosen, x, 0, rows, source)


def _scatter_add_(chosen: Choosing, x: Tensor, *given: Any, **named: Any) -> Any:
    count = compat.count_recorded()
    found = _scatter_add(chosen, x, *given, **named)
    return found if found is NotImplemented else chosen.put(x, found, count)


def _scatter_reduce(
    chosen: Choosing, x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    return _scatter_add(chosen, x, dim, index, src) if reduce == "sum" and include_self else NotImplemented


def _scatter_reduce_(chosen: Choosing, x: Tensor, *given: Any, **named: Any) -> Any:
    count = compat.count_recorded()
    found = _scatter_reduce(chosen, x, *given, **named)
    return found if found is NotImplemented else chosen.put(x, found, count)


def _index_put_(chosen: Choosing, x: Tensor, index: Any, value: Tensor, accumulate: bool = False) -> Any:
    if not accumulate:
        return _setitem(chosen, x, tuple(index), value)
    rows, count = chosen.rows_in(tuple(index)), compat.count_recorded()
    if rows is None or rows.at or rows.new or rows.rest:
        return NotImplemented
    found = chosen.add(x, rows, value)
    return found if found is NotImplemented else chosen.put(x, found, count)


def _cat(chosen: Choosing, tensors: Any, dim: int = 0, **named: Any) -> Any:
    return NotImplemented if named else chosen.join(tensors, dim)


def _split(chosen: Choosing, x: Tensor, sizes: Any, dim: int = 0) -> Any:
    """Rows that a mask chooses, of which each part has a number of rows that is known."""
    if not isinstance(sizes, list | tuple) or x.shape[dim] not in chosen.within.masks:
        return NotImplemented
    found, start = [], 0
    for size in sizes:
        found.append(chosen.sliced(x, (*(slice(None),) * (dim % x.dim()), slice(start, start + size))))
        start += size
    return NotImplemented if any(each is NotImplemented for each in found) else tuple(found)


def _masked_scatter(chosen: Choosing, x: Tensor, mask: Tensor, source: Tensor) -> Any:
    known = chosen.broadcast_of(mask, source.shape[0]) if source.dim() and mask.dim() == x.dim() else None
    return NotImplemented if known is None else chosen.write(x, known, source)


def _masked_scatter_(chosen: Choosing, x: Tensor, mask: Tensor, source: Tensor) -> Any:
    count = compat.count_recorded()
    found = _masked_scatter(chosen, x, mask, source)
    return found if found is NotImplemented else chosen.put(x, found, count)


def _masked_select(chosen: Choosing, x: Tensor, mask: Tensor) -> Any:
    """Whole numbers apart: labels that are put one after the other, of which `ctc_loss` is given the lengths."""
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    return chosen.take(x.expand(shape), mask.expand(shape)) if x.is_floating_point() else NotImplemented


def _nonzero(chosen: Choosing, x: Tensor, *, as_tuple: bool = False) -> Any:
    found = chosen.places(x if x.dtype == torch.bool else x != 0) if x.dim() else NotImplemented
    return found if as_tuple or found is NotImplemented else chosen.stack(found)


def _flattened(chosen: Choosing, x: Tensor, *sizes: Any, **named: Any) -> Any:
    """The places of a mask of one dim, which stand in a column."""
    columns = chosen.columns(x)
    return columns[0] if len(columns) == 1 and sizes in ((), (-1,), (1,)) and not named else NotImplemented


def _viewed(chosen: Choosing, x: Tensor, *sizes: Any, **named: Any) -> Any:
    found = _flattened(chosen, x, *sizes, **named)
    return seen_apart(chosen, x, *sizes, **named) if found is NotImplemented else found


def _where(chosen: Choosing, condition: Tensor, *others: Any, **named: Any) -> Any:
    return NotImplemented if others or named else _nonzero(chosen, condition, as_tuple=True)


def _select(chosen: Choosing, x: Tensor, dim: int, index: Any) -> Any:
    number = chosen.round_number(index)
    if number is None or dim or not x.dim():
        return one_of(chosen, x, (*(slice(None),) * (dim % max(1, x.dim())), index))
    return chosen.loops.item(x, number, with_dim=False)


def _index_select(chosen: Choosing, x: Tensor, dim: int, index: Tensor) -> Any:
    rows = chosen.rows_in((*(slice(None),) * (dim % x.dim()), index))
    seen = None if rows is None else rows.seen(x)
    return NotImplemented if rows is None or seen is None else chosen.take(seen, rows.mask, rows.at)


_FUNCTIONS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    Tensor.__getitem__: _getitem,
    Tensor.__setitem__: _setitem,
    torch.cat: _cat,
    torch.concat: _cat,
    torch.split: _split,
    Tensor.split: _split,
    torch.masked_select: _masked_select,
    Tensor.masked_select: _masked_select,
    torch.masked_scatter: _masked_scatter,
    Tensor.masked_scatter: _masked_scatter,
    Tensor.masked_scatter_: _masked_scatter_,
    torch.nonzero: _nonzero,
    Tensor.nonzero: _nonzero,
    torch.argwhere: _nonzero,
    Tensor.argwhere: _nonzero,
    Tensor.squeeze: _flattened,
    Tensor.flatten: _flattened,
    Tensor.view: _viewed,
    Tensor.reshape: _viewed,
    torch.reshape: _viewed,
    torch.unflatten: unflattened,
    Tensor.unflatten: unflattened,
    torch.unique_consecutive: runs_of,
    Tensor.unique_consecutive: runs_of,
    Tensor.__iter__: _one_by_one,
    Tensor.unbind: _one_by_one,
    torch.unbind: _one_by_one,
    torch.where: _where,
    Tensor.item: _number_of,
    Tensor.__int__: _number_of,
    Tensor.__index__: _number_of,
    Tensor.__format__: _formatted,
    torch.index_add: _index_add,
    Tensor.index_add: _index_add,
    Tensor.index_add_: _index_add_,
    Tensor.index_put_: _index_put_,
    torch.scatter_add: _scatter_add,
    Tensor.scatter_add: _scatter_add,
    Tensor.scatter_add_: _scatter_add_,
    torch.scatter_reduce: _scatter_reduce,
    Tensor.scatter_reduce: _scatter_reduce,
    Tensor.scatter_reduce_: _scatter_reduce_,
    torch.select: _select,
    Tensor.select: _select,
    torch.index_select: _index_select,
    Tensor.index_select: _index_select,
}
"""What chooses, by functions of torch."""


class Chosen(Choosing):
    """While a model is traced: masks that nobody knows choose rows."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self._calls += bool(self._known)
        if self._calls > MOST_CALLS:
            raise looped()
        instead = _FUNCTIONS.get(func)
        found = NotImplemented if instead is None else instead(self, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if found is NotImplemented else found
