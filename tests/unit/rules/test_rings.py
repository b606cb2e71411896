"""Rules with a ring: notation, choices, shardings, proof by execution; and what ranks then compute and send."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar import operators
from autopar.cost import rings
from autopar.ir.op_call import OpCall
from autopar.ir.region import NodeStrategy
from autopar.ir.rule import Ring, format_rule, with_fields
from autopar.ir.sharding import PARTIAL, REPLICATE, Shard
from autopar.machine.mesh import Mesh
from autopar.operators.rules import Choice, Rule, axis_choices, op_call, parse_rule, rule_for, shardings
from autopar.operators.rules.attention_cost import pairs_by_rank, seen_pairs, share_of_slowest, visits
from autopar.operators.rules.verify import verify_rule

TEXT = "b h s d, b h t d, b h t e, b t -> b h s e, b h s | d !, t !, s ring t 1 2"
SHAPES = [(2, 2, 8, 4), (2, 2, 8, 4), (2, 2, 8, 4), (2, 8)]
RING, ZIGZAG = Choice("ring", "s"), Choice("ring", "s", 2, zigzag=True)
LENGTH = 16


def attention_call(
    length: int = LENGTH, *, keys: int | None = None, backward: bool = False, **options: Any
) -> tuple[OpCall, Rule, tuple[Any, ...], dict[str, Any]]:
    """A call on q[2, 4, length, 8] and two key heads in float64, its rule, and its arguments."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, length, 8), (2, 2, keys or length, 8), (2, 2, keys or length, 8)]
    tensors: list[Any] = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    said = {"scale": 0.3, **options}
    target: Any = torch.ops.autopar.attention.default
    args = tuple(tensors)
    out, lse = operators.attention(*tensors, **said)
    results: Any = (out, lse)
    if backward:
        target = torch.ops.autopar.attention_backward.default
        args = (torch.randn(out.shape, generator=generator, dtype=torch.float64), *tensors, *[None] * 4, out, lse)
        results = target(*args, **said)
    call = op_call(target, args, said, results)
    return call, rule_for(call), args, said


def test_the_mark_is_read_and_written() -> None:
    rule = parse_rule(TEXT, SHAPES, [(2, 2, 8, 4), (2, 2, 8)])
    assert rule.ring is not None and (rule.ring.query, rule.ring.key, rule.ring.travelling) == ("s", "t", (1, 2))
    assert str(rule) == TEXT
    assert parse_rule(format_rule(rule, with_sizes=True)) == rule


def test_an_axis_may_be_a_ring_where_it_divides_both() -> None:
    assert RING in axis_choices(attention_call()[1], 4)
    assert ZIGZAG in axis_choices(attention_call()[1], 4, zigzags={"s": (2,)})
    assert not [c for c in axis_choices(attention_call(keys=18)[1], 4, zigzags={"s": (2,)}) if c.kind == "ring"]
    assert [c for c in axis_choices(attention_call(keys=12)[1], 4, zigzags={"s": (2,)}) if c.kind == "ring"] == [RING]


def test_what_travels_is_split_along_the_keys_and_complete() -> None:
    rule = attention_call(backward=True)[1]
    found = shardings(rule, (ZIGZAG,), (2,))
    along = (Shard(2, 2, True),)
    assert set(found[0]) == set(found[1]) == {along}
    found = shardings(rule, (ZIGZAG, Choice("factor", "s"), Choice("factor", "h")), (2, 2, 2))
    assert found[0][1] == (Shard(2, 2, True), Shard(2), Shard(1))
    assert found[0][2] == (Shard(2, 2, True), REPLICATE, Shard(1))
    assert found[1][1] == (Shard(2, 2, True), PARTIAL, Shard(1))


def test_one_ring_a_node() -> None:
    assert shardings(attention_call()[1], (RING, RING), (2, 2)) is None


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("seen", [{}, {"right": 0}, {"left": 3, "right": 0, "prefix": 2}], ids=str)
def test_proved_by_execution(backward: bool, seen: dict[str, Any]) -> None:
    call, rule, args, kwargs = attention_call(backward=backward, **seen)
    zigzags = {"s": (2,)}
    assert any(choice.kind == "ring" and choice.zigzag for choice in axis_choices(rule, 2, zigzags=zigzags))
    assert verify_rule(call.target, args, kwargs, rule, zigzags=zigzags, num_pairs=24) == []


def test_a_wrong_ring_is_found_out() -> None:
    """Rows of the batch do not see each other's keys, however these travel."""
    call, rule, args, kwargs = attention_call()
    wrong = verify_rule(call.target, args, kwargs, with_fields(rule, ring=Ring("b", "t", (1, 2))))
    assert wrong and all("ring b" in line for line in wrong)


# ------------------------------------------------------------------------------------------------------ pairs, by rank

WINDOWS = st.tuples(
    st.none() | st.integers(-3, 12), st.none() | st.integers(-12, 12), st.integers(0, 20)
)  # fmt: skip


@pytest.mark.moderate
@given(
    st.integers(0, 12), st.integers(0, 8), st.integers(0, 12), st.integers(0, 8), WINDOWS,
)  # fmt: skip
def test_pairs_are_counted_exactly(
    query: int, queries: int, key: int, keys: int, window: tuple[int | None, int | None, int]
) -> None:
    left, right, prefix = window
    expected = sum(
        ((left is None or t >= s - left) and (right is None or t <= s + right)) or t < prefix
        for s in range(query, query + queries)
        for t in range(key, key + keys)
    )
    assert int(seen_pairs(np.array(query), queries, np.array(key), keys, window)) == expected


def test_contiguous_causal_ranks_are_unequal_and_zigzag_ones_are_not() -> None:
    call, rule, _, _ = attention_call(64, right=0)
    whole = 64 * 65 // 2
    contiguous, zigzag = Choice("factor", "s"), Choice("factor", "s", 2, zigzag=True)
    assert pairs_by_rank(call, rule, (contiguous,), (4,)).sum() == whole
    assert share_of_slowest(call, rule, (contiguous,), (4,)) == (16 * 48 + 16 * 17 // 2) / whole
    assert share_of_slowest(call, rule, (zigzag,), (4,)) == 1 / 4
    assert share_of_slowest(call, rule, (RING,), (4,)) == share_of_slowest(call, rule, (contiguous,), (4,))
    # A second axis cuts what the first left: its last rank has the last queries of the last.
    assert share_of_slowest(call, rule, (contiguous, contiguous), (2, 2)) == (16 * 48 + 16 * 17 // 2) / whole
    assert share_of_slowest(call, rule, (Choice("factor", "b"),), (2,)) == 1


def test_with_zigzag_all_ranks_have_equal_work_in_every_step() -> None:
    call, rule, _, _ = attention_call(64, right=0)
    pairs = pairs_by_rank(call, rule, (ZIGZAG,), (4,))
    own = pairs[0, 0]
    assert {int(pairs[i, i]) for i in range(4)} == {int(own)}
    assert {int(pairs[i, j]) for i in range(4) for j in range(4) if i != j} == {64 * 64 // 32}


@pytest.mark.parametrize(("choice", "seen", "expected"), [
    (RING, {}, (0, 1, 2, 3)),
    (RING, {"right": 0}, (0, 1, 2, 3)),
    (RING, {"left": 4, "right": 0}, (0, 1)),
    (RING, {"left": 5, "right": 0}, (0, 1, 2)),
    (RING, {"left": 0, "right": 0}, (0,)),
    (RING, {"left": 2, "right": 1}, (0, 1, 3)),
    (ZIGZAG, {"left": 1, "right": 0}, (0, 1, 3)),
], ids=str)  # fmt: skip
def test_blocks_visit_those_who_see_them(choice: Choice, seen: dict[str, Any], expected: tuple[int, ...]) -> None:
    call, rule, _, _ = attention_call(**seen)
    assert visits(call, rule, (choice,), (4,)) == expected


def ring_under(choices: tuple[Choice, ...], sizes: tuple[int, ...], **said: Any) -> tuple[OpCall, Rule, NodeStrategy]:
    call, rule, _, _ = attention_call(**said)
    found = shardings(rule, choices, sizes)
    assert found is not None
    return call, rule, NodeStrategy(choices, *found)


def test_bytes_of_a_ring() -> None:
    block = 2 * 2 * LENGTH * 8 * 8 * 2  # keys and values, whole
    forward = rings.ring_of(*ring_under((RING,), (4,)), (4,))
    backward = rings.ring_of(*ring_under((RING,), (4,), backward=True), (4,))
    assert forward is not None and forward.bytes_sent == 3 * block // 4
    assert backward is not None and backward.bytes_sent == (3 + 4) * block // 4
    near = rings.ring_of(*ring_under((RING,), (4,), backward=True, left=3, right=0), (4,))
    assert near is not None and near.bytes_sent == (1 + 2) * block // 4
    alone = rings.ring_of(*ring_under((RING,), (4,), backward=True, left=0, right=0), (4,))
    assert alone is not None and alone.bytes_sent == 0
    split = rings.ring_of(*ring_under((RING, Choice("factor", "h")), (4, 2)), (4, 2))
    assert split is not None and split.bytes_sent == 3 * block // 8


@pytest.mark.parametrize("choice", [Choice("factor", "s"), RING, ZIGZAG])
def test_the_slowest_rank_is_what_counts(choice: Choice) -> None:
    call, rule, _ = ring_under((choice, Choice("factor", "h")), (4, 2), length=64, right=0)
    share = 1 / 4 if choice.zigzag else (16 * 48 + 16 * 17 // 2) / (64 * 65 // 2)
    found = rings.longest_s(call, rule, (choice, Choice("factor", "h")), (4, 2), lambda flops: flops)
    assert found == pytest.approx(rule.flops * share / 2)


def test_only_what_computing_does_not_hide_is_charged() -> None:
    mesh = Mesh.parse("cp=4", hardware="h100")
    node = ring_under((RING,), (4,))
    fast, slow = rings.exposed_s(*node, mesh, lambda _: 1.0), rings.exposed_s(*node, mesh, lambda _: 0.0)
    assert fast == 0 and slow > 0
    assert rings.longest_s(node[0], node[1], node[2].choices, (4,), lambda _: 1.0) == 4


def test_a_ring_of_unequal_ranks_ends_with_the_slowest() -> None:
    """Under a causal mask the last rank computes in every step, the first in one; messages wait for nobody."""
    mesh = Mesh.parse("cp=4", hardware="h100")
    node = ring_under((RING,), (4,), right=0)
    assert rings.longest_s(node[0], node[1], node[2].choices, (4,), lambda _: 1.0) == 4
    assert rings.exposed_s(*node, mesh, lambda _: 1.0) == 0
    backward = ring_under((RING,), (4,), backward=True, right=0)
    home = rings.exposed_s(*backward, mesh, lambda _: 1.0)
    assert 0 < home < 1e-3  # the last gradients travel home when all is computed


def test_buffers_of_a_ring() -> None:
    forward, backward = ring_under((RING,), (4,)), ring_under((RING,), (4,), backward=True)
    block = 2 * 2 * 2 * (LENGTH // 4) * 8 * 8
    assert rings.buffer_bytes(*forward, (4,)) >= 2 * block
    assert rings.buffer_bytes(*backward, (4,)) >= 5 * block
    assert rings.buffer_bytes(*ring_under((Choice("factor", "s"),), (4,)), (4,)) == 0
