"""Experts by PyTorch's grouped product, which runs on the CPU too, against experts computed densely in float64."""

from __future__ import annotations

import pytest
import torch

from autopar.operators.expert_layout import Layout
from autopar.operators.grouped_experts import fits, grouped, grouped_gradients
from tests.unit.kernels.expert_cases import CLAMPED, GATED, ROUTINGS, Case
from tests.unit.kernels.interpreted import assert_near

pytestmark = pytest.mark.unit
LAYOUTS = [(False, False, False), (False, True, True), (True, False, True), (True, True, False)]


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("interleaved", "transposed", "biased"), LAYOUTS)
def test_is_what_experts_are(routing: str, interleaved: bool, transposed: bool, biased: bool) -> None:
    """Breaks if a group has another's rows, rows of no expert count, or a matrix is turned."""
    case = Case(
        routing=ROUTINGS[routing], D=16, F=8, act=CLAMPED if interleaved else GATED, interleaved=interleaved,
        transposed=transposed, biased=biased, start=1,
    )  # fmt: skip
    given = case.tensors()
    g, x, indices, weights, first, second, *bias = given
    layout = Layout(case.act, True, interleaved, transposed)
    parameters = (first, second, bias[0] if bias else None)
    made = grouped(x, indices, weights, *parameters, layout, case.start)
    gradients = grouped_gradients(g, x, indices, weights, *parameters, layout, case.start)
    for own, want in zip((made, *gradients[: 5 if biased else 4]), case.dense(given), strict=True):
        assert_near(own, want)


def test_only_where_it_is_served() -> None:
    """Breaks if a CPU, or another dtype, is sent to a product that PyTorch has for CUDA and bfloat16."""
    for dtype in (torch.bfloat16, torch.float64):
        _, x, indices, _, first, second = Case(dtype=dtype, D=16, F=8).tensors()
        assert not fits(x, indices, first, second, None)
