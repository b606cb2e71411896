"""What the sweep over architectures found (benchmarks/coverage), each shown by a small module of its own."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.api.reference import NotEager
from autopar.base.errors import AutoparError
from autopar.base.huggingface import masks
from autopar.base.torch_compat.tracing import known_value
from autopar.ir.op_call import op_call
from autopar.operators.decompositions import DECOMPOSITIONS
from autopar.operators.rules.discover import discover

MESH = autopar.Mesh({"dp": 2}, hardware="cpu")


class Chosen(nn.Module):
    """What is summed depends on values: which there are, how often each."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(8, 8), how

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.how == "kinds":
            return torch.unique(y).sum()
        return y.repeat_interleave((x[:, 0] > 0).long(), 0).mean()


@pytest.mark.parametrize(("how", "operator"), [("kinds", "unique"), ("repeats", "repeat_interleave")])
def test_a_size_that_depends_on_values_is_refused_with_its_line(how: str, operator: str) -> None:
    """Breaks if what tracing cannot know reaches a pass that counts on numbers."""
    with pytest.raises(AutoparError, match=rf"^{operator} makes .* by the values of a tensor.*test_odd_models\.py"):
        autopar.plan(Chosen(how), MESH, example_inputs={"x": torch.randn(4, 8)}, strategy="ddp")


class Narrow(nn.Module):
    """Its operator knows no float64."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.dtype == torch.float64 and not torch.compiler.is_compiling():
            raise RuntimeError("Expected Float32, got Double")
        return y.square().mean()


def test_a_model_that_knows_no_float64_is_told_and_proven_in_float32() -> None:
    """Breaks if the reference's own error reaches the user bare, or says nothing of the other dtype."""
    plan = autopar.plan(Narrow(), MESH, example_inputs={"x": torch.randn(4, 8)}, strategy="ddp")
    with pytest.raises(NotEager, match=r"does not run in float64.*test_odd_models\.py.*float32"):
        plan.verify()
    assert plan.verify(dtype=torch.float32).ok


@pytest.mark.moderate
def test_a_mask_that_eager_leaves_out_is_left_out() -> None:
    """Breaks if transformers makes a causal mask while it is traced, where in eager mode it makes none and attention
    goes both ways (PaliGemma without images).
    """
    transformers = pytest.importorskip("transformers")
    config = transformers.GemmaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, use_bidirectional_attention=True,
    )  # fmt: skip
    ids = torch.randint(1, 32, (4, 6), generator=torch.Generator().manual_seed(0))
    plan = autopar.plan(transformers.GemmaForCausalLM(config), MESH, example_inputs={"input_ids": ids, "labels": ids})
    plan.verify().raise_on_failure()


@pytest.mark.parametrize("later", [False, True])
def test_masks_of_every_version_are_asked_for_as_in_eager(later: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if what decides on a mask is told that it is traced where there is no padding: as versions up to 5.17 ask,
    by a tensor that is None, or as later ones, whether anything is exported; or if it stays changed afterwards.
    """
    tracing = {
        "is_tracing": lambda tensor=None: True,
        "find_packed_sequence_indices": lambda position_ids: position_ids,
    }
    exporting = {"is_torchdynamo_exporting": lambda: True} if later else {}
    module = types.SimpleNamespace(**tracing, **exporting)
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", module)
    before = dict(vars(module))
    with masks.as_in_eager():
        assert (module.is_tracing(None), module.is_tracing(torch.ones(2))) == (False, True)
        assert not later or not module.is_torchdynamo_exporting()
    assert vars(module) == before


def test_how_many_tokens_a_cache_holds_does_not_decide_on_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if versions up to 5.17 ask a traced cache whether it is empty: each number of tokens in it would be a
    program of its own, and no block of the model be traced for others; or if a number is not asked.
    """
    asked: list[object] = []

    def needless(padding: object, num_new: int, num_held: int, first: object, *others: object) -> bool:
        asked.append(first)
        return first == 0

    kinds = {"is_tracing": lambda tensor=None: True, "find_packed_sequence_indices": lambda ids: ids}
    module = types.SimpleNamespace(**kinds, _ignore_causal_mask_sdpa=needless)
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", module)
    with masks.as_in_eager():
        assert not module._ignore_causal_mask_sdpa(None, 2, 8, torch.tensor(0), 0, None)
        assert module._ignore_causal_mask_sdpa(None, 2, 8, 0, 0, None)
        assert not module._ignore_causal_mask_sdpa(None, 2, 8, 3, 0, None)
    assert asked == [0, 3]


def test_masks_of_an_unknown_version_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Breaks if a version of transformers that asks otherwise is traced without a word."""
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", types.SimpleNamespace())
    with masks.as_in_eager():
        pass
    assert "plan.verify()" in caplog.text


class Counted(nn.Module):
    """Asks for the numbers of what it makes itself, and of what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        made = torch.arange(4).unsqueeze(0).expand(2, -1) + 1
        self.own, self.given, self.drawn = map(known_value, (made, x, torch.rand(4)))
        return x + made.sum()


def test_numbers_that_no_input_goes_into_are_known_while_tracing() -> None:
    """Breaks if such a number is not found, or one that depends on an input or on chance is."""
    model = Counted()
    torch.export.export(model, (torch.ones(2, 4),), strict=False)
    assert (model.own, model.given, model.drawn) == ([[1, 2, 3, 4]] * 2, None, None)


class Bins(nn.Module):
    """Makes a tensor on a device that it names, out of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        low, high = torch.tensor(0.5), torch.tensor(2.0)
        centers = torch.linspace(low, high, 8, device=x.device)
        return (self.linear(x).softmax(-1) * centers).sum(-1).square().mean()


@pytest.mark.moderate
def test_an_operator_that_names_its_device_is_tried_where_there_are_numbers() -> None:
    """Breaks if a rule is looked for on the meta device, of which the captured operator speaks."""
    plan = autopar.plan(Bins(), MESH, example_inputs={"x": torch.randn(4, 8)}, strategy="ddp")
    plan.verify().raise_on_failure()
    bound, made = torch.empty((), device="meta"), torch.empty(8, device="meta")
    device = {"device": torch.device("meta")}
    found = discover(op_call(torch.ops.aten.linspace.Tensor_Tensor, (bound, bound, 8), device, made))
    assert found is None or not any(factor.split for factor in found.factors)


@pytest.mark.parametrize("steps", [2, 5, 8])
def test_numbers_between_two_tensors_are_those_of_torch(steps: int) -> None:
    """Breaks if a number, the last one above all, is not torch's."""
    low, high = torch.tensor(-0.3, dtype=torch.float64), torch.tensor(7.1, dtype=torch.float64)
    want = torch.linspace(low, high, steps, dtype=torch.float64)
    made = DECOMPOSITIONS[torch.ops.aten.linspace.Tensor_Tensor](low, high, steps, dtype=torch.float64)
    torch.testing.assert_close(made, want, rtol=1e-15, atol=0)
    assert made[-1] == high


@pytest.mark.parametrize("copies", [False, True])
def test_a_value_under_two_names_has_two_gradients(copies: bool) -> None:
    """Breaks if a tensor that is returned twice passes on the gradient of one of its names alone."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            y = self.linear(x)
            return {"last": y, "pooled": y.clone() if copies else y}

    mesh = autopar.Mesh.parse("dp=2", hardware="cpu")
    plan = autopar.plan(Twice(), mesh, example_inputs={"x": torch.randn(4, 8)}, strategy="ddp")
    plan.verify().raise_on_failure()


@pytest.mark.moderate
@pytest.mark.parametrize(("mesh", "strategy"), [("dp=2", "zero3"), ("dp=2,tp=2", "auto"), ("pp=2", "pipeline(1f1b)")])
def test_what_came_in_may_go_out(mesh: str, strategy: str) -> None:
    """Breaks if a model that returns an input, a parameter or a buffer is not planned, or the parameter's gradient
    through the output is lost.
    """

    class Returning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.register_buffer("places", torch.arange(8.0))

        def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
            y = x * mask
            for block in self.blocks:
                y = y + block(y)
            return (y * self.scale).square().mean(), self.scale, self.places, mask

    devices = autopar.Mesh.parse(mesh, hardware="cpu")
    batch = {"x": torch.randn(4, 8), "mask": torch.ones(4, 8)}
    autopar.plan(Returning(), devices, example_inputs=batch, strategy=strategy).verify().raise_on_failure()


class Hooked(nn.Module):
    """Changes gradients on their way, of tensors that were read before and are read behind it."""

    def __init__(self, *hooks: Any) -> None:
        super().__init__()
        self.first, self.last, self.hooks = nn.Linear(8, 8), nn.Linear(8, 8), hooks
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h, scale = self.first(x), 0.5
        read = self.last(h)
        for hook in self.hooks:
            h.register_hook(hook)
        for layer in self.layers:
            h = layer(h)
            h.register_hook(lambda grad: scale * grad)
        return read.pow(2).mean() + h.mean()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        del ctx
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        del ctx
        return grad * 2


class DoubledOtherwise(Hooked):
    """As the error says."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Doubled.apply(self.first(x))).pow(2).mean()


@pytest.mark.moderate
def test_hooks_that_change_gradients_are_in_the_program() -> None:
    """Breaks if a hook that forward registers is lost, sees a part of a gradient, makes blocks differ, or is taken for
    one that keeps what it sees, which no program does; or if what that one's error recommends does not do.
    """
    given, kept = {"x": torch.randn(4, 8)}, list[Tensor]()
    plan = autopar.plan(
        Hooked(lambda grad: grad.clamp(-0.01, 0.01), lambda grad: 2 * grad),
        MESH,
        example_inputs=given,
        strategy="zero3",
    )
    assert plan.verify().ok and plan.program is not None
    assert max(sum(call.region == region.name for call in plan.program.calls) for region in plan.program.regions) > 1
    with pytest.raises(AutoparError, match=r"hook on a tensor's gradient(.|\n)*test_odd_models\.py:\d+(.|\n)*Function"):
        autopar.plan(Hooked(kept.append), MESH, example_inputs=given, strategy="ddp")
    assert autopar.plan(DoubledOtherwise(), MESH, example_inputs=given, strategy="ddp").verify().ok


class Turned(nn.Module):
    """Complex numbers of Python's own in a forward that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(self.linear(x))
        return torch.fft.irfft(waves * torch.exp(1j * waves.abs()), n=8).pow(2).mean()


@pytest.mark.moderate
def test_a_complex_number_of_pythons_own_is_no_operand() -> None:
    """Breaks if the conjugate of a number is taken for one of a tensor (an IndexError), or a gradient is wrong."""
    plan = autopar.plan(Turned(), MESH, example_inputs={"x": torch.randn(4, 8)}, strategy="zero3")
    assert plan.verify(rtol=1e-9).ok
