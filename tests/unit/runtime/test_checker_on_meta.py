"""on_meta: what the checker says of operators without torch is what torch says."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.ir.op_call import flatten_results
from autopar.ir.sharding import Replicate, Shard
from autopar.ir.terms import leaf, short
from autopar.runtime.checker.on_meta import on_meta
from autopar.runtime.checker.types import Axes, Typed, give
from autopar.runtime.checker.typing_mode import Typing

pytestmark = pytest.mark.unit
aten = torch.ops.aten


def seen(made: Any) -> list[Any]:
    return [(tuple(x.shape), x.dtype, x.stride()) if isinstance(x, Tensor) else x for x in flatten_results(made)]


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("shape", "normalized"), [((2, 3, 8), [8]), ((2, 3, 8), [3, 8]), ((8,), [8]), ((0, 8), [8])])
def test_layer_norms(dtype: torch.dtype, shape: tuple[int, ...], normalized: list[int]) -> None:
    """Breaks when a norm's results, or its gradients, are said to have other shapes or kinds of numbers."""
    x = empty(*shape, dtype=dtype)
    for weight, bias in product((None, empty(*normalized, dtype=dtype)), repeat=2):
        args = [x, normalized, weight, bias, 1e-5]
        norm = aten.native_layer_norm.default(*args)
        assert seen(on_meta(aten.native_layer_norm.default, args, {})) == seen(norm)
        for mask in product((True, False), repeat=3):
            args = [x, x, normalized, norm[1], norm[2], weight, bias, list(mask)]
            gradients = aten.native_layer_norm_backward.default(*args)
            assert seen(on_meta(aten.native_layer_norm_backward.default, args, {})) == seen(gradients)


@pytest.mark.parametrize("weight", [empty(4), empty(8, 1), empty(8, dtype=torch.float64)])
def test_layer_norms_that_do_not_fit(weight: Tensor) -> None:
    """Breaks when a weight of another shape, which torch refuses, passes, or mixed numbers are said to be something."""
    args = [empty(2, 3, 8), [8], weight, None, 1e-5]
    try:
        wanted = seen(aten.native_layer_norm.default(*args))
    except RuntimeError:
        with pytest.raises(RuntimeError):
            on_meta(aten.native_layer_norm.default, args, {})
    else:
        assert seen(on_meta(aten.native_layer_norm.default, args, {})) == wanted


@pytest.mark.parametrize(
    "target", [aten.add.Tensor, aten.div.Tensor, aten.mul.Tensor, aten.gt.Tensor, aten.gelu_backward.default]
)
@pytest.mark.parametrize("kinds", product((torch.float32, torch.bfloat16, torch.int64, torch.bool), repeat=2))
def test_elementwise_operators(target: Any, kinds: tuple[torch.dtype, torch.dtype]) -> None:
    """Breaks when what single numbers give is not what tensors of these kinds give, scalars and broadcasts included."""
    one, other = kinds
    for left, right in product(((2, 3), ()), ((3,), (), (1, 1))):
        args = [empty(*left, dtype=one), empty(*right, dtype=other)]
        try:
            wanted = seen(target(*args))
        except (RuntimeError, ValueError):
            continue
        if target is not aten.gelu_backward.default or left == right:
            assert seen(on_meta(target, args, {})) == wanted


def same(target: Any, *args: Any) -> None:
    """What is said of a call is what torch says, that it does not fit included."""
    try:
        wanted = seen(target(*args))
    except (RuntimeError, IndexError, ValueError) as error:
        with pytest.raises(type(error)):
            on_meta(target, args, {})
    else:
        assert seen(on_meta(target, args, {})) == wanted


@pytest.mark.parametrize("target", [aten.sum.dim_IntList, aten.amax.default])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool])
@pytest.mark.parametrize("dims", [[0], [-1], [0, 2], [2, 1], [], None, [3], [-4], [1, 1], [1, -2]])
def test_reductions(target: Any, dtype: torch.dtype, dims: list[int] | None) -> None:
    """Breaks when a sum is said to be of another shape or kind of numbers, or one over no dim of it passes."""
    if dims is None and target is aten.amax.default:
        return
    for shape, keepdim in product(((2, 3, 4), (2, 0, 4), ()), (False, True)):
        same(target, empty(*shape, dtype=dtype), dims, keepdim)
    same(target, empty(4, 3, 2, dtype=dtype).transpose(0, 2), dims)


@pytest.mark.parametrize("target", [aten.cat.default, aten.stack.default])
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3, 3, -4])
def test_tensors_put_together(target: Any, dim: int) -> None:
    """Breaks when tensors that torch does not put together pass, or are said to make something else."""
    x, half = empty(2, 3), empty(2, 3, dtype=torch.float16)
    others = (empty(2, 3), empty(2, 5), empty(4, 3), empty(0), empty(3), empty(), half, empty(3, 2).t())
    for tensors in ([x], [], *([x, each, x] for each in others), [others[-1]] * 2, [empty()] * 2, [empty(2, 0)] * 2):
        same(target, tensors, dim)


def test_one_whole_tensor_among_parts() -> None:
    """Breaks when a product of a rank's rows is taken for the whole one, as the weight is whole and it was planned."""
    linear, axes = torch.ops.autopar.linear.default, Axes(("dp",), (2,))

    def typed(typing: Typing) -> Typed:
        rows = give(empty(4, 8), {Typed((8, 8), (Shard(0),), leaf("x"))})
        weight = give(empty(6, 8), {Typed((6, 8), (Replicate(),), leaf("w"))})
        (found,) = axes.of(typing.typed(linear, (rows, weight), {}))
        return found

    plain = typed(Typing(axes, ""))
    assert plain.bare == Typed((8, 6), (Shard(0),))
    assert typed(Typing(axes, "", frozenset({short(plain.term)}), hinted=True)) == plain
