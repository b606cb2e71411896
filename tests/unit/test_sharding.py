"""Shardings: local shapes, text, and redistribution steps against a reference in numpy."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from autopar.base.errors import AutoparError
from autopar.ir import sharding
from autopar.ir.sharding import (
    PARTIAL,
    REPLICATE,
    Partial,
    Placement,
    Replicate,
    Shard,
    Sharding,
    Step,
    format_shape,
    format_sharding,
    is_valid,
    local_shape,
    num_pieces,
    parse_placement,
    parse_sharding,
    redistribution_steps,
    splits_of,
)

MANY = settings(max_examples=400, deadline=None, derandomize=True)
AXES = ("dp", "tp", "ep")
Pieces = dict[tuple[int, ...], np.ndarray]

PLACEMENTS = st.one_of(
    st.just(Replicate()),
    st.builds(Shard, st.integers(0, 2), st.sampled_from([1, 1, 1, 2, 3])),
    st.builds(Shard, st.integers(0, 2), st.sampled_from([2, 4]), st.just(True)),
    st.sampled_from([Partial(), Partial("max")]),
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], Sharding, Sharding, tuple[int, ...]]:
    """Sizes of 1 to 3 axes, two shardings, and a shape that both divide."""
    sizes = tuple(draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=3)))
    source, target = (tuple(draw(PLACEMENTS) for _ in sizes) for _ in range(2))
    shape = []
    for dim in range(draw(st.integers(1, 3))):
        need = 1
        for layout in (source, target):
            pieces = math.prod(
                size for p, size in zip(layout, sizes, strict=True) if isinstance(p, Shard) and p.dim == dim
            )
            stripes = math.lcm(*(p.outer for p in layout if isinstance(p, Shard) and p.dim == dim))
            need = math.lcm(need, pieces * stripes)
        shape.append(need * draw(st.sampled_from([1, 2])))
    assume(math.prod(shape) <= 4000)
    assume(is_valid(shape, source, sizes) and is_valid(shape, target, sizes))
    return sizes, source, target, tuple(shape)


def cut(x: np.ndarray, index: int, num: int, dim: int, outer: int, zigzag: bool) -> np.ndarray:
    """This rank's piece of `dim` seen as (outer, rest): the definition of Shard, written down as plainly as can be."""
    pieces = [np.split(stripe, num, axis=dim) for stripe in np.split(x, outer, axis=dim)]
    return np.concatenate([p[num - 1 - index if zigzag and k % 2 else index] for k, p in enumerate(pieces)], axis=dim)


def rank_pieces(whole: np.ndarray, layout: Sharding, sizes: Sequence[int]) -> Pieces:
    """What each rank holds. Terms of a sum, and candidates for a maximum, differ from rank to rank."""
    noise = np.random.default_rng(0)
    terms: Pieces = {}
    partial = [axis for axis, p in enumerate(layout) if isinstance(p, Partial)]
    for rank in itertools.product(*map(range, sizes)):
        terms[rank] = whole
    for axis in partial:
        for rest in {tuple(i for a, i in enumerate(rank) if a != axis) for rank in terms}:
            group = [(*rest[:axis], i, *rest[axis:]) for i in range(sizes[axis])]
            value = terms[group[0]]
            placement = layout[axis]
            assert isinstance(placement, Partial)
            key = noise.integers(-9, 9, value.shape)
            for i, rank in enumerate(group):
                if placement.op == "sum":
                    terms[rank] = value - key * (len(group) - 1) if i == 0 else key
                else:
                    terms[rank] = value if i == len(group) - 1 else value - abs(key)
    for axis, placement in enumerate(layout):
        if isinstance(placement, Shard):
            terms = {r: _own(x, r[axis], sizes[axis], placement) for r, x in terms.items()}
    return terms


def _own(x: np.ndarray, index: int, num: int, placement: Shard) -> np.ndarray:
    return cut(x, index, num, placement.dim, placement.outer, placement.zigzag)


def execute(pieces: Pieces, step: Step, sizes: Sequence[int]) -> Pieces:
    """One step for all ranks: each collective by its definition."""
    num = sizes[step.axis]
    own = (step.dim, step.outer, step.zigzag)
    reduce: Callable[..., np.ndarray] = np.sum if step.op == "sum" else np.max
    done: Pieces = {}
    for rank in pieces:
        group = [pieces[(*rank[: step.axis], i, *rank[step.axis + 1 :])] for i in range(num)]
        if step.kind == "slice":
            done[rank] = cut(pieces[rank], rank[step.axis], num, *own)
        elif step.kind == "all_reduce":
            done[rank] = reduce(np.stack(group), axis=0)
        elif step.kind == "reduce_scatter":
            done[rank] = cut(reduce(np.stack(group), axis=0), rank[step.axis], num, *own)
        elif step.kind == "all_gather":
            done[rank] = glue(group, *own)
        else:
            whole = glue(group, step.from_dim, step.from_outer, step.from_zigzag)
            done[rank] = cut(whole, rank[step.axis], num, *own)
    return done


def glue(group: Sequence[np.ndarray], dim: int, outer: int, zigzag: bool) -> np.ndarray:
    """The inverse of `cut`."""
    stripes = [np.split(piece, outer, axis=dim) for piece in group]
    orders = [stripes[::-1] if zigzag and k % 2 else stripes for k in range(outer)]
    return np.concatenate([piece[k] for k, order in enumerate(orders) for piece in order], axis=dim)


@pytest.mark.moderate
@MANY
@given(cases())
@example(
    ((2, 2), (Replicate(), Shard(0)), (Shard(0, 3), Shard(0)), (12,))
)  # a stripe and a half for each of the second
@example(((2, 2), (Shard(0, 3), Shard(0)), (Shard(1), Shard(0)), (12, 2)))
def test_redistribution_moves_the_right_elements(case: tuple) -> None:
    """Breaks if steps come in a wrong order (a split undone under a later one), or with wrong stripes or operators, or
    if a split is made in front of another whose pieces are no whole ones of its stripes.
    """
    sizes, source, target, shape = case
    if sum(isinstance(p, Partial) for p in source) > 1:
        # Terms over several axes, of a sum and of a maximum, do not commute: nothing makes such values.
        assume(len({p.op for p in source if isinstance(p, Partial)}) == 1)
    steps = redistribution_steps(source, target, sizes)
    becomes_partial = any(isinstance(t, Partial) and s != t for s, t in zip(source, target, strict=True))
    assert (steps is None) == becomes_partial
    if steps is None:
        return
    whole = np.random.default_rng(1).integers(-50, 50, shape)
    pieces = rank_pieces(whole, source, sizes)
    for step in steps:
        pieces = execute(pieces, step, sizes)
    wanted = rank_pieces(whole, target, sizes)
    kept = [axis for axis, p in enumerate(target) if isinstance(p, Partial)]
    for rank, piece in pieces.items():
        assert piece.shape == local_shape(shape, target, sizes) == wanted[rank].shape
        if not kept:
            np.testing.assert_array_equal(piece, wanted[rank])
    for axis in kept:  # terms that stay terms: compare what they add up to
        placement = target[axis]
        assert isinstance(placement, Partial)
        pieces = execute(pieces, Step("all_reduce", axis, op=placement.op), sizes)
    plain = tuple(Replicate() if isinstance(p, Partial) else p for p in target)
    for rank, piece in rank_pieces(whole, plain, sizes).items():
        np.testing.assert_array_equal(pieces[rank], piece)


@pytest.mark.slow
@MANY
@given(cases())
def test_no_step_is_wasted(case: tuple) -> None:
    """Breaks if something is moved that lies right, reduced twice, or gathered before it was made small."""
    sizes, source, target, _ = case
    steps = redistribution_steps(source, target, sizes)
    if steps is None:
        return
    assert (steps == ()) == (source == target)
    for axis, (have, want) in enumerate(zip(source, target, strict=True)):
        own = [step.kind for step in steps if step.axis == axis]
        assert sum(kind in ("all_reduce", "reduce_scatter") for kind in own) == (
            isinstance(have, Partial) and have != want
        )
        assert len(own) <= 4
    assert len(steps) <= 4 * len(source)


def test_rules_that_lead_nowhere_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a wrong rule (terms combined over the wrong axis, a split made and undone) has the compiler loop."""
    steps = redistribution_steps.__wrapped__
    monkeypatch.setattr(sharding, "next_steps", lambda *_: iter([("all_reduce", 1, True)]))
    with pytest.raises(AssertionError, match="all_reduce over axis 1"):
        steps((Partial(), Replicate()), (Replicate(), Replicate()), (2, 2))
    turns = {True: ("slice", 0, True), False: ("all_gather", 0, True)}
    monkeypatch.setattr(sharding, "next_steps", lambda have, *_: iter([turns[have[0] == 0]]))
    with pytest.raises(AssertionError, match="never becomes"):
        steps((Replicate(), Replicate()), (Shard(0), Shard(1)), (2, 2))


def test_a_split_in_front_of_another_is_one_step() -> None:
    """Breaks if heads that tensor parallelism has dealt out are gathered before ulysses deals out its share of them."""
    tokens, heads = (Shard(1), Shard(2)), (Shard(2, outer=4), Shard(2))
    assert redistribution_steps(tokens, heads, (2, 4)) == (Step("all_to_all", 0, 2, from_dim=1, parts=4),)
    assert redistribution_steps(heads, tokens, (2, 4)) == (Step("all_to_all", 0, 1, from_dim=2),)
    assert redistribution_steps((Partial(), Shard(2)), heads, (2, 4)) == (Step("reduce_scatter", 0, 2, parts=4),)
    assert redistribution_steps(heads, (Replicate(), Shard(2)), (2, 4)) == (Step("all_gather", 0, 2),)
    no_whole_stripes = redistribution_steps(tokens, heads, (2, 8))
    assert no_whole_stripes is not None and "all_gather" in [step.kind for step in no_whole_stripes]


@pytest.mark.slow
@MANY
@given(cases())
def test_local_shape(case: tuple) -> None:
    """Breaks if local shapes, the number of pieces, validity or the order of splits disagree."""
    sizes, source, _, shape = case
    assert local_shape(shape, source, sizes) == next(iter(rank_pieces(np.zeros(shape), source, sizes).values())).shape
    assert math.prod(local_shape(shape, source, sizes)) * num_pieces(source, sizes) == math.prod(shape)
    for dim in range(len(shape)):
        splits = splits_of(source, dim)
        assert list(splits) == sorted(splits)
        assert all(source[axis] == Shard(dim, outer, zigzag) for axis, outer, zigzag in splits)
    for axis, placement in enumerate(source):
        if isinstance(placement, Shard):
            odd = list(shape)
            odd[placement.dim] = odd[placement.dim] * sizes[axis] + 1
            if sizes[axis] * placement.outer > 1:
                assert not is_valid(odd, source, sizes)


@pytest.mark.moderate
@MANY
@given(st.lists(PLACEMENTS, min_size=1, max_size=3))
def test_text_round_trips(placements: list[Placement]) -> None:
    """Breaks if a plan file, or a sharding in a generated program, is read back as something else."""
    layout = tuple(placements)
    axes = AXES[: len(layout)]
    assert parse_sharding(format_sharding(layout, axes), axes) == layout
    assert all(parse_placement(str(placement)) == placement for placement in layout)


def test_text() -> None:
    """Breaks if the notation changes, which plan files, programs and messages share."""
    layout: Sharding = (Shard(0), Shard(2, outer=3), Partial())
    assert format_sharding(layout, AXES) == "dp=S(0), tp=S(2, outer=3), ep=P"
    assert format_shape("f32", (8, 16, 64), layout, AXES) == "f32[8/dp, 16, 64/3:tp] +ep"
    assert format_shape("f32", (8,), (Partial("max"),), ("dp",)) == "f32[8] max:dp"
    assert parse_sharding("tp=S(1)", ("dp", "tp")) == (Replicate(), Shard(1))
    zigzag: Sharding = (Shard(0), Shard(1, outer=2, zigzag=True))
    assert format_sharding(zigzag, AXES[:2]) == "dp=S(0), tp=S(1, outer=2, zigzag)"
    assert format_shape("bf16", (8, 128), zigzag, ("dp", "cp")) == "bf16[8/dp, 128/2~cp]"
    with pytest.raises(AutoparError, match=r"dim 1 cannot be split zigzag in 3 stripes\..*even number"):
        parse_placement("S(1, outer=3, zigzag)")
    with pytest.raises(AutoparError, match=r"'S\(x\)' is not a placement.*write"):
        parse_placement("S(x)")
    with pytest.raises(AutoparError, match=r"names unknown axes \['ep'\].*axes: dp, tp"):
        parse_sharding("ep=R", ("dp", "tp"))


def test_a_split_that_does_not_divide() -> None:
    """Breaks if an uneven split is cut short instead of refused."""
    with pytest.raises(AutoparError, match=r"dim 1 of \(4, 6\) cannot be split over 4 ranks\. 6 elements in 1 stripes"):
        local_shape((4, 6), (Shard(1),), (4,))


@pytest.mark.parametrize("placement", [Shard(1), Shard(0, 2, zigzag=True), REPLICATE, PARTIAL, Partial("max")], ids=str)
def test_equal_placements_are_one_object(placement: Placement) -> None:
    """Breaks when a placement that is spelled otherwise, copied or read from a pickle is another object, or another
    key of a dict, than the one that it equals.
    """
    same = [copy.deepcopy(placement), pickle.loads(pickle.dumps(placement)), replace(placement)]
    assert all(each is placement for each in same)
    assert Shard(1) is Shard(dim=1, outer=1, zigzag=False)
    assert Shard(0) is not Shard(1) and Shard(0) < Shard(1)
