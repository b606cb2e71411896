"""Which parameters the gradient of which output comes to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from tests.dist.loss_terms import Probed, head_and_batch


def reached(model: nn.Module, inputs: dict[str, Any], roots: tuple[str, ...]) -> dict[str, set[str]]:
    """By module, the outputs that reach its parameters."""
    mesh = autopar.Mesh({"dp": 2}, hardware="cpu")
    interface = autopar.plan(model, mesh, example_inputs=inputs, strategy="zero3", roots=roots).interface
    names = [output.name for output in interface.outputs]
    return {
        parameter.name.removesuffix(".weight"): {names[place] for place in parameter.reached_by or ()}
        for parameter in interface.parameters
        if parameter.name.endswith(".weight")
    }


@pytest.mark.parametrize("roots", [("loss", "extra"), ("loss",), ("extra",)])
def test_outputs_of_one_region(roots: tuple[str, ...]) -> None:
    """Breaks if a gradient that is made of two outputs' counts as one's, or a head as reached by another's."""
    model, x, y = head_and_batch()
    wanted = {"body": {"loss", "extra"}, "main": {"loss"}, "extra": {"extra"}}
    assert reached(model, {"x": x, "y": y}, roots) == {name: own & {*roots} for name, own in wanted.items()}


@pytest.mark.moderate
def test_outputs_along_layers() -> None:
    """Breaks if what several calls read has the gradient of one of them, or layers behind an output that of it."""
    batch = {"x": torch.randn(8, 8), "y": torch.randint(5, (8,))}
    found = reached(Probed(), batch, ("loss", "hidden.2", "probe"))
    first = {"loss", "hidden.2", "probe"}
    layers = {f"layers.{i}.inner": own for i, own in enumerate([first, first, {"loss", "hidden.2"}, {"loss"}])}
    assert found == layers | {"head": {"loss"}, "probe": {"probe"}, "spare": set()}
