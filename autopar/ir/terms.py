"""What a value is, whoever computes which part of it: a number for the expression that gives it.

Values with the same term are equal in exact arithmetic: they come of the same leaves (parameters, inputs, seeds) by the
same operators with the same arguments. Where a value lies, how it got there and how often it was computed leave no
trace. Neither does what moves no element out of its order (`view`), the order in which terms are added, in which
shape elements meet that pair off, or whether a tensor is taken apart by `split` or by slices. Everything else does:
another operand, a factor, a term added twice.

    linear(x, w) + b   →   hash("sum", hash("autopar.linear", x, w) + hash(b))

What an operator does to terms says its form (`forms.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from operator import itemgetter
from typing import Any, Literal, NamedTuple

from torch import Tensor

Term = int
Shape = tuple[int, ...]
Kind = Literal["op", "same", "sum", "view", "order", "stack", "pick", "zero", "shaped"]
SCHEME = hash((1, 1 << 60, -5, (7, 11)))
"""What Python's hash of numbers gives here: terms of another Python can be compared where it gives the same."""
_MASK = (1 << 64) - 1


class Form(NamedTuple):
    """What an operator does to its operands, arguments included, as far as terms tell it.

    key: of kind, operator and arguments. data: view: the shapes before and after; order: the dims;
    pick: the place; sum: the number that is added; shaped: what is done to the operands in a shape that is the
    same for all that do the same to the elements: the form, each operand's shapes, the result's.
    """

    kind: Kind
    key: int
    data: tuple[Any, ...] = ()


class Terms:
    """Makes terms, and knows of each what it consists of."""

    def __init__(self) -> None:
        self._parts: dict[Term, tuple[Form, tuple[Term, ...]]] = {}
        self._sums: dict[Term, _Sum] = {}
        self._fresh = 0

    def fresh(self) -> Term:
        """A leaf like no other."""
        self._fresh += 1
        return leaf("argument", str(self._fresh))

    def parts(self, term: Term) -> tuple[Form, tuple[Term, ...]] | None:
        """What a term was made of; None of leaves."""
        return self._parts.get(term)

    def made(self) -> Iterable[Term]:
        """Every term that is made of others."""
        return self._parts.keys()

    def make(self, form: Form, operands: Sequence[Term]) -> Term:
        """The term of what an operator gives."""
        if form.kind != "op":
            return _MAKERS[form.kind](self, form, operands)
        return self._keep(hash((form.key, *operands)), form, operands)

    def total(self, terms: Iterable[Term], shape: Shape) -> Term:
        """The term of the sum of tensors of this shape."""
        given = tuple(terms)
        return self.make(elementwise(SUM, shape, (False,) * len(given)), given)

    def _keep(self, term: Term, form: Form, operands: Sequence[Term]) -> Term:
        self._parts[term] = (form, tuple(operands))
        return term

    def _same(self, form: Form, operands: Sequence[Term]) -> Term:
        del form
        return operands[0]

    def _zero(self, form: Form, operands: Sequence[Term]) -> Term:
        return self._keep(ZERO, form, ())

    def _sum(self, form: Form, operands: Sequence[Term]) -> Term:
        total, count, number, single = 0, 0, form.data[0], ZERO
        operands = [operand for operand in operands if operand != ZERO]
        if len(operands) == 1 and not number:
            return operands[0]
        for operand in operands:
            known = self._sums.get(operand)
            if known is not None:
                total, count, number = total + known.total, count + known.count, number + known.number
                single = known.single
            else:
                total, count, single = total + hash((SUM.key, operand)), count + 1, operand
        if not number and count < 2:
            return self._keep(ZERO, NOTHING, ()) if not count else single
        term = hash((SUM.key, total & _MASK, number))
        self._sums[term] = _Sum(total & _MASK, count, number, single)
        return self._keep(term, form, operands)

    def _view(self, form: Form, operands: Sequence[Term], shapes: tuple[Shape, Shape] | None = None) -> Term:
        (base,), (before, after) = operands, shapes or form.data
        known = self._parts.get(base)
        if known is not None and known[0].kind == "view":
            (base,), before = known[1], known[0].data[0]
        if before == after or base == ZERO:
            return base
        return self._keep(hash((VIEW, after, base)), viewed(before, after), (base,))

    def _order(self, form: Form, operands: Sequence[Term]) -> Term:
        (base,), dims = operands, form.data
        known = self._parts.get(base)
        if known is not None and known[0].kind == "order":
            (base,), before = known[1], known[0].data
            dims = tuple(before[dim] for dim in dims)
        if dims == tuple(range(len(dims))) or base == ZERO:
            return base
        made = form if dims == form.data else Form("order", ORDER, dims)
        return self._keep(hash((ORDER, dims, base)), made, (base,))

    def _pick(self, form: Form, operands: Sequence[Term]) -> Term:
        (base,) = operands
        known = self._parts.get(base)
        if known is not None and known[0].kind == "stack":
            return known[1][form.data[0]]
        return self._keep(hash((form.key, base)), form, operands)

    def _shaped(self, form: Form, operands: Sequence[Term]) -> Term:
        inner, given, (made, shape) = form.data
        rows = [
            term if shapes is None else self._view(form, (term,), shapes)
            for term, shapes in zip(operands, given, strict=True)
        ]
        return self._view(form, (self.make(inner, rows),), (made, shape))

    def _stack(self, form: Form, operands: Sequence[Term]) -> Term:
        return self._keep(hash((form.key, *operands)), form, operands)


@dataclass(frozen=True, slots=True)
class _Sum:
    """What a sum adds up: the sum of its terms' hashes, how many they are, and a number. single: the one, if so."""

    total: int
    count: int
    number: int
    single: Term


class Tape:
    """What some terms are of others, to be made again of other leaves.

    results: terms made of `leaves` and of what is the same everywhere.
    """

    def __init__(self, terms: Terms, leaves: Sequence[Term], results: Sequence[Term]) -> None:
        self._terms = terms
        places = {term: place for place, term in enumerate(leaves)}
        self._own: list[Term] = []
        self._steps: list[_Step] = []
        order = _in_order(terms, places, results)
        for term in order:
            if terms.parts(term) is None:
                places[term] = len(places)
                self._own.append(term)
        made: dict[Term, Kind] = {}
        for term in order:
            parts = terms.parts(term)
            if parts is not None:
                form, given = parts
                taking = _taking([places[each] for each in given]) if len(given) != 1 else None
                first = places[given[0]] if given else 0
                key = _key_of(form, None if len(given) != 1 else made.get(given[0]))
                if key is not None:
                    made[term] = form.kind
                self._steps.append((form, first, taking, key, _MAKERS.get(form.kind)))
                places[term] = len(places)
        self._results = _taking([places[term] for term in results])

    def __call__(self, leaves: Sequence[Term]) -> tuple[Term, ...]:
        """The results' terms where the leaves are these."""
        values = [*leaves, *self._own]
        terms = self._terms
        parts, add = terms._parts, values.append
        for form, first, taking, key, maker in self._steps:
            operands = (values[first],) if taking is None else taking(values)
            if key is not None:  # as most are
                term = hash(key + operands)
                parts[term] = (form, operands)
                add(term)
            else:
                assert maker is not None
                add(maker(terms, form, operands))
        return self._results(values)


def _key_of(form: Form, kind: Kind | None) -> tuple[Any, ...] | None:
    """What a term is the hash of, before its operands; None where that depends on what these are.

    kind: of its one operand, where that is known whatever the leaves are.
    """
    if form.kind == "op":
        return (form.key,)
    if form.kind == "view" and kind in ("op", "order"):
        return VIEW, form.data[1]
    return (ORDER, form.data) if form.kind == "order" and kind in ("op", "view") else None


def _taking(places: Sequence[int]) -> Callable[[Sequence[Term]], tuple[Term, ...]]:
    """What takes the values at these places."""
    if len(places) > 1:
        return itemgetter(*places)
    first, behind = (places[0], places[0] + 1) if places else (0, 0)
    return lambda values: tuple(values[first:behind])


def _in_order(terms: Terms, known: Mapping[Term, int], results: Sequence[Term]) -> list[Term]:
    """All that the results consist of, operands first."""
    order: dict[Term, None] = {}
    waiting = [(term, False) for term in reversed(results)]
    while waiting:
        term, ready = waiting.pop()
        if term in known or term in order:
            continue
        parts = terms.parts(term)
        if ready or parts is None:
            order[term] = None
            continue
        waiting.append((term, True))
        waiting += [(each, False) for each in parts[1]]
    return list(order)


def short(term: Term) -> int:
    """32 bits of a term: enough to tell one of a program's own from most others."""
    return term & 0xFFFF_FFFF


def leaf(*words: str) -> Term:
    """The term of what comes from outside, by its name."""
    return digest("\0".join(words))


def constant_leaf(x: Tensor) -> Term:
    """The term of numbers that the program's text has itself."""
    return leaf("constant", str(x.dtype), repr(x.tolist()))


@lru_cache(maxsize=1 << 16)
def digest(text: str) -> int:
    """56 bits of a text, in every process the same."""
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big")


@lru_cache(maxsize=1 << 14)
def viewed(before: Shape, after: Shape) -> Form:
    """What a view from one shape to another is."""
    return Form("view", VIEW, (before, after))


SUM = Form("sum", digest("sum"), (0,))
VIEW, ORDER = digest("view"), digest("order")
ZERO = digest("zero")
NOTHING = Form("zero", ZERO)
SAME = Form("same", digest("same"))
_Step = tuple[Form, int, Callable[[Sequence[Term]], tuple[Term, ...]] | None, tuple[Any, ...] | None, "_Maker | None"]
"""Its form; the place of its operand; how several are taken; what its term is the hash of; who makes it otherwise."""
_Maker = Callable[[Terms, Form, Sequence[Term]], Term]
_MAKERS: Mapping[str, _Maker] = {
    "same": Terms._same, "sum": Terms._sum, "view": Terms._view, "order": Terms._order,
    "shaped": Terms._shaped, "stack": Terms._stack, "pick": Terms._pick, "zero": Terms._zero,
}  # fmt: skip


def shifted(terms: Terms, term: Term, number: int) -> Term:
    """The term with an integer added."""
    return terms.make(Form("sum", SUM.key, (number,)), (term,))


def elementwise(form: Form, shape: Shape, scalars: tuple[bool, ...]) -> Form:
    """A form of operands whose elements pair off. scalars: of each operand, whether it is one number for all."""
    flat = (math.prod(shape),)
    return reshaped(form, [None if scalar else (shape, flat) for scalar in scalars], (flat, shape)) if shape else form


def reshaped(form: Form, given: Sequence[tuple[Shape, Shape] | None], made: tuple[Shape, Shape]) -> Form:
    """A form of operands in other shapes. given, made: the shapes before and after the views of operands and result."""
    if all(each is None or each[0] == each[1] for each in (*given, made)):
        return form
    return Form("shaped", form.key, (form, tuple(given), made))
