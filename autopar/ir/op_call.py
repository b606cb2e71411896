"""One call of an operator, as rules see it: its name, its arguments, what it takes and gives."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.ir.rule import ArgPath


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor argument of a call: its global shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return torch.Size(self.shape).numel()


class Parameter(NamedTuple):
    """An argument that an operator takes."""

    name: str
    kwarg_only: bool
    has_default: bool
    default: Any


@lru_cache(maxsize=1 << 12)
def parameters_of(target: Any) -> tuple[Parameter, ...]:
    """What an operator takes, in order. torch makes its schema anew whenever it is asked."""
    return tuple(
        Parameter(each.name, each.kwarg_only, each.has_default_value(), each.default_value)
        for each in target._schema.arguments
    )


@lru_cache(maxsize=1 << 12)
def _places(target: Any) -> dict[str, int | None]:
    """The place of each argument; None of those that are passed by name alone."""
    return {each.name: None if each.kwarg_only else place for place, each in enumerate(parameters_of(target))}


@lru_cache(maxsize=1 << 12)
def name_of(target: Any) -> str:
    """torch makes it anew whenever it is asked."""
    return str(target)


@dataclass(frozen=True, slots=True)
class OpCall:
    """One call of an operator. Tensors in `args` and `kwargs` are `TensorSpec`s.

    operands: the tensors of args, then of kwargs, in order, those in lists too; each occurrence is an operand of its
    own. results: one per result, None for what is not a tensor; a list of tensors counts as that many results.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    operands: tuple[TensorSpec, ...]
    results: tuple[TensorSpec | None, ...]

    @property
    def name(self) -> str:
        """As in `aten.mm.default`."""
        return name_of(self.target)

    @property
    def content(self) -> Hashable:
        """What is equal for calls of the same operator with the same arguments, whatever they return."""
        return content_of(self.target, self.args, self.kwargs)

    @property
    def result(self) -> TensorSpec:
        """The first, which is a tensor."""
        assert self.results[0] is not None
        return self.results[0]

    def arg(self, name: str, default: Any = None) -> Any:
        """The argument of that name in the schema: as passed, else the schema's default, else `default`."""
        places = _places(self.target)
        if name not in places:
            return default
        place = places[name]
        if place is not None and place < len(self.args):
            return self.args[place]
        if name in self.kwargs:
            return self.kwargs[name]
        own = next(each for each in parameters_of(self.target) if each.name == name)
        return own.default if own.has_default else default

    def path(self, name: str) -> ArgPath:
        """Where the argument of that name stands, or would stand."""
        place = _places(self.target).get(name)
        return (place,) if place is not None and place < len(self.args) else (name,)

    def operand_of(self, name: str) -> int | None:
        """The operand number of the tensor argument of that name; None where it is not given."""
        wanted = self.path(name)
        for index, (path, _) in enumerate(self.operand_paths()):
            if path == wanted:
                return index
        return None

    def operand_paths(self) -> Iterator[tuple[ArgPath, TensorSpec]]:
        """Each operand with the place where it stands."""
        for position, value in enumerate(self.args):
            yield from _tensors_in(value, (position,))
        for name, value in self.kwargs.items():
            yield from _tensors_in(value, (name,))


def _tensors_in(value: Any, path: ArgPath) -> Iterator[tuple[ArgPath, Any]]:
    if isinstance(value, TensorSpec | Tensor):
        yield path, value
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors_in(item, (*path, index))


def map_tensors(value: Any, function: Callable[[Any], Any]) -> Any:
    """`value` with each tensor or TensorSpec in it (lists and tuples too) replaced by `function` of it."""
    if isinstance(value, Tensor | TensorSpec):
        return function(value)
    if isinstance(value, list | tuple):
        items = [map_tensors(item, function) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def content_of(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
    """`OpCall.content` of a call whose tensors are `TensorSpec`s."""
    return target, _hashable(args), tuple((name, _hashable(value)) for name, value in kwargs.items()) if kwargs else ()


def _hashable(value: Any) -> Any:
    """Lists as tuples; 1, 1.0 and True, which Python takes for one, apart."""
    if isinstance(value, list | tuple):
        return tuple(map(_hashable, value))
    return (type(value), value) if isinstance(value, bool | float | complex) else value


def spec_of(value: Any) -> TensorSpec | None:
    """The spec of a tensor; None for anything else."""
    return TensorSpec(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None


def flatten_results(output: Any) -> list[Any]:
    """The results of a call in order: a tuple's or list's items, lists inside them too."""
    if isinstance(output, list | tuple):
        return [item for part in output for item in (flatten_results(part) if isinstance(part, list) else [part])]
    return [output]


def op_call(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> OpCall:
    """The call of `target` on these (fake, meta or real) tensors, which returned `output`."""
    specs = tuple(map_tensors(tuple(args), spec_of)), {k: map_tensors(v, spec_of) for k, v in kwargs.items()}
    operands = [spec for _, spec in _tensors_in(specs[0], ())]
    operands += [spec for value in specs[1].values() for _, spec in _tensors_in(value, ())]
    return OpCall(target, specs[0], specs[1], tuple(operands), tuple(spec_of(r) for r in flatten_results(output)))


def is_float(dtype: torch.dtype) -> bool:
    """Whether sums of terms in this dtype make sense: floating or complex."""
    return dtype.is_floating_point or dtype.is_complex
