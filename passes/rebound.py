"""`x.data = value` in a forward: x lies where the value does from then on. In a program x is written instead.

    old = self.mean.data                    lies where the mean lay: eager keeps it, the program's would be the new one
    self.mean.data = new                    a copy of what is new
    new.add_(1)                             eager's mean is one more, too

So what can tell both apart is refused: what lay in x's memory is used afterwards, what is written into the memory of
the value, or into x where the value is used afterwards, and values that are the model's own, which others write between
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.base.errors import AutoparError
from autopar.base.torch_compat import tracing as compat

_Line = Callable[[], "str | None"]
"""The model's line that is run."""
_ASKING = frozenset({"size", "stride", "storage_offset", "dim", "numel", "is_contiguous", "untyped_storage", "__get__"})
"""What asks how a tensor lies, as what traces does of all, or gives a view of it."""
_WRITING = (Tensor.__setitem__, Tensor.__iadd__, Tensor.__isub__, Tensor.__imul__, Tensor.__itruediv__)


@dataclass(slots=True)
class _Set:
    """A tensor, what it was given, and what was recorded before. writes: whether x was written to afterwards."""

    x: Tensor
    value: Tensor
    before: frozenset[fx.Node]
    writes: bool = False


class Rebound:
    """What forward has assigned to `.data` in a trace."""

    def __init__(self) -> None:
        self._sets: list[_Set] = []

    def set(self, x: Tensor, value: Any, held: Iterable[Tensor], line: _Line) -> None:
        """Write to x what it is given.

        Raises:
            AutoparError: x has a gradient, or is a parameter; the value is of another shape or type, or held by the
                model.
        """
        alike = isinstance(value, Tensor) and value.shape == x.shape and value.dtype == x.dtype
        if not alike or x.requires_grad:
            raise AutoparError(
                "forward() assigns to the .data of a tensor that has a gradient, or what is of another shape or dtype, "
                "which no program does",
                where=line(), values=_values(x),
                remedy="update it outside of forward(), between steps, or keep it as a buffer",
            )  # fmt: skip
        if any(_lie_together(value, each) for each in held):
            raise _tells_apart(x, "a buffer or a parameter, which may be written between steps", line)
        self._sets.append(_Set(x, value, frozenset(compat.recorded_since(0))))
        x.copy_(value)

    def look_at(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], line: _Line) -> None:
        """Look at what is called.

        Raises:
            AutoparError: it is given, or writes, what tells a copy from the memory itself.
        """
        if not self._sets:
            return  # asked of every function that a forward calls
        if getattr(func, "__name__", "") in _ASKING:
            return
        given = [leaf for leaf in compat.tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        written = args[0] if args and _writes(func) else kwargs.get("out")
        for each in self._sets if given else ():
            if any(y is not each.x and _lie_together(y, each.x) and compat.node_of(y) in each.before for y in given):
                raise _tells_apart(each.x, "something else, and what it was is used", line)
            of_value = [y for y in given if _lie_together(y, each.value)]
            if of_value and (each.writes or any(y is written for y in of_value)):
                raise _tells_apart(each.x, "what is written, or used as it was before x is written", line)
            each.writes = each.writes or (isinstance(written, Tensor) and _lie_together(written, each.x))


def _writes(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return func in _WRITING or (name.endswith("_") and not name.endswith("__"))


def _lie_together(one: Any, other: Tensor) -> bool:
    """Whether two tensors have one memory."""
    if not isinstance(one, Tensor) or one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _tells_apart(x: Tensor, what: str, line: _Line) -> AutoparError:
    return AutoparError(
        f"forward() makes the .data of a buffer {what}: eager has both in one memory, a program has copies",
        where=line(), values=_values(x),
        remedy="write to the buffer by .copy_(), and keep what it was by .clone()",
    )  # fmt: skip


def _values(x: Tensor) -> str:
    return f"a tensor of shape {tuple(x.shape)}"
