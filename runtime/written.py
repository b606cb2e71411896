"""What a script writes to tensors that lie in pieces and are seen whole: to each, however it is written.

ema["w"].lerp_(now["w"], 0.1);  torch._foreach_lerp_(ema, now, 0.1)      by element: in pieces, nothing is sent
ema["w"][0] = row;  torch.matmul(a, b, out=ema["w"])                     whole, and what was written is cut again
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from autopar.base.torch_compat.distributed import local_tensor, storage_key, tree_leaves, tree_map
from autopar.runtime import lost_writes

IN_PLACE = frozenset({"__iadd__", "__imul__", "__isub__", "__itruediv__", "__ipow__", "__setitem__"})
"""Beside the functions whose names end with an underscore."""
BY_ELEMENT = frozenset({
    "__iadd__", "__imul__", "__isub__", "__itruediv__", "add_", "addcdiv_", "addcmul_", "clamp_", "copy_", "div_",
    "fill_", "lerp_", "mul_", "neg_", "sub_", "zero_",
})  # fmt: skip
"""What writes each element by those of the operands that lie where it does; `_foreach_` before it of each of a list."""


def writes(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function's name, or an argument of it, says that it writes to a tensor."""
    return name in IN_PLACE or (name.endswith("_") and not name.endswith("__")) or kwargs.get("out") is not None


def by_element(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], held: Callable[[Any], tuple[Tensor, Any] | None]
) -> tuple[Sequence[Any], Mapping[str, Any]] | None:
    """The arguments with this rank's pieces in the place of tensors, where that is all that a function needs.

    held: a tensor's piece and how it lies, None of one that is not to be written in pieces.
    """
    listed = name.startswith("_foreach_")
    if name.removeprefix("_foreach_") not in BY_ELEMENT:
        return None
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    if any(held(each) is None for each in tensors):
        return None
    lists = [each for each in (*args, *kwargs.values()) if isinstance(each, list | tuple)] if listed else [tensors]
    if listed and len({len(each) for each in lists}) != 1:
        return None
    for beside in zip(*lists) if listed else lists:
        lie = [held(each) for each in beside if isinstance(each, Tensor)]
        if any(one is not None and other is not None and one[1] != other[1] for one, other in pairwise(lie)):
            return None

    def piece(x: Any) -> Any:
        found = held(x) if isinstance(x, Tensor) else None
        return x if found is None else found[0]

    return tree_map(piece, (args, kwargs))


class Taken:
    """Whole tensors that a function is given in the place of others, one for each memory that these lie in.

    whole: makes them. is_written: whether what is written to one is to be written to the other.
    """

    def __init__(self, whole: Callable[[Any], Any], is_written: Callable[[Any], bool]) -> None:
        self._whole, self._is_written = whole, is_written
        self._known: dict[Any, tuple[Any, Tensor, int]] = {}

    def __call__(self, x: Any) -> Any:
        """The whole tensor, the same for each that shares its memory: tied parameters have two names."""
        if not self._is_written(x):
            return self._whole(x)
        held = local_tensor(x)
        key = held.data_ptr() or id(x), tuple(held.shape), held.stride()
        if key not in self._known:
            value = self._whole(x)
            self._known[key] = x, value, _version(value)
        return self._known[key][1]

    def written(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, Tensor]]:
        """Those that a function with these arguments, whole tensors, has written to, each with its whole tensor."""
        named = tree_leaves((args[:1], kwargs.get("out"))) if writes(name, kwargs) else []
        for x, value, version in self._known.values():
            if _version(value) != version or (value.is_inference() and any(each is value for each in named)):
                yield x, value

    def watch(self, found: Any) -> None:
        """Tell of writes to what a function gave that lies in the memory of a whole tensor: nobody keeps that."""
        apart = ((value, local_tensor(x)) for x, value, _ in self._known.values())
        known = {storage_key(value): value for value, held in apart if storage_key(value) != storage_key(held)}
        for each in tree_leaves(found) if known else ():
            value = known.get(storage_key(each)) if type(each) is Tensor else None
            if value is not None and each is not value:
                lost_writes.watch_view(each, value)

    def back(self, value: Any) -> Any:
        """The tensor that a whole one stood for, where a function gives back what it was given."""
        return next((x for x, whole, _ in self._known.values() if whole is value), value)


def _version(x: Tensor) -> int:
    """How often it was written to; torch does not count that of tensors of `inference_mode`."""
    return 0 if x.is_inference() else x._version
