"""Of what whole operation a call on local tensors is a part, by the operator's sharding rule.

A call on pieces is taken for a part of the same call on whole tensors, whose sizes among the arguments are put in where
the rule says that an argument follows the shape (`_whole_calls`). It is a part where each axis does something to it
that the rule allows (`ir.choices`), the operands lie so, and what the rule says that a rank must pass is what is
passed. Its results are then pieces, or terms, of the whole results.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import tree_leaves
from autopar.ir.choices import Choice, Offset, Positions, Starts, axis_choices, localize, shardings
from autopar.ir.forms import form_of, summed_over
from autopar.ir.op_call import OpCall, flatten_results, map_tensors, op_call
from autopar.ir.rule import ArgPath, Rule
from autopar.ir.sharding import (
    PARTIAL,
    Partial,
    Placement,
    Replicate,
    Shard,
    Sharding,
    is_valid,
    local_shape,
    splits_of,
)
from autopar.ir.terms import Form, Term, Terms, short
from autopar.operators.rules.attention_cost import visits
from autopar.operators.rules.lookup import rule_for
from autopar.runtime.checker.on_meta import on_meta
from autopar.runtime.checker.ranks import Places, RankInt, Runs
from autopar.runtime.checker.told import is_told
from autopar.runtime.checker.types import Axes, Typed, Types, bare, in_order

MOST_CALLS = 4096
"""Whole calls that are tried for one call on pieces."""
Known = tuple[Types | None, ...]
"""The types of each result; None for what is no tensor."""
MOST_TERMS = 8
"""Terms that are told apart of one result that lies in one way."""


@dataclass(frozen=True, slots=True)
class Operand:
    """As what an operand is taken: `typed`, or, where `dim` says so, a term of the sum of `source` over that dim."""

    typed: Typed
    source: Typed
    dim: int | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """One thing that a result is: how it lies, and what it is of which readings of the operands."""

    typed: Typed
    form: Form
    operands: tuple[Operand, ...]


Readings = tuple[tuple[Reading, ...] | None, ...]
"""Of each result; None for what is no tensor."""


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


class Inference:
    """The types of operators' results on one mesh; the same question is answered once.

    is_cut: something may be so many things that not all were followed.
    """

    def __init__(self, axes: Axes, steps: frozenset[int] = frozenset()) -> None:
        self.axes, self.terms = axes, Terms()
        self._known: dict[Any, Readings | None] = {}
        self._steps = steps
        self._stripes: set[tuple[int, bool]] = set()
        self.is_cut = False

    def results(
        self,
        target: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        made: Any,
        ring: RingCall | ExchangeCall | None = None,
    ) -> Known | None:
        """Of each result; None where there is no whole operation. made: what the call gave, on meta."""
        operands = _tensors(_without_places(tuple(args), dict(kwargs)))
        self._stripes |= {(p.outer, p.zigzag) for x in operands for each in self.axes.of(x)
                          for p in each.sharding if isinstance(p, Shard) and p.outer > 1}  # fmt: skip
        key = (
            target, ring, len(self._stripes), _text((args, dict(kwargs))),
            tuple((x.dtype, tuple(x.shape), bare(self.axes.of(x))) for x in operands),
            tuple(tuple(x.shape) if isinstance(x, Tensor) else None for x in flatten_results(made)),
        )  # fmt: skip
        if key not in self._known:
            call = _Call(target, tuple(args), dict(kwargs), made, self.axes, ring, frozenset(self._stripes))
            self._known[key] = self._results(call, operands)
        readings = self._known[key]
        if readings is None:
            return None
        lie = [_terms_of(self.axes.of(x)) for x in operands]
        return tuple(None if each is None else frozenset(self._typed(each, lie)) for each in readings)

    def _typed(self, readings: Sequence[Reading], lie: Sequence[Mapping[Typed, Sequence[Term]]]) -> Iterator[Typed]:
        """What a result is where the operands have these terms."""
        found: dict[Typed, dict[Term, None]] = {}
        for reading in readings:
            of = [self._as_read(operand, terms) for operand, terms in zip(reading.operands, lie, strict=True)]
            made = [self.terms.make(reading.form, chosen) for chosen in islice(product(*of), MOST_TERMS)]
            self.is_cut |= len(made) < prod(map(len, of))
            found.setdefault(reading.typed, {}).update(dict.fromkeys(made))
        for typed, terms in found.items():
            for term in self.meant(terms):
                yield typed.of(term)

    def meant(self, terms: Collection[Term]) -> Collection[Term]:
        """Of several terms of what lies in one way: those that were planned, if some were."""
        if len(terms) == 1:
            return terms
        found = [term for term in terms if short(term) in self._steps] or list(terms)
        self.is_cut |= len(found) > MOST_TERMS
        return found[:MOST_TERMS]

    def _as_read(self, operand: Operand, terms: Mapping[Typed, Sequence[Term]]) -> Sequence[Term]:
        found = terms[operand.source]
        if operand.dim is None:
            return found
        return [self.terms.make(summed_over(operand.dim, operand.source.shape), (term,)) for term in found]

    def _results(self, own: _Call, operands: Sequence[Tensor]) -> Readings | None:
        plain = [[Operand(each, each) for each in sorted(bare(self.axes.of(x)), key=in_order)] for x in operands]
        found = self._of_types(own, plain)
        if found is None:
            summed = [[*types, *_summed(x, types)] for x, types in zip(operands, plain, strict=True)]
            found = self._of_types(own, summed) if summed != plain else None
        return found

    def _of_types(self, own: _Call, types: Sequence[Sequence[Operand]]) -> Readings | None:
        local = own.shapes
        found: list[dict[Reading, None]] = [{} for _ in local]
        for chosen in _chosen(types):
            for whole, results in own.parts_of([each.typed for each in chosen]):
                for index, each in enumerate(results):
                    if each is not None:
                        found[index][Reading(each, form_of(whole, index), chosen)] = None
        if any(shape is not None and not known for shape, known in zip(local, found, strict=True)):
            return None
        return tuple(None if shape is None else tuple(known) for shape, known in zip(local, found, strict=True))


def _chosen(types: Sequence[Sequence[Operand]]) -> Iterator[tuple[Operand, ...]]:
    """As what the operands are taken, together. Where these are too many to try (a `cat` of many numbers), operands
    that may be the same things are taken for the same.
    """
    if prod(map(len, types)) <= MOST_CALLS:
        yield from product(*types)
        return
    kinds = list(dict.fromkeys(map(tuple, types)))
    for each in islice(product(*kinds), MOST_CALLS):
        yield tuple(each[kinds.index(tuple(own))] for own in types)


def _terms_of(types: Iterable[Typed]) -> dict[Typed, list[Term]]:
    """The terms of a tensor by how it lies."""
    found: dict[Typed, list[Term]] = {}
    for each in types:
        found.setdefault(each.bare, []).append(each.term)
    return found


def _summed(x: Tensor, types: Iterable[Operand]) -> Iterator[Operand]:
    """What a tensor is also that has one element of a dim: a term of the sum over it, which needs no statement."""
    for source in types:
        each = source.typed
        for dim, size in enumerate(each.shape):
            if x.shape[dim] == 1 and size > 1:
                shape = (*each.shape[:dim], 1, *each.shape[dim + 1 :])
                splits = [isinstance(p, Shard) and p.dim == dim for p in each.sharding]
                lies = tuple(PARTIAL if split else p for split, p in zip(splits, each.sharding, strict=True))
                yield Operand(Typed(shape, lies), each, dim)


class _Call:
    """One call on local tensors. stripes: in which anything of the program lies, with whether zigzag."""

    def __init__(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any, axes: Axes,
        ring: RingCall | ExchangeCall | None, stripes: frozenset[tuple[int, bool]],
    ) -> None:  # fmt: skip
        self.target, self.axes, self.ring, self.stripes = target, axes, ring, stripes
        self.args, self.kwargs = _without_places(args, kwargs)
        self.given, self.given_kwargs = args, kwargs
        self.shapes = [tuple(x.shape) if isinstance(x, Tensor) else None for x in flatten_results(made)]
        self.made = made
        self._rule: tuple[Rule | None] | None = None

    def parts_of(self, types: Sequence[Typed]) -> Iterator[tuple[OpCall, tuple[Typed | None, ...]]]:
        """Each whole call, of operands of these types, that it is a part of, and the types of its results.

        First the arguments as they are; then, where some are sizes, with those of the whole.
        """
        rule, whole = self._whole(self.args, self.kwargs, types)
        if rule is not None and whole is not None:
            yield from self._parts(rule, whole, types)
        if rule is not None and not (rule.shape_args or rule.size_args or self._takes_sizes()):
            return
        if self._rule is None:
            self._rule = (_rule(op_call(self.target, self.args, self.kwargs, self.made)),)
        rules = [rule, *self._rule]
        for args, kwargs in islice(self._grown_calls(rules, types), MOST_CALLS):
            rule, whole = self._whole(args, kwargs, types)
            if rule is not None and whole is not None:
                yield from self._parts(rule, whole, types)

    def _whole(self, args: Any, kwargs: Any, types: Sequence[Typed]) -> tuple[Rule | None, OpCall | None]:
        whole = _executed(self.target, args, kwargs, types)
        return (None, None) if whole is None else (_rule(whole), whole)

    def _takes_sizes(self) -> bool:
        leaves = tree_leaves((self.args, self.kwargs))
        return any(isinstance(leaf, int) and not isinstance(leaf, bool) and leaf > 1 for leaf in leaves)

    def _parts(
        self, rule: Rule, whole: OpCall, types: Sequence[Typed]
    ) -> Iterator[tuple[OpCall, tuple[Typed | None, ...]]]:
        for choices in self._choices(rule, types):
            lie = shardings(rule, choices, self.axes.sizes)
            if lie is None or any(a != b.sharding for a, b in zip(lie[0], types, strict=True)):
                continue
            if not self._passes(rule, whole, choices) or not self._is_told(whole, types, lie[1]):
                continue
            if (results := self._fitting(whole, lie[1])) is not None:
                yield whole, results

    def _is_told(self, whole: OpCall, types: Sequence[Typed], results: Sequence[Sharding | None]) -> bool:
        return is_told(whole, types, results, lambda name: self._own(whole.path(name)), self.axes)

    def _choices(self, rule: Rule, types: Sequence[Typed]) -> Iterator[tuple[Choice, ...]]:
        """What each axis may do to it, where its operands lie so."""
        if len(rule.operands) != len(types):
            return
        stripes, zigzags = _stripes(rule, types)
        for name in _made_of_one(rule):  # alike all along: in whatever stripes what it meets lies in
            stripes[name] = {outer for outer, zigzag in self.stripes if not zigzag}
            zigzags[name] = {outer for outer, zigzag in self.stripes if zigzag}
        ways: list[list[Choice]] = []
        for axis, size in enumerate(self.axes.sizes):
            wanted = [each.sharding[axis] for each in types]
            allowed = axis_choices(rule, size, stripes, zigzags)
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
            if not is_valid(spec.shape, sharding, self.axes.sizes):
                return None
            if local_shape(spec.shape, sharding, self.axes.sizes) != shape:
                return None
            found.append(self.axes.typed(spec.shape, sharding))
        return tuple(found)

    def _passes(self, rule: Rule, whole: OpCall, choices: Sequence[Choice]) -> bool:
        """Whether the arguments are those of a rank that does its part of the whole call."""
        args, kwargs = localize(rule, whole.args, whole.kwargs, choices, self.axes.sizes)
        follows = {path for path, _ in rule.shape_args}
        for path in [(i,) for i in range(len(args))] + [(name,) for name in {**kwargs, **self.given_kwargs}]:
            if path not in follows and not _alike(_at(args, kwargs, path), self._own(path), self.axes):
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
        return _at(self.given, self.given_kwargs, path)

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
            if any(word in str(self.target) for word in _REGROUPS):
                grown = (each for each in grown if prod(each) == prod(types[0].shape))
            ways.append([(path, list(each)) for each in grown])
        for path in sized:
            value = _at(self.args, self.kwargs, path)
            if value is not None:
                ways.append([(path, _times(value, by)) for by in self._multiples(split)])
        for changes in product(*ways) if ways else ():
            args, kwargs = self.args, self.kwargs
            for path, value in changes:
                args, kwargs = _put(args, kwargs, path, value)
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


def _rule(call: OpCall) -> Rule | None:
    """The rule of a call; None where its operands do not fit each other."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operators that are whole everywhere: said when the plan was made
        try:
            return rule_for(call)
        except (AutoparError, AssertionError):
            return None


def _executed(target: Any, args: Any, kwargs: Any, types: Sequence[Typed]) -> OpCall | None:
    """The call on whole tensors; None where these arguments do not fit them."""
    shapes = iter(types)

    def whole(x: Tensor) -> Tensor:
        return torch.empty(next(shapes).shape, dtype=x.dtype, device="meta")

    args, kwargs = map_tensors(args, whole), {name: map_tensors(value, whole) for name, value in kwargs.items()}
    try:
        return op_call(target, args, kwargs, on_meta(target, args, kwargs))
    except (RuntimeError, ValueError, IndexError, NotImplementedError, AssertionError):
        return None


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
    first = factor.strip("()").split()
    return next((at for at, dim in enumerate(rule.operands[index]) if set(first) <= set(dim)), None)


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


def _alike(wanted: Any, said: Any, axes: Axes) -> bool:
    """Whether an argument says on every rank what it must."""
    if isinstance(wanted, Offset):
        return isinstance(said, RankInt) and _form(wanted, axes) == (said.base, dict(said.terms))
    if isinstance(wanted, Starts):
        return isinstance(said, Runs) and (said.size, splits_of(said.sharding, 0)) == (
            wanted.size, tuple((axis, outer, zigzag) for axis, _, outer, zigzag in wanted.splits)
        )  # fmt: skip
    if isinstance(wanted, list) and wanted and isinstance(wanted[0], Positions):
        own = [tuple((axis, outer, zigzag) for axis, _, outer, zigzag in each.splits) for each in wanted]
        if not isinstance(said, Places):
            return not any(own) and not said
        return [splits_of(said.sharding, dim) for dim in range(len(said.shape))] == own
    if isinstance(said, RankInt):
        return not said.terms and int.__index__(said) == wanted
    if isinstance(said, Runs):
        return not splits_of(said.sharding, 0)
    if isinstance(said, Places):
        return not any(isinstance(each, Shard) for each in said.sharding)
    if isinstance(said, Tensor) or said is None or wanted is None:
        return True
    if isinstance(said, list | tuple):
        return len(said) == len(wanted) and all(_alike(a, b, axes) for a, b in zip(wanted, said))
    return bool(wanted == said or (wanted != wanted and said != said))  # NaN


def _form(offset: Offset, axes: Axes) -> tuple[int, dict[str, int]]:
    terms: dict[str, int] = {}
    by = offset.local_size
    for axis, size in reversed(list(zip(offset.axes, offset.axis_sizes, strict=True))):
        terms[axes.names[axis]] = by
        by *= size
    return offset.base, {name: value for name, value in terms.items() if value}


def _without_places(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments as the whole call has them, where nothing says where a rank's elements lie."""

    def plain(value: Any) -> Any:
        if isinstance(value, Places | Runs):
            return []
        return value.base if isinstance(value, RankInt) else value

    return tuple(map(plain, args)), {name: plain(value) for name, value in kwargs.items()}


def _at(args: Sequence[Any], kwargs: Mapping[str, Any], path: ArgPath) -> Any:
    root, *rest = path
    value: Any = kwargs.get(root) if isinstance(root, str) else args[root] if root < len(args) else None
    for key in rest:
        value = value[key]
    return value


def _put(
    args: tuple[Any, ...], kwargs: dict[str, Any], path: ArgPath, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    root, *rest = path
    if rest:
        inner = list(_at(args, kwargs, (root,)))
        assert isinstance(rest[0], int)
        inner[rest[0]] = value
        value = inner
    if isinstance(root, int):
        return (*args[:root], value, *args[root + 1 :]), kwargs
    return args, {**kwargs, root: value}


def _times(value: Any, by: int) -> Any:
    return [_times(item, by) for item in value] if isinstance(value, list | tuple) else value * by


def _tensors(value: Any) -> list[Tensor]:
    """In the order in which a call counts its operands."""
    args, kwargs = value
    found: list[Tensor] = []
    map_tensors(tuple(args), lambda x: found.append(x))
    for each in kwargs.values():
        map_tensors(each, lambda x: found.append(x))
    return found


def _text(value: Any) -> str:
    """The arguments that are no tensors, with all that differs from rank to rank."""
    if isinstance(value, Places | Runs):
        size = value.shape if isinstance(value, Places) else value.size
        return f"{type(value).__name__}{size}{value.sharding}"
    if isinstance(value, Tensor):
        return "T"
    if isinstance(value, RankInt):
        return f"{value.base}{sorted(value.terms.items())}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{name}:{_text(each)}' for name, each in value.items())}}}"
    return repr(value)
