"""Terms: equal ones are equal values, and what does not change a value does not change its term."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.ir.forms import form_of
from autopar.ir.op_call import flatten_results, op_call
from autopar.ir.terms import ZERO, Tape, Term, Terms, constant_leaf, leaf

pytestmark = pytest.mark.unit
aten = torch.ops.aten


class Traced:
    """Tensors with their numbers and their terms."""

    def __init__(self) -> None:
        self.terms = Terms()
        self.known: list[tuple[Tensor, Term]] = []

    def leaf(self, name: str, *shape: int) -> int:
        """Another tensor; its place."""
        generator = torch.Generator().manual_seed(len(self.known))
        self.known.append((torch.randn(shape, generator=generator, dtype=torch.float64), leaf(name)))
        return len(self.known) - 1

    def call(self, target: Any, *args: Any, **kwargs: Any) -> int:
        """An operator on tensors that are known, by their places (`T(…)`); the first result's place."""
        operands: list[Term] = []

        def given(value: Any) -> Any:
            if isinstance(value, T):
                operands.append(self.known[value.place][1])
                return self.known[value.place][0]
            return type(value)(map(given, value)) if isinstance(value, list) else value

        values = [given(each) for each in args]
        made = target(*values, **kwargs)
        call = op_call(target, tuple(values), kwargs, made)
        first = len(self.known)
        for index, result in enumerate(flatten_results(made)):
            assert isinstance(result, Tensor)
            self.known.append((result.contiguous(), self.terms.make(form_of(call, index), operands)))
        return first


class T:
    """A tensor by its place."""

    def __init__(self, place: int) -> None:
        self.place = place


def _steps(traced: Traced, draw: random.Random) -> Sequence[Callable[[], object]]:
    """Calls that may be made next."""
    place = draw.randrange(len(traced.known))
    x, call = traced.known[place][0], traced.call
    dim = draw.randrange(x.ndim) if x.ndim else 0
    alike = [i for i, (other, _) in enumerate(traced.known) if other.shape == x.shape]
    mate = T(draw.choice(alike))
    steps: list[Callable[[], object]] = [
        lambda: call(aten.add.Tensor, T(place), mate), lambda: call(aten.add.Tensor, mate, T(place)),
        lambda: call(aten.add.Tensor, T(place), draw.choice([1, 2, -1])), lambda: call(aten.mul.Tensor, T(place), mate),
        lambda: call(aten.mul.Tensor, T(place), 2), lambda: call(aten.sub.Tensor, T(place), mate),
        lambda: call(aten.neg.default, T(place)), lambda: call(aten.clone.default, T(place)),
        lambda: call(aten.view.default, T(place), [-1]), lambda: call(aten.zeros_like.default, T(place)),
    ]  # fmt: skip
    if x.ndim:
        size, dims = x.shape[dim], list(range(x.ndim))
        draw.shuffle(dims)
        start = draw.randrange(size)
        keep = draw.random() < 0.5
        steps += [
            lambda: call(aten.unsqueeze.default, T(place), dim), lambda: call(aten.squeeze.dim, T(place), dim),
            lambda: call(aten.permute.default, T(place), dims),
            lambda: call(aten.transpose.int, T(place), dim, -1),
            lambda: call(aten.slice.Tensor, T(place), dim, start, draw.choice([size, start + 1, -1, 1 << 62]), 1),
            lambda: call(aten.select.int, T(place), dim, draw.choice([start, start - size])),
            lambda: call(aten.split.Tensor, T(place), max(size // 2, 1), dim),
            lambda: call(aten.unbind.int, T(place), dim), lambda: call(aten.stack.default, [T(place), mate], dim),
            lambda: call(aten.cat.default, [T(place), mate], dim),
            lambda: call(aten.sum.dim_IntList, T(place), [dim], keep),
            lambda: call(aten.sum.dim_IntList, T(place), [dim, dims[0]] if dim != dims[0] else [dim], keep),
            lambda: call(aten.mean.dim, T(place), [dim - x.ndim], keep),
            lambda: call(aten.amax.default, T(place), [dim]),
            lambda: call(aten.sum.default, T(place)), lambda: call(aten.softmax.int, T(place), dim),
        ]  # fmt: skip
        if size > 1:
            steps += [lambda: call(aten.view.default, T(place), [*x.shape[:dim], 1, *x.shape[dim:]])]
            if size % 2 == 0:
                steps += [
                    lambda: call(aten.view.default, T(place), [*x.shape[:dim], 2, size // 2, *x.shape[dim + 1 :]])
                ]
    return steps


@pytest.mark.parametrize("seed", range(60))
def test_equal_terms_are_equal_values(seed: int) -> None:
    """Breaks when two values that differ have one term: a wrong program would be taken for the planned one."""
    draw, traced = random.Random(seed), Traced()
    for name, shape in (("a", (2, 4)), ("b", (2, 4)), ("c", (4, 2, 3)), ("d", (8,))):
        traced.leaf(name, *shape)
    for _ in range(60):
        step = draw.choice(_steps(traced, draw))
        before = len(traced.known)
        step()
        traced.known = [each for i, each in enumerate(traced.known) if i < before or each[0].numel() in range(1, 200)]
    found: dict[tuple[Term, torch.Size], Tensor] = {}
    for value, term in traced.known:
        if term == ZERO:
            assert not value.any()
        first = found.setdefault((term, value.shape), value)
        torch.testing.assert_close(value, first)
    assert len({term for term, _ in found}) > 20


def test_equal_terms_of_other_shapes_are_one_view_of_the_other() -> None:
    """Breaks when a view is forgotten between what has another shape."""
    traced = Traced()
    a = traced.leaf("a", 2, 6)
    rows = traced.call(aten.view.default, T(a), [12])
    assert traced.known[rows][1] != traced.known[a][1]
    back = traced.call(aten.view.default, T(rows), [2, 6])
    assert traced.known[back][1] == traced.known[a][1]


SAME: dict[str, tuple[Callable[[Traced, T, T], int], Callable[[Traced, T, T], int]]] = {
    "order of a sum": (
        lambda t, a, b: t.call(aten.add.Tensor, T(t.call(aten.add.Tensor, a, b)), a),
        lambda t, a, b: t.call(aten.add.Tensor, b, T(t.call(aten.add.Tensor, a, a))),
    ),
    "split and slice": (
        lambda t, a, b: t.call(aten.split.Tensor, a, 3, 1) + 1,
        lambda t, a, b: t.call(aten.slice.Tensor, a, -1, 3, 6),
    ),
    "a slice of one and select": (
        lambda t, a, b: t.call(aten.unsqueeze.default, T(t.call(aten.select.int, a, 1, 2)), 1),
        lambda t, a, b: t.call(aten.slice.Tensor, a, 1, 2, 3),
    ),
    "stack and take": (
        lambda t, a, b: t.call(aten.unbind.int, T(t.call(aten.stack.default, [a, b], 1)), 1) + 1,
        lambda t, a, b: t.call(aten.clone.default, b),
    ),
    "a sum that keeps its dim": (
        lambda t, a, b: t.call(aten.squeeze.dim, T(t.call(aten.sum.dim_IntList, a, [0], True)), 0),
        lambda t, a, b: t.call(aten.sum.dim_IntList, a, [0]),
    ),
    "elements that pair off in another shape": (
        lambda t, a, b: t.call(aten.mul.Tensor, a, b),
        lambda t, a, b: t.call(
            aten.view.default,
            T(
                t.call(
                    aten.mul.Tensor,
                    T(t.call(aten.view.default, a, [3, 4])),
                    T(t.call(aten.view.default, b, [3, 4])),
                )
            ),
            [2, 6],
        ),
    ),
    "zeros added": (
        lambda t, a, b: t.call(aten.add.Tensor, a, T(t.call(aten.zeros_like.default, b))),
        lambda t, a, b: t.call(aten.clone.default, a),
    ),
    "transposed twice": (
        lambda t, a, b: t.call(aten.t.default, T(t.call(aten.permute.default, a, [1, 0]))),
        lambda t, a, b: t.call(aten.clone.default, a),
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_ways_to_write_the_same(name: str) -> None:
    """Breaks when a program that computes what was planned in another way is refused."""
    traced = Traced()
    a, b = T(traced.leaf("a", 2, 6)), T(traced.leaf("b", 2, 6))
    one, other = (each(traced, a, b) for each in SAME[name])
    torch.testing.assert_close(traced.known[one][0], traced.known[other][0])
    assert traced.known[one][1] == traced.known[other][1]


def test_a_tape_gives_the_terms_of_other_leaves() -> None:
    """Breaks when a layer's terms of other operands are not those that its statements would give."""
    made = []
    for names in (("x", "y"), ("u", "v")):
        traced = Traced()
        a, b = T(traced.leaf(names[0], 2, 6)), T(traced.leaf(names[1], 2, 6))
        total = traced.call(aten.add.Tensor, T(traced.call(aten.mul.Tensor, a, b)), a)
        made.append((traced, traced.known[traced.call(aten.sum.dim_IntList, T(total), [0])][1]))
    (first, term), (_, wanted) = made
    tape = Tape(first.terms, [leaf("x"), leaf("y")], [term, leaf("x")])
    assert tape([leaf("u"), leaf("v")]) == (wanted, leaf("u"))
    assert tape([leaf("x"), leaf("y")]) == (term, leaf("x"))
    assert tape([leaf("v"), leaf("u")])[0] not in (term, wanted)


def _chain(traced: Traced, place: int, *calls: tuple[Any, ...]) -> int:
    """Operators one after the other, each with its further arguments; the last result's place."""
    for target, *arguments in calls:
        place = traced.call(target, T(place), *arguments)
    return place


def _computed(kind: str, traced: Traced, name: str) -> int:
    """A value of 2 × 3 × 4, of a kind whose terms others are put together with; its place."""
    exp, view, transpose = aten.exp.default, aten.view.default, aten.transpose.int
    if kind == "view":
        return _chain(traced, traced.leaf(name, 6, 4), (exp,), (view, [2, 3, 4]))
    if kind == "order":
        return _chain(traced, traced.leaf(name, 2, 4, 3), (exp,), (transpose, 1, 2))
    plain = traced.leaf(name, 2, 3, 4)
    if kind == "sum":
        return traced.call(aten.add.Tensor, T(plain), T(traced.leaf(f"{name} too", 2, 3, 4)))
    calls = {"leaf": [], "op": [(exp,)], "zero": [(aten.zeros_like.default,)]}
    return _chain(traced, plain, *calls[kind])


def _drawn(traced: Traced, values: list[int], seed: int) -> list[Term]:
    """The terms of what operators drawn by the seed give of values of 2 × 3 × 4."""
    draw, values, first = random.Random(seed), list(values), len(traced.known)
    view, transpose = aten.view.default, aten.transpose.int
    for _ in range(12):
        x, y, kind, dims = draw.choice(values), draw.choice(values), draw.randrange(6), draw.sample(range(3), 2)
        if kind < 2:
            values.append(traced.call([aten.add.Tensor, aten.mul.Tensor][kind], T(x), T(y)))
        elif kind == 2:
            values.append(_chain(traced, x, (transpose, *dims), (aten.sin.default,), (transpose, *dims)))
        elif kind == 3:
            values.append(_chain(traced, x, (view, [4, 6]), (aten.tanh.default,), (view, [2, 3, 4])))
        elif kind == 4:
            values.append(_chain(traced, x, (view, [6, 4]), (view, [2, 3, 4])))
        else:
            _chain(traced, x, (aten.cumsum.default, 0), (transpose, *dims), (transpose, 0, 1), (view, [24]))
    return [term for _, term in traced.known[first:]]


@pytest.mark.parametrize("kind", ["leaf", "op", "view", "order", "sum", "zero"])
@pytest.mark.parametrize("seed", range(12))
def test_a_tape_gives_the_terms_of_leaves_that_are_computed(kind: str, seed: int) -> None:
    """Breaks when a layer's terms depend on whether what it is given was viewed, turned or added up before it."""
    traced = Traced()
    recorded = _drawn(traced, [traced.leaf(name, 2, 3, 4) for name in ("x", "y")], seed)
    tape = Tape(traced.terms, [leaf("x"), leaf("y")], recorded)
    other = [_computed(kind, traced, name) for name in ("u", "v")]
    terms = [traced.known[place][1] for place in other]
    assert list(tape(terms)) == _drawn(traced, other, seed)


def test_constants_by_their_numbers() -> None:
    """Breaks when a program's table of other numbers is taken for the planned one."""
    assert constant_leaf(torch.tensor([1, 2])) == constant_leaf(torch.tensor([1, 2]))
    assert constant_leaf(torch.tensor([1, 2])) != constant_leaf(torch.tensor([1, 3]))
    assert constant_leaf(torch.tensor([1, 2])) != constant_leaf(torch.tensor([1.0, 2.0]))
