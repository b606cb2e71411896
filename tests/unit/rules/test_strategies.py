"""From rules to shardings and local arguments: placements, stripes, clashes, what is localized and how."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir.choices import local_shape_of, local_sizes
from autopar.ir.sharding import PARTIAL, REPLICATE, Partial, Shard, is_valid, local_shape
from autopar.operators.rules import (
    Choice,
    Offset,
    Positions,
    Starts,
    axis_choices,
    localize,
    op_call,
    parse_rule,
    rule_for,
    shardings,
)
from autopar.operators.rules.views import match_shapes

pytestmark = pytest.mark.unit
aten = torch.ops.aten
NONE = Choice()


def split(name: str, outer: int = 1) -> Choice:
    return Choice("factor", name, outer)


MM = parse_rule("m k, k n -> m n | k sum | linear 0; 1", [(8, 12), (12, 6)], [(8, 6)])
HEADS = parse_rule("b (h r) d, b h d -> b (h r) d", [(2, 8, 4), (2, 4, 4)], [(2, 8, 4)])
FUSED = parse_rule("b (c h d) -> b h d | c !", [(2, 48)], [(2, 4, 4)])


def test_choices_of_a_product() -> None:
    assert [str(choice) for choice in axis_choices(MM, 2)] == ["-", "m", "k", "n", "+0", "+1"]
    assert [str(choice) for choice in axis_choices(MM, 4)] == ["-", "m", "k", "+0", "+1"]
    assert axis_choices(MM, 1) == [NONE]
    assert [str(c) for c in axis_choices(MM, 2, {"k": [3, 5], "m": (2,)})][1:5] == ["m", "2:m", "k", "3:k"]


def test_choices_leave_out_what_a_result_can_neither_show_nor_sum() -> None:
    rule = parse_rule("a b -> a, b | a sum", [(4, 4)], [(4,), (4,)])
    assert [str(choice) for choice in axis_choices(rule, 2)] == ["-", "a"]


def test_shardings_of_a_product() -> None:
    found = shardings(MM, [split("k"), split("m")], (2, 4))
    assert found == (((Shard(1), Shard(0)), (Shard(0), REPLICATE)), ((PARTIAL, Shard(0)),))
    found = shardings(MM, [Choice("linear", group=1), split("n")], (2, 2))
    assert found == (((REPLICATE, REPLICATE), (PARTIAL, Shard(1))), ((PARTIAL, Shard(1)),))


def test_a_maximum_is_a_partial_maximum() -> None:
    rule = parse_rule("a b -> a | b max", [(4, 4)], [(4,)])
    assert shardings(rule, [split("b")], (2,)) == (((Shard(1),),), ((Partial("max"),),))


def test_minor_factors_are_split_in_stripes_of_the_local_sizes() -> None:
    assert shardings(HEADS, [split("r")], (2,)) == (((Shard(1, 4),), (REPLICATE,)), ((Shard(1, 4),),))
    operands, _ = shardings(HEADS, [split("h"), split("r")], (2, 2)) or ((), ())
    assert operands[0] == (Shard(1), Shard(1, 2))
    operands, _ = shardings(HEADS, [split("r"), split("h")], (2, 2)) or ((), ())
    assert operands[0] == (Shard(1, 4), Shard(1))
    assert shardings(FUSED, [split("d"), split("h")], (2, 2)) == (
        ((Shard(1, 12), Shard(1, 3)),),
        ((Shard(2), Shard(1)),),
    )


def test_one_factor_over_two_axes() -> None:
    assert shardings(MM, [split("m"), split("m")], (2, 4)) is not None
    assert shardings(MM, [split("m"), split("m")], (4, 4)) is None
    assert shardings(MM, [split("k", 3), split("k", 3)], (2, 2)) == (
        ((Shard(1, 3), Shard(1, 3)), (Shard(0, 3), Shard(0, 3))),
        ((PARTIAL, PARTIAL),),
    )
    assert shardings(MM, [split("k", 3), split("k", 2)], (2, 2)) is None
    contiguous_last = shardings(MM, [split("k", 2), split("k")], (2, 2))
    assert contiguous_last is not None and contiguous_last[0][0] == (Shard(1, 2), Shard(1))
    assert shardings(MM, [split("k"), split("k", 3)], (2, 2)) == (
        ((Shard(1), Shard(1, 3)), (Shard(0), Shard(0, 3))),
        ((PARTIAL, PARTIAL),),
    )


def test_zigzag() -> None:
    """Breaks if a joined dim loses which of its stripes are odd, or mixed splits of a factor are taken for others."""
    zigzag = Choice("factor", "s", 2, zigzag=True)
    assert str(zigzag) == "2~s"
    joined = parse_rule("b s d -> (b s) d", [(4, 8, 3)], [(32, 3)])
    assert shardings(joined, [split("b"), zigzag], (2, 2)) == (
        ((Shard(0), Shard(1, 2, True)),),
        ((Shard(0), Shard(0, 4, True)),),
    )
    assert shardings(joined, [zigzag, split("b")], (2, 2)) == (
        ((Shard(1, 2, True), Shard(0)),),
        ((Shard(0, 8, True), Shard(0)),),
    )
    assert shardings(joined, [zigzag, split("s")], (2, 2)) is not None
    assert shardings(joined, [zigzag, zigzag], (2, 2)) is not None
    assert shardings(joined, [split("s", 2), zigzag], (2, 2)) is None
    assert shardings(joined, [zigzag, zigzag], (2, 4)) is None  # four local elements are no eight pieces
    offered = [str(c) for c in axis_choices(joined, 2, zigzags={"s": (2, 4, 8)})]
    assert offered == ["-", "b", "s", "2~s", "4~s"]


def test_starts_are_data() -> None:
    rule = replace(parse_rule("b s -> b s", [(4, 16)], [(4, 16)]), starts_args=((("starts",), "s"),))
    zigzag = Choice("factor", "s", 2, zigzag=True)
    assert localize(rule, (), {"starts": []}, [split("b"), NONE], (2, 2))[1] == {"starts": []}
    _, kwargs = localize(rule, (), {}, [zigzag, split("b"), split("s")], (2, 2, 2))
    starts = kwargs["starts"]
    assert starts == Starts(16, ((0, 2, 2, True), (2, 2, 1, False)))
    assert starts.sharding(3) == (Shard(0, 2, True), REPLICATE, Shard(0))
    assert [starts.value((i, 0, j)) for i in range(2) for j in range(2)] == [[0], [12], [4], [8]]


@pytest.mark.moderate
@given(st.data())
@settings(deadline=None)
def test_shardings_are_valid_and_agree_with_local_shapes(data: st.DataObject) -> None:
    rule = data.draw(st.sampled_from([MM, HEADS, FUSED]))
    sizes = data.draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3))
    choices = [data.draw(st.sampled_from(axis_choices(rule, size, {"k": (2, 3), "h": (2,)}))) for size in sizes]
    found = shardings(rule, choices, sizes)
    if found is None:
        return
    local = local_sizes(rule, choices, sizes)
    for dims, sharding in zip((*rule.operands, *rule.results), (*found[0], *found[1])):
        assert dims is not None
        assert sharding is not None
        assert is_valid(rule.shape_of(dims), sharding, sizes)
        assert local_shape(rule.shape_of(dims), sharding, sizes) == local_shape_of(dims, local)


def call(target, *args, **kwargs):
    output = target(*args, **kwargs)
    made = op_call(target, args, kwargs, output)
    return rule_for(made), made


def test_shape_and_size_arguments_become_local() -> None:
    rule, made = call(aten.view.default, torch.zeros(4, 6, 8), [24, 8])
    args, _ = localize(rule, made.args, made.kwargs, [split("d0"), split("d2")], (2, 4))
    assert args[1] == [12, 2]
    rule, made = call(aten.slice.Tensor, torch.zeros(4, 8), 1, 4, 8)
    assert localize(rule, made.args, {}, [split("f")], (2,))[0][1:] == (1, 2, 4)
    rule, made = call(aten.split_with_sizes.default, torch.zeros(12), [4, 4, 4])
    assert localize(rule, made.args, {}, [split("f")], (4,))[0][1] == [1, 1, 1]
    rule, made = call(aten.native_group_norm.default, torch.zeros(4, 8, 4), None, None, 4, 8, 4, 4, 1e-5)
    assert localize(rule, made.args, {}, [split("n"), split("g")], (2, 2))[0][3:7] == (2, 4, 4, 2)


def test_arguments_stay_where_nothing_is_split() -> None:
    rule, made = call(aten.view.default, torch.zeros(4, 6), [-1])
    assert localize(rule, made.args, {}, [NONE, Choice("linear", group=0)], (2, 2))[0][1] == [-1]


def test_offsets_and_positions_are_data() -> None:
    import autopar.operators  # noqa: F401

    ops = torch.ops.autopar
    rule, made = call(ops.embedding.default, torch.zeros(16, 4), torch.zeros(3, dtype=torch.int64))
    _, kwargs = localize(rule, made.args, {}, [split("v"), NONE, split("v")], (2, 3, 4))
    assert kwargs == {"start": Offset(0, (0, 2), (2, 4), 2)}
    assert kwargs["start"].value((1, 0, 3)) == 14
    assert all(choice.outer == 1 for choice in axis_choices(rule, 2, {"v": (2,)}))
    rule, made = call(ops.embedding_grad.default, torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64), 16, 2)
    args, kwargs = localize(rule, made.args, {}, [split("v")], (4,))
    assert (args[2], args[3]) == (4, Offset(2, (0,), (4,), 4))
    rule, made = call(ops.dropout.default, torch.zeros(8, 6), 0.5, torch.tensor(0), 1, [], [8, 6])
    args, _ = localize(rule, made.args, {}, [split("d0", 2), split("d0", 2)], (2, 2))
    assert args[4:] == ([Positions(8, ((0, 2, 2, False), (1, 2, 2, False))), Positions(6, ())], [8, 6])


shapes = st.lists(st.sampled_from([1, 2, 3, 4, 6]), max_size=4)


@given(shapes, shapes)
@settings(deadline=None)
def test_reshapes_match_what_both_sides_share(source: list[int], rest: list[int]) -> None:
    target = [*rest, math.prod(source)] if math.prod(source) % max(math.prod(rest), 1) == 0 else [math.prod(source)]
    if math.prod(rest) and math.prod(source) % math.prod(rest) == 0:
        target[-1] //= math.prod(rest)
    left, right, sizes, blocked = match_shapes(source, target)
    for dims, shape in ((left, source), (right, target)):
        assert [math.prod(sizes[name] for name in dim) for dim in dims] == shape
    free = [[n for dim in dims for n in dim if n not in blocked] for dims in (left, right)]
    assert free[0] == free[1]
