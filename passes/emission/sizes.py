"""The sizes that the text has names for: B rows of the batch, S positions, H heads, G key heads, D elements of a head.

What attention reads says which dims these are, and rules say which dims of other values are the same: those that walk
one factor. Sizes are those on a rank; where a value has another, the text says the number.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopar.ir.graphs import operands_of, source_of
from autopar.ir.program import Program
from autopar.ir.region import LoweredFunction, Region
from autopar.ir.rule import Dims
from autopar.ir.sharding import Shard
from autopar.ir.values import ValueRef

WORDS = {"B": "rows of the batch", "S": "positions", "H": "heads", "G": "key heads", "D": "elements of a head"}

_Dim = tuple[str, str, int]
"""Region, value (an operator's result as `name#index`), dim."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """values: of each name. notes: the same as global sizes with the axes that split them."""

    values: Mapping[str, int] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[tuple[str, str, str], tuple[str, ...]] = field(default_factory=dict)
    """Region, operator, factor -> names."""

    @property
    def text(self) -> str:
        """The lines that say them."""
        width = max((len(f"{name} = {value}") for name, value in self.values.items()), default=0)
        lines = [f"{f'{name} = {self.values[name]}'.ljust(width)}  # {WORDS[name]}: {self.notes[name]}"
                 for name in WORDS if name in self.values]  # fmt: skip
        return "\n".join(lines)

    def shape(self, region: Region, node: fx.Node, sizes: list[object]) -> list[str] | None:
        """The local shape of an operator's result as text; None where it has no names."""
        operator = str(node.meta.get("operator", ""))
        if operator not in region.ops:
            return None
        result = region.ops[operator][1].results[0]
        if result is None or len(result) != len(sizes):
            return None
        return [self._size(region.name, operator, factors, size) for factors, size in zip(result, sizes, strict=True)]

    def _size(self, region: str, operator: str, factors: tuple[str, ...], size: object) -> str:
        names = [name for factor in factors for name in self.labels.get((region, operator, factor), ("",))]
        known = bool(names) and all(name in self.values for name in names)
        if known and math.prod(self.values[name] for name in names) == size:
            return " * ".join(names)
        return repr(size)


def sizes_of(program: Program) -> Sizes:
    """The sizes that a lowered program's views, expansions and ranges speak of."""
    sets = _Sets()
    walks = {region.name: _walks(region) for region in program.regions}
    for walk in (walk for each in walks.values() for walk in each):
        for dims in walk.single.values():
            for dim in dims[1:]:
                sets.join(dims[0], dim)
    for call in program.calls:
        _join_arguments(program, sets, program.region(call.region), call.arguments)
    names = _Names(program, sets, walks)
    names.spread()
    return _counted(program, names.labels())


class _Sets:
    """Sets of dims that are the same."""

    def __init__(self) -> None:
        self._above: dict[_Dim, _Dim] = {}

    def root(self, dim: _Dim) -> _Dim:
        while (above := self._above.get(dim, dim)) != dim:
            self._above[dim] = self._above.get(above, above)
            dim = above
        return dim

    def join(self, one: _Dim, other: _Dim) -> None:
        self._above[self.root(one)] = self.root(other)


def _value(node: fx.Node) -> str:
    producer, index = source_of(node)
    return f"{producer.name}#{index}"


@dataclass(frozen=True, slots=True)
class _Walk:
    """What an operator walks: dims of one factor alone, by factor, and dims of several with their factors."""

    operator: str
    single: Mapping[str, list[_Dim]]
    joined: tuple[tuple[_Dim, tuple[str, ...]], ...]
    sizes: Mapping[str, int]


def _walks(region: Region) -> list[_Walk]:
    """For each operator, the dims of its operands and results."""
    walks: list[_Walk] = []
    for node in region.graph.nodes:
        if node.name not in region.ops:
            continue
        _, rule = region.ops[node.name]
        values: list[tuple[str, Dims | None]] = list(zip(map(_value, operands_of(node)), rule.operands, strict=True))
        values += [(f"{node.name}#{index}", dims) for index, dims in enumerate(rule.results)]
        every = [((region.name, v, i), factors) for v, dims in values for i, factors in enumerate(dims or ())]
        single: dict[str, list[_Dim]] = {}
        for dim, factors in every:
            if len(factors) == 1:
                single.setdefault(factors[0], []).append(dim)
        joined = tuple((dim, factors) for dim, factors in every if len(factors) > 1)
        walks.append(_Walk(node.name, single, joined, rule.sizes))
    return walks


def _join_arguments(program: Program, sets: _Sets, region: Region, arguments: tuple[ValueRef, ...]) -> None:
    holders = [node for node in region.graph.nodes if node.op == "placeholder"][len(region.slots) :]
    for node, ref in zip(holders, arguments, strict=False):
        if ref.call < 0:
            others = [("", ref.name, dim) for dim in range(len(program.port(ref).type.shape))]
        else:
            maker = program.region_of(ref)
            output = next(each for each in maker.graph.nodes if each.op == "output")
            value = _value(list(output.args[0])[ref.index])
            others = [(maker.name, value, dim) for dim in range(len(maker.outputs[ref.index].type.shape))]
        for dim, other in enumerate(others):
            sets.join((region.name, _value(node), dim), other)


class _Names:
    """What sets of dims are called: a dim that walks several factors has the names of all."""

    def __init__(self, program: Program, sets: _Sets, walks: Mapping[str, Sequence[_Walk]]) -> None:
        self._sets, self._walks = sets, walks
        self._found: dict[_Dim, tuple[tuple[str, int], ...]] = {}
        self._unsure: set[_Dim] = set()
        for region in program.regions:
            for node in region.graph.nodes:
                if str(node.target).startswith("autopar.attention"):
                    self._attention(region, node)
        ports = [port for port in program.inputs if port.type.shape]
        if len({port.type.shape[0] for port in ports}) == 1:
            for port in ports:
                self._call(("", port.name, 0), (("B", port.type.shape[0]),))

    def _attention(self, region: Region, node: fx.Node) -> None:
        is_forward = "backward" not in str(node.target)
        operands = operands_of(node)[: 3 if is_forward else 4]
        q = operands[-3]
        if node.kwargs.get("storage"):
            operands = operands[:1]  # of codes a row may have other elements than a head
        picked = (0,) if is_forward else (0, 1, 2)
        picks = [user for user in node.users if user.target is operator.getitem and user.args[1] in picked]
        for value in [*operands, *picks]:
            shape = value.meta["val"].shape
            of_keys = shape[1] != q.meta["val"].shape[1]
            for dim, name in enumerate("BGSD" if of_keys else "BHSD"):
                self._call((region.name, _value(value), dim), ((name, shape[dim]),))

    def _call(self, dim: _Dim, names: tuple[tuple[str, int], ...]) -> bool:
        """Note what a dim is called; whether that is news."""
        root = self._sets.root(dim)
        if self._found.setdefault(root, names) != names:
            self._unsure.add(root)
            return False
        return True

    def _of(self, dim: _Dim) -> tuple[tuple[str, int], ...]:
        root = self._sets.root(dim)
        return () if root in self._unsure else self._found.get(root, ())

    def spread(self) -> None:
        """From dims that walk one factor to those that walk several, and back, until nothing is new."""
        known = -1
        while known < len(self._found):
            known = len(self._found)
            for walks in self._walks.values():
                for walk in walks:
                    self._through(walk)

    def _through(self, walk: _Walk) -> None:
        single = walk.single
        for dim, factors in walk.joined:
            parts = [self._of(single[factor][0]) if factor in single else () for factor in factors]
            if all(parts):
                self._call(dim, tuple(name for part in parts for name in part))
            elif len(names := self._of(dim)) == len(factors):
                for factor, name in zip(factors, names, strict=True):
                    if factor in single and walk.sizes[factor] == name[1]:
                        self._call(single[factor][0], (name,))

    def labels(self) -> dict[tuple[str, str, str], tuple[str, ...]]:
        """Region, operator, factor -> names."""
        found: dict[tuple[str, str, str], tuple[str, ...]] = {}
        for region, walks in self._walks.items():
            for walk in walks:
                for factor, dims in walk.single.items():
                    if names := self._of(dims[0]):
                        found[region, walk.operator, factor] = tuple(name for name, _ in names)
        return found


def _counted(program: Program, labels: Mapping[tuple[str, str, str], tuple[str, ...]]) -> Sizes:
    """Of each name the size that the text says most often."""
    seen: dict[str, Counter[tuple[int, str]]] = {}
    axes = program.mesh.axis_names if program.mesh is not None else ()
    for region in program.regions:
        for lowered in region.phases.values():
            for node, sizes in shaped(lowered):
                result = region.ops[node.meta["operator"]][1].results[0] or ()
                for dim, (factors, size) in enumerate(zip(result, sizes, strict=False)):
                    names = (
                        labels.get((region.name, node.meta["operator"], factors[0]), ()) if len(factors) == 1 else ()
                    )
                    if len(names) == 1 and isinstance(size, int):
                        seen.setdefault(names[0], Counter())[size, _note(node, dim, axes)] += 1
    chosen = {name: max(counts, key=lambda each: (counts[each], each)) for name, counts in seen.items()}
    chosen = {name: each for name, each in chosen.items() if each[0] > 1}
    values, notes = ({name: each[i] for name, each in chosen.items()} for i in (0, 1))
    return Sizes(values, notes, labels)  # type: ignore[arg-type]


def _note(node: fx.Node, dim: int, axes: Sequence[str]) -> str:
    """`8/dp`: the global size of a dim, and what splits it."""
    placements = zip(axes, node.meta["sharding"], strict=True)
    splits = [axis for axis, placement in placements if isinstance(placement, Shard) and placement.dim == dim]
    return "/".join([str(node.meta["type"].shape[dim]), *splits])


SHAPED = frozenset({"aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten.expand.default"})


def shaped(lowered: LoweredFunction) -> Iterator[tuple[fx.Node, list[object]]]:
    """The operators of a lowered graph that are given the local shape of their result, with it."""
    for node in lowered.graph.nodes:
        if str(node.target) in SHAPED and "operator" in node.meta and "type" in node.meta:
            yield node, list(node.args[1])
        elif str(node.target) == "aten.arange.default" and "operator" in node.meta and "type" in node.meta:
            yield node, [node.args[0]]
