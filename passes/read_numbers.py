"""Numbers that Python reads of tensors: while a model is traced, tensors of no dims that stand for them.

    for n in counts.tolist():                      n, a tensor [] of int64
        rows = x[start : start + n]                    a slice between two tensors (`ragged.py`)
        start += n
    scale = x.abs().max().item();  x / scale           x / scale, which has no gradient
    torch.tensor([x.max(), 1.0])                       a stack of both, which has no gradient
    h[rows, columns]                                   of lists of them: a stack each
    h[:, scores.argmax()]                              the one column that is chosen

They are what Python's numbers would be: of int64 or float64, beside other tensors of these tensors' types, and without
a gradient. What asks for more than arithmetic (a size, a branch, a format) meets a tensor whose value nobody knows.
Numbers that forward returns are outputs of the program, read where it is over: `float(x)` and `int(x)`, too, where the
source says that nothing else is done with them.
"""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.base.errors import AutoparError
from autopar.base.torch_compat import tracing as compat
from autopar.passes.checks import frame_of_model
from autopar.passes.source import is_only_added, is_only_handed_out

MOST_RETURNED = 64
"""Numbers that a forward returns."""
MOST = 4096
"""Elements of a tensor whose numbers are read one by one: as many groups, not tokens."""
_DIVIDING = frozenset({"div", "true_divide", "divide", "__truediv__", "__rtruediv__", "__rdiv__", "__div__"})
_ARITHMETIC = _DIVIDING | frozenset(
    {"add", "sub", "mul", "neg", "subtract", "multiply", "floor_divide", "remainder", "pow", "abs", "rsub", "__add__"}
    | {"__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__floordiv__", "__rfloordiv__", "__mod__", "__neg__"}
    | {"__rmod__", "__pow__", "__rpow__", "__abs__", "__pos__"}
)
_IN_PLACE: Mapping[str, Callable[..., Any]] = {
    "__iadd__": torch.add, "__isub__": torch.sub, "__imul__": torch.mul, "__itruediv__": torch.div,
    "add_": torch.add, "sub_": torch.sub, "mul_": torch.mul, "div_": torch.div, "__ifloordiv__": torch.floor_divide,
    "floor_divide_": torch.floor_divide, "__imod__": torch.remainder, "remainder_": torch.remainder,
}  # fmt: skip
"""What changes a tensor: a number is another one then, and stays what it was for others."""


class Numbers(TorchFunctionMode):
    """While a model is traced: what Python reads of values is a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[int, weakref.ref[Tensor]] = {}
        self._plain: dict[int, tuple[int | float, Tensor]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READ and not kwargs and len(args) == 1 and self._is_read(args[0], func):
            return _READ[func](self, args[0])
        if func in _PLAIN and self._is_read(args[0], Tensor.item) and args[0].numel() == 1:
            frame = frame_of_model(sys._getframe(1), own=True)
            name = "float" if func is Tensor.__float__ else "int"
            if frame is not None and (is_only_handed_out(frame, name) or is_only_added(frame, name)):
                return self._as_plain(args[0], func)
        if func in _LISTING and (listed := self._listed(func, args, kwargs)) is not None:
            return listed
        if func in _INDEXING:
            indexed, places, *rest = list(args)
            if isinstance(places, tuple):
                args = (indexed, tuple([self._stacked(each) for each in places]), *rest)
        if func is torch.select and len(args) == 3 and not kwargs and _is_place(args[2]):
            return self._selected(*args)
        name = getattr(func, "__name__", "")
        if name == "__format__" and self.is_number(args[0]):
            raise AutoparError(
                "forward() writes down a number that it reads of a tensor, which nobody has when a program is made",
                remedy="return the tensor, and print it outside of forward()",
            )
        if not self._numbers or not any(self.is_number(each) for each in args):
            return func(*args, **kwargs)
        func = _IN_PLACE.get(name, func) if self.is_number(args[0]) else func
        others = [each for each in args if isinstance(each, Tensor) and not self.is_number(each)]
        if others:
            return func(*(self._beside(each, others) for each in args), **kwargs)
        if (name not in _ARITHMETIC and name not in _IN_PLACE) or kwargs:
            return func(*args, **kwargs)
        if name in _DIVIDING or func is torch.div or any(isinstance(each, float) for each in args):
            args = tuple([each.to(torch.float64) if isinstance(each, Tensor) else each for each in args])
        return self._number(func(*args))

    def is_number(self, value: Any) -> bool:
        """Whether a tensor stands for a number of Python's."""
        held = self._numbers.get(id(value)) if isinstance(value, Tensor) else None
        return held is not None and held() is value

    def handed_out(self, results: Any) -> Any:
        """What a forward returns, its numbers marked as such: a program returns the tensors, of which they are read.

        Raises:
            AutoparError: there are more than `MOST_RETURNED`.
        """
        leaves, spec = compat.tree_flatten(results)
        read = [each if self.is_number(each) else self.made_plain(each) for each in leaves]
        count = sum(each is not None for each in read)
        if count > MOST_RETURNED:
            raise AutoparError(
                f"forward() returns {count} numbers that it reads of tensors (.tolist()): a program returns "
                f"{MOST_RETURNED} at most",
                remedy="return the tensor, predictions.detach(), and read its numbers where they are used",
            )
        marked = [x if number is None else compat.ReadNumber(number) for x, number in zip(leaves, read, strict=True)]
        return compat.tree_unflatten(marked, spec) if count else results

    def _number(self, value: Tensor) -> Tensor:
        wide = torch.float64 if value.is_floating_point() else torch.int64
        value = value.to(wide).reshape(())
        self._numbers[id(value)] = weakref.ref(value)
        return value

    def _is_read(self, x: Tensor, func: Callable[..., Any]) -> bool:
        """Whether a traced tensor has numbers that nobody knows; which more than one number may be that count."""
        whole = not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
        if x.numel() > MOST or not (whole or (func is Tensor.item and x.is_floating_point())):
            return False
        return compat.node_of(x) is not None and not compat.is_unknown(x) and compat.value_from(x, {}) is None

    def _beside(self, value: Any, others: Sequence[Tensor]) -> Any:
        """A number as an operand beside other tensors, whose type decides."""
        if not self.is_number(value):
            return value
        floating = [each.dtype for each in others if each.is_floating_point() or each.is_complex()]
        if value.is_floating_point():
            return value.to(floating[0] if floating else torch.get_default_dtype())
        whole = [each.dtype for each in others if each.dtype != torch.bool]
        return value.to(floating[0]) if floating else value.to(whole[0]) if whole else value

    def _listed(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
        """What torch makes of a list with traced tensors in it, of which it reads the numbers; None of other lists."""
        *liked, data = args[: 2 if func is Tensor.new_tensor else 1] or (None,)
        shape, leaves = _spread(data)
        tensors = [each for each in leaves if isinstance(each, Tensor)]
        if shape is None or not shape or len(leaves) > MOST or not any(map(compat.is_stand_in, tensors)):
            return None
        if len(args) > 1 + len(liked) or kwargs.keys() - {"dtype", "device", "requires_grad", "pin_memory"}:
            return None
        dtype = kwargs.get("dtype") or (liked[0].dtype if liked else None)
        if dtype is None:
            dtype = functools.reduce(torch.promote_types, map(self._listed_dtype, leaves))
        numbers = [
            each.detach().reshape(()).to(dtype) if isinstance(each, Tensor) else torch.scalar_tensor(each, dtype=dtype)
            for each in leaves
        ]
        return torch.stack(numbers).reshape(shape)

    def _stacked(self, index: Any) -> Any:
        """One of the dims' indices: a list with traced tensors in it is the tensor that torch makes of it."""
        listed = self._listed(torch.tensor, (index,), {}) if isinstance(index, list | tuple) else None
        return index if listed is None or listed.is_floating_point() or listed.is_complex() else listed

    def _selected(self, x: Tensor, dim: int, place: Tensor) -> Tensor:
        """The row, or column, that a traced whole number says: torch.export writes `x[place]` so, with the tensor."""
        row = place.detach().reshape(1)
        return x.index_select(dim, torch.where(row < 0, row + x.shape[dim], row)).squeeze(dim)

    def _listed_dtype(self, value: Any) -> torch.dtype:
        if isinstance(value, Tensor) and not (self.is_number(value) and value.is_floating_point()):
            return value.dtype
        if isinstance(value, complex):
            return torch.get_default_dtype().to_complex()
        if isinstance(value, Tensor | float):
            return torch.get_default_dtype()
        return torch.bool if isinstance(value, bool) else torch.int64

    def _as_plain(self, x: Tensor, func: Callable[..., Any]) -> int | float:
        """`float(x)`, `int(x)`: a number like no other, which is found again in what forward returns."""
        number = math.nan if func is Tensor.__float__ else _MANY + len(self._plain)
        number = number + 0  # an object of its own
        value = x.detach().reshape(())
        value = value.to(torch.float64) if func is Tensor.__float__ else value.trunc().to(torch.int64)
        self._plain[id(number)] = number, value
        return number

    def is_made_plain(self, value: int | float) -> bool:
        """Whether a number is one that `float(x)` or `int(x)` gave."""
        return self.made_plain(value) is not None

    def made_plain(self, value: Any) -> Tensor | None:
        """The tensor of a number that `float(x)` or `int(x)` gave; None of others."""
        held = self._plain.get(id(value))
        return held[1] if held is not None and held[0] is value else None

    def whole(self, x: Tensor) -> Tensor | None:
        """As `int(x)`; None of what nobody reads numbers of here."""
        if self.is_number(x) and x.dtype == torch.int64:
            return x
        is_read = x.numel() == 1 and (self.is_number(x) or self._is_read(x, Tensor.item))
        return self._number(x.detach().trunc().to(torch.int64)) if is_read else None

    def item(self, x: Tensor) -> Tensor:
        """As `x.item()`."""
        return self._number(x.detach())

    def tolist(self, x: Tensor) -> Any:
        """As `x.tolist()`."""
        return [self.tolist(each) for each in x.unbind(0)] if x.dim() else self._number(x.detach())

    def numpy(self, x: Tensor) -> np.ndarray[Any, Any]:
        """As `x.numpy()`: an array of objects."""
        flat = [self._number(each) for each in x.detach().reshape(-1).unbind(0)]
        found = np.empty(len(flat), dtype=object)
        for place, each in enumerate(flat):
            found[place] = each
        return found.reshape(tuple(x.shape))


def _is_place(value: Any) -> bool:
    """Whether it is a traced whole number."""
    whole = (torch.int64, torch.int32, torch.int16, torch.int8)
    return isinstance(value, Tensor) and not value.dim() and value.dtype in whole and compat.is_stand_in(value)


def _spread(data: Any) -> tuple[tuple[int, ...] | None, list[Any]]:
    """The shape of nested lists, and the numbers in them: Python's, and tensors of one element. None where they are
    something else.
    """
    if not isinstance(data, list | tuple):
        is_number = isinstance(data, Tensor) and data.numel() == 1
        return (() if is_number or type(data) in (bool, int, float, complex) else None), [data]
    parts = [_spread(each) for each in data]
    shapes = {shape for shape, _ in parts}
    shape = shapes.pop() if len(shapes) == 1 else None
    return None if shape is None else (len(data), *shape), [each for _, leaves in parts for each in leaves]


_LISTING = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
"""What makes a tensor of numbers in a list."""
_INDEXING = (Tensor.__getitem__, Tensor.__setitem__)
_MANY = 1 << 61
"""No small number, of which Python has one object each."""
_PLAIN = (Tensor.__float__, Tensor.__int__)
_READ: Mapping[Callable[..., Any], Callable[[Numbers, Tensor], Any]] = {
    Tensor.item: Numbers.item, Tensor.tolist: Numbers.tolist, Tensor.numpy: Numbers.numpy,
}  # fmt: skip
