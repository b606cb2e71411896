"""Forward hooks of modules inside a model that only look: they are called with what a program returns for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.base.errors import AutoparError
from autopar.passes.capture import capture
from tests.unit.runtime.saved_run import one_rank as one_rank

ROUNDING = 1e-12
"""Relative, in float64: sums of at most 48 terms in another order, one behind another a few times (48 × 2e-16 each)."""
MESH = autopar.Mesh({"dp": 2}, hardware="cpu")


class Twice(nn.Module):
    """A layer that is called twice, its output written over the second time; and one in a block of two values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.LSTM(4, 4, batch_first=True)
        self.found: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.first(x).relu_()
        return self.second(x)[0].square().mean()


def looks(model: nn.Module) -> list[tuple[str, tuple[Any, ...]]]:
    """What the program of a model leaves for hooks."""
    program = capture(model, {"x": torch.randn(2, 3, 4)}, tells_ways=True)
    assert program.output_leaves == (0,)
    return [(each.held.path, each.held.keys[:-2]) for each in program.carried]


def test_what_a_hook_looks_at_is_left() -> None:
    """Breaks if a hook's values are not returned, if what it does not read is, if calls are not told apart, or a value
    is returned as it is after the model wrote into it.
    """
    model, kept = Twice(), []
    model.first.register_forward_hook(lambda module, args, output: kept.append(output))
    model.second.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    name = "test_what_a_hook_looks_at_is_left.<locals>.<lambda>"
    assert looks(model) == [("first", (name, 0, 0)), ("second", (name, 0, 0))]
    assert not kept
    model.first.register_forward_hook(lambda module, args, output: output * 2)
    assert looks(model)[0] == ("first", (name, 0, 0)) and len(looks(model)) == 3


def test_nothing_of_a_trace_stays_with_a_hook() -> None:
    """Breaks if a list, a dict or a set that a hook knows has tensors of a trace afterwards, or lost what it had."""
    model, kept, named, shapes = Twice(), [torch.ones(1)], {"a": 1}, {(1,)}

    def keep(output: Tensor, into: Callable[[Tensor], None] = kept.append) -> None:
        into(output)
        named.update(b=2)

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        keep(output)
        shapes.add(tuple(output.shape))

    model.first.register_forward_hook(hook)
    for tells in (True, False):
        capture(model, {"x": torch.randn(2, 3, 4)}, tells_ways=tells)
        assert len(kept) == 1 and named == {"a": 1} and shapes == {(1,)}


@pytest.mark.moderate
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_what_hooks_look_at_is_proven(strategy: str) -> None:
    """Breaks if the program's value for a hook is another than eager's, or the proof does not compare it."""
    model, kept = Twice(), []
    model.second.register_forward_hook(lambda module, args, output: kept.append(output[1][0].detach()))
    plan = autopar.plan(model, MESH, example_inputs=torch.randn(4, 3, 4), strategy=strategy)
    proof = plan.verify()
    compared = {each.name for each in proof.comparisons}
    assert proof.ok and {"left_0", "left_1", "left_2"} <= compared and not kept


def compiled(model: nn.Module, x: Tensor) -> Any:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    return autopar.compile(model, mesh, strategy="ddp", example_inputs=x)


@pytest.mark.usefixtures("one_rank")
def test_hooks_are_called_with_values() -> None:
    """Breaks if a hook that looks at numbers is refused or gets other ones, has no gradient, or a hook that is taken
    off is called still.
    """
    kept, numbers = [], []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        numbers.append(float(output[0].detach().numpy().max()))

    plain, other = Twice().double(), Twice().double()
    other.load_state_dict(plain.state_dict())
    for model in (plain, other):
        handle = model.second.register_forward_hook(hook)
        model.second.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    x = torch.randn(4, 3, 4, dtype=torch.float64)
    other = compiled(other, x)
    for model in (plain, other):
        (model(x) + kept[-1].square().mean()).backward()
    assert len(kept) == 2 and numbers[0] == pytest.approx(numbers[1], rel=ROUNDING)
    for name, parameter in plain.named_parameters():
        found = other.get_parameter(name).grad.full_tensor()
        assert float((found - parameter.grad).norm()) <= ROUNDING * float(parameter.grad.norm()), name
    handle.remove()
    other(x)
    assert len(kept) == 3 and len(numbers) == 2


@pytest.mark.usefixtures("one_rank")
def test_one_of_two_hooks_of_a_name_is_not_guessed() -> None:
    """Breaks if the wrong one of two hooks is called, where one was taken off."""
    model, calls = Twice(), []
    handles = [
        model.second.register_forward_pre_hook(lambda module, args, number=number: calls.append((number, args)))
        for number in range(2)
    ]
    model = compiled(model, torch.randn(4, 3, 4))
    model(torch.randn(4, 3, 4))
    assert [number for number, _ in calls] == [0, 1]
    handles[0].remove()
    with pytest.raises(AutoparError, match=r"second had several hooks .*<lambda> .*some were taken off"):
        model(torch.randn(4, 3, 4))


class Reads(Twice):
    """Goes on with what its own hook kept."""

    def forward(self, x: Tensor) -> Tensor:
        self.first(x)
        return self.second(self.found["x"])[0].square().mean()


@pytest.mark.moderate
def test_forward_may_read_what_a_hook_keeps() -> None:
    """Breaks if hooks do not run while the model is traced."""
    model = Reads()
    model.first.register_forward_hook(lambda module, args, output: model.found.update(x=output))
    assert autopar.plan(model, MESH, example_inputs=torch.randn(4, 3, 4), strategy="ddp").verify().ok
