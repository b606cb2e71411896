"""Sequences that are packed, of which there are as many steps as lengths say: rows that a mask chooses.

    packed = pack_padded_sequence(x, lengths, …)      packed.data: rows of x[B, T, D] that arange(T) < lengths chooses
    y, last = self.lstm(packed)                       of all steps, by operators that end each row at its length
    y, _ = pad_packed_sequence(y)                     all of them, 0 where none is chosen

So `data` is worked on as such rows are (`chosen_rows.py`), rows of the batch stay where they are and split, and nothing
is sorted: the order of lengths (`enforce_sorted=False`), which the kernels want, is that of the batch. Steps lie in
another order than eager's, so that nothing may ask for some of them by their place. What is as long as the longest
sequence is taken to be as long as what was packed (`usual.py`), where no `total_length` says how long it is. Lengths
that Python's own numbers say are known.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules import rnn as layers
from torch.nn.utils.rnn import invert_permutation, pack_padded_sequence, pad_packed_sequence
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.base.errors import AutoparError
from autopar.base.torch_compat import tracing as compat
from autopar.base.torch_compat.values import lifted
from autopar.passes import recurrent
from autopar.passes.chosen_functions import Chosen
from autopar.passes.usual import Usual

_PACK, _PAD, _INVERT = (each.__code__ for each in (pack_padded_sequence, pad_packed_sequence, invert_permutation))


@dataclass(frozen=True, slots=True)
class _Sequences:
    """Which of x[B, T, …] are packed: those before lengths[B], mask[B, T]."""

    lengths: Tensor
    mask: Tensor

    @property
    def time(self) -> int:
        return self.mask.shape[1]


class Packed(TorchFunctionMode):
    """While forward is traced: sequences are packed by masks. To be entered last, so that it sees who calls."""

    def __init__(self, chosen: Chosen, usual: Usual) -> None:
        super().__init__()
        self._chosen, self._usual = chosen, usual
        self._sizes: MutableMapping[Tensor, _Sequences] = WeakTensorKeyDictionary()
        self._orders: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()

    def within(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A forward in which it is on."""

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                found = forward(*args, **kwargs)
            leaves, _ = compat.tree_flatten(found)
            if any(isinstance(each, Tensor) and each in self._orders for each in leaves):
                raise AutoparError(
                    "forward() returns the order in which sequences are packed, and a program packs them in no order",
                    remedy="return lengths.argsort(descending=True)",
                )
            return found

        return run

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        instead = _FUNCTIONS.get(func)
        found = NotImplemented if instead is None else instead(self, sys._getframe(1), func, *args, **kwargs)
        return func(*args, **kwargs) if found is NotImplemented else found

    # ----------------------------------------------------------------------------------------------- there and back

    def pack(self, frame: FrameType, _: Any, input: Tensor, lengths: Tensor, batch_first: bool) -> Any:
        """The steps that lengths say, and how many rows have each of them."""
        rows = input if batch_first else input.transpose(0, 1)
        with compat.no_torch_functions():  # whoever knows the lengths' values is not to know the mask
            ends = lengths.to(input.device)
            longest = compat.known_value(ends, lambda value: int(value.max()))
            rows = rows if longest is None else rows[:, :longest]
            # Said as nobody else says it: a mask of the model's own chooses rows in another order.
            mask = (torch.arange(rows.shape[1], device=input.device) - ends[:, None]).sign() == -1
            sizes = mask.sum(0)
        self._sizes[sizes] = _Sequences(ends, mask)
        data = self._taken(rows, mask)
        self._chosen.within.unordered.add(data.shape[0])
        return data, sizes

    def pad(
        self, frame: FrameType, _: Any, data: Tensor, sizes: Tensor, batch_first: bool, fill: float, total: int
    ) -> Any:
        """The rows of all steps, `fill` where they have none, and their lengths."""
        known = self._sizes.get(sizes)
        if known is None:
            return NotImplemented
        if frame.f_code is not _PAD or frame.f_locals.get("total_length") is None:
            self._takes_all(known, frame)
        padded = self._padded(data, known, fill)
        if total > known.time:
            padded = F.pad(padded, (*(0, 0) * (padded.dim() - 2), 0, total - known.time), value=fill)
        return padded if batch_first else padded.transpose(0, 1), known.lengths.clone()

    def layers(
        self, frame: FrameType, func: Callable[..., Any], data: Tensor, sizes: Any, hx: Any, params: Any, *options: Any
    ) -> Any:
        """Recurrent layers of packed sequences: what they give for each step, and the last states."""
        known = self._sizes.get(sizes) if isinstance(sizes, Tensor) else None
        if known is None:
            return NotImplemented
        x = self._padded(data, known, 0)
        y, *last = recurrent.of_lengths(func, x, known.lengths, hx, params, *options)
        return self._taken(y, known.mask), *last

    def _taken(self, rows: Tensor, mask: Tensor) -> Any:
        found = self._chosen.take(rows, mask)
        return rows[mask] if found is NotImplemented else found

    def _padded(self, data: Tensor, known: _Sequences, fill: float) -> Tensor:
        blank = torch.full((*known.mask.shape, *data.shape[1:]), fill, dtype=data.dtype, device=data.device)
        found: Any = self._chosen.write(blank, known.mask, data)
        if found is not NotImplemented:
            return found
        places = compat.known_value(known.mask, _places_of)
        if places is None or len(places) != len(data):
            raise AutoparError(
                "steps of packed sequences have become more or fewer, and a program has no such packed sequence",
                remedy="change what pad_packed_sequence gives",
            )
        return blank.flatten(0, 1).index_copy(0, lifted(places), data).unflatten(0, tuple(known.mask.shape))

    def _takes_all(self, known: _Sequences, frame: FrameType) -> None:
        if compat.known_value(known.lengths, len) is None:
            self._usual.takes_longest(known.lengths.max() == known.time, frame)

    # --------------------------------------------------------------------------------------------- what torch asks for

    def sort(self, frame: FrameType, _: Any, x: Tensor, *args: Any, **named: Any) -> Any:
        """The lengths, in the order of the batch."""
        if frame.f_code is not _PACK:
            return NotImplemented
        with compat.no_torch_functions():
            order = torch.arange(len(x), device=x.device)
        self._orders[order] = True
        return x, order

    def kept(self, frame: FrameType, func: Callable[..., Any], x: Tensor, *args: Any, **named: Any) -> Any:
        """Where it lies does not change what an order is."""
        if x not in self._orders:
            return NotImplemented
        found = func(x, *args, **named)
        self._orders[found] = True
        return found

    def inverted(self, frame: FrameType, func: Callable[..., Any], x: Tensor, dim: int, index: Tensor, src: Any) -> Any:
        """The order back is the order."""
        if frame.f_code is not _INVERT or index not in self._orders:
            return NotImplemented
        self._orders[x] = True
        return func(x, dim, index, src)

    def ordered(self, frame: FrameType, _: Any, x: Tensor, dim: int, index: Tensor) -> Any:
        """Rows in such an order."""
        return x.clone() if index in self._orders else NotImplemented

    def item(self, frame: FrameType, _: Any, x: Tensor, index: Any) -> Any:
        """Rows in such an order; how many rows have a first step, where a layer asks for it."""
        if isinstance(index, Tensor):
            return x.clone() if index in self._orders else NotImplemented
        known = self._sizes.get(x)
        if (
            known is not None
            and type(index) is int
            and not index
            and frame.f_globals.get("__name__") == layers.__name__
        ):
            return known.mask.shape[0]
        return NotImplemented

    def size(self, frame: FrameType, _: Any, x: Tensor, *args: Any) -> Any:
        """How long the longest is, which is asked for."""
        known = self._sizes.get(x) if self._sizes else None
        if known is not None and frame.f_code is not _PAD and not _of_torch(frame.f_code):
            self._takes_all(known, frame)
        return NotImplemented

    def tensor(self, frame: FrameType, _: Any, numbers: Any, **named: Any) -> Any:
        """Lengths, of numbers that are read of tensors."""
        if frame.f_code is not _PACK or not any(isinstance(each, Tensor) for each in numbers):
            return NotImplemented
        found = [each if isinstance(each, Tensor) else torch.scalar_tensor(each, dtype=torch.int64) for each in numbers]
        return torch.stack(found).to(torch.int64)


def _places_of(mask: Tensor) -> Tensor:
    return mask.flatten().nonzero().flatten()


def _of_torch(code: CodeType) -> bool:
    return code.co_filename == layers.__file__


_FUNCTIONS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    compat.pack_padded_sequence: Packed.pack,
    compat.pad_packed_sequence: Packed.pad,
    **dict.fromkeys(recurrent.KINDS, Packed.layers),
    torch.sort: Packed.sort,
    Tensor.to: Packed.kept,
    Tensor.cpu: Packed.kept,
    Tensor.scatter_: Packed.inverted,
    torch.index_select: Packed.ordered,
    Tensor.index_select: Packed.ordered,
    Tensor.__getitem__: Packed.item,
    Tensor.size: Packed.size,
    Tensor.shape.__get__: Packed.size,  # type: ignore[attr-defined]
    Tensor.__len__: Packed.size,
    torch.as_tensor: Packed.tensor,
}
"""What packs and unpacks, or asks something of what is packed."""
