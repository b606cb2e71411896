"""What a loss reads of Python is found, and no more than that."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.base.errors import AutoparError
from autopar.planner import python_state
from autopar.planner.with_loss import LossAndOutput, Watched, with_loss

SETTINGS = {"temperature": 2.0}


def tempered(scores: Tensor, labels: Tensor) -> Tensor:
    """A function that another one calls."""
    return F.cross_entropy(scores / SETTINGS["temperature"], labels)


class Loop:
    """Somebody's trainer: the loss is a method of it, and it counts its steps."""

    def __init__(self) -> None:
        self.step, self.alpha = 0, 0.1

    def penalty(self, scores: Tensor) -> Tensor:
        return self.alpha * scores.pow(2).mean()

    def loss(self, scores: Tensor, batch: Any) -> Tensor:
        """scores: [rows, classes]."""
        return tempered(scores, batch["y"]) + self.penalty(scores)


def test_what_is_read_is_followed() -> None:
    """Breaks if a number behind a method, a closure, a global of a function that is called, or a partial is not seen,
    or if one is that the code does not name.
    """
    loop = Loop()
    found = python_state.numbers_of(loop.loss)
    assert {name: value for name, value in found.items() if "len" not in name} == {
        "SETTINGS['temperature']": "2.0",
        "self.alpha": "0.1",
    }
    before = python_state.numbers_of(loop.loss)
    loop.step = 7
    assert python_state.changed(before, loop.loss) is None
    loop.alpha = 0.2
    assert python_state.changed(before, loop.loss) == ("self.alpha", "0.1", "0.2")
    schedule = SimpleNamespace(now=SimpleNamespace(weight=1.0), name="linear")
    inside = functools.partial(lambda scale, scores, batch: scale * schedule.now.weight * scores.mean(), 3.0)
    assert python_state.numbers_of(inside) == {"0": "3.0", "schedule.now.weight": "1.0"}


def test_tensors_and_parameters_are_told_apart() -> None:
    """Breaks if a tensor that is written to stays unseen, or a parameter inside of a module that is called."""
    weights = torch.ones(3)

    def weighted(scores: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(scores, batch["y"], weight=weights)

    watched = Watched(weighted)
    watched.check()
    weights.mul_(2)
    with pytest.raises(AutoparError, match=r"reads weights.*times written"):
        watched.check()
    assert not list(python_state.parameters_of(nn.CrossEntropyLoss(torch.ones(3))))
    teacher = nn.Sequential(nn.Linear(4, 3))
    names = [name for name, _ in python_state.parameters_of(lambda scores, batch: teacher(batch["x"]).sum())]
    assert names == ["teacher.0.weight", "teacher.0.bias"]


class Doubled(nn.Module):
    """Returns a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [rows, 4]."""
        return self.own(x), 2 * x


def test_a_model_with_a_loss_is_the_model() -> None:
    """Breaks if the copy has other names or modules, if the model itself gets another forward, or an input of the loss
    reaches it.
    """
    model = Doubled()
    ended = with_loss(model, lambda outputs, batch: F.cross_entropy(outputs[0], batch["y"]))
    assert type(ended) is Doubled and ended.own is model.own and "forward" not in vars(model)
    x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    found = ended(x, y=y)
    assert isinstance(found, LossAndOutput) and torch.equal(found.loss, F.cross_entropy(model(x)[0], y))
    assert len(found.output) == 2 and isinstance(ended(x), tuple) and not isinstance(ended(x, y=None), LossAndOutput)
