"""Rows that a mask chooses, of which there are as many as its values say: traced by a size that nothing else has.

    F.cross_entropy(logits[labels != -100], labels[labels != -100])
    x[is_image] = self.project(x[is_image])

While `Chosen` is on, what a mask takes out of a tensor is `CHOSEN`, of a prime number of rows that stands for this mask
alone, and what is written where it is set `SPREAD`. `chosen_rows.py` then leaves all rows where they are. Numbers that
Python makes of that size would be in the program: so a model is traced for two such sizes, and has to say the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from autopar.base.errors import AutoparError
from autopar.base.torch_compat import tracing as compat
from autopar.base.torch_compat.values import lifted

FIRST, SECOND = 1_000_003, 2_000_003
"""Where the primes of two traces begin: no size of a model is one of them, nor one of the other trace."""

MOST_CALLS = 100_000
"""Of torch's functions, once a mask has chosen: what goes through rows one by one would not end."""

_LIBRARY = torch.library.Library("autopar_chosen", "DEF")
_LIBRARY.define("chosen(Tensor x, Tensor mask, int dim, int rows) -> Tensor")
_LIBRARY.define("spread(Tensor rows, Tensor mask) -> Tensor")
CHOSEN, SPREAD = torch.ops.autopar_chosen.chosen.default, torch.ops.autopar_chosen.spread.default
"""What a mask takes of x, whose dims from `dim` on it has; and rows back in their places, whatever lies elsewhere."""

_aten = torch.ops.aten
_CASTS = (_aten.to.dtype, _aten.to.device, _aten.to.dtype_layout, _aten.to.other, _aten._to_copy.default)
_COPIES = (_aten.clone.default, _aten.alias.default, _aten.detach.default, _aten.contiguous.default, *_CASTS)


@torch.library.register_fake("autopar_chosen::chosen")
def _(x: Tensor, mask: Tensor, dim: int, rows: int) -> Tensor:
    return x.new_empty((*x.shape[:dim], rows, *x.shape[dim + mask.dim() :]))


@torch.library.register_fake("autopar_chosen::spread")
def _(rows: Tensor, mask: Tensor) -> Tensor:
    return rows.new_empty((*mask.shape, *rows.shape[1:]))


class Said:
    """Numbers for what nodes of a graph say: equal for those that compute the same of the same.

    A mask that is repeated along dims behind its own says what it says without them.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._of: dict[fx.Node, int] = {}

    def __call__(self, node: fx.Node) -> int:
        waiting = [node]
        while waiting:
            last = waiting[-1]
            missing = [] if last in self._of or not _is_plain(last) else self._missing(last)
            if missing:
                waiting += missing
                continue
            if last not in self._of:
                self._of[last] = self._number(last)
            waiting.pop()
        return self._of[node]

    def _missing(self, node: fx.Node) -> list[fx.Node]:
        return [each for each in node.all_input_nodes if each not in self._of]

    def _number(self, node: fx.Node) -> int:
        if not _is_plain(node):
            return self._numbers.setdefault(node, len(self._numbers))
        operands = node.all_input_nodes
        if _repeats_behind(node) or (node.target in _COPIES and _dtype(node) == _dtype(operands[0])):
            return self._of[operands[0]]
        alone = len(operands) == 1 and torch.Tag.pointwise in getattr(node.target, "tags", ())

        def said(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return "value", self._of[value], () if alone else _shape(value)
            if isinstance(value, list | tuple):
                return tuple(map(said, value))
            return type(value), value

        key = (node.target, said(node.args), tuple((name, said(value)) for name, value in node.kwargs.items()))
        try:
            return self._numbers.setdefault(key, len(self._numbers))
        except TypeError:  # an argument that cannot be looked up
            return self._numbers.setdefault(node, len(self._numbers))


def _is_plain(node: fx.Node) -> bool:
    """Whether a node gives the same for the same, and writes nothing."""
    tags = getattr(node.target, "tags", ())
    return node.op == "call_function" and torch.Tag.nondeterministic_seeded not in tags and not compat.is_mutable(node)


def _repeats_behind(node: fx.Node) -> bool:
    """Whether a node has its operand's elements, each as often as dims say that come behind all others."""
    if node.target is _aten.unsqueeze.default:
        return node.args[1] in (-1, len(_shape(node.args[0])))
    if node.target in (_aten.expand.default, _aten.expand_as.default):
        before, after = _shape(node.args[0]), _shape(node)
        kept = next((place for place, (a, b) in enumerate(zip(before, after)) if a != b), len(before))
        return len(before) == len(after) and all(size == 1 for size in before[kept:])
    return False


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(getattr(node.meta.get("val"), "shape", ()))


def _dtype(node: fx.Node) -> Any:
    return getattr(node.meta.get("val"), "dtype", None)


class Chosen(TorchFunctionMode):
    """While a model is traced: masks that nobody knows choose rows. used: whether one did."""

    def __init__(self, first: int = FIRST) -> None:
        super().__init__()
        self.used = False
        self._next = first
        self._calls = 0
        self._said = Said()
        self._known: dict[tuple[int, tuple[int, ...]], tuple[Tensor, int]] = {}
        self._places: dict[int, tuple[Tensor, Tensor, int]] = {}
        self._stacked: dict[int, tuple[Tensor, tuple[Tensor, ...]]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self._calls += bool(self._known)
        if self._calls > MOST_CALLS:
            raise _looped()
        instead = _FUNCTIONS.get(func)
        found = NotImplemented if instead is None else instead(self, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if found is NotImplemented else found

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
        self.used = True
        key = (self._said(node), tuple(mask.shape))
        if key not in self._known:
            self._known[key] = mask, self._next
            self._next = _prime_after(self._next)
        return self._known[key][1]

    def take(self, x: Tensor, mask: Tensor, dim: int = 0) -> Any:
        """The rows of x, along its dims from `dim` on, that a mask chooses; NotImplemented where it has others.

        Which those are is known where Python's own numbers say the mask.
        """
        if tuple(x.shape[dim : dim + mask.dim()]) != tuple(mask.shape):
            return NotImplemented
        places = compat.known_value(mask, _places_of) if mask.dtype == torch.bool and mask.dim() else None
        if places is not None:
            flat = x.flatten(dim, dim + mask.dim() - 1)
            return flat.clone() if len(places) == mask.numel() else flat.index_select(dim, lifted(places))
        rows = self.number(mask)
        return NotImplemented if rows is None else CHOSEN(x, mask, dim, rows)

    def write(self, x: Tensor, mask: Tensor, value: Any) -> Any:
        """x with such rows where a mask is set."""
        rest = tuple(x.shape[mask.dim() :])
        if not isinstance(value, Tensor) or tuple(x.shape[: mask.dim()]) != tuple(mask.shape):
            return NotImplemented
        rows = self.number(mask) if tuple(value.shape[1:]) == rest and value.dim() == len(rest) + 1 else None
        if rows is None or value.shape[0] != rows:
            return NotImplemented
        place = mask.reshape(*mask.shape, *(1,) * len(rest))
        return torch.where(place, SPREAD(value, mask).to(x.dtype), x)

    def places(self, mask: Tensor) -> Any:
        """The indices, one a dim, of where a mask is set."""
        rows, shape = self.number(mask), tuple(mask.shape)
        if rows is None:
            return NotImplemented
        found = []
        for dim, size in enumerate(shape):
            counted = torch.arange(size, device=mask.device).reshape(-1, *(1,) * (len(shape) - dim - 1)).expand(shape)
            index = CHOSEN(counted, mask, 0, rows)
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

    def mask_in(self, index: Any) -> tuple[Tensor, int, tuple[Any, ...]] | None:
        """The one mask of an index, the dim that it begins at, and what else is to be taken of its rows; None where
        rows are not chosen so.
        """
        parts = list(index) if isinstance(index, tuple) else [index]
        at = next((place for place, each in enumerate(parts) if isinstance(each, Tensor)), None)
        if at is None or any(each != slice(None) for each in parts[:at]):
            return None
        mask, used = parts[at], 1
        if id(mask) in self._places:
            _, mask, _ = self._places[id(mask)]
            used = mask.dim()
            held = [self._places.get(id(each)) for each in parts[at : at + used]]
            if [None if each is None else (each[1] is mask, each[2]) for each in held] != [
                (True, d) for d in range(used)
            ]:
                return None
        rest = parts[at + used :]
        whole = all(each is Ellipsis or isinstance(each, slice) or (isinstance(each, int) and not at) for each in rest)
        if not whole or mask.dtype != torch.bool:
            return None
        return mask, at, tuple(rest) if any(each not in (Ellipsis, slice(None)) for each in rest) else ()

    def broadcast_of(self, mask: Tensor, rows: int) -> Tensor | None:
        """The mask of so many rows that a mask of elements repeats along the dims behind."""
        node = compat.node_of(mask)
        for (said, _), (known, number) in self._known.items():
            if number == rows and node is not None and said == self._said(node) and known.dim() < mask.dim():
                return known
        return None


def _looped() -> AutoparError:
    return AutoparError(
        "forward() goes through the rows that a mask chooses one by one: how many there are, values say",
        remedy="work on all rows and mark those that count with a mask (torch.where), or choose them outside of "
        "forward()",
    )


def _one_by_one(chosen: Chosen, x: Tensor, dim: int = 0) -> Any:
    """Raises an AutoparError where there are as many as a mask chooses."""
    if x.dim() and any(x.shape[dim] == rows for _, rows in chosen.known()):
        raise _looped()
    return NotImplemented


def _places_of(mask: Tensor) -> Tensor:
    """Where a mask is set, counted over all of its dims."""
    return mask.flatten().nonzero().flatten()


def _prime_after(number: int) -> int:
    while True:
        number += 2
        if all(number % divisor for divisor in range(3, math.isqrt(number) + 1, 2)):
            return number


def _getitem(chosen: Chosen, x: Tensor, index: Any) -> Any:
    columns = chosen.columns(x)
    if columns and isinstance(index, tuple) and index[0] == slice(None) and isinstance(index[-1], int):
        return columns[index[-1]]
    at = chosen.mask_in(index)
    if at is None:
        return NotImplemented
    mask, dim, rest = at
    found = chosen.take(x, mask, dim)
    return found[(*(slice(None),) * (dim + 1), *rest)] if rest and found is not NotImplemented else found


def _setitem(chosen: Chosen, x: Tensor, index: Any, value: Any) -> Any:
    at = chosen.mask_in(index)
    if at is None or at[1] or at[2]:
        return NotImplemented
    found = chosen.write(x, at[0], value)
    return found if found is NotImplemented else x.copy_(found)


def _masked_scatter(chosen: Chosen, x: Tensor, mask: Tensor, source: Tensor) -> Any:
    known = chosen.broadcast_of(mask, source.shape[0]) if source.dim() and mask.dim() == x.dim() else None
    return NotImplemented if known is None else chosen.write(x, known, source)


def _masked_scatter_(chosen: Chosen, x: Tensor, mask: Tensor, source: Tensor) -> Any:
    found = _masked_scatter(chosen, x, mask, source)
    return found if found is NotImplemented else x.copy_(found)


def _masked_select(chosen: Chosen, x: Tensor, mask: Tensor) -> Any:
    """Whole numbers apart: labels that are put one after the other, of which `ctc_loss` is given the lengths."""
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    return chosen.take(x.expand(shape), mask.expand(shape)) if x.is_floating_point() else NotImplemented


def _nonzero(chosen: Chosen, x: Tensor, *, as_tuple: bool = False) -> Any:
    found = chosen.places(x if x.dtype == torch.bool else x != 0) if x.dim() else NotImplemented
    return found if as_tuple or found is NotImplemented else chosen.stack(found)


def _flattened(chosen: Chosen, x: Tensor, *sizes: Any, **named: Any) -> Any:
    """The places of a mask of one dim, which stand in a column."""
    columns = chosen.columns(x)
    return columns[0] if len(columns) == 1 and sizes in ((), (-1,), (1,)) and not named else NotImplemented


def _where(chosen: Chosen, condition: Tensor, *others: Any, **named: Any) -> Any:
    return NotImplemented if others or named else _nonzero(chosen, condition, as_tuple=True)


def _index_select(chosen: Chosen, x: Tensor, dim: int, index: Tensor) -> Any:
    at = chosen.mask_in(index)
    return NotImplemented if at is None else chosen.take(x, at[0], dim % x.dim())


_FUNCTIONS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    Tensor.__getitem__: _getitem,
    Tensor.__setitem__: _setitem,
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
    Tensor.view: _flattened,
    Tensor.reshape: _flattened,
    Tensor.__iter__: _one_by_one,
    Tensor.unbind: _one_by_one,
    torch.unbind: _one_by_one,
    torch.where: _where,
    torch.index_select: _index_select,
    Tensor.index_select: _index_select,
}
"""What chooses, by functions of torch."""
