"""What differs from rank to rank in a program's arguments, as expressions instead of numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import tree_map
from autopar.ir.sharding import Sharding


class RankInt(int):
    """An int of rank 0 that is `base + Σ coefficient · index(axis)` on any rank.

    It may be added and multiplied; what a program would do with it otherwise depends on the rank.
    """

    base: int
    terms: Mapping[str, int]

    def __new__(cls, base: int, terms: Mapping[str, int]) -> RankInt:
        made = super().__new__(cls, base)
        made.base, made.terms = base, {axis: by for axis, by in terms.items() if by}
        return made

    def __add__(self, other: Any) -> RankInt:
        if isinstance(other, RankInt):
            axes = {*self.terms, *other.terms}
            return RankInt(
                self.base + other.base, {axis: self.terms.get(axis, 0) + other.terms.get(axis, 0) for axis in axes}
            )
        return RankInt(self.base + int(other), self.terms)

    __radd__ = __add__

    def __mul__(self, other: Any) -> RankInt:
        if isinstance(other, RankInt):
            _refuse()
        return RankInt(self.base * int(other), {axis: by * int(other) for axis, by in self.terms.items()})

    __rmul__ = __mul__

    def __neg__(self) -> RankInt:
        return self * -1

    def __sub__(self, other: Any) -> RankInt:
        return self + (-other)

    def __rsub__(self, other: Any) -> RankInt:
        return -self + other

    def _refused(self, *_: Any) -> NoReturn:
        _refuse()

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = _refused
    __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = __pow__ = __and__ = __or__ = __xor__ = _refused
    __hash__ = int.__hash__


class AxisSize(int):
    """How many ranks an axis has. What is divided by it is a term of what was divided."""

    axis: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = tree_map(lambda x: int(x) if isinstance(x, AxisSize) else x, (args, kwargs or {}))
        made = func(*plain[0], **plain[1])
        if getattr(func, "__name__", "") in _DIVISIONS and len(args) == 2 and isinstance(args[1], AxisSize):
            args[1].divided(args[0], made)
        return made

    divided: Callable[[Any, Any], None]
    """Told what was divided, and what came of it."""


_DIVISIONS = ("div", "true_divide", "__truediv__", "div_")


def _refuse() -> NoReturn:
    raise AutoparError(
        "the program decides by the number of its rank",
        remedy="every rank runs the same statements; what differs are offsets, sums and products of comm.index(axis)",
    )


class Places(list[Tensor]):
    """Of `comm.positions`: where the elements of a whole tensor lie that a rank holds, per dim."""

    shape: tuple[int, ...]
    sharding: Sharding


class Runs(list[int]):
    """Of `comm.starts`: where the runs of a dim of `size` begin that a rank holds."""

    size: int
    sharding: Sharding
