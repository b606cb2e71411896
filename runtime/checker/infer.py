"""Of what whole operation a call on local tensors is a part, by the operator's sharding rule.

A call on pieces is taken for a part of the same call on whole tensors, whose sizes among the arguments are put in where
the rule says that an argument follows the shape (`_whole_calls`). It is a part where each axis does something to it
that the rule allows (`ir.choices`), the operands lie so, and what the rule says that a rank must pass is what is
passed. Its results are then pieces, or terms, of the whole results.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, product
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.ir.choices import Choice, Offset, Positions, Starts, axis_choices, localize, shardings
from autopar.ir.forms import form_of, summed_over
from autopar.ir.op_call import OpCall, TensorSpec, flatten_results, map_tensors, spec_of
from autopar.ir.rule import ArgPath, Rule
from autopar.ir.sharding import (
    PARTIAL,
    REPLICATE,
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
from autopar.operators.rules.lookup import calls_on, rule_for
from autopar.runtime.checker.on_meta import executed
from autopar.runtime.checker.ranks import Places, RankInt, Runs
from autopar.runtime.checker.told import is_told
from autopar.runtime.checker.types import Axes, Said, Typed, ordered

MOST_CALLS = 4096
"""Whole calls that are tried for one call on pieces."""
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


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call gives. results: of each, one like it, None for what is no tensor; readings: what each is; kind: of
    what holds several.

    is_whole: nothing else that it may be was left out because something that was planned had been found.
    """

    results: tuple[Tensor | None, ...]
    readings: Readings
    is_whole: bool
    kind: type[list[Any]] | type[tuple[Any, ...]] | None


class Inference:
    """The types of operators' results on one mesh; the same question is answered once.

    steps: the terms of what was planned (`Meaning`). hinted: of the things that something may be, one that was planned
    is enough: nothing else that it may be is looked for. is_cut: something may be so many things that not all were
    followed.
    """

    def __init__(self, axes: Axes, steps: frozenset[int] = frozenset(), *, hinted: bool = False) -> None:
        self.axes, self.terms = axes, Terms()
        self._known: dict[Any, Answer] = {}
        self._ways: dict[Any, tuple[Rule, list[Choice]]] = {}
        self._steps, self._hinted = steps, hinted and bool(steps)
        self._stripes: set[tuple[int, bool]] = set()
        self._actual: dict[Term, Term] | None = None
        self.is_cut = False

    def question(self, target: Any, args: Any, kwargs: Any, ring: Any) -> tuple[Any, list[Tensor]]:
        """What is equal for calls of which the same is true, terms apart; and the operands of the call."""
        operands: list[Tensor] = []
        asked = self._asked(args, operands), self._asked(kwargs, operands) if kwargs else None
        return (target, ring, len(self._stripes), asked), operands

    def _asked(self, value: Any, operands: list[Tensor]) -> Any:
        """The arguments with all that differs from rank to rank; of tensors how they lie, here and as parts."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, Tensor):
            operands.append(value)
            strides = None if value.is_contiguous() else value.stride()
            return value.dtype, value.shape, self.axes.said(value)[0], strides
        if kind is list or kind is tuple:
            return tuple([self._asked(each, operands) for each in value])
        if kind is dict:
            return tuple([(name, self._asked(each, operands)) for name, each in value.items()])
        if isinstance(value, Places | Runs):
            return kind, value.shape if isinstance(value, Places) else value.size, value.sharding
        if isinstance(value, RankInt):
            return kind, value.base, tuple(sorted(value.terms.items()))
        return kind, int(value) if isinstance(value, int) and kind is not bool else value

    def answer(
        self, func: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any,
        ring: RingCall | ExchangeCall | None = None, *, hinted: bool = True,
    ) -> Answer | None:  # fmt: skip
        """What is true of a call's results; None where there is no whole operation.

        made: what it gave, on meta. target: the operator that gives what `func` writes; mostly the same.
        """
        question, operands = self.question(func, args, kwargs, ring)
        said = [self.axes.said(x) for x in operands]
        self._stripes |= {(p.outer, p.zigzag) for types, _ in said for each in types
                          for p in each.sharding if isinstance(p, Shard) and p.outer > 1}  # fmt: skip
        results = flatten_results(made)
        call = _Call(target, args, kwargs, results, self, ring)
        found, is_whole = self._readings(call, operands, said, hinted and self._hinted)
        if found is None:
            return None
        like = tuple(x.detach() if isinstance(x, Tensor) else None for x in results)
        kind = type(made) if isinstance(made, list | tuple) else None
        flat = kind is None or not any(isinstance(each, list) for each in made)
        self._known[question] = answer = Answer(like if flat else (None,), found, is_whole, kind)
        if len(self._stripes) != question[2]:
            self._known[self.question(func, args, kwargs, ring)[0]] = answer
        return answer

    def known(self, question: Any) -> Answer | None:
        """The answer to a question that was asked before."""
        return self._known.get(question)

    def said(self, answer: Answer, operands: Sequence[Tensor]) -> list[Said | None] | None:
        """The types of each result where the operands are these; None where what was planned is not among them, and
        not all that they may be is known.
        """
        lie = [_terms_of(self.axes.said(x)) for x in operands]
        found = [None if each is None else self._typed(each, lie) for each in answer.readings]
        if not answer.is_whole and not any(self._is_planned(term) for each in found if each for term in each[1]):
            return None
        return found

    def _typed(self, readings: Sequence[Reading], lie: Sequence[Mapping[Typed, Sequence[Term]]]) -> Said:
        """What a result is where the operands have these terms."""
        if len(readings) == 1:
            (reading,) = readings
            of = [self._as_read(operand, terms) for operand, terms in zip(reading.operands, lie, strict=True)]
            if all(len(each) == 1 for each in of):
                return (reading.typed,), (self.terms.make(reading.form, [each[0] for each in of]),)
        found: dict[Typed, dict[Term, None]] = {}
        for reading in readings:
            of = [self._as_read(operand, terms) for operand, terms in zip(reading.operands, lie, strict=True)]
            made = [self.terms.make(reading.form, chosen) for chosen in islice(product(*of), MOST_TERMS)]
            self.is_cut |= len(made) < prod(map(len, of))
            found.setdefault(reading.typed, {}).update(dict.fromkeys(made))
        return ordered(typed.of(term) for typed, terms in found.items() for term in self.meant(terms))

    def meant(self, terms: Collection[Term]) -> Collection[Term]:
        """Of several terms of what lies in one way: those that were planned, if some were."""
        if len(terms) == 1:
            return terms
        found = [term for term in terms if short(term) in self._steps] or list(terms)
        self.is_cut |= len(found) > MOST_TERMS
        return found[:MOST_TERMS]

    @contextmanager
    def standing_for(self, leaves: Mapping[Term, Term]) -> Iterator[None]:
        """While terms are made of these leaves, that stand for other terms."""
        own = {leaf: self.actual(term) for leaf, term in leaves.items()}
        before, self._actual = self._actual, own
        try:
            yield
        finally:
            self._actual = before

    def actual(self, term: Term) -> Term:
        """A term of what its leaves stand for."""
        known = self._actual
        if known is None:
            return term
        waiting = [term]
        while waiting:
            each = waiting[-1]
            parts = None if each in known else self.terms.parts(each)
            missing = () if parts is None else [part for part in parts[1] if part not in known]
            if missing:
                waiting += missing
                continue
            waiting.pop()
            if each not in known:
                known[each] = each if parts is None else self.terms.make(parts[0], [known[part] for part in parts[1]])
        return known[term]

    def _is_planned(self, term: Term) -> bool:
        return short(self.actual(term)) in self._steps

    def _as_read(self, operand: Operand, terms: Mapping[Typed, Sequence[Term]]) -> Sequence[Term]:
        found = terms[operand.source]
        if operand.dim is None:
            return found
        return [self.terms.make(summed_over(operand.dim, operand.source.shape), (term,)) for term in found]

    def ways(self, rule: Rule, size: int) -> list[Choice]:
        """What an axis may do to an operator, in no stripes."""
        known = self._ways.get((id(rule), size))
        if known is None:
            known = self._ways[(id(rule), size)] = rule, axis_choices(rule, size)
        return known[1]

    def _readings(
        self, own: _Call, operands: Sequence[Tensor], said: Sequence[Said], hinted: bool
    ) -> tuple[Readings | None, bool]:
        """What each result may be, and whether that is all."""
        plain = [[Operand(each, each) for each in dict.fromkeys(types)] for types, _ in said]
        lie = [_terms_of(each) for each in said] if hinted else None
        if lie is not None and (whole := own.as_whole(said)) is not None:
            chosen = tuple(each for (each,) in plain)
            made = [None if x is None else self.axes.said_whole(x.shape)[0][0] for x in whole.results]
            read = [None if each is None else Reading(each, form_of(whole, index), chosen)
                    for index, each in enumerate(made)]  # fmt: skip
            if self._meets(own, read, lie):
                return tuple(None if each is None else (each,) for each in read), False
        found, is_whole = self._of_types(own, plain, lie)
        if found is None:
            summed = [[*types, *_summed(x, types)] for x, types in zip(operands, plain, strict=True)]
            if summed != plain:
                found, is_whole = self._of_types(own, summed, lie)
        return found, is_whole

    def _of_types(
        self, own: _Call, types: Sequence[Sequence[Operand]], lie: Sequence[Mapping[Typed, Sequence[Term]]] | None
    ) -> tuple[Readings | None, bool]:
        """lie: the operands' terms, where a whole call that was planned ends the search."""
        local = own.shapes
        found: list[dict[Reading, None]] = [{} for _ in local]
        for chosen in _chosen(types):
            for whole, results, is_known in own.parts_of([each.typed for each in chosen], hinted=lie is not None):
                read = self._read(whole, results, chosen)
                for into, each in zip(found, read, strict=True):
                    if each is not None:
                        into[each] = None
                is_full = all(each is not None or shape is None for each, shape in zip(read, local, strict=True))
                if is_full and (is_known or (lie is not None and self._meets(own, read, lie))):
                    return self._all_of(own, whole, types, chosen), is_known
        if any(shape is not None and not known for shape, known in zip(local, found, strict=True)):
            return None, True
        return tuple(None if s is None else tuple(known) for s, known in zip(local, found, strict=True)), True

    def _read(
        self, whole: OpCall, results: Sequence[Typed | None], chosen: tuple[Operand, ...]
    ) -> list[Reading | None]:
        return [None if x is None else Reading(x, form_of(whole, i), chosen) for i, x in enumerate(results)]

    def _all_of(
        self, own: _Call, whole: OpCall, types: Sequence[Sequence[Operand]], chosen: tuple[Operand, ...]
    ) -> Readings:
        """In every way in which a call is a part of one whole call: of which axis its rows are, may be seen later."""
        found: list[dict[Reading, None]] = [{} for _ in own.shapes]
        alike = [[each for each in given if each.typed.shape == one.typed.shape] for given, one in zip(types, chosen)]
        rule = _rule(whole)
        assert rule is not None
        for each in _chosen(alike):
            for _, results in own._parts(rule, whole, [operand.typed for operand in each]):
                for into, reading in zip(found, self._read(whole, results, each), strict=True):
                    if reading is not None:
                        into[reading] = None
        return tuple(tuple(known) or None for known in found)

    def _meets(self, own: _Call, read: Sequence[Reading | None], lie: Sequence[Mapping[Typed, Sequence[Term]]]) -> bool:
        """Whether every result is something, and one of them something that was planned."""
        if any(shape is not None and each is None for shape, each in zip(own.shapes, read, strict=True)):
            return False
        return any(self._is_planned(term) for each in read if each is not None for term in self._typed((each,), lie)[1])


_PLAIN = frozenset({int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})


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


def _terms_of(said: Said) -> dict[Typed, list[Term]]:
    """The terms of a tensor by how it lies."""
    types, terms = said
    if len(types) == 1:
        return {types[0]: [terms[0]]}
    found: dict[Typed, list[Term]] = {}
    for each, term in zip(types, terms, strict=True):
        found.setdefault(each, []).append(term)
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
    """One call on local tensors, of which these are the results."""

    def __init__(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Sequence[Any], inference: Inference,
        ring: RingCall | ExchangeCall | None,
    ) -> None:  # fmt: skip
        self.target, self.axes, self.ring = target, inference.axes, ring
        self.inference, self.stripes = inference, frozenset(inference._stripes)
        self.args, self.kwargs = _without_places(args, kwargs)
        self.given, self.given_kwargs = args, kwargs
        self.shapes = [tuple(x.shape) if isinstance(x, Tensor) else None for x in results]
        self._results = tuple(map(spec_of, results))
        self._rule: tuple[Rule | None] | None = None

    def as_whole(self, said: Sequence[Said]) -> OpCall | None:
        """The call itself, where all that it is given is whole on every rank, and no rank is told anything else."""
        if self.ring is not None or _differs(self.given) or _differs(list(self.given_kwargs.values())):
            return None
        if not all(len(types) == 1 and _is_whole(types[0]) for types, _ in said):
            return None
        return OpCall(self.target, *_specs(self.args, self.kwargs, None), self._results)

    def parts_of(
        self, types: Sequence[Typed], *, hinted: bool = False
    ) -> Iterator[tuple[OpCall, tuple[Typed | None, ...], bool]]:
        """Each whole call, of operands of these types, that it is a part of, and the types of its results.

        hinted: first those on such operands that somebody asked a rule for, which is told. Then the arguments as they
        are; then, where some are sizes, with those of the whole.
        """
        operands = _specs(self.args, self.kwargs, types)
        for whole in calls_on(self.target, operands[2]) if hinted else ():
            numbers = len(whole.args), len(whole.results)
            if numbers == (len(self.args), len(self.shapes)) and whole.kwargs.keys() == self.kwargs.keys():
                planned = _rule(whole)
                if planned is not None:
                    yield from ((*part, True) for part in self._parts(planned, whole, types))
        rule, whole_call = self._whole(self.args, self.kwargs, types)
        if rule is not None and whole_call is not None:
            yield from ((*part, False) for part in self._parts(rule, whole_call, types))
        if rule is not None and not (rule.shape_args or rule.size_args or self._takes_sizes()):
            return
        if self._rule is None:
            own = _specs(self.args, self.kwargs, None)
            self._rule = (_rule(OpCall(self.target, *own, self._results)),)
        rules = [rule, *self._rule]
        for args, kwargs in islice(self._grown_calls(rules, types), MOST_CALLS):
            rule, whole_call = self._whole(args, kwargs, types)
            if rule is not None and whole_call is not None:
                yield from ((*part, False) for part in self._parts(rule, whole_call, types))

    def _whole(self, args: Any, kwargs: Any, types: Sequence[Typed]) -> tuple[Rule | None, OpCall | None]:
        whole = executed(self.target, *_specs(args, kwargs, types))
        return (None, None) if whole is None else (_rule(whole), whole)

    def _takes_sizes(self) -> bool:
        return _has_sizes(self.args) or any(map(_has_sizes, self.kwargs.values()))

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
            in_stripes = stripes or zigzags
            allowed = axis_choices(rule, size, stripes, zigzags) if in_stripes else self.inference.ways(rule, size)
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
        args, kwargs = whole.args, dict(whole.kwargs)
        if rule.shape_args or rule.size_args or rule.offset_args or rule.position_args or rule.starts_args:
            args, kwargs = localize(rule, args, kwargs, choices, self.axes.sizes)
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


def _differs(value: Any) -> bool:
    """Whether some argument is another one on another rank."""
    if isinstance(value, Places | Runs | RankInt):
        return True
    return isinstance(value, list | tuple) and any(map(_differs, value))


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
        if type(value) is list or type(value) is tuple:
            return type(value)(map(plain, value))
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
