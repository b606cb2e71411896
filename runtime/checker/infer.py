"""What the results of a call on local tensors are: how they lie, and of which whole values they are parts.

An operand may be several things at once, all of them true; what the call is a part of (`part.py`) is asked for each,
and the answer is kept for the next call that is asked the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.ir.choices import Choice, axis_choices
from autopar.ir.forms import form_of, summed_over
from autopar.ir.op_call import OpCall, flatten_results
from autopar.ir.rule import Rule
from autopar.ir.sharding import PARTIAL, Shard, Sharding
from autopar.ir.terms import ZERO, Form, Term, Terms, short
from autopar.runtime.checker.part import MOST_CALLS, ExchangeCall, Given, LocalCall, RingCall, Way
from autopar.runtime.checker.ranks import Places, RankInt, Runs
from autopar.runtime.checker.types import Axes, Said, Typed, ordered

MOST_TERMS = 8
"""Terms that are told apart of one result that lies in one way."""


class Operand(NamedTuple):
    """As what an operand is taken: `typed`, or, where `dim` says so, a term of the sum of `source` over that dim."""

    typed: Typed
    source: Typed
    dim: int | None = None


class Lying(NamedTuple):
    """What an operand may be of wholes of one shape, and as what it is taken where it lies in each way."""

    given: Given
    operands: Mapping[Sharding, Sequence[Operand]]


class Reading(NamedTuple):
    """One thing that a result is: how it lies, and what it is of which readings of the operands."""

    typed: Typed
    form: Form
    operands: tuple[Operand, ...]


Readings = tuple[tuple[Reading, ...] | None, ...]
"""Of each result; None for what is no tensor."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call gives. results: one like each; None where some are no tensors; readings: what each is; kind: of
    what holds several.

    is_whole: nothing else that it may be was left out because something that was planned had been found. alone: of
    each result its type and its form, where each is one thing, of operands as they are.
    """

    results: tuple[Tensor, ...] | None
    readings: Readings
    is_whole: bool
    alone: tuple[tuple[tuple[Typed, ...], Form] | None, ...] | None
    kind: type[list[Any]] | type[tuple[Any, ...]] | None


class Inference:
    """The types of operators' results on one mesh; the same question is answered once.

    steps: the terms of what was planned (`Meaning`). hinted: of the things that something may be, one that was planned
    is enough: nothing else that it may be is looked for. any_stripes: what repeats itself along a dim is followed in
    all stripes that divide it, not only in those in which something was seen to lie. is_cut: something may be so many
    things that not all were followed.
    """

    def __init__(
        self, axes: Axes, steps: frozenset[int] = frozenset(), *, hinted: bool = False, any_stripes: bool = False
    ) -> None:
        self.axes, self.terms = axes, Terms()
        self._known: dict[Any, Answer] = {}
        self._numbers: dict[int, tuple[int, tuple[Typed, ...]]] = {}
        self._by_types: dict[tuple[Typed, ...], int] = {}
        self._ways: dict[Any, tuple[Rule, list[Choice]]] = {}
        self._steps, self._hinted = steps, hinted and bool(steps)
        self._stripes: set[tuple[int, bool]] = set()
        self._any_stripes = any_stripes
        self._actual: dict[Term, Term] | None = None
        self.is_cut = False

    def question(self, target: Any, args: Any, kwargs: Any, ring: Any) -> tuple[Any, list[Tensor]]:
        """What is equal for calls of which the same is true, terms apart; and the operands of the call."""
        operands: list[Tensor] = []
        asked = self._asked(args, operands), self._asked(kwargs, operands) if kwargs else None
        return (target, ring, len(self._stripes), asked), operands

    def number(self, types: tuple[Typed, ...]) -> int:
        """Equal for equal types: tensors of the same are told by it without comparing these. In which stripes any lie
        is noted.
        """
        known = self._numbers.get(id(types))
        if known is None:
            if types not in self._by_types:
                self._stripes |= {(p.outer, p.zigzag) for each in types
                                  for p in each.sharding if isinstance(p, Shard) and p.outer > 1}  # fmt: skip
            number = self._by_types.setdefault(types, len(self._by_types))
            known = self._numbers[id(types)] = number, types  # kept, so that nothing else has its place
        return known[0]

    def _asked(self, value: Any, operands: list[Tensor]) -> Any:
        """The arguments with all that differs from rank to rank; of tensors how they lie, here and as parts."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, Tensor):
            operands.append(value)
            strides = None if value.is_contiguous() else value.stride()
            return value.dtype, value.shape, self.number(self.axes.said(value)[0]), strides
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
        self, question: Any, operands: Sequence[Tensor], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
        made: Any, ring: RingCall | ExchangeCall | None = None, *, hinted: bool = True,
    ) -> Answer | None:  # fmt: skip
        """What is true of a call's results; None where there is no whole operation.

        question, operands: of the call. made: what it gave, on meta. target: the operator that gives what the call's
        writes; mostly the same.
        """
        said = [self.axes.said(x) for x in operands]
        results = flatten_results(made)
        dtypes = [x.dtype for x in operands]
        stripes = None if self._any_stripes else self._stripes
        call = LocalCall(target, args, kwargs, dtypes, results, ring, self.axes, self.ways, stripes)
        found, is_whole = self._readings(call, operands, said, hinted and self._hinted)
        if found is None:
            return None
        like = tuple(x.detach() for x in results if isinstance(x, Tensor))
        kind = type(made) if isinstance(made, list | tuple) else None
        flat = len(like) == len(results) and (kind is None or not any(isinstance(each, list) for each in made))
        self._known[question] = answer = Answer(like if flat else None, found, is_whole, _alone(found), kind)
        return answer

    def known(self, question: Any) -> Answer | None:
        """The answer to a question that was asked before."""
        return self._known.get(question)

    def said(self, answer: Answer, operands: Sequence[Tensor]) -> list[Said | None] | None:
        """The types of each result where the operands are these; None where what was planned is not among them, and
        not all that they may be is known.
        """
        given = [self.axes.said(x) for x in operands]
        found: list[Said | None]
        if answer.alone is not None and all(len(types) == 1 for types, _ in given):
            of = [terms[0] for _, terms in given]
            found = [None if each is None else (each[0], (self.terms.make(each[1], of),)) for each in answer.alone]
        else:
            lie = [_terms_of(each) for each in given]
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
        """Whether it is the value of something that was planned. That zeros were planned says not which these are."""
        own = self.actual(term)
        return own != ZERO and short(own) in self._steps

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
        self, own: LocalCall, operands: Sequence[Tensor], said: Sequence[Said], hinted: bool
    ) -> tuple[Readings | None, bool]:
        """What each result may be, and whether that is all."""
        plain = [[Operand(each, each) for each in dict.fromkeys(types)] for types, _ in said]
        lie = [_terms_of(each) for each in said] if hinted else None
        if lie is not None and (whole := own.as_whole(said)) is not None:
            way = (
                tuple(each.typed.sharding for (each,) in plain),
                tuple(None if x is None else self.axes.said_whole(x.shape)[0][0] for x in whole.results),
            )
            read = self._read(whole, [way], [one for each in plain for one in _by_shape(each)])
            if self._meets(own, read, lie):
                return tuple(tuple(each) or None for each in read), False
        found, is_whole = self._of_types(own, plain, lie)
        if found is None:
            summed = [[*types, *_summed(x, types)] for x, types in zip(operands, plain, strict=True)]
            if summed != plain:
                found, is_whole = self._of_types(own, summed, lie)
        return found, is_whole

    def _of_types(
        self, own: LocalCall, types: Sequence[Sequence[Operand]], lie: Sequence[Mapping[Typed, Sequence[Term]]] | None
    ) -> tuple[Readings | None, bool]:
        """lie: the operands' terms, where a whole call that was planned ends the search."""
        local = own.shapes
        found: list[dict[Reading, None]] = [{} for _ in local]
        given = [_by_shape(each) for each in types]
        if lie is not None:
            zeros: list[dict[Reading, None]] = [{} for _ in local]
            other: Readings | None = None
            for chosen in _chosen(given):
                for whole, ways in own.parts_of_asked([each.given for each in chosen]):
                    read = self._read(whole, ways, chosen) if ways else []
                    if not read or any(shape is not None and not x for shape, x in zip(local, read, strict=True)):
                        continue
                    if not self._is_zero(read, lie):
                        # Another program may have been asked for a call on such operands, too: of another whole.
                        if self._meets(own, read, lie):
                            return tuple(tuple(each) or None for each in read), True
                        other = other or tuple(tuple(each) or None for each in read)
                        continue
                    for into, each in zip(zeros, read, strict=True):
                        into.update(each)
            if other is not None:
                return other, True
            if any(zeros):
                return tuple(tuple(each) or None for each in zeros), True
        for chosen in _chosen(given):
            for whole, ways in own.parts_of([each.given for each in chosen]):
                if not ways:
                    continue
                read = self._read(whole, ways, chosen)
                for into, each in zip(found, read, strict=True):
                    into.update(each)
                if lie is not None and self._meets(own, read, lie):
                    return tuple(tuple(each) or None for each in read), False
        if any(shape is not None and not known for shape, known in zip(local, found, strict=True)):
            return None, True
        return tuple(None if s is None else tuple(known) for s, known in zip(local, found, strict=True)), True

    def _read(self, whole: OpCall, ways: Sequence[Way], chosen: Sequence[Lying]) -> list[dict[Reading, None]]:
        """Of each result what it is in every way in which a call is a part of one whole call: of which axis its rows
        are, may be seen later.
        """
        found: list[dict[Reading, None]] = [{} for _ in whole.results]
        for shardings, results in ways:
            typed_results = enumerate(zip(found, results, strict=True))
            made = [(into, typed, form_of(whole, index)) for index, (into, typed) in typed_results if typed is not None]
            lying = [each.operands[sharding] for each, sharding in zip(chosen, shardings, strict=True)]
            for operands in product(*lying):
                for into, typed, form in made:
                    into[Reading(typed, form, operands)] = None
        return found

    def _is_zero(self, read: Sequence[Iterable[Reading]], lie: Sequence[Mapping[Typed, Sequence[Term]]]) -> bool:
        """Whether all that a call gives is zero: of which whole it is a part, no term tells."""
        return all(self.actual(term) == ZERO for each in read for one in each for term in self._typed((one,), lie)[1])

    def _meets(
        self, own: LocalCall, read: Sequence[Iterable[Reading]], lie: Sequence[Mapping[Typed, Sequence[Term]]]
    ) -> bool:
        """Whether every result is something, and one of them something that was planned."""
        if any(shape is not None and not each for shape, each in zip(own.shapes, read, strict=True)):
            return False
        return any(self._is_planned(term) for each in read for one in each for term in self._typed((one,), lie)[1])


_PLAIN = frozenset({int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})


def _by_shape(operands: Iterable[Operand]) -> list[Lying]:
    """As what an operand is taken, by the shape of the whole: how that lies is asked of all of one shape at once."""
    found: dict[tuple[int, ...], dict[Sharding, list[Operand]]] = {}
    for each in operands:
        found.setdefault(each.typed.shape, {}).setdefault(each.typed.sharding, []).append(each)
    return [Lying(Given(shape, tuple(own)), own) for shape, own in found.items()]


def _chosen(given: Sequence[Sequence[Lying]]) -> Iterator[tuple[Lying, ...]]:
    """Of what shape the operands are taken to be, together. Where these are too many to try (a `cat` of many numbers),
    operands that may be the same things are taken for the same.
    """
    if prod(map(len, given)) <= MOST_CALLS:
        yield from product(*given)
        return
    kinds = [tuple([each.given for each in own]) for own in given]
    apart = list(dict.fromkeys(kinds))
    places = [apart.index(kind) for kind in kinds]
    for each in islice(product(*[range(len(kind)) for kind in apart]), MOST_CALLS):
        yield tuple([own[each[place]] for own, place in zip(given, places, strict=True)])


def _alone(readings: Readings) -> tuple[tuple[tuple[Typed, ...], Form] | None, ...] | None:
    for each in readings:
        if each is not None and (len(each) > 1 or any(of.dim is not None for one in each for of in one.operands)):
            return None
    return tuple(None if each is None else ((each[0].typed,), each[0].form) for each in readings)


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
