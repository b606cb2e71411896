"""Rules found by running: right for operators that have none, and none for what only looks as if it could be split."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.library import Library

from autopar.operators.rules import OpCall, TensorSpec, op_call, rule_for
from autopar.operators.rules.discover import discover

pytestmark = pytest.mark.unit
LIBRARY = Library("autopar_test_discover", "DEF")


def define(schema: str, function):
    LIBRARY.define(schema)
    name = schema.partition("(")[0]
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    return getattr(torch.ops.autopar_test_discover, name).default


def weighted(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).cumsum(-1).sum(0)


def largest(x: Tensor) -> Tensor:
    return x.amax(0).exp()


def centred(x: Tensor) -> Tensor:
    return x - x.mean(0)


def by_segment(x: Tensor, ends: Tensor) -> Tensor:
    total = torch.cat([x.new_zeros(1, *x.shape[1:]), x.cumsum(0)])
    return total[ends] - total[torch.cat([ends.new_zeros(1), ends[:-1]])]


WEIGHTED = define("weighted(Tensor x, Tensor w) -> Tensor", weighted)
LARGEST = define("largest(Tensor x) -> Tensor", largest)
CENTRED = define("centred(Tensor x) -> Tensor", centred)
BY_SEGMENT = define("by_segment(Tensor x, Tensor ends) -> Tensor", by_segment)
NOISE = define("noise(Tensor x) -> Tensor", lambda x: x + torch.rand_like(x))


def found(target, *args) -> str:
    rule = discover(op_call(target, args, {}, target(*args)))
    return "" if rule is None else str(rule)


def test_products_sums_and_linearity_are_found() -> None:
    text = found(WEIGHTED, torch.randn(4, 6, 8), torch.randn(6, 8))
    assert text == "d0 d1 x0_2, d1 x1_1 -> d1 y0_1 | d0 sum, x0_2 !, x1_1 !, y0_1 ! | linear 0; 1"


def test_a_maximum_is_found() -> None:
    assert found(LARGEST, torch.randn(4, 6)) == "d0 d1 -> d1 | d0 max"


def test_what_needs_the_whole_dim_is_blocked() -> None:
    assert found(CENTRED, torch.randn(4, 6)) == "x0_0 d0 -> y0_0 d0 | x0_0 !, y0_0 ! | linear 0"


def test_integers_that_mean_places_are_not_split_by_chance() -> None:
    ends = torch.tensor([1, 1, 3, 4])
    text = found(BY_SEGMENT, torch.randn(4, 6), ends)
    assert text == "x0_0 d0, x1_0 -> y0_0 d0 | x0_0 !, x1_0 !, y0_0 ! | linear 0"


def test_large_calls_are_tried_small() -> None:
    x, w = TensorSpec((512, 64, 128), torch.float32), TensorSpec((64, 128), torch.float32)
    rule = discover(OpCall(WEIGHTED, (x, w), {}, (x, w), (TensorSpec((64, 128), torch.float32),)))
    assert rule.sizes["d0"] == 512
    assert str(rule).startswith("d0 d1 x0_2, d1 x1_1 -> d1 y0_1 | d0 sum")


def test_random_operators_are_not_discovered() -> None:
    x = torch.randn(4, 6)
    assert found(NOISE, x) == ""
    with pytest.warns(UserWarning, match=r"autopar_test_discover\.noise\.default has no sharding rule"):
        rule = rule_for(op_call(NOISE, (x,), {}, NOISE(x)))
    assert not any(factor.split for factor in rule.factors)
