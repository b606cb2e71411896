"""How an operation of drawn modules is written down: as a line that says which values it suits and what it does.

A line says which values it suits and what it does with them. Values are described by their dims: `b s d` has three,
`b ... d` any number of which the last is d, `int b s` is of integers; a dim that is named twice is the same. Every
value has the batch as its first dim, and no operation lets one row of it look at another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Item = TypeVar("Item")
MOST_A_ROW = 1 << 11
"""Numbers that a row of a value may have."""
TOKENS = 16
"""Different integers among the inputs."""


@dataclass
class Values:
    """What a step may read, and what decides: tensors of an eager run so far, the picks that are left, modules made
    before (which may be used again).
    """

    tensors: list[Tensor]
    picks: list[int]
    made: list[nn.Module] = field(default_factory=list)

    def pick(self, options: Iterable[Item]) -> Item:
        """One of the options; the first where nothing is left to decide by."""
        listed = list(options)
        return listed[self.picks.pop(0) % len(listed)] if self.picks else listed[0]

    def find(self, dims: str, known: SimpleNamespace) -> int | None:
        """A value of these dims, which are added to those that are known; the most recent for a pick of 0."""
        fitting = [
            (index, bound) for index, each in reversed(list(enumerate(self.tensors)))
            if (bound := bindings(dims, each, known)) is not None
        ]  # fmt: skip
        if not fitting:
            return None
        index, bound = self.pick(fitting)
        vars(known).update(bound)
        return index


def kind(tensor: Tensor) -> str:
    return "float" if tensor.is_floating_point() else "bool" if tensor.dtype == torch.bool else "int"


def bindings(dims: str, tensor: Tensor, known: SimpleNamespace) -> dict[str, Any] | None:
    """What each name in `dims` stands for; None where the tensor is another."""
    words = dims.removeprefix("int ").split()
    sizes: list[Any] = list(tensor.shape)
    if kind(tensor) != ("int" if dims.startswith("int ") else "float"):
        return None
    if "..." in words:
        at = words.index("...")
        after = len(words) - at - 1
        if len(sizes) < max(2, at + after):
            return None
        sizes[at : len(sizes) - after] = [tuple(sizes[at : len(sizes) - after])]
    if len(sizes) != len(words):
        return None
    bound = dict(zip(["rest" if word == "..." else word for word in words], sizes, strict=True))
    return bound if all(getattr(known, name, size) == size for name, size in bound.items()) else None


@dataclass
class Made:
    module: nn.Module
    reads: Sequence[int]


class Apply(nn.Module):
    """A function of values, with what else it is handed (first the module itself, where it has parts)."""

    def __init__(self, function: Callable[..., Any], parts: dict[str, Any], more: Sequence[Any] = ()) -> None:
        super().__init__()
        self.function, self.with_parts, self.more = function, bool(parts), tuple(more)
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *values: Tensor) -> Any:
        return self.function(*([self] if self.with_parts else []), *values, *self.more)


Operation = Callable[[Values], Made | None]


@dataclass(frozen=True, slots=True)
class Line:
    """An operation. when: of the dims; along: whether it is handed one of the first value's dims; parts: parameters by
    their dims (`d 6`), or what makes a layer of the dims.
    """

    reads: str
    make: Callable[..., Any]
    when: Callable[[Any], bool] | None = None
    along: bool = False
    layer: bool = False
    parts: dict[str, Any] = field(default_factory=dict)

    def __call__(self, values: Values) -> Made | None:
        n = SimpleNamespace()
        found = [values.find(dims, n) for dims in self.reads.split(", ")]
        indices = [each for each in found if each is not None]
        if len(indices) < len(found) or (self.when is not None and not self.when(n)):
            return None
        if self.layer:
            return Made(self.make(n), indices)
        dim = [values.pick(range(values.tensors[indices[0]].dim() - 1, 0, -1))] if self.along else []
        parts = {name: part(n) if callable(part) else parameter(part, n) for name, part in self.parts.items()}
        return Made(Apply(self.make, parts, dim), indices)


def parameter(dims: str, n: SimpleNamespace) -> nn.Parameter:
    sizes = [int(word) if word.isdigit() else getattr(n, word) for word in dims.split()]
    return nn.Parameter(torch.randn(sizes) * 0.5)


def on(reads: str, function: Callable[..., Any], when: Callable[[Any], bool] | None = None, **parts: Any) -> Line:
    return Line(reads, function, when, parts=parts)


def along(reads: str, function: Callable[..., Any], when: Callable[[Any], bool] | None = None) -> Line:
    return Line(reads, function, when, along=True)


def layer(reads: str, make: Callable[..., nn.Module], when: Callable[[Any], bool] | None = None) -> Line:
    return Line(reads, make, when, layer=True)


def linear(*sizes: str | int, bias: bool = True) -> Callable[[Any], nn.Module]:
    """A layer between sizes that are numbers, or the names of dims."""
    return lambda n: nn.Linear(*(getattr(n, s) if isinstance(s, str) else s for s in sizes), bias=bias)
