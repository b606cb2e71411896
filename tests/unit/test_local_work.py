"""What one rank does of an operator: local m, n, k and batch, rows and keys seen, bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopar.operators
from autopar.cost.local_work import local_work
from autopar.cost.roofline import Work
from autopar.ir.choices import NONE, Choice, shardings
from autopar.ir.op_call import op_call
from autopar.ir.region import NodeStrategy
from autopar.operators.rules.lookup import rule_for

SIZES = (2, 4)
OWN, ATEN = torch.ops.autopar, torch.ops.aten


def work_of(
    target: Any, *args: Any, choices: tuple[Choice, ...] = (NONE, NONE), dtype: Any = None, **kwargs: Any
) -> Work:
    """The work of an operator on meta tensors of these shapes, all of its FLOPs divided by the split factors."""
    tensors = [torch.empty(arg, device="meta", dtype=dtype) if isinstance(arg, tuple) else arg for arg in args]
    call = op_call(target, tensors, kwargs, target(*tensors, **kwargs))
    rule = rule_for(call)
    placed = shardings(rule, choices, SIZES)
    assert placed is not None
    split = 1
    for choice, size in zip(choices, SIZES, strict=True):
        split *= size if choice.kind == "factor" else 1
    return local_work(call, rule, NodeStrategy(choices, *placed), SIZES)(rule.flops / split)


@pytest.mark.parametrize(
    ("target", "shapes", "dims"),
    [
        (ATEN.mm.default, [(64, 32), (32, 16)], (64, 16, 32, 1)),
        (ATEN.bmm.default, [(4, 64, 32), (4, 32, 16)], (64, 16, 32, 4)),
        (ATEN.addmm.default, [(16,), (64, 32), (32, 16)], (64, 16, 32, 1)),
        (ATEN.baddbmm.default, [(4, 64, 16), (4, 64, 32), (4, 32, 16)], (64, 16, 32, 4)),
        (ATEN.mv.default, [(64, 32), (32,)], (64, 1, 32, 1)),
        (OWN.linear.default, [(2, 64, 32), (16, 32)], (128, 16, 32, 1)),
        (OWN.linear.default, [(2, 64, 32), (16, 32), (16,)], (128, 16, 32, 1)),
        (OWN.linear_grad_input.default, [(2, 64, 16), (16, 32)], (128, 32, 16, 1)),
        (OWN.linear_grad_weight.default, [(2, 64, 16), (2, 64, 32)], (16, 32, 128, 1)),
        (OWN.matmul.default, [(2, 8, 64, 32), (2, 8, 32, 16)], (64, 16, 32, 16)),
    ],
)
def test_dims_of_products(target: Any, shapes: list[tuple[int, ...]], dims: tuple[int, ...]) -> None:
    """Breaks if m, n, k or the batch of a product is taken for another one."""
    work = work_of(target, *shapes)
    assert work.dims == dims and work.op_class == "matmul"
    m, n, k, batch = dims
    assert work.flops == 2 * m * n * k * batch


@pytest.mark.parametrize(("factor", "dims"), [("_0", (32, 16, 32, 1)), ("n", (128, 4, 32, 1)), ("k", (128, 16, 8, 1))])
def test_a_split_makes_one_dim_smaller(factor: str, dims: tuple[int, ...]) -> None:
    """Breaks if an axis of four that splits a factor does not leave a quarter of its dim, or touches another."""
    assert work_of(OWN.linear.default, (8, 16, 32), (16, 32), choices=(NONE, Choice("factor", factor))).dims == dims


@pytest.mark.parametrize(
    ("choice", "dims"),
    [
        (NONE, (40, 24, 6, 8)),
        (Choice("factor", "t"), (10 / (1 - 0.75**40), 24, 6, 8 * (1 - 0.75**40))),  # 40 tokens leave some out
        (Choice("factor", "e"), (40, 24, 6, 2)),
        (Choice("factor", "f"), (40, 6, 6, 8)),
        (Choice("exchange", "t"), (40, 24, 6, 2)),
    ],
    ids=str,
)
def test_experts_are_products_of_their_share_of_the_rows(choice: Choice, dims: tuple[float, ...]) -> None:
    """Breaks if a layer of experts is taken for a product of its numbers and weights, which no curve has; or experts to
    which tokens come for such with fewer rows.
    """
    meta = {"device": "meta", "dtype": torch.float32}
    numbers = torch.empty(160, 2, device="meta", dtype=torch.int64)
    given = (torch.empty(160, 6, **meta), numbers, torch.empty(160, 2, **meta))
    work = work_of(
        OWN.experts.default, *given, torch.empty(8, 24, 6, **meta), torch.empty(8, 6, 12, **meta),
        choices=(NONE, choice), act="mul(silu(gate), up)",
    )  # fmt: skip
    assert work.dims == pytest.approx(dims, rel=1e-12)


@pytest.mark.parametrize(
    ("choice", "elements"),
    [
        (NONE, 320 * (2 * 6 + 24 + 12)),
        (Choice("factor", "t"), 80 * (2 * 6 + 24 + 12)),
        (Choice("factor", "e"), 80 * (2 * 6 + 24 + 12)),
        (Choice("factor", "f"), 320 * (2 * 6 + 6 + 3)),
    ],
    ids=str,
)
def test_rows_of_experts_are_moved_beside_their_products(choice: Choice, elements: int) -> None:
    """Breaks if bringing rows together, the activation and bringing them back cost nothing, or do not follow what a
    rank has: 160 tokens with 2 experts each, of 6 features, 24 columns and 12 behind the activation.
    """
    meta = {"device": "meta", "dtype": torch.float32}
    numbers = torch.empty(160, 2, device="meta", dtype=torch.int64)
    given = (torch.empty(160, 6, **meta), numbers, torch.empty(160, 2, **meta))
    parameters = (torch.empty(8, 24, 6, **meta), torch.empty(8, 6, 12, **meta))
    options: dict[str, Any] = {"choices": (NONE, choice), "act": "mul(silu(gate), up)"}
    work = work_of(OWN.experts.default, *given, *parameters, **options)
    assert work.around_bytes == pytest.approx(4 * elements)
    grad = work_of(OWN.experts_grad.default, given[0], *given, *parameters, **options)
    rows, columns = (80 if choice.factor in ("t", "e") else 320), (6 if choice.factor == "f" else 24)
    assert grad.around_bytes == pytest.approx(4 * rows * (3 * 6 + 3 * columns + 4 * columns / 2))


def test_groups_share_the_rows() -> None:
    """Breaks if each expert's product is taken to have all rows."""
    work = work_of(
        ATEN._grouped_mm.default,
        (64, 32),
        (4, 32, 16),
        torch.empty(4, dtype=torch.int32, device="meta"),
        dtype=torch.bfloat16,
    )
    assert work.dims == (16, 16, 32, 4)


@pytest.mark.parametrize(("right", "seen", "full"), [(None, 64, 1.0), (0, 32.5, 0.0)])
def test_attention_sees_keys(right: int | None, seen: float, full: float) -> None:
    """Breaks if the keys that a query sees are miscounted, or a split over heads changes more than the rows."""
    shape = (2, 8, 64, 16)
    whole = work_of(OWN.attention.default, shape, shape, shape, scale=1.0, right=right)
    assert (whole.op_class, whole.dims) == ("attention", (2 * 8 * 64, seen, 16, full))
    split = work_of(
        OWN.attention.default, shape, shape, shape, scale=1.0, right=right, choices=(NONE, Choice("factor", "h"))
    )
    assert split.dims == (2 * 2 * 64, seen, 16, full)
    back = work_of(
        OWN.attention_backward.default, shape, shape, shape, shape, None, None, None, None, shape, shape[:3],
        scale=1.0, right=right,
    )  # fmt: skip
    assert (back.op_class, back.dims) == ("attention_backward", whole.dims)


def test_a_gather_reads_what_it_gives() -> None:
    """Breaks if looking up a few rows is charged the whole table."""
    ids = torch.empty(8, dtype=torch.int64, device="meta")
    work = work_of(OWN.embedding.default, (100_000, 16), ids)
    assert work.moved_bytes == 2 * 8 * 16 * 4 + 8 * 8 and work.op_class == "gather" and work.name == "embedding"
    back = work_of(OWN.embedding_grad.default, (8, 16), ids, 100)
    assert back.moved_bytes == 100 * 16 * 4 + 8 * 16 * 4 + 8 * 8


def test_fused_operators_move_their_operands_once() -> None:
    """Breaks if RMSNorm's kernel is charged for the steps that it was made of."""
    assert autopar.operators
    work = work_of(OWN.rms_norm.default, (64, 32), (32,), 1e-6)
    assert work.op_class == "reduction"
    assert work.moved_bytes == 4 * (2 * 64 * 32 + 32 + 64)


def test_what_may_keep_attention_from_a_kernel() -> None:
    """Breaks if a soft-cap, dropout or an added bias is overlooked, or a mask of bools is taken for a bias."""
    shape = (2, 4, 8, 16)
    q = torch.empty(shape, device="meta")
    bias, mask = torch.empty(1, 4, 8, 8, device="meta"), torch.empty(1, 4, 8, 8, device="meta", dtype=torch.bool)

    def variant(*more: Any, **options: Any) -> str:
        return work_of(OWN.attention.default, q, q, q, *more, scale=1.0, **options).variant

    assert (variant(), variant(right=0), variant(mask), variant(left=3, right=0)) == ("", "", "masked", "masked")
    assert variant(bias) == "bias"
    assert variant(bias, softcap=30.0) == "softcap"
    assert variant(None, None, None, torch.empty((), device="meta", dtype=torch.int64), dropout_p=0.1) == "dropout"
