"""Experts by PyTorch's grouped product, which runs on the CPU too, against experts computed densely in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import autopar
from autopar.cost import grouped_products
from autopar.cost.exchanges import grouped_holds
from autopar.machine import profiles
from autopar.machine.mesh import Mesh
from autopar.operators.expert_layout import Layout
from autopar.operators.grouped_experts import fits, grouped, grouped_gradients
from tests.unit.kernels.expert_cases import CLAMPED, GATED, ROUTINGS, Case
from tests.unit.kernels.interpreted import assert_near
from tests.unit.passes.test_stage_costs import LiveBytes
from tests.unit.test_expert_prices import call_of
from tests.unit.test_mixtures import VOCABULARY, model_of

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


WIDE = "mul(narrow(gelu(wide(gate), approximate='tanh')), up)"


@pytest.mark.parametrize("wide_weights", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("act", [GATED, CLAMPED, WIDE])
@pytest.mark.parametrize(("hidden", "width"), [(256, 96), (64, 256), (128, 8)])
def test_what_is_held_is_what_is_planned(hidden: int, width: int, act: str, biased: bool, wide_weights: bool) -> None:
    """Breaks if a plan leaves out a copy of rows that are sorted by experts, of what lies between products or of what
    is summed, forward or backward, or has far more.
    """
    case = Case(routing=[[0, 1, 2]] * 64, D=hidden, F=width, act=act, dtype=torch.bfloat16, biased=biased)
    given = case.tensors()
    given[3] = given[3].float() if wide_weights else given[3]
    g, x, indices, weights, first, second, *bias = given
    rest: tuple[Any, ...] = (first, second, bias[0] if bias else None, Layout(act, True, False, False), 0)
    options: dict[str, Any] = {"act": act, "hidden": hidden, "width": width, "experts": case.E, "bias": biased}
    for grad in (False, True):
        call = call_of(64, 3, grad=grad, **options)
        place, operands = 3 if grad else 2, list(call.operands)
        operands[place] = replace(operands[place], dtype=weights.dtype)
        planned = grouped_products.held_bytes(replace(call, operands=tuple(operands)), 64, hidden, width, 2 * width)
        with LiveBytes(given) as live:
            if grad:
                made = grouped_gradients(g, x, indices, weights, *rest)
            else:
                made = (grouped(x, indices, weights, *rest),)
        held = live.peak - sum(each.nbytes for each in made)
        assert (0.35 if act == WIDE and grad else 0.5) * planned < held <= planned, (grad, held / planned)


@pytest.mark.moderate
def test_a_plan_has_what_it_holds() -> None:
    """Breaks if a plan for machines without kernels of experts leaves out what PyTorch's product holds there, or has it
    where sizes, or a dtype, do not suit that.
    """
    hardware = replace(profiles.load("h100"), fused_kernels=())
    ids = torch.zeros(8, 64, dtype=torch.int64) + torch.arange(64) % VOCABULARY
    plan = autopar.plan(
        model_of("mixtral", intermediate_size=2048, num_hidden_layers=1), Mesh({"dp": 2}, hardware=hardware),
        strategy="zero3", precision="bf16", example_inputs={"input_ids": ids, "labels": ids},
    )  # fmt: skip
    call = call_of(4 * 64, 2, grad=True, hidden=32, width=2048, experts=4)
    held = grouped_products.held_bytes(call, 4 * 64, 32, 2048, 4096)
    assert plan.cost.peak_memory_bytes > held and plan.program is not None
    phases = [each for region in plan.program.regions for each in region.lowered.values()]
    buffers = [node.meta["buffers"]((2,)) for each in phases for node in each.graph.nodes if "buffers" in node.meta]
    assert held <= max(buffers) < 1.1 * held  # weights of the router are float32
    assert grouped_products.held_bytes(call, 4 * 64, 32, 2044, 4088) == 0
    assert grouped_holds(call_of(64, 2, dtype=torch.float32), hardware) is None
    assert grouped_holds(call, profiles.load("h100")) is not grouped_products.held_bytes
