"""A run of query heads split off where the axis divides them but not their key heads, proved by execution.

What breaks it: a rank that reads the wrong key heads, or whose terms of the keys' gradients do not add up; a product of
factors split where a single one would do, or split again by a later axis as if it were whole.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar import operators as ops
from autopar.ir.choices import local_shape_of, local_sizes
from autopar.ir.sharding import PARTIAL, REPLICATE, Shard, local_shape
from autopar.operators.rules import Choice, Offset, axis_choices, localize, op_call, parse_rule, rule_for, shardings
from autopar.operators.rules.verify import check_choices, run

pytestmark = [pytest.mark.slow, pytest.mark.unit]
JOINT = Choice("factor", "(h r)")
RULE = parse_rule("b (h r), b h -> b (h r), b h | r=4 sum, (h r)", [(2, 16), (2, 4)], [(2, 16), (2, 4)])


def split(name: str, outer: int = 1) -> Choice:
    return Choice("factor", name, outer)


def test_the_product_is_split_where_no_factor_can_be() -> None:
    assert JOINT in axis_choices(RULE, 8) and split("h") not in axis_choices(RULE, 8)
    whole = shardings(RULE, [JOINT], (8,))
    assert whole == (((Shard(1),), (REPLICATE,)), ((Shard(1),), (PARTIAL,)))
    assert shardings(RULE, [JOINT], (4,)) is None, "h would do"
    assert shardings(RULE, [split("h"), JOINT], (4, 2)) is None, "r would do: h is used up"
    assert JOINT not in axis_choices(RULE, 32)


def test_after_a_split_of_its_factors_the_product_is_what_is_left() -> None:
    found = shardings(RULE, [split("h"), JOINT], (2, 4))
    assert found == (((Shard(1), Shard(1)), (Shard(1), REPLICATE)), ((Shard(1), Shard(1)), (Shard(1), PARTIAL)))
    found = shardings(RULE, [split("r"), JOINT], (2, 8))
    assert found is not None and found[0] == ((Shard(1, 4), Shard(1)), (REPLICATE, REPLICATE))
    assert shardings(RULE, [JOINT, split("h")], (8, 2)) is None
    assert shardings(RULE, [JOINT, split("r")], (8, 2)) is None
    assert shardings(RULE, [JOINT, JOINT], (8, 2)) is not None
    assert shardings(RULE, [JOINT, JOINT], (8, 4)) is None


def test_its_local_sizes_are_those_of_the_shardings() -> None:
    choices, sizes = [split("b"), split("r"), JOINT], (2, 2, 8)
    found = shardings(RULE, choices, sizes)
    local = local_sizes(RULE, choices, sizes)
    for dims, sharding in zip(RULE.operands, found[0]):
        assert local_shape(RULE.shape_of(dims), sharding, sizes) == local_shape_of(dims, local)


def test_a_rank_is_told_its_first_head_and_how_many_share_a_key_head() -> None:
    q, k = torch.randn(2, 16, 6, 4), torch.randn(2, 4, 6, 4)
    rule = rule_for(op_call(torch.ops.autopar.attention.default, (q, k, k), {"group": 4, "scale": 1.0}, (q, q[..., 0])))
    kwargs = localize(rule, (q, k, k), {"group": 4, "scale": 1.0}, [split("r"), JOINT], (2, 8))[1]
    assert kwargs == {"group": 2, "scale": 1.0, "first": Offset(0, (1,), (8,), 1)}
    plain = rule_for(op_call(torch.ops.autopar.attention.default, (k, k, k), {"scale": 1.0}, (k, k[..., 0])))
    assert not plain.joints


def make(batch: int, heads: int, key_heads: int, generator: torch.Generator) -> list[Tensor]:
    return [
        torch.randn(batch, h, 5, 4, generator=generator, dtype=torch.float64) for h in (heads, key_heads, key_heads)
    ]


@pytest.mark.parametrize(
    ("key_heads", "group", "sizes"),
    [(4, 2, (8,)), (4, 4, (8,)), (4, 8, (8,)), (2, 4, (8,)), (6, 2, (4,)), (3, 4, (6,)), (4, 4, (2, 4)), (4, 4, (2, 8)),
     (6, 4, (2, 4)), (2, 8, (4, 4))],
)  # fmt: skip
@pytest.mark.parametrize("masked", [False, True])
def test_every_strategy_gives_the_whole(key_heads: int, group: int, sizes: tuple[int, ...], masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = make(8, key_heads * group, key_heads, generator)
    mask = torch.randn(1, key_heads * group, 5, 5, generator=generator, dtype=torch.float64) if masked else None
    kwargs: dict[str, Any] = {"group": group, "scale": 0.5} | ({} if masked else {"right": 0})
    out, lse = ops.attention(q, k, v, mask, **kwargs)
    g = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (torch.ops.autopar.attention.default, (q, k, v, mask), kwargs),
        (torch.ops.autopar.attention_backward.default, (g, q, k, v, mask, None, None, None, out, lse), kwargs),
        (torch.ops.autopar.repeat_heads.default, (k, group, key_heads * group), {}),
        (torch.ops.autopar.repeat_heads_grad.default, (q, key_heads, group), {}),
    ]
    for target, args, options in calls:
        whole = run(target, args, options)
        rule = rule_for(op_call(target, args, options, whole))
        seen = 0
        for choices in itertools.product(*(axis_choices(rule, size) for size in sizes)):
            if JOINT in choices and shardings(rule, choices, sizes) is not None:
                seen += 1
                assert check_choices(target, args, options, rule, choices, sizes, whole, generator) == "", choices
        assert seen, "the heads were never split as one"


@pytest.mark.parametrize(
    ("heads", "key_heads", "group", "first"), [(3, 2, 2, 1), (1, 4, 2, 5), (2, 2, 4, 6), (4, 3, 4, 3)]
)
def test_a_part_of_the_query_heads_reads_its_key_heads(
    heads: int, key_heads: int, group: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = make(2, heads, key_heads, torch.Generator().manual_seed(1))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    index = (first + torch.arange(heads)) // group
    want = torch.nn.functional.scaled_dot_product_attention(
        leaves[0], leaves[1][:, index], leaves[2][:, index], scale=0.5
    )
    want.sum().backward()
    for kernel in (True, False):
        if not kernel:
            monkeypatch.setattr("autopar.operators.scaled_dot_product._fits_cpu_flash", lambda *_: False)
        out, lse = ops.attention(q, k, v, scale=0.5, group=group, first=first)
        grads = ops.attention_backward(
            torch.ones_like(out), q, k, v, None, None, None, None, out, lse, scale=0.5, group=group, first=first
        )
        torch.testing.assert_close(out, want)
        for have, leaf in zip(grads, leaves, strict=True):
            torch.testing.assert_close(have, leaf.grad)


def test_heads_that_are_not_there_are_refused() -> None:
    q, k, _ = make(1, 4, 2, torch.Generator())
    with pytest.raises(ValueError, match="query heads 2 to 5, 2 for each key head, read beyond 2"):
        ops.attention(q, k, k, scale=1.0, group=2, first=2)
    with pytest.raises(ValueError, match="3 query heads are no multiple of 2"):
        ops.attention(q[:, :3], k, k, scale=1.0)


def test_a_rank_s_own_heads_may_be_as_many_as_its_key_heads() -> None:
    """Breaks when the rule of a call on parts, which still says how many read a key head, names heads it has not."""
    q, k = torch.randn(2, 2, 6, 4), torch.randn(2, 2, 6, 4)
    made = torch.ops.autopar.attention(q, k, k, scale=0.5, group=2)
    rule = rule_for(op_call(torch.ops.autopar.attention.default, (q, k, k), {"scale": 0.5, "group": 2}, made))
    assert rule.joints == () and split("h") in axis_choices(rule, 2)
