"""The text form of rules: what is printed parses back, sizes come from shapes, nonsense is refused with a reason."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.base.errors import AutoparError
from autopar.operators.rules import Factor, Rule, format_rule, parse_rule

pytestmark = pytest.mark.unit
NAMES = ("a", "b", "c", "d", "e_1", "long", "_0", "sumo")


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    """Any rule that the text can hold: every factor occurs somewhere, and stands in the order of first occurrence."""
    tensors = st.lists(st.lists(st.sampled_from(NAMES), max_size=3, unique=True).map(tuple), max_size=4).map(tuple)
    operands = tuple(draw(st.lists(tensors, max_size=3)))
    results = tuple(draw(st.lists(st.none() | tensors, max_size=3)))
    names = dict.fromkeys(n for dims in (*operands, *results) if dims is not None for dim in dims for n in dim)
    factors = tuple(
        Factor(name, draw(st.integers(0, 12)), draw(st.booleans()), draw(st.sampled_from([None, "sum", "max"])))
        for name in names
    )
    groups = st.lists(st.frozensets(st.integers(0, max(len(operands) - 1, 0)), min_size=1), max_size=2)
    return Rule(factors, operands, results, tuple(draw(groups)) if operands else ())


@pytest.mark.moderate
@given(rules())
@settings(deadline=None)
def test_text_with_sizes_parses_back(rule: Rule) -> None:
    assert parse_rule(format_rule(rule, with_sizes=True)) == rule


@pytest.mark.moderate
@given(rules())
@settings(deadline=None)
def test_text_without_sizes_parses_back_with_shapes(rule: Rule) -> None:
    operands = [rule.shape_of(dims) for dims in rule.operands]
    results = [None if dims is None else rule.shape_of(dims) for dims in rule.results]
    assert parse_rule(format_rule(rule), operands, results) == rule


def test_sizes_of_composites_come_from_the_rest() -> None:
    rule = parse_rule("(b s) (h d) -> b s h d", [(6, 20)], [(2, 3, 4, 5)])
    assert rule.sizes == {"b": 2, "s": 3, "h": 4, "d": 5}
    assert parse_rule("(c f) -> f | c=3 !", [(12,)], [(4,)]).sizes == {"c": 3, "f": 4}


def test_leading_dims_are_broadcast() -> None:
    rule = parse_rule("... k, ... k -> ... k | k !", [(2, 3, 4), (3, 4)], [(2, 3, 4)])
    assert str(rule) == "_0 _1 k, _1 k -> _0 _1 k | k !"
    assert str(parse_rule("..., ... -> ...", [(2, 1), (1, 3)], [(2, 3)])) == "_0 1, 1 _1 -> _0 _1"


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    [
        ("a b", None, "one '->'"),
        ("a -> b ->", None, "one '->'"),
        ("a (b -> c", None, "leaves a parenthesis open"),
        ("a (b (c)) -> c", None, "is not a tensor"),
        ("a ? -> a", None, "is not a tensor"),
        ("a -> a | a plus", None, "says nothing of a factor"),
        ("a -> a", None, "no size for a"),
        ("a, a -> a", ([(2,), (3,)], [(2,)]), "has 2 elements, the dim 3"),
        ("a -> a", ([(2,), (3,)], [(2,)]), "it is for 1 operands and 1 results"),
        ("a b -> a", ([(2,)], [(2,)]), "is not for shape (2,)"),
    ],
)
def test_nonsense_is_refused(text: str, shapes: tuple | None, message: str) -> None:
    with pytest.raises(AutoparError) as caught:
        parse_rule(text, *(shapes or ()))
    assert message in str(caught.value)
