"""Slices that begin where a tensor says, and whose length is known: rows by their places.

    ptr = int(self.queue_ptr)                          ptr, a tensor of the buffer's value in each step
    self.queue[:, ptr:ptr + n] = keys.T          →     self.queue[:, ptr + arange(n)] = keys.T
    self.queue_ptr[0] = (ptr + n) % size               self.queue_ptr[0] = (ptr + n) % size
    arange(past, past + n)                       →     arange(n) + past          the positions of new tokens

Eager cuts such a slice off where what it is of ends, and counts from behind where it begins before: that it does not
is taken for granted (`usual.py`). `int(x)`, which Python makes a number of its own whatever is done, is another
function in the files of such a model's code while it is traced (`whole_numbers`); only where a buffer that forward
changes says a number is that done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar.base.torch_compat import tracing as compat
from autopar.passes.read_numbers import Numbers
from autopar.passes.said import COPIES

_aten = torch.ops.aten
_WHOLE = (torch.int64, torch.int32)
_SAME = (*COPIES, _aten.reshape.default, _aten.view.default)
_ADDED = {_aten.add.Tensor: 1, _aten.add.Scalar: 1, _aten.sub.Tensor: -1, _aten.sub.Scalar: -1}


def length_of(index: slice) -> int | None:
    """How many rows a slice takes whose ends are tensors; None where that is not known, or no number above 0."""
    start, stop = _apart(index.start), _apart(index.stop)
    if index.step not in (None, 1) or start is None or stop is None or start[0] is not stop[0]:
        return None
    return stop[1] - start[1] if stop[1] > start[1] else None


def _apart(end: Any) -> tuple[fx.Node, int] | None:
    """What an end is computed of, and how far behind that it lies."""
    node: Any = compat.node_of(end) if isinstance(end, Tensor) else None
    far = 0
    while node is not None:
        added = _ADDED.get(node.target)
        if added is not None and type(node.args[1]) is int and node.kwargs.get("alpha", 1) == 1:
            far += added * node.args[1]
        elif node.target not in _SAME:
            return node, far
        node = node.args[0]
    return None


def counted_on(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """What `torch.arange` of these arguments counts, from a whole number that a tensor is to another one that is known
    to lie so far behind it; None of other arguments.
    """
    if len(args) != 2 or not kwargs.keys() <= {"dtype", "device"}:
        return None
    start, stop = args
    if not all(isinstance(each, Tensor) and each.dtype in _WHOLE and each.numel() == 1 for each in args):
        return None
    length = length_of(slice(start, stop))
    if length is None:
        return None
    places_from_0 = torch.arange(length, device=kwargs.get("device"))
    found = places_from_0 + start.reshape(()).to(places_from_0.device, torch.int64)
    return found if kwargs.get("dtype") is None else found.to(kwargs["dtype"])


@contextlib.contextmanager
def whole_numbers(numbers: Numbers, files: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Inside, `int(x)` of a traced tensor is a number that is read of it in the functions of these global names."""
    own = _of(numbers)
    before = [names.get("int", int) for names in files]
    had = ["int" in names for names in files]
    for names in files:
        names["int"] = own
    try:
        yield
    finally:
        for names, value, kept in zip(files, before, had, strict=True):
            if kept:
                names["int"] = value
            else:
                del names["int"]


def _of(numbers: Numbers) -> Any:
    class Kind(type):
        """`int`, to all that asks it but for its call."""

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, int)

        def __subclasscheck__(cls, kind: type) -> bool:
            return issubclass(kind, int)

        def __getattr__(cls, name: str) -> Any:
            return getattr(int, name)

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            found = numbers.whole(args[0]) if len(args) == 1 and isinstance(args[0], Tensor) else None
            return int(*args, **kwargs) if found is None else found

    return Kind("int", (), {})


def places(start: Tensor, length: int, size: int, take: Callable[[Tensor], None]) -> Tensor:
    """The rows of a slice of so many among `size`, from `start` on. take: is told what has to be so."""
    first = start.reshape(())
    take((first >= 0) & (first + length <= size))
    return (torch.arange(length, device=first.device) + first).clamp(0, size - 1)  # no index that fails by itself
