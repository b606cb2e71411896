"""Inputs whose values decide what a forward does: computed beside the trace, which has no values.

    for t, h, w in grid.tolist():          # how many patches each image has
        positions.append(torch.arange(t * h * w))

While `ByValue` is on, every tensor that is made of such inputs and of Python's own numbers alone has its value beside
it. Where Python asks for one (`tolist`, a branch, a size) it gets it; where values make a size, what the operator gives
is a constant of the program. Which inputs were asked for is noted: the program is for their values, as it is for the
shapes of the others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.base.torch_compat import tracing as compat
from autopar.base.torch_compat.values import computed, lifted, tree_map
from autopar.passes.checks import frame_of_model

MOST_IN_A_ROW = 8
"""Numbers of one row of an input whose values may decide: the sizes of an image, not the tokens of a text."""
MOST = 1 << 16
"""Elements of a value that is computed beside the trace."""
_ASKING = frozenset(
    {"tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__"}
    | {"equal", "allclose", "is_nonzero", "__format__"}
)
"""Functions that give no tensor, but something that values say."""
_SIZING = frozenset({"nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "bincount"})
"""Functions that give a tensor of a size that values say; `repeat_interleave` and masks do, too."""
_WRITING = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__iand__", "__ior__"})


@dataclass(frozen=True, slots=True)
class _Known:
    """A traced tensor, its value, and the inputs that it is made of."""

    traced: Tensor
    value: Tensor
    sources: frozenset[str]


class ByValue(TorchFunctionMode):
    """While a model is traced: what is made of some inputs' values is known.

    decided: the names of inputs whose values decided something -> the model's line that asked first. looked_up: of
    inputs that choose rows of a table, as tokens do: they differ in every batch. leaves_branches: whether programs say
    which way branches go (`branches.py`), which then decide nothing here. takes: is told of buffers that decide: name,
    traced, and the line; none of them is in `decided`.
    """

    def __init__(
        self,
        values: Mapping[str, Tensor],
        leaves_branches: bool = False,
        takes: Callable[[str, Tensor, str], None] | None = None,
    ) -> None:
        super().__init__()
        self.values, self._leaves_branches, self._takes = values, leaves_branches, takes
        self._buffers: dict[str, Tensor] = {}
        self._known: dict[int, _Known] = {}
        self.decided: dict[str, str] = {}
        self.looked_up: set[str] = set()

    def give(self, name: str, traced: Tensor) -> None:
        """Say which traced tensor stands for an input."""
        if name in self.values:
            with computed():
                value = self.values[name].clone()
            self._keep(traced, value, frozenset({name}))

    def give_buffer(self, name: str, traced: Tensor, value: Tensor) -> None:
        """Say what a small buffer of whole numbers holds."""
        if self._takes is not None and not value.is_floating_point() and value.numel() <= MOST_IN_A_ROW:
            self._buffers[name] = traced
            with computed():
                own = value.detach().cpu().clone()
            self._keep(traced, own, frozenset({name}))

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in ("__getitem__", "__setitem__"):
            args = (args[0], self._with_numbers(args[1]), *args[2:])
        tensors = [leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = [each for each in map(self._of, tensors) if each is not None]
        sources = frozenset[str]().union(*(each.sources for each in known))
        if name == "embedding":
            self.looked_up |= {name for each in known for name in each.sources if self._is_all(name, each)}
        if name == "__iter__" and known:
            with self:
                return iter(tensors[0].unbind(0))
        if len(known) < len(tensors):
            return self._mixed(func, name, args, kwargs, known)
        if not tensors:
            return self._traced(func, args, kwargs, sources)
        left = name == "__bool__" and self._leaves_branches and not sources <= self.decided.keys()
        asks = name in _ASKING and not left
        if asks or name in _SIZING or name == "repeat_interleave" or _has_masks(name, args):
            found = self._value(func, args, kwargs)
            if found is not None:
                self._decide(sources)
                return found if asks else self._constants(found, sources)
        return self._traced(func, args, kwargs, sources)

    def _traced(self, func: Callable[..., Any], args: Any, kwargs: Any, sources: frozenset[str]) -> Any:
        """A function of known values alone: traced, and computed beside."""
        found = self._value(func, args, kwargs) if any(map(self._of, _leaves((args, kwargs)))) else None
        if any(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in _leaves(found)):
            args, kwargs = tree_map(self._held, (args, kwargs))
        try:
            traced = func(*args, **kwargs)
        except Exception as error:
            if found is None or not compat.is_data_dependent(error):
                raise
            return self._constants(found, sources)
        results = [leaf for leaf in _leaves(traced) if isinstance(leaf, Tensor)]
        if found is not None and any(map(compat.is_unknown, results)):
            return self._constants(found, sources)
        if results and sum(each.numel() for each in results) <= MOST:
            found = self._value(func, args, kwargs) if found is None else found
            values = [leaf for leaf in _leaves(found) if isinstance(leaf, Tensor)]
            if len(values) == len(results):
                for one, other in zip(results, values, strict=True):
                    self._keep(one, other, sources)
        return traced

    def _mixed(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any, known: Sequence[_Known]) -> Any:
        """A function of other tensors, too: known ones that say where, or how many, are put in by their values."""
        if known and _has_masks(name, args):
            args = (args[0], self._places(args[1]), *args[2:])
        if known and name == "repeat_interleave" and len(args) > 1 and self._of(args[1]) is not None:
            return self._repeated(args, kwargs)
        writes = name in _WRITING or (name.endswith("_") and not name.startswith("__")) or "out" in kwargs
        if not writes:
            args, kwargs = tree_map(self._held, (args, kwargs))
        result: Any = None
        try:
            result = func(*args, **kwargs)
            unknown = any(map(compat.is_unknown, _leaves(result)))
        except Exception as error:
            if not known or not compat.is_data_dependent(error):
                raise
            unknown = True
        if unknown and known:
            args, kwargs = tree_map(self._number, (args, kwargs))
            result = func(*args, **kwargs)
        if writes:
            self._forget(kwargs.get("out", args[0] if args else None))
        return result

    def _repeated(self, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
        """Rows, each as often as a known tensor says."""
        source, counts = args[0], self._known[id(args[1])]
        dim = kwargs.get("dim", args[2] if len(args) > 2 else None)
        source, dim = (source.flatten(), 0) if dim is None else (source, dim)
        with computed():
            places = torch.repeat_interleave(counts.value.expand(source.shape[dim]).contiguous())
        return source.index_select(dim, self._constants(places, counts.sources))

    def _with_numbers(self, index: Any) -> Any:
        """An index whose slices begin and end at numbers, not at tensors."""
        if isinstance(index, tuple):
            return tuple(map(self._with_numbers, index))
        if isinstance(index, slice):
            return slice(*map(self._number, (index.start, index.stop, index.step)))
        return index

    def _places(self, index: Any) -> Any:
        """An index with places instead of known masks."""
        if isinstance(index, tuple):
            found: list[Any] = []
            for each in index:
                place = self._places(each)
                found += place if isinstance(place, tuple) else [place]
            return tuple(found)
        known = self._of(index)
        if known is None or known.value.dtype != torch.bool:
            return index
        with computed():
            places = known.value.nonzero(as_tuple=True)
        return self._constants(tuple(places), known.sources)

    def _number(self, value: Any) -> Any:
        """The integer that a known tensor holds, instead of it."""
        known = self._of(value)
        if known is None or known.value.ndim or known.value.is_floating_point():
            return value
        self._decide(known.sources)
        with computed():
            return known.value.item()

    def _value(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a function gives of known values; None where it cannot be computed, or differs every time."""

        def value(leaf: Any) -> Any:
            return self._known[id(leaf)].value if isinstance(leaf, Tensor) else leaf

        try:
            args, kwargs = tree_map(value, (args, kwargs))
            with computed():
                return func(*args, **kwargs)
        except Exception:
            return None

    def _constants(self, found: Any, sources: frozenset[str]) -> Any:
        """What was computed, as tensors that the program holds."""
        self._decide(sources)

        def constant(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            with computed():
                own = leaf.clone()
            traced = lifted(own)
            self._keep(traced, leaf, sources)
            return traced

        return tree_map(constant, found)

    def _held(self, leaf: Any) -> Any:
        """Once values decide: whole numbers that they say, as constants instead of how they were made, where something
        else reads them. Other numbers are made as the model makes them, in its precision.
        """
        known = self._of(leaf)
        if known is None or not self.decided or not known.sources <= self.decided.keys():
            return leaf
        if known.value.is_floating_point() or known.value.is_complex() or known.value.dtype == torch.bool:
            return leaf
        return self._constants(known.value, known.sources)

    def _is_all(self, name: str, known: _Known) -> bool:
        """Whether a value has a number for each of an input's, not what a few say."""
        return name in self.values and known.value.numel() == self.values[name].numel()

    def _of(self, traced: Any) -> _Known | None:
        return self._known.get(id(traced)) if isinstance(traced, Tensor) else None

    def _keep(self, traced: Tensor, value: Tensor, sources: frozenset[str]) -> None:
        self._known[id(traced)] = _Known(traced, value, sources)

    def _forget(self, written: Any) -> None:
        """A value, and all that lies where it lies."""
        known = self._of(written)
        if known is not None:
            gone = [key for key, each in self._known.items() if compat.shares_storage(each.value, known.value)]
            for key in gone:
                del self._known[key]

    def _decide(self, sources: frozenset[str]) -> None:
        frame = frame_of_model(sys._getframe(1), own=True)
        line = "" if frame is None else f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
        for name in sorted(sources):
            if name not in self._buffers:
                self.decided.setdefault(name, line)
            elif self._takes is not None:
                self._takes(name, self._buffers[name], line)


def _leaves(tree: Any) -> list[Any]:
    leaves, _ = compat.tree_flatten(tree)
    return list(leaves)


def _has_masks(name: str, args: Sequence[Any]) -> bool:
    """Whether a function reads, or writes, where masks say."""
    if name == "where":
        return len(args) == 1
    if name not in ("__getitem__", "__setitem__"):
        return False
    return any(isinstance(each, Tensor) and each.dtype == torch.bool for each in _leaves(args[1]))


def candidates(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The inputs whose values may decide: few integers a row, which are there."""
    return {
        name: leaf.detach().cpu()
        for name, leaf in compat.tree_leaves_with_path(dict(inputs))
        if type(leaf) is Tensor and not leaf.is_meta and not leaf.is_floating_point() and not leaf.is_complex()
        and leaf.dtype != torch.bool and 0 < leaf.numel() <= MOST_IN_A_ROW * len(leaf if leaf.ndim else leaf[None])
    }  # fmt: skip
