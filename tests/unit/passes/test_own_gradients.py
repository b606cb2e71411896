"""Functions of a model's own that say their gradient themselves: what they say is what is computed."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.api.plan import Plan
from autopar.base.errors import AutoparError
from autopar.passes.capture import capture


class Rounded(torch.autograd.Function):
    """Straight through: the gradient of the operators inside is zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]


rounded = Rounded.apply  # as many a library has it: bound before anything is traced


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, scale: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return -ctx.scale * grads[0], None


class Gated(torch.autograd.Function):
    """Two results and an index of which there is no gradient; tensors saved, and put into ctx."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, power: int) -> tuple[Tensor, Tensor, Tensor]:
        where = x.argmax(-1)
        ctx.save_for_backward(x, None)
        ctx.gate, ctx.power = gate, power
        ctx.mark_non_differentiable(where)
        return x * gate.sigmoid(), x**power, where

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        first, second, _ = grads
        x, nothing = ctx.saved_tensors
        assert nothing is None
        gate = ctx.gate.sigmoid()
        own = 3 * first * gate + ctx.power * second * x ** (ctx.power - 1)  # three times what it is
        return own, (first * x * gate * (1 - gate)) if ctx.needs_input_grad[1] else None, None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        first, second, where = Gated.apply(self.up(x), self.gate(x), 2)
        hidden = rounded(4 * first) + second + (where.unsqueeze(-1) > 3)
        return Reversed.apply(x, 2.0) + Reversed.apply(self.down(hidden), 0.5)


class Model(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.square().mean()


def planned(model: nn.Module, mesh: str, strategy: Any, **options: Any) -> Plan:
    torch.manual_seed(0)
    batch = {"x": torch.arange(64).reshape(8, 8) % 32}
    hardware = autopar.Mesh.parse(mesh, hardware="cpu")
    return autopar.plan(model, hardware, example_inputs=batch, strategy=strategy, **options)


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [("dp=2", "zero3"), ("dp=2,tp=2", {"dp": "ddp", "tp": "tensor"}), ("dp=2,tp=2", "auto"), ("pp=2", "pipeline")],
    ids=str,
)
def test_what_functions_say_is_their_gradient(mesh: str, strategy: Any) -> None:
    """Breaks if the gradient of the operators inside is taken for it: without a word, as a trace knows no other."""
    plan = planned(Model(), mesh, strategy)
    proof = plan.verify()
    assert proof.ok, str(proof)
    assert "autopar.own_gradient" not in plan.source and "ops.own_gradient" not in plan.source
    assert all(c.error < 1e-9 for c in proof.comparisons) and len(proof.comparisons) > 18


def test_eager_has_other_gradients_where_the_function_is_not_asked() -> None:
    """Breaks if the models here would not show the difference."""
    torch.manual_seed(0)
    model, x = Model().double(), torch.arange(64).reshape(8, 8) % 32
    model(x).backward()
    grads = [p.grad for p in model.parameters()]
    assert all(grad is not None and bool(grad.abs().sum() > 0) for grad in grads)


class Opaque(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return torch.from_numpy(grads[0].numpy() * 2)


class Calls(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x.float())).square().mean()


def test_a_backward_that_does_not_trace_is_named() -> None:
    """Breaks if it is a traceback, or does not say which function."""
    with pytest.raises(AutoparError, match=r"backward of .*Opaque cannot be traced .*test_own_gradients.py:\d+"):
        planned(Calls(Opaque.apply), "dp=2", "ddp")


def _anew(x: Tensor) -> Tensor:
    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.round()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return grads[0]

    found: Tensor = Inner.apply(x)
    return found


@pytest.mark.moderate
def test_a_function_that_is_defined_in_forward() -> None:
    """Breaks if nobody knows of it, and its gradient is lost."""
    plan = planned(Calls(_anew), "dp=2", "ddp")
    assert plan.verify().ok and "linear_grad_weight" in plan.source


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return 2 * grads[0]


def test_a_function_that_writes_into_its_input_is_refused() -> None:
    """Breaks if its gradient is taken twice: the function's, and that of the operator that writes."""
    with pytest.raises(AutoparError, match="writes into its input"):
        planned(Calls(lambda x: Doubled.apply(x * 1)), "dp=2", "ddp")


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, depth: int = 1) -> None:
        super().__init__()
        self.first, self.second, self.reentrant, self.depth = nn.Linear(8, 8), nn.Linear(8, 8), reentrant, depth

    def forward(self, x: Tensor) -> Tensor:
        def run(y: Tensor) -> Tensor:
            return self.second(y.float()).tanh().to(y.dtype)

        for _ in range(self.depth):
            run = functools.partial(checkpoint, run, use_reentrant=self.reentrant)
        return run(self.first(x.float())).square().mean()


@pytest.mark.moderate
@pytest.mark.parametrize(("reentrant", "depth"), [(False, 1), (True, 1), (False, 3)])
def test_checkpoints_have_the_gradient_of_what_they_run_again(reentrant: bool, depth: int) -> None:
    """Breaks if a trace takes what a checkpoint runs without gradients, or what follows hooks of one within another,
    for a constant, and all that follows with it.
    """
    plan = planned(Checkpointed(reentrant, depth), "dp=2", "ddp")
    assert plan.verify().ok and plan.source.count("linear_grad_weight") == 2


class Teaches(Checkpointed):
    """Follows what it computes in inference mode, in which a part is switched back."""

    @torch.inference_mode()
    def teacher(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(False):
            second = self.second(x)
        return self.first(x), second

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.first.weight.dtype)
        first, second = self.teacher(x)
        return (self.first(2 * x) - first.clone()).square().mean() + second.square().mean()


@pytest.mark.moderate
def test_inference_mode_within_forward_has_no_gradient() -> None:
    """Breaks if what is made in inference mode has a gradient, or what follows it has none."""
    assert planned(Teaches(False), "dp=2", "ddp").verify().ok


def test_hooks_of_a_users_own_on_what_is_saved_are_refused() -> None:
    """Breaks if a gradient is computed of what was saved, where eager computes it of what the user's hook made of it;
    or if those that change nothing are refused.
    """

    def hooked(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            x = x.square()
        with torch.autograd.graph.saved_tensors_hooks(lambda y: y.half(), lambda y: y.float()):
            return x.square()

    with pytest.raises(AutoparError, match=r"hooks of its own .*saved_tensors_hooks\(lambda y: y.half"):
        planned(Calls(hooked), "dp=2", "ddp")


class OfInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = checkpoint(self.first, x, use_reentrant=True)
        return self.second(first).square().mean()


@pytest.mark.moderate
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("is_wanted", [False, True])
def test_a_checkpoint_of_what_wants_no_gradient_gives_none(is_wanted: bool) -> None:
    """Breaks if parameters are trained that a reentrant checkpoint trains in eager only where its inputs want one."""
    x = torch.randn(4, 8).requires_grad_(is_wanted)
    plan = autopar.plan(OfInputs(), autopar.Mesh("dp=2", "cpu"), example_inputs={"x": x}, strategy="ddp")
    trained = {each.name for each in plan.interface.parameters if each.is_reached((0,))}
    assert plan.verify().ok and ("first.weight" in trained) == is_wanted


class OfAFunction(nn.Module):
    def __init__(self, apply: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.apply_it = nn.Linear(8, 8), apply

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(self.apply_it(x)) * x).square().mean()


@pytest.mark.parametrize("apply", [rounded, lambda x: Rounded.apply(x) * 2], ids=["bound", "looked up"])
def test_a_function_of_the_batch_gives_it_its_gradient(apply: Callable[[Tensor], Tensor]) -> None:
    """Breaks if an input that wants a gradient does not get the one that a function of its own says."""
    _has_input_gradient(OfAFunction(apply))


class Weighed(OfAFunction):
    """The function reads a parameter that it is not given."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight

        class Weighing(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x * weight[0]

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> Any:
                return 2 * grads[0]

        weighed: Tensor = Weighing.apply(x)
        return (self.linear(weighed) * x).square().mean()


def test_a_function_of_the_batch_that_reads_a_parameter() -> None:
    """Breaks if the parameter gets a gradient, or the input none."""
    _has_input_gradient(Weighed(torch.relu))


def _has_input_gradient(model: nn.Module) -> None:
    x = torch.randn(4, 8).requires_grad_()
    plan = autopar.plan(model, autopar.Mesh("dp=2", "cpu"), example_inputs={"x": x}, strategy="ddp")
    proof = plan.verify()
    assert proof.ok and "gradient of input x" in {each.name for each in proof.comparisons}


@pytest.mark.moderate
def test_a_proof_asks_for_gradients_that_a_program_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a program without any gradient is proven, since nothing of it is asked for."""
    monkeypatch.setattr(
        "autopar.operators.own_gradients._checkpointed", lambda ctx, function, _, *x: _lost(function, x)
    )
    proof = planned(Checkpointed(True), "dp=2", "ddp").verify()
    assert not proof.ok and {"gradient of second.weight", "gradient of first.weight"} <= {
        c.name for c in proof.comparisons if not c.ok
    }


def _lost(function: Any, args: Any) -> Any:
    with torch.no_grad():
        return function(*args)


def test_other_threads_and_eager_never_notice() -> None:
    """Breaks if what a trace does to functions is seen outside of it."""
    seen: list[bool] = []

    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            def other() -> None:
                y = torch.ones(3, requires_grad=True)
                rounded(1.4 * y).sum().backward()
                seen.append(y.grad is not None and bool((y.grad == 1.4).all()))

            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            found: Tensor = rounded(x.float()).sum()
            return found

    before = vars(Rounded)["forward"]
    capture(Asks(), {"x": torch.ones(2, 3)})
    assert seen and all(seen) and vars(Rounded)["forward"] is before


def test_inference_runs_what_forward_runs() -> None:
    """Breaks if a model that is not trained needs the backward of a function."""
    torch.manual_seed(0)
    assert planned(Calls(Opaque.apply), "dp=2", "ddp", inference=True).verify().ok
