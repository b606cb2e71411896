"""The experts' kernels, interpreted, against experts computed densely in float64, with autograd's gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.operators import expert_tiles
from autopar.operators.compiled_activations import compilable
from tests.unit.kernels.expert_cases import CLAMPED, GATED, ROUTINGS, Case
from tests.unit.kernels.interpreted import assert_near, load


@pytest.fixture(autouse=True)
def unwritten_is_nan() -> Iterator[None]:
    """Memory that nobody writes is no number."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def found(case: Case, given: list[Tensor]) -> list[Tensor]:
    """What kernels make of it: y, and the gradients to x, weights, first, second and bias."""
    kernels = load("experts")
    gradient = kernels.experts_grad_bias if case.biased else kernels.experts_grad
    return [kernels.experts(*given[1:], **case.options()), *gradient(*given, **case.options())]


def check(case: Case) -> None:
    given = case.tensors()
    for own, want in zip(found(case, given), case.dense(given), strict=True):
        assert own.dtype == case.dtype
        assert_near(own, want)


@pytest.mark.moderate
@pytest.mark.parametrize(("routing", "window"), [("hot", False), *((name, True) for name in ROUTINGS)])
def test_every_routing(routing: str, window: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a tile is of another expert, is left out or goes over its group's end; if an expert without tokens, or
    whose rows two windows share, has another gradient; if what is elsewhere adds anything.
    """
    case = Case(routing=[row[:1] + row for row in ROUTINGS[routing]], biased=True, start=2)
    if window:
        monkeypatch.setattr(expert_tiles, "FEW_PLACES", 1)
        monkeypatch.setattr(load("experts"), "FEW_PLACES", 1)
        assert expert_tiles.window_rows(len(case.routing), 3) == 2 * len(case.routing)
    check(case)


LAYOUTS = [(False, False, False), (False, True, True), (True, False, True), (True, True, False)]


@pytest.mark.moderate
@pytest.mark.parametrize(("interleaved", "transposed", "biased"), LAYOUTS)
@pytest.mark.parametrize("text", [GATED, "mul(softplus(gate), up)"])
def test_every_layout(interleaved: bool, transposed: bool, biased: bool, text: str) -> None:
    """Breaks if gate and up, or a matrix and its turned one, are taken for each other, in kernels or between them."""
    layout = {"interleaved": interleaved, "transposed": transposed, "biased": biased}
    check(Case(**layout, act=text, routing=ROUTINGS["balanced"][:8]))


@pytest.mark.parametrize(
    "text",
    [
        CLAMPED, "mul(gelu(gate), up)", "mul(gelu(gate, approximate='tanh'), up)", "narrow(mul(silu(wide(gate)), up))",
        "div(tanh(gate), add(exp(neg(up)), 1.5))", "sub(clamp_max(up, 0.5), clamp_min(gate, min=0.1))", "pow(up, 3)",
    ],
)  # fmt: skip
def test_every_gated_activation(text: str) -> None:
    """Breaks if the value, or either derivative, of an operator is another."""
    assert compilable(text)
    check(Case(act=text, E=1, D=16, F=16, routing=[[0], [0], [0], [0], [0]], biased=True))


@pytest.mark.moderate
@pytest.mark.parametrize("text", ["relu(gate)", "pow(relu(gate), 2)", "gelu(gate)", "logit(sigmoid(gate))"])
def test_without_a_gate(text: str) -> None:
    check(Case(act=text, gated=False, routing=ROUTINGS["balanced"][:5]))


@pytest.mark.moderate
def test_half_precision_and_sizes_that_tiles_divide() -> None:
    check(Case(dtype=torch.float16, D=32, F=16, act=CLAMPED, interleaved=True, transposed=True, biased=True))


@pytest.mark.moderate
def test_rows_that_are_no_neighbours() -> None:
    """Breaks if strided tokens, gradients and weights are read as if they lay beside each other."""
    case = Case(routing=ROUTINGS["balanced"][:6])
    g, x, indices, weights, first, second = case.tensors()
    strided = [
        g[:1].expand(g.shape), torch.cat([x, x], 1)[:, : case.D], indices.t().contiguous().t(),
        torch.stack([weights, weights], 2)[..., 0], first.transpose(1, 2).contiguous().transpose(1, 2), second,
    ]  # fmt: skip
    for own, want in zip(found(case, strided), case.dense([each.contiguous() for each in strided]), strict=True):
        assert_near(own, want)


@pytest.mark.moderate
def test_the_same_bits_again() -> None:
    """Breaks if what is added depends on which program is first."""
    case = Case(biased=True, dtype=torch.float16)
    given = case.tensors()
    assert all(map(torch.equal, found(case, given), found(case, given)))


def test_what_kernels_do_not_have_goes_to_the_reference() -> None:
    """Breaks if float64 is rounded, or nothing at all is an error."""
    check(Case(dtype=torch.float64, biased=True, routing=ROUTINGS["balanced"][:4]))
    case = Case()
    g, x, indices, weights, *parameters = case.tensors()
    y, dx, dweights, dfirst, _ = found(case, [g[:0], x[:0], indices[:0], weights[:0], *parameters])
    assert y.shape == dx.shape == (0, case.D) and dweights.shape == (0, 2) and not dfirst.any()


def test_matrices_that_reach_too_far_go_to_the_reference() -> None:
    """Breaks if a view of experts' parameters is read by places of 32 bits that it goes beyond (on meta: 4 GiB)."""
    _, x, indices, weights, first, second = (each.to("meta") for each in Case().tensors())
    serves = load("experts").serves
    assert serves(x, indices, weights, first, second, None)
    for stride in (1 << 25, 1 << 26):  # of a column; as with parameters that lie as [columns, experts, terms]
        far = torch.empty_strided(first.shape, (first.shape[2], stride, 1), device="meta")
        assert serves(x, indices, weights, far, second, None) == (35 * stride < 1 << 31)


class NoWaiting(TorchDispatchMode):
    """Refuses what brings a number of a device to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in ("_local_scalar_dense", "nonzero", "bincount", "item"), func
        return func(*args, **(kwargs or {}))


def nothing(kernel: Any, grid: tuple[int, ...], device: torch.device, *given: Any, **options: Any) -> None:
    """In place of a launch: numbers of rows that are there."""
    for each in given:
        if isinstance(each, Tensor) and each.dtype == torch.int32:
            each.zero_()


@pytest.mark.parametrize("text", [GATED, "mul(softplus(gate), up)"])
@pytest.mark.parametrize("few", [1, 1024])
def test_the_host_waits_for_nothing(text: str, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a count comes to the host. Launches are left out: the interpreter reads its arguments."""
    monkeypatch.setattr(expert_tiles, "FEW_PLACES", few)
    monkeypatch.setattr(load("experts"), "FEW_PLACES", few)
    monkeypatch.setattr(load("experts"), "launch", nothing)
    case = Case(act=text, biased=True)
    given = case.tensors()
    with NoWaiting():
        found(case, given)


@pytest.mark.moderate
@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 70), min_size=1, max_size=12), st.sampled_from([16, 32, 64, 128]))
def test_as_many_programs_as_there_may_be_tiles(counts: list[int], block: int) -> None:
    """Breaks if the worst routing has a tile without a program."""
    rows, num = sum(counts), len(counts)
    if rows:
        assert load("experts").most_tiles(rows, num, block) >= sum(-(-count // block) for count in counts)
    worst = [1] * (num - 1) + [block + 1]
    assert load("experts").most_tiles(sum(worst), num, block) == num + 1


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(-2, 9), min_size=1, max_size=70), st.integers(1, 6), st.integers(0, 2))
def test_places_are_sorted_by_experts(numbers: list[int], num_experts: int, start: int) -> None:
    """Breaks if equal experts change their order, or the one kernel and PyTorch's sort differ."""
    kernels = load("experts")
    indices = torch.tensor(numbers)[:, None]
    order, rows, offsets = kernels.places_by_expert(indices, num_experts, start)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "FEW_PLACES", 0)
        assert all(map(torch.equal, (order, rows, offsets), kernels.places_by_expert(indices, num_experts, start)))
    own = [n - start if 0 <= n - start < num_experts else num_experts for n in numbers]
    assert order.tolist() == sorted(range(len(own)), key=lambda place: own[place])
    assert offsets.tolist() == [sum(n < e for n in own) for e in range(num_experts + 1)]


def test_texts_that_kernels_do_not_know() -> None:
    assert compilable(CLAMPED) == (
        "mul(add(clamp(up,-0.7,0.7),1.0),mul(clamp(gate,None,0.7),sigmoid(mul(clamp(gate,None,0.7),1.702))))"
    )
    for text in (
        "softplus(gate)", "add(gate, up, alpha=2)", "pow(gate, 2.5)", "gelu(gate, approximate='x')", "mul(gate)",
        "clamp(gate, 1, min=2)", "add(gate, 'up')", "silu(gate", "mul(" * 300 + "gate",
    ):  # fmt: skip
        assert compilable(text) is None, text
