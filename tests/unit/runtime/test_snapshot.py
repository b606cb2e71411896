"""What of a model makes a forward of it another one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autopar.runtime.snapshot import Snapshot

pytestmark = pytest.mark.unit


def _hook(*_: Any) -> None:
    return None


def _with_grad(model: Any) -> None:
    model[0].weight.grad = torch.zeros_like(model[0].weight)


CHANGES: dict[str, Callable[[Any], object]] = {
    "mode": lambda model: model[1].train(False),
    "another child": lambda model: setattr(model, "0", nn.Linear(3, 3)),
    "one more child": lambda model: model[2].add_module("more", nn.Identity()),
    "another parameter": lambda model: setattr(model[0], "weight", nn.Parameter(model[0].weight.detach().clone())),
    "no bias": lambda model: setattr(model[0], "bias", None),
    "a parameter of a module without": lambda model: model[1].register_parameter("w", nn.Parameter(torch.ones(1))),
    "a hook": lambda model: model[1].register_forward_hook(_hook),
    "one more hook": lambda model: model[0].register_forward_hook(_hook),
    "no hook": lambda model: model[0]._forward_hooks.clear(),
    "a number": lambda model: setattr(model[1], "p", 0.25),
    "a configuration": lambda model: setattr(model[2].config, "output_hidden_states", True),
    "a class": lambda model: setattr(model[2], "__class__", nn.Identity),
    "frozen": lambda model: model[0].weight.requires_grad_(False),
    "a gradient": _with_grad,
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_is_seen(name: str) -> None:
    """Breaks if a call goes on as the one before though the model is another, or if what nobody tells ends it."""
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Sequential())
    model[0].register_forward_hook(_hook)
    model[2].config = SimpleNamespace(output_hidden_states=False)
    snapshot = Snapshot(model)
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert snapshot.holds()
    alone = Snapshot(model, with_grads=False)
    CHANGES[name](model)
    assert not snapshot.holds()
    assert alone.holds() is (name in ("frozen", "a gradient"))
