"""Of what whole operation a call on local tensors is a part, by the operator's sharding rule.

A call on pieces is taken for a part of the same call on whole tensors, whose sizes among the arguments are put in where
the rule says that an argument follows the shape (`_grown_calls`). It is a part where each axis does something to it
that the rule allows (`ir.choices`), the operands lie so, and what the rule says that a rank must pass is what is
passed (`arguments.py`). Its results are then pieces, or terms, of the whole results.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice, product
from math import isqrt, prod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.ir.choices import Choice, axis_choices, localize, shardings
from autopar.ir.op_call import OpCall, TensorSpec, map_tensors, name_of, spec_of
from autopar.ir.rule import ArgPath, Dims, Rule
from autopar.ir.sharding import PARTIAL, REPLICATE, Placement, Shard, Sharding
from autopar.operators.rules.attention_cost import visits
from autopar.operators.rules.lookup import calls_on, is_written, rule_for
from autopar.runtime.checker.arguments import alike, at, differs, put, without_places
from autopar.runtime.checker.on_meta import executed
from autopar.runtime.checker.ranks import Places
from autopar.runtime.checker.told import is_told
from autopar.runtime.checker.types import Axes, Said, Typed

Shape = tuple[int, ...]
MOST_CALLS = 4096
"""Whole calls that are tried for one call on pieces."""


@dataclass(frozen=True, slots=True)
class RingCall:
    """How keys go round an axis: as `comm.ring_attention` is told."""

    axis: int
    outer: int
    zigzag: bool
    visits: tuple[int, ...]
    kind: ClassVar[str] = "ring"


@dataclass(frozen=True, slots=True)
class ExchangeCall:
    """Over which axis rows go to the ranks of what they need, and come back: as `comm.exchange_experts` is told."""

    axis: int
    kind: ClassVar[str] = "exchange"


class Given(NamedTuple):
    """What an operand may be of wholes of one shape: how it may lie."""

    shape: Shape
    shardings: tuple[Sharding, ...]


Way = tuple[tuple[Sharding, ...], tuple[Typed | None, ...]]
"""How operands lie where a call is a part of a whole one, and the types of its results then."""


class LocalCall:
    """One call on local tensors, of these dtypes, of which these are the results.

    ways: what an axis of a size may do to an operator, in no stripes. stripes: outer and zigzag, that tensors lie in;
    None: in any.
    """

    def __init__(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtypes: Sequence[torch.dtype],
        results: Sequence[Any], ring: RingCall | ExchangeCall | None, axes: Axes,
        ways: Callable[[Rule, int], list[Choice]], stripes: Iterable[tuple[int, bool]] | None,
    ) -> None:  # fmt: skip
        self.target, self.axes, self.ring = target, axes, ring
        self.ways, self.stripes = ways, None if stripes is None else frozenset(stripes)
        self._differs = differs(args) or (bool(kwargs) and differs(list(kwargs.values())))
        self.args, self.kwargs = without_places(args, kwargs) if self._differs else (args, kwargs)
        self.given, self.given_kwargs = args, kwargs
        self._results = tuple(map(spec_of, results))
        self.shapes = [None if each is None else each.shape for each in self._results]
        self._dtypes = dtypes
        self._regroups = any(word in name_of(target) for word in _REGROUPS)
        self._rule: tuple[Rule | None] | None = None
        self._found: dict[Any, tuple[OpCall, tuple[Way, ...]]] = {}

    def as_whole(self, said: Sequence[Said]) -> OpCall | None:
        """The call itself, where all that it is given is whole on every rank, and no rank is told anything else."""
        for types, _ in said:
            if len(types) != 1 or not _is_whole(types[0]):
                return None
        if self.ring is not None or self._differs:
            return None
        return OpCall(self.target, *_specs(self.args, self.kwargs, None), self._results)

    def parts_of_asked(self, given: Sequence[Given]) -> Iterator[tuple[OpCall, tuple[Way, ...]]]:
        """As `parts_of`, of the whole calls on such operands that somebody asked a rule for: a search begins there."""
        specs = [TensorSpec(each.shape, dtype) for each, dtype in zip(given, self._dtypes, strict=True)]
        for whole, rule in calls_on(self.target, specs):
            numbers = len(whole.args), len(whole.results)
            if numbers == (len(self.args), len(self.shapes)) and whole.kwargs.keys() == self.kwargs.keys():
                yield whole, self.parts_of_one(rule, whole, given)

    def parts_of(self, given: Sequence[Given]) -> Iterator[tuple[OpCall, tuple[Way, ...]]]:
        """Each whole call, of operands of these shapes, that it may be a part of, and in which ways it is: with the
        arguments as they are; then, where some are sizes, with those of the whole.
        """
        shapes = [each.shape for each in given]
        rule, whole_call = self._whole(self.args, self.kwargs, shapes)
        if rule is not None and whole_call is not None:
            yield whole_call, self.parts_of_one(rule, whole_call, given)
        if rule is not None and not (rule.shape_args or rule.size_args or self._takes_sizes()):
            return
        if self._rule is None:
            own = _specs(self.args, self.kwargs, None)
            self._rule = (rule_of(OpCall(self.target, *own, self._results)),)
        rules = [rule, *self._rule]
        for args, kwargs in islice(self._grown_calls(rules, shapes), MOST_CALLS):
            rule, whole_call = self._whole(args, kwargs, shapes)
            if rule is not None and whole_call is not None:
                yield whole_call, self.parts_of_one(rule, whole_call, given)

    def _whole(self, args: Any, kwargs: Any, shapes: Sequence[Shape]) -> tuple[Rule | None, OpCall | None]:
        if self._regroups and not _are_as_many(shapes[0], args[1] if len(args) > 1 else None):
            return None, None
        whole = executed(self.target, *_specs(args, kwargs, shapes))
        return (None, None) if whole is None else (rule_of(whole), whole)

    def _takes_sizes(self) -> bool:
        return _has_sizes(self.args) or any(map(_has_sizes, self.kwargs.values()))

    def parts_of_one(self, rule: Rule, whole: OpCall, given: Sequence[Given]) -> tuple[Way, ...]:
        """In which ways it is a part of this whole call."""
        key = id(whole), tuple(given)
        known = self._found.get(key)
        if known is None:
            known = self._found[key] = whole, tuple(self._parts_of_one(rule, whole, given))
        return known[1]

    def _parts_of_one(self, rule: Rule, whole: OpCall, given: Sequence[Given]) -> Iterator[Way]:
        if not self._may_fit(whole):
            return
        may_lie = [frozenset(each.shardings) for each in given]
        for choices in self._choices(rule, whole, given):
            lie = shardings(rule, choices, self.axes.sizes)
            if lie is None or not all(own in each for own, each in zip(lie[0], may_lie, strict=True)):
                continue
            if not self._passes(rule, whole, choices):
                continue
            operands = [Typed(each.shape, own) for each, own in zip(given, lie[0], strict=True)]
            if not self._is_told(whole, operands, lie[1]):
                continue
            if (results := self._fitting(whole, lie[1])) is not None:
                yield lie[0], results

    def _may_fit(self, whole: OpCall) -> bool:
        """Whether the results are as long as even pieces of the whole ones may be: asked before how they would lie."""
        if len(whole.results) != len(self.shapes):
            return False
        for shape, spec in zip(self.shapes, whole.results, strict=True):
            if shape is None or spec is None or shape == spec.shape:
                continue
            if len(shape) != len(spec.shape):
                return False
            for own, size in zip(shape, spec.shape, strict=True):
                if own != size and (not own or size % own):
                    return False
        return True

    def _is_told(self, whole: OpCall, types: Sequence[Typed], results: Sequence[Sharding | None]) -> bool:
        return is_told(whole, types, results, lambda name: self._own(whole.path(name)), self.axes)

    def _choices(self, rule: Rule, whole: OpCall, given: Sequence[Given]) -> Iterator[tuple[Choice, ...]]:
        """What each axis may do to it, where its operands lie so, and its results may be pieces of that size."""
        if len(rule.operands) != len(given):
            return
        in_stripes, stripes, zigzags = False, dict[str, set[int]](), dict[str, set[int]]()
        if self.stripes is None or self.stripes:  # some operand lies in some
            stripes, zigzags = _stripes(rule, given)
            for name in _made_of_one(rule):  # alike all along: in whatever stripes what it meets lies in
                if self.stripes is None:
                    stripes[name] = set(_divisors(rule.sizes[name]))
                    continue
                stripes[name] = {outer for outer, zigzag in self.stripes if not zigzag}
                zigzags[name] = {outer for outer, zigzag in self.stripes if zigzag}
            in_stripes = any(stripes.values()) or any(zigzags.values())
        ways: list[list[Choice]] = []
        for axis, size in enumerate(self.axes.sizes):
            wanted = [{each[axis] for each in operand.shardings} for operand in given]
            allowed = axis_choices(rule, size, stripes, zigzags) if in_stripes else self.ways(rule, size)
            kind = self.ring.kind if self.ring is not None and self.ring.axis == axis else None
            own = [way for way in allowed if (way.kind == kind if kind else not way.splits_two)]
            ways.append([way for way in own if _may_be(rule, way, wanted)])
        yield from islice(self._of_pieces(rule, whole, ways), MOST_CALLS)

    def _of_pieces(self, rule: Rule, whole: OpCall, ways: Sequence[Sequence[Choice]]) -> Iterator[tuple[Choice, ...]]:
        """One way of each axis, together: those under which the pieces of results have the sizes that were made."""
        if prod(map(len, ways)) == 1 or any(way.splits_two for each in ways for way in each):
            yield from product(*ways)
            return
        parts = {
            (index, dim): size // own
            for index, (shape, spec) in enumerate(zip(self.shapes, whole.results, strict=True))
            if shape is not None and spec is not None and rule.results[index] is not None
            for dim, (own, size) in enumerate(zip(shape, spec.shape, strict=True))
            if own
        }
        splits = {way: _splits(rule, way, parts) for way in dict.fromkeys(chain.from_iterable(ways))}
        yield from _as_many_pieces(parts, ways, splits, self.axes.sizes)

    def _fitting(self, whole: OpCall, lie: Sequence[Sharding | None]) -> tuple[Typed | None, ...] | None:
        """The types of the results, where the pieces have the sizes that were made."""
        found: list[Typed | None] = []
        for shape, spec, sharding in zip(self.shapes, whole.results, lie, strict=True):
            if spec is None or sharding is None or shape is None:
                found.append(None)
                continue
            if _piece(spec.shape, sharding, self.axes.sizes) != shape:
                return None
            found.append(self.axes.typed(spec.shape, sharding))
        return tuple(found)

    def _passes(self, rule: Rule, whole: OpCall, choices: Sequence[Choice]) -> bool:
        """Whether the arguments are those of a rank that does its part of the whole call."""
        args, kwargs = whole.args, dict(whole.kwargs)
        if rule.shape_args or rule.size_args or rule.offset_args or rule.position_args or rule.starts_args:
            args, kwargs = localize(rule, args, kwargs, choices, self.axes.sizes)
        follows = {path for path, _ in rule.shape_args}
        for place, wanted in enumerate(args):
            own = self.given[place] if place < len(self.given) else None
            if isinstance(own, Tensor) and isinstance(wanted, TensorSpec):
                continue
            if own is not wanted and (place,) not in follows and not alike(wanted, own, self.axes):
                return False
        for name in {**kwargs, **self.given_kwargs} if kwargs or self.given_kwargs else ():
            if (name,) not in follows and not alike(kwargs.get(name), self.given_kwargs.get(name), self.axes):
                return False
        return self._places_fit(rule, whole) and self._goes_round(rule, whole, choices)

    def _goes_round(self, rule: Rule, whole: OpCall, choices: Sequence[Choice]) -> bool:
        """Whether the ring is told the stripes in which the keys lie, and visits all blocks that are seen."""
        if not isinstance(self.ring, RingCall):
            return True
        own = choices[self.ring.axis]
        wanted = visits(whole, rule, choices, self.axes.sizes)
        return (own.outer, own.zigzag) == (self.ring.outer, self.ring.zigzag) and set(wanted) <= set(self.ring.visits)

    def _own(self, path: ArgPath) -> Any:
        return at(self.given, self.given_kwargs, path)

    def _places_fit(self, rule: Rule, whole: OpCall) -> bool:
        """Random draws are by the place in the whole tensor: that must be the one that is said."""
        for path, index in rule.position_args:
            said = self._own(path)
            shape = rule.shape_of(rule.operands[index])
            if isinstance(said, Places) and said.shape != shape:
                return False
            if whole.target in _DRAWN_WHOLE and tuple(whole.arg("global_shape")) != shape:
                return False
        return True

    def _grown_calls(
        self, rules: Iterable[Rule | None], shapes: Sequence[Shape]
    ) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Arguments with sizes of the whole. rules: which say what arguments are sizes."""
        split = [axis for axis, size in enumerate(self.axes.sizes) if size > 1]
        shaped = {path: index for rule in rules if rule is not None for path, index in rule.shape_args}
        sized = dict.fromkeys(path for rule in rules if rule is not None for path, _ in rule.size_args)
        ways: list[list[tuple[ArgPath, Any]]] = []
        for path, index in shaped.items():
            shape = self.shapes[index]
            assert shape is not None
            grown = self._grown(shape, split)
            if self._regroups:
                grown = (each for each in grown if prod(each) == prod(shapes[0]))
            ways.append([(path, list(each)) for each in grown])
        for path in sized:
            value = at(self.args, self.kwargs, path)
            if value is not None:
                ways.append([(path, _times(value, by)) for by in self._multiples(split)])
        for changes in product(*ways) if ways else ():
            args, kwargs = self.args, self.kwargs
            for path, value in changes:
                args, kwargs = put(args, kwargs, path, value)
            yield args, kwargs

    def _grown(self, shape: Sequence[int], split: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Whole shapes of a local one: each axis has split one of its dims, or none."""
        seen = set()
        for dims in product((None, *range(len(shape))), repeat=len(split)):
            grown = list(shape)
            for axis, dim in zip(split, dims, strict=True):
                if dim is not None:
                    grown[dim] *= self.axes.sizes[axis]
            if tuple(grown) not in seen:
                seen.add(tuple(grown))
                yield tuple(grown)

    def _multiples(self, split: Sequence[int]) -> list[int]:
        """By what a size may grow: the ranks of some axes."""
        found = {1}
        for axis in split:
            found |= {by * self.axes.sizes[axis] for by in found}
        return sorted(found)


_REGROUPS = ("view", "reshape")
"""Parts of the names of operators whose results have as many elements as their operand: others need not be tried."""
_DRAWN_WHOLE = (torch.ops.autopar.dropout.default, torch.ops.autopar.random.default)


def rule_of(call: OpCall) -> Rule | None:
    """The rule of a call; None where its operands do not fit each other."""
    # Of operators that are whole everywhere it was said when the plan was made.
    quiet = nullcontext() if is_written(call) else warnings.catch_warnings(action="ignore")
    try:
        with quiet:
            return rule_for(call)
    except (AutoparError, AssertionError):
        return None


def _specs(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], shapes: Sequence[Shape] | None
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[TensorSpec, ...]]:
    """Arguments with specs in place of tensors, and the specs. shapes: of the wholes that the tensors are parts of."""
    found: list[TensorSpec] = []

    def spec(x: Tensor) -> TensorSpec:
        shape = tuple(x.shape) if shapes is None else shapes[len(found)]
        found.append(TensorSpec(shape, x.dtype))
        return found[-1]

    whole = tuple([map_tensors(each, spec) for each in args])
    named = {name: map_tensors(value, spec) for name, value in kwargs.items()}
    return whole, named, tuple(found)


def _is_whole(typed: Typed) -> bool:
    return all(placement is REPLICATE for placement in typed.sharding)


def _has_sizes(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_sizes, value))
    return isinstance(value, int) and not isinstance(value, bool) and value > 1


def _may_be(rule: Rule, choice: Choice, wanted: Sequence[Collection[Placement]]) -> bool:
    """Whether each operand can lie in one of these ways under the choice, stripes apart: most choices are out before
    shapes are asked.
    """
    if choice.kind == "none":
        return all(REPLICATE in each for each in wanted)
    if choice.kind == "linear":
        assert choice.group is not None
        group = rule.linear[choice.group]
        return all((PARTIAL if index in group else REPLICATE) in each for index, each in enumerate(wanted))
    for index, each in enumerate(wanted):
        dim = _dim_split(rule, choice, index)
        if REPLICATE not in each if dim is None else not any(isinstance(p, Shard) and p.dim == dim for p in each):
            return False
    return True


def _splits(rule: Rule, choice: Choice, parts: Mapping[tuple[int, int], int]) -> list[tuple[int, int]]:
    """The dims of results, by their place, that the choice splits."""
    if choice.factor is None:
        return []
    found = []
    for index, dims in enumerate(rule.results):
        dim = None if dims is None else _dim_of(dims, choice.factor)
        if dim is not None and (index, dim) in parts:
            found.append((index, dim))
    return found


def _as_many_pieces(
    parts: Mapping[tuple[int, int], int], ways: Sequence[Sequence[Choice]],
    splits: Mapping[Choice, Sequence[tuple[int, int]]], sizes: Sequence[int],
) -> Iterator[tuple[Choice, ...]]:  # fmt: skip
    """One way of each axis, by which dims are split in as many parts as `parts` says. splits: the dims that a way
    splits. sizes: of the axes.
    """
    if not ways:
        if all(number == 1 for number in parts.values()):
            yield ()
        return
    for way in ways[0]:
        if any(parts[dim] % sizes[0] for dim in splits[way]):
            continue
        left = {**parts, **{dim: parts[dim] // sizes[0] for dim in splits[way]}} if splits[way] else parts
        for others in _as_many_pieces(left, ways[1:], splits, sizes[1:]):
            yield way, *others


def _dim_split(rule: Rule, choice: Choice, index: int) -> int | None:
    """The dim of an operand that the choice splits."""
    factor = choice.factor
    assert factor is not None
    if choice.splits_two and rule.pair is not None and index in rule.pair.travelling:
        factor = rule.pair.key
    return _dim_of(rule.operands[index], factor)


def _dim_of(dims: Dims, factor: str) -> int | None:
    """The dim that walks a factor, or a product of factors."""
    if not factor.startswith("("):
        return next((at for at, dim in enumerate(dims) if factor in dim), None)
    names = tuple(factor.strip("()").split())
    for place, dim in enumerate(dims):
        if any(dim[first : first + len(names)] == names for first in range(len(dim))):
            return place
    return None


def _piece(whole: Sequence[int], sharding: Sharding, sizes: Sequence[int]) -> tuple[int, ...] | None:
    """The shape that one rank holds; None where some split does not divide."""
    local = list(whole)
    for placement, size in zip(sharding, sizes, strict=True):
        if isinstance(placement, Shard):
            dim = placement.dim
            if dim >= len(local) or local[dim] % (placement.outer * size):
                return None
            local[dim] //= size
    return tuple(local)


def _stripes(rule: Rule, given: Sequence[Given]) -> tuple[dict[str, set[int]], dict[str, set[int]]]:
    """In how many stripes each factor may be split, as far as the operands lie in stripes; and zigzag."""
    outers: dict[str, set[int]] = {}
    zigzags: dict[str, set[int]] = {}
    for dims, each in zip(rule.operands, given, strict=True):
        for placement in dict.fromkeys(chain.from_iterable(each.shardings)):
            if isinstance(placement, Shard) and placement.outer > 1 and placement.dim < len(dims):
                into = zigzags if placement.zigzag else outers
                divisors = {by for by in range(2, placement.outer + 1) if placement.outer % by == 0}
                for name in dims[placement.dim]:
                    into.setdefault(name, set()).update(by for by in divisors if not placement.zigzag or by % 2 == 0)
    return outers, zigzags


def _made_of_one(rule: Rule) -> set[str]:
    """The factors of results that no operand has: along these a result repeats itself."""
    given = {name for dims in rule.operands for dim in dims for name in dim}
    return {name for dims in rule.results if dims is not None for dim in dims for name in dim} - given


@lru_cache(maxsize=1 << 10)
def _divisors(size: int) -> frozenset[int]:
    """Those of a size but 1: in as many stripes a dim may be cut."""
    small = [by for by in range(1, isqrt(size) + 1) if size % by == 0]
    return frozenset(small[1:]) | {size // by for by in small if size > 1}


def _are_as_many(shape: Sequence[int], size: Any) -> bool:
    """Whether a view has as many elements; torch takes long to say that it does not. Of other arguments torch says."""
    if not isinstance(size, list | tuple) or any(type(each) is not int or each < 0 for each in size):
        return True
    return prod(shape) == prod(size)


def _times(value: Any, by: int) -> Any:
    return [_times(item, by) for item in value] if isinstance(value, list | tuple) else value * by
