"""Programs of one model for batches of several sizes, and what follows of them for another size.

Two programs are alike where they differ in numbers alone: sizes of values, of views, of constants. Every such number is
read as one of

    q · m + r        q / m        m  a product of powers of the sizes that vary (`x`, `x²`, `x y`, …)

and only those readings stay that all programs known so far agree with. A number of another size is known where all that
stay give the same, and whole where it is to be whole. So what three sizes said of one that varies, or what four said of
two, says it for the next; what no reading explains says so, and never guesses.

    view(x, [4, 16, 64]), view(x, [4, 24, 64]), view(x, [4, 40, 64])  →  view(x, [4, s, 64])

That the model does the same for another size (that it has no `if length > 512`) is not known here
(`autopar/planner/sizes.py` says).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from fractions import Fraction
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from autopar.ir.program import Program

MOST_VARYING = 2
"""Sizes that may vary at once: rows and a length. More would need more programs than they save."""
T = TypeVar("T")
Number = int | float
Size = tuple[str, int]
"""An input's name and one of its dims."""


class NotAlike(Exception):
    """Two programs differ in more than numbers, or a number of another size does not follow."""


@dataclass(frozen=True, slots=True)
class _Numbers:
    """A number that differs, by program."""

    values: tuple[Number, ...]


@dataclass(slots=True)
class Sized:
    """The programs of a family that are known, alike but for numbers.

    programs: as they were traced, the first one first. sizes: of the batches that they were traced for.
    """

    programs: list[Program] = field(default_factory=list)
    sizes: list[Mapping[Size, int]] = field(default_factory=list)
    _merged: dict[str, Any] | None = None

    def add(self, program: Program, sizes: Mapping[Size, int]) -> None:
        """The program for another size.

        Raises:
            NotAlike: it is another program.
        """
        if self.sizes and sizes.keys() != self.sizes[0].keys():
            raise NotAlike("other inputs")
        self._merged = _merge_programs([*self.programs, program])
        self.programs.append(program)
        self.sizes.append(sizes)

    def at(self, sizes: Mapping[Size, int]) -> Program:
        """The program for inputs of these sizes.

        Raises:
            NotAlike: that does not follow from the programs known.
        """
        if self._merged is None or len(self.programs) < 2:
            raise NotAlike("too few sizes are known")
        return _Writer(self.sizes, sizes).program(self._merged)

    def varying(self) -> list[list[Size]]:
        """The sizes that vary, those together that vary alike."""
        return list(_groups(self.sizes).values()) if self.sizes else []


def _groups(known: Sequence[Mapping[Size, int]]) -> dict[tuple[int, ...], list[Size]]:
    """The sizes that are not always the same, by what they were."""
    found: dict[tuple[int, ...], list[Size]] = {}
    for size in known[0]:
        values = tuple(each[size] for each in known)
        if len(set(values)) > 1:
            found.setdefault(values, []).append(size)
    return found


# ------------------------------------------------------------------------------------------------------------- merging

_SAME: tuple[type, ...] = (str, bytes, bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_META = "val"
_STALE = ("tensor_meta", "eager_input_vals")
"""What torch notes beside it of its sizes, and nobody reads."""


def _merge_programs(programs: Sequence[Program]) -> dict[str, Any]:
    """The fields of programs, with `_Numbers` where they differ."""
    found = {}
    for each in fields(Program):
        if each.init:
            found[each.name] = _merge([getattr(program, each.name) for program in programs])
    return found


def _merge(values: Sequence[Any]) -> Any:
    first = values[0]
    if all(value is first for value in values):
        return first
    if any(type(value) is not type(first) for value in values):
        raise NotAlike(f"{first!r:.80} and something of another kind")
    if isinstance(first, str) and any(value != first for value in values):
        return _Text.of(values)
    if isinstance(first, _SAME) or callable(first) or isinstance(first, frozenset):
        return _equal(values)
    if isinstance(first, int | float):
        return first if all(_is_same_number(value, first) for value in values) else _Numbers(tuple(values))
    if isinstance(first, Tensor):
        return _merge_tensors(values)
    if isinstance(first, fx.Graph):
        return _Graph.of(values)
    if isinstance(first, fx.Node):
        if any(value.name != first.name for value in values):
            raise NotAlike(f"{first.name} and {values[-1].name}")
        return _Named(first.name)
    if isinstance(first, Mapping):
        if any(list(value) != list(first) for value in values):
            raise NotAlike("other names")
        merged = {key: _merge([value[key] for value in values]) for key in first}
        return first if _is_same(merged.values(), first.values()) else merged
    if isinstance(first, tuple | list):
        if any(len(value) != len(first) for value in values):
            raise NotAlike("another number of things")
        items = [_merge(each) for each in zip(*values, strict=True)]
        if isinstance(first, torch.Size):
            return tuple(items)
        if _is_same(items, first):
            return first
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if isinstance(first, slice):
        parts = [(value.start, value.stop, value.step) for value in values]
        return _Made(slice, tuple(_merge(each) for each in zip(*parts, strict=True)))
    if is_dataclass(first) and not isinstance(first, type):
        changed = {}
        for each in fields(first):
            if each.init:
                old = getattr(first, each.name)
                new = _merge([getattr(value, each.name) for value in values])
                if new is not old:
                    changed[each.name] = new
        return first if not changed else _Replaced(first, changed)
    return _equal(values)


def _is_same_number(value: Number, first: Number) -> bool:
    return value == first or (value != value and first != first)  # what is no number is as good as another one


def _is_same(merged: Iterable[Any], first: Iterable[Any]) -> bool:
    return all(new is old for new, old in zip(merged, first, strict=True))


def _equal(values: Sequence[T]) -> T:
    if any(value != values[0] for value in values):
        raise NotAlike(f"{values[0]!r:.80} and others")
    return values[0]


_WHOLE_NUMBER = re.compile(r"(?<![\w.])(\d+)(?![\w.])")


@dataclass(frozen=True, slots=True)
class _Text:
    """A text with numbers in it that differ: every other part is one."""

    parts: tuple[Any, ...]

    @staticmethod
    def of(texts: Sequence[str]) -> _Text:
        parts = [_WHOLE_NUMBER.split(text) for text in texts]
        if any(len(each) != len(parts[0]) or each[::2] != parts[0][::2] for each in parts):
            raise NotAlike(f"{texts[0]!r:.80} and others")
        numbers = [[int(part) for part in each[1::2]] for each in parts]
        merged = iter([_merge(each) for each in zip(*numbers, strict=True)])
        return _Text(tuple(next(merged) if i % 2 else part for i, part in enumerate(parts[0])))


@dataclass(frozen=True, slots=True)
class _Named:
    """A node of the graph that is being written."""

    name: str


@dataclass(frozen=True, slots=True)
class _Made:
    """What a class makes of parts."""

    cls: Any
    parts: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Replaced:
    """A dataclass with some fields of other numbers."""

    base: Any
    changed: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Shape:
    """A tensor without values, of other sizes."""

    base: Tensor
    shape: tuple[Any, ...]
    stride: tuple[Any, ...]


def _merge_tensors(values: Sequence[Tensor]) -> Any:
    first = values[0]
    if any((x.dtype, x.dim(), x.device) != (first.dtype, first.dim(), first.device) for x in values):
        raise NotAlike("a tensor of another kind")
    if first.device.type != "meta":
        if any(x.shape != first.shape or not torch.equal(x, first) for x in values):
            raise NotAlike("a constant that the model makes changes with the sizes of the batch")
        return first
    shape, stride = (_merge([tuple(getter(x)) for x in values]) for getter in (Tensor.size, Tensor.stride))
    return first if shape == tuple(first.shape) and stride == first.stride() else _Shape(first, shape, stride)


@dataclass(frozen=True, slots=True)
class _Statement:
    """One node: what it was in the first program, and its arguments and meta where they differ."""

    node: fx.Node
    args: Any
    kwargs: Any
    meta: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Graph:
    """A graph with numbers that differ."""

    statements: tuple[_Statement, ...]

    @staticmethod
    def of(graphs: Sequence[fx.Graph]) -> _Graph:
        nodes = [list(graph.nodes) for graph in graphs]
        if len({len(each) for each in nodes}) > 1:
            raise NotAlike("another number of operators")
        return _Graph(tuple(_merge_nodes(each) for each in zip(*nodes, strict=True)))


def _merge_nodes(nodes: Sequence[fx.Node]) -> _Statement:
    first = nodes[0]
    for node in nodes:
        if (node.op, node.name, node.target) != (first.op, first.name, first.target):
            raise NotAlike(f"{first.name} is {first.target}, {node.name} is {node.target}")
    args, kwargs = (_merge([_plain(getattr(node, which)) for node in nodes]) for which in ("args", "kwargs"))
    if any(set(node.meta) != set(first.meta) for node in nodes):
        raise NotAlike(f"{first.name} is known otherwise")
    meta = {key: _merge_meta(key, [node.meta[key] for node in nodes]) for key in first.meta if key not in _STALE}
    return _Statement(first, args, kwargs, meta)


def _merge_meta(key: str, values: Sequence[Any]) -> Any:
    """Of what is noted beside a node only what is a value of sizes differs."""
    return _merge(values) if key == _META else values[0]


def _plain(value: Any) -> Any:
    """Arguments in containers of Python's own."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return list(map(_plain, value))
    if type(value) is tuple:
        return tuple(map(_plain, value))
    return value


# ------------------------------------------------------------------------------------------------------------- writing


class _Writer:
    """Writes a program of other sizes."""

    def __init__(self, known: Sequence[Mapping[Size, int]], sizes: Mapping[Size, int]) -> None:
        if known[0].keys() != sizes.keys():
            raise NotAlike("other inputs")
        self.readings = Readings.of(known, sizes)
        self.nodes: dict[str, fx.Node] = {}
        self._numbers: dict[tuple[Number, ...], Number] = {}

    def program(self, merged: Mapping[str, Any]) -> Program:
        """Of the merged fields."""
        return Program(**{name: self.value(each) for name, each in merged.items()})

    def value(self, merged: Any) -> Any:
        """What it is at these sizes."""
        if isinstance(merged, _Numbers):
            return self.number(merged.values)
        if isinstance(merged, _Text):
            return "".join(str(self.value(part)) for part in merged.parts)
        if isinstance(merged, _Named):
            return self.nodes[merged.name]
        if isinstance(merged, _Shape):
            shape, stride = self.value(merged.shape), self.value(merged.stride)
            return torch.empty_strided(shape, stride, dtype=merged.base.dtype, device="meta")
        if isinstance(merged, _Replaced):
            return replace(merged.base, **{name: self.value(each) for name, each in merged.changed.items()})
        if isinstance(merged, _Graph):
            return self.graph(merged)
        if isinstance(merged, _Made):
            return merged.cls(*map(self.value, merged.parts))
        if isinstance(merged, Mapping):
            return {key: self.value(each) for key, each in merged.items()}
        if isinstance(merged, tuple | list):
            items = [self.value(each) for each in merged]
            return type(merged)(*items) if hasattr(merged, "_fields") else type(merged)(items)
        return merged

    def number(self, values: tuple[Number, ...]) -> Number:
        """What a number that was these is now."""
        if values not in self._numbers:
            self._numbers[values] = self.readings.read(values)
        return self._numbers[values]

    def graph(self, merged: _Graph) -> fx.Graph:
        """Its nodes in order, under their names."""
        graph = fx.Graph()
        self.nodes = {}
        for each in merged.statements:
            args, kwargs = self.value(each.args), self.value(each.kwargs)
            first = each.node
            node = graph.create_node(first.op, first.target, args, kwargs, first.name, first.type)
            assert node.name == first.name, (node.name, first.name)
            node.meta = {key: self.value(value) if key == _META else value for key, value in each.meta.items()}
            self.nodes[first.name] = node
        return graph


Monomial = Callable[[Sequence[int]], int]


def _monomials(count: int) -> list[Monomial]:
    """Products of powers up to the square of each size, but for 1."""
    powers = [each for each in itertools.product(range(3), repeat=count) if any(each)]

    def of(exponents: Sequence[int]) -> Monomial:
        return lambda sizes: _product(size**power for size, power in zip(sizes, exponents, strict=True))

    return list(map(of, powers))


def _product(values: Iterable[int]) -> int:
    found = 1
    for value in values:
        found *= value
    return found


@dataclass(frozen=True, slots=True)
class Readings:
    """What numbers may be of the sizes that vary.

    known: each monomial's value in the programs known; wanted: at the sizes asked for.
    """

    known: tuple[tuple[int, ...], ...]
    wanted: tuple[int, ...]

    @staticmethod
    def of(known: Sequence[Mapping[Size, int]], sizes: Mapping[Size, int]) -> Readings:
        """Raises NotAlike: a size that never varied does now, or one that varied with another does not."""
        groups = _groups(known)
        varies = {size for group in groups.values() for size in group}
        if any(sizes[size] != known[0][size] for size in known[0] if size not in varies):
            raise NotAlike("a size that did not vary does")
        if len(groups) > MOST_VARYING:
            raise NotAlike("too many sizes vary")
        wanted = []
        for group in groups.values():
            if len({sizes[size] for size in group}) > 1:
                raise NotAlike("sizes that were the same are not")
            wanted.append(sizes[group[0]])
        rows = list(zip(*groups, strict=True))  # by program
        monomials = _monomials(len(groups))
        values = tuple(tuple(each(row) for row in rows) for each in monomials)
        aims = tuple(each(wanted) for each in monomials)
        for own, aim in zip(values, aims, strict=True):
            if len(set(own)) == 1 and aim != own[0]:
                raise NotAlike("a product of sizes that did not vary does")
        return Readings(values, aims)

    def read(self, values: tuple[Number, ...]) -> Number:
        """The number that followed these.

        Raises:
            NotAlike: none does, or several.
        """
        found = {each for own, aim in zip(self.known, self.wanted, strict=True) for each in _readings(values, own, aim)}
        if len(found) != 1:
            raise NotAlike(f"numbers {values[:4]} have {len(found)} readings")
        number = found.pop()
        if isinstance(values[0], float):
            return float(number)
        if number.denominator != 1:
            raise NotAlike(f"{number} is no whole number")
        return int(number)


def _readings(values: Sequence[Number], own: Sequence[int], aim: int) -> Iterable[Fraction]:
    """q m + r and q / m, where all values are."""
    different = next((i for i, each in enumerate(own) if each != own[0]), None)
    if different is None or not all(map(math.isfinite, values)):
        return
    exact = [Fraction(value) for value in values]
    slope = (exact[different] - exact[0]) / (own[different] - own[0])
    rest = exact[0] - slope * own[0]
    if all(slope * m + rest == value for m, value in zip(own, exact, strict=True)):
        yield slope * aim + rest
    if isinstance(values[0], float):
        product = values[0] * own[0]
        if all(product / m == value for m, value in zip(own, values, strict=True)):
            yield Fraction(product / aim)
