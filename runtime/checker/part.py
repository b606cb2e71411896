"""Of what whole operation a call on local tensors is a part, by the operator's sharding rule.

A call on pieces is taken for a part of the same call on whole tensors, whose sizes among the arguments are put in where
the rule says that an argument follows the shape (`_grown_calls`). It is a part where each axis does something to it
that the rule allows (`ir.choices`), the operands lie so, and what the rule says that a rank must pass is what is
passed (`arguments.py`). Its results are then pieces, or terms, of the whole results.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice, product
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.ir.choices import Choice, axis_choices, localize, shardings
from autopar.ir.op_call import OpCall, TensorSpec, map_tensors, name_of, spec_of
from autopar.ir.rule import ArgPath, Rule
from autopar.ir.sharding import REPLICATE, Partial, Placement, Replicate, Shard, Sharding
from autopar.operators.rules.attention_cost import visits
from autopar.operators.rules.lookup import calls_on, is_written, rule_for
from autopar.runtime.checker.arguments import alike, at, differs, put, without_places
from autopar.runtime.checker.on_meta import executed
from autopar.runtime.checker.ranks import Places
from autopar.runtime.checker.told import is_told
from autopar.runtime.checker.types import Axes, Said, Typed

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


class LocalCall:
    """One call on local tensors, of these dtypes, of which these are the results.

    ways: what an axis of a size may do to an operator, in no stripes. stripes: outer and zigzag, that tensors lie in.
    """

    def __init__(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtypes: Sequence[torch.dtype],
        results: Sequence[Any], ring: RingCall | ExchangeCall | None, axes: Axes,
        ways: Callable[[Rule, int], list[Choice]], stripes: Iterable[tuple[int, bool]],
    ) -> None:  # fmt: skip
        self.target, self.axes, self.ring = target, axes, ring
        self.ways, self.stripes = ways, frozenset(stripes)
        self._differs = differs(args) or (bool(kwargs) and differs(list(kwargs.values())))
        self.args, self.kwargs = without_places(args, kwargs) if self._differs else (args, kwargs)
        self.given, self.given_kwargs = args, kwargs
        self._results = tuple(map(spec_of, results))
        self.shapes = [None if each is None else each.shape for each in self._results]
        self._dtypes = dtypes
        self._regroups = any(word in name_of(target) for word in _REGROUPS)
        self._rule: tuple[Rule | None] | None = None
        self._found: dict[Any, tuple[OpCall, tuple[tuple[Typed | None, ...], ...]]] = {}

    def as_whole(self, said: Sequence[Said]) -> OpCall | None:
        """The call itself, where all that it is given is whole on every rank, and no rank is told anything else."""
        for types, _ in said:
            if len(types) != 1 or not _is_whole(types[0]):
                return None
        if self.ring is not None or self._differs:
            return None
        return OpCall(self.target, *_specs(self.args, self.kwargs, None), self._results)

    def parts_of_asked(self, types: Sequence[Typed]) -> Iterator[tuple[Rule, OpCall, tuple[Typed | None, ...]]]:
        """As `parts_of`, of the whole calls on such operands that somebody asked a rule for: a search begins there."""
        specs = [TensorSpec(typed.shape, dtype) for typed, dtype in zip(types, self._dtypes, strict=True)]
        for whole, rule in calls_on(self.target, specs):
            numbers = len(whole.args), len(whole.results)
            if numbers == (len(self.args), len(self.shapes)) and whole.kwargs.keys() == self.kwargs.keys():
                for part in self.parts_of_one(rule, whole, types):
                    yield rule, whole, part

    def parts_of(self, types: Sequence[Typed]) -> Iterator[tuple[Rule, OpCall, tuple[Typed | None, ...]]]:
        """Each whole call, of operands of these types, that it is a part of, its rule, and the types of its results:
        with the arguments as they are; then, where some are sizes, with those of the whole.
        """
        rule, whole_call = self._whole(self.args, self.kwargs, types)
        if rule is not None and whole_call is not None:
            for part in self.parts_of_one(rule, whole_call, types):
                yield rule, whole_call, part
        if rule is not None and not (rule.shape_args or rule.size_args or self._takes_sizes()):
            return
        if self._rule is None:
            own = _specs(self.args, self.kwargs, None)
            self._rule = (rule_of(OpCall(self.target, *own, self._results)),)
        rules = [rule, *self._rule]
        for args, kwargs in islice(self._grown_calls(rules, types), MOST_CALLS):
            rule, whole_call = self._whole(args, kwargs, types)
            if rule is not None and whole_call is not None:
                for part in self.parts_of_one(rule, whole_call, types):
                    yield rule, whole_call, part

    def _whole(self, args: Any, kwargs: Any, types: Sequence[Typed]) -> tuple[Rule | None, OpCall | None]:
        if self._regroups and not _are_as_many(types[0].shape, args[1] if len(args) > 1 else None):
            return None, None
        whole = executed(self.target, *_specs(args, kwargs, types))
        return (None, None) if whole is None else (rule_of(whole), whole)

    def _takes_sizes(self) -> bool:
        return _has_sizes(self.args) or any(map(_has_sizes, self.kwargs.values()))

    def parts_of_one(self, rule: Rule, whole: OpCall, types: Sequence[Typed]) -> tuple[tuple[Typed | None, ...], ...]:
        """The types of its results, in each way in which it is a part of this whole call."""
        key = id(whole), tuple(types)
        known = self._found.get(key)
        if known is None:
            known = self._found[key] = whole, tuple(self._parts_of_one(rule, whole, types))
        return known[1]

    def _parts_of_one(self, rule: Rule, whole: OpCall, types: Sequence[Typed]) -> Iterator[tuple[Typed | None, ...]]:
        if not self._may_fit(whole):
            return
        for choices in self._choices(rule, types):
            lie = shardings(rule, choices, self.axes.sizes)
            if lie is None or any(a != b.sharding for a, b in zip(lie[0], types, strict=True)):
                continue
            if not self._passes(rule, whole, choices) or not self._is_told(whole, types, lie[1]):
                continue
            if (results := self._fitting(whole, lie[1])) is not None:
                yield results

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

    def _choices(self, rule: Rule, types: Sequence[Typed]) -> Iterator[tuple[Choice, ...]]:
        """What each axis may do to it, where its operands lie so."""
        if len(rule.operands) != len(types):
            return
        in_stripes, stripes, zigzags = False, dict[str, set[int]](), dict[str, set[int]]()
        if self.stripes:  # some operand lies in some
            stripes, zigzags = _stripes(rule, types)
            for name in _made_of_one(rule):  # alike all along: in whatever stripes what it meets lies in
                stripes[name] = {outer for outer, zigzag in self.stripes if not zigzag}
                zigzags[name] = {outer for outer, zigzag in self.stripes if zigzag}
            in_stripes = any(stripes.values()) or any(zigzags.values())
        ways: list[list[Choice]] = []
        for axis, size in enumerate(self.axes.sizes):
            wanted = [each.sharding[axis] for each in types]
            allowed = axis_choices(rule, size, stripes, zigzags) if in_stripes else self.ways(rule, size)
            kind = self.ring.kind if self.ring is not None and self.ring.axis == axis else None
            own = [way for way in allowed if (way.kind == kind if kind else not way.splits_two)]
            ways.append([way for way in own if _may_be(rule, way, wanted)])
        yield from islice(product(*ways), MOST_CALLS)

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
        self, rules: Iterable[Rule | None], types: Sequence[Typed]
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
                grown = (each for each in grown if prod(each) == prod(types[0].shape))
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
    args: tuple[Any, ...], kwargs: Mapping[str, Any], types: Sequence[Typed] | None
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[TensorSpec, ...]]:
    """Arguments with specs in place of tensors, and the specs. types: of the wholes that the tensors are parts of."""
    found: list[TensorSpec] = []

    def spec(x: Tensor) -> TensorSpec:
        shape = tuple(x.shape) if types is None else types[len(found)].shape
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


def _may_be(rule: Rule, choice: Choice, wanted: Sequence[Placement]) -> bool:
    """Whether operands can lie so under the choice, stripes apart: most choices are out before shapes are asked."""
    if choice.kind == "none":
        return all(isinstance(each, Replicate) for each in wanted)
    if choice.kind == "linear":
        assert choice.group is not None
        group = rule.linear[choice.group]
        return all(
            each == Partial("sum") if index in group else isinstance(each, Replicate)
            for index, each in enumerate(wanted)
        )
    for index, each in enumerate(wanted):
        if isinstance(each, Partial) or _dim_split(rule, choice, index) != (
            each.dim if isinstance(each, Shard) else None
        ):
            return False
    return True


def _dim_split(rule: Rule, choice: Choice, index: int) -> int | None:
    """The dim of an operand that the choice splits."""
    factor = choice.factor
    assert factor is not None
    if choice.splits_two and rule.pair is not None and index in rule.pair.travelling:
        factor = rule.pair.key
    if not factor.startswith("("):
        return next((at for at, dim in enumerate(rule.operands[index]) if factor in dim), None)
    first = factor.strip("()").split()
    return next((at for at, dim in enumerate(rule.operands[index]) if set(first) <= set(dim)), None)


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


def _stripes(rule: Rule, types: Sequence[Typed]) -> tuple[dict[str, set[int]], dict[str, set[int]]]:
    """In how many stripes each factor may be split, as far as the operands lie in stripes; and zigzag."""
    outers: dict[str, set[int]] = {}
    zigzags: dict[str, set[int]] = {}
    for dims, each in zip(rule.operands, types, strict=True):
        for placement in each.sharding:
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


def _are_as_many(shape: Sequence[int], size: Any) -> bool:
    """Whether a view has as many elements; torch takes long to say that it does not. Of other arguments torch says."""
    if not isinstance(size, list | tuple) or any(type(each) is not int or each < 0 for each in size):
        return True
    return prod(shape) == prod(size)


def _times(value: Any, by: int) -> Any:
    return [_times(item, by) for item in value] if isinstance(value, list | tuple) else value * by
