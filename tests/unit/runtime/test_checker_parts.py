"""Of what wholes a local tensor may be a part: of all of them at once, however many these are."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.ir.sharding import PARTIAL, REPLICATE, Placement, Shard
from autopar.ir.terms import ZERO, leaf, short
from autopar.operators.rules.lookup import rules_for
from autopar.runtime.checker.on_meta import executed
from autopar.runtime.checker.types import Axes, Typed, bare, give
from autopar.runtime.checker.typing_mode import TypedOperators, Typing

pytestmark = pytest.mark.unit
ATEN = torch.ops.aten


def typing_on(names: str, steps: Iterable[int] = ()) -> Typing:
    """A typing on axes of two ranks each. steps: the terms of what was planned, if anything was."""
    axes = names.split(",")
    planned = frozenset(map(short, steps))
    return Typing(Axes(tuple(axes), (2,) * len(axes)), "", planned, hinted=bool(planned))


def given(shape: tuple[int, ...], *types: tuple[tuple[int, ...], tuple[Placement, ...]]) -> Tensor:
    """A local tensor that is a part of each of these wholes."""
    x = torch.empty(shape, device="meta")
    return give(x, {Typed(whole, lies, leaf("x")) for whole, lies in types})


def zeros(typing: Typing, *shape: int) -> Tensor:
    """What `aten.zeros` gives in a program."""
    made: Tensor = typing.typed(ATEN.zeros.default, (list(shape),), {"dtype": torch.float32})
    return made


def meet_stripes(typing: Typing, axes: int) -> None:
    """Values in two, four and eight stripes: from here on zeros may lie in these, too."""
    for outer in (2, 4, 8):
        lies = (Shard(0, outer), *[REPLICATE] * (axes - 1))
        typing.typed(ATEN.neg.default, (given((16,), ((32,), lies)),), {})


BATCH = (Shard(0), Shard(0), REPLICATE)


@pytest.mark.parametrize("steps", [(), (ZERO,)], ids=["nothing planned", "zeros planned"])
def test_zeros_are_a_part_of_any_zeros(steps: tuple[int, ...]) -> None:
    """Breaks if zeros are taken to be whole since zeros were planned somewhere: all zeros have one term."""
    typing = typing_on("dp,ep,tp", steps)
    rows = given((2, 8, 4), ((8, 8, 4), BATCH))
    state = zeros(typing, 2, 4, 4)
    for other in (state, typing.typed(ATEN.transpose.int, (state, -1, -2), {})):
        made = TypedOperators(typing).matmul(rows, other)
        assert Typed((8, 8, 4), BATCH) in bare(typing.axes.of(made))


def test_zeros_are_a_part_of_all_zeros_that_were_asked_for() -> None:
    """Breaks if only the zeros of the first call that a rule was asked for are followed: they may be another's."""
    named = {"dtype": torch.float32, "device": "meta"}
    calls = [executed(ATEN.zeros.default, ([*shape],), named, ()) for shape in ((6, 5), (3, 10))]
    rules_for([call for call in calls if call is not None])
    typing = typing_on("dp,tp", (ZERO,))
    for whole, dim in (((6, 5), 0), ((3, 10), 1)):
        rows = given((3, 5), (whole, (REPLICATE, Shard(dim))))
        made = typing.typed(ATEN.mul.Tensor, (rows, zeros(typing, 3, 5)), {})
        assert Typed(whole, (REPLICATE, Shard(dim))) in bare(typing.axes.of(made))


def test_what_lies_in_many_ways_beside_what_lies_in_two() -> None:
    """Breaks if what two operands may be together is tried pair by pair, until there is no more room: a value that
    was whole was a term alone after it had met zeros.
    """
    typing = typing_on("dp,ep,tp")
    meet_stripes(typing, 3)
    state = zeros(typing, 2, 8, 4, 4)
    assert len(bare(typing.axes.of(state))) > 1500
    summed = (Shard(0), Shard(0), PARTIAL)
    rows = given((2, 8, 6, 4), ((8, 8, 6, 4), BATCH), ((8, 8, 6, 4), summed))
    made = TypedOperators(typing).matmul(rows, state)
    assert {Typed((8, 8, 6, 4), BATCH), Typed((8, 8, 6, 4), summed)} <= bare(typing.axes.of(made))


@pytest.mark.moderate
def test_zeros_on_four_axes_lie_in_all_their_ways() -> None:
    """Breaks if ways that make pieces of other sizes use up the room: the first axis then splits nothing."""
    typing = typing_on("dp,ep,cp,tp")
    meet_stripes(typing, 4)
    lies = (Shard(0, 8), REPLICATE, REPLICATE, REPLICATE)
    rows = given((16, 8, 8), ((32, 8, 8), lies))
    made = typing.typed(ATEN.mul.Tensor, (rows, zeros(typing, 16, 8, 8)), {})
    assert Typed((32, 8, 8), lies) in bare(typing.axes.of(made))


def test_what_does_not_fit_zeros_is_refused_all_the_same() -> None:
    """Breaks if zeros of other sizes fit, or if a term is added to a value because this met zeros."""
    typing = typing_on("dp,ep,tp", (ZERO,))
    rows = given((2, 8, 4), ((8, 8, 4), BATCH))
    with pytest.raises(AutoparError, match=r"does not run|no part of one whole"):
        TypedOperators(typing).matmul(rows, zeros(typing, 4, 4, 4))
    term = given((2, 8), ((2, 8), (PARTIAL, REPLICATE, REPLICATE)))
    one = given((2, 8), ((2, 8), (REPLICATE, REPLICATE, REPLICATE)))
    with pytest.raises(AutoparError, match="no part of one whole"):
        typing.typed(ATEN.add.Tensor, (term, typing.typed(ATEN.mul.Tensor, (one, zeros(typing, 2, 8) + 1), {})), {})


def test_a_row_that_is_a_value_or_a_term_of_the_sum() -> None:
    """Breaks if what a call on rows was found to be, before these were taken for terms, is remembered for terms."""
    typing = typing_on("tp")
    row = given((1, 3), ((1, 3), (REPLICATE,)), ((2, 3), (Shard(0),)))
    term = given((1, 3), ((1, 3), (PARTIAL,)))
    made = typing.typed(ATEN.add.Tensor, (row, term), {})
    assert bare(typing.axes.of(made)) == {Typed((1, 3), (PARTIAL,))}
