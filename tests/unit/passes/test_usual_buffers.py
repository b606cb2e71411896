"""The usual case of what buffers decide: taken as they are, guarded at run time, or refused where they change."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.base.errors import AutoparError
from autopar.passes.capture import capture
from tests.unit.passes.usual import planned, ran


class Holds(nn.Module):
    """A stack of torch's own, which asks whether the mask that it is given is the causal one."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(16), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        y: Tensor = self.layers(x, mask=self.get_buffer("mask")[:length, :length])
        return y.square().mean()


@pytest.mark.moderate
def test_a_stack_of_torch_takes_a_mask_that_is_a_buffer() -> None:
    """Breaks if torch's question whether a mask is the causal one is refused."""
    torch.manual_seed(0)
    plan = planned(Holds(), x=torch.randn(8, 6, 8))
    assert any("as here (transformer.py:" in note and "called at test_usual_buffers.py:" in note for note in plan.notes)
    assert plan.verify().ok


class Scaled(nn.Module):
    """Leaves out scales that are all one."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.full((8,), scale))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.get_buffer("scale")
        return (self.linear(x) if (scale == 1).all() else self.linear(x * scale)).square().mean()


@pytest.mark.moderate
def test_a_buffer_decides_and_where_it_says_something_else_outputs_are_nan() -> None:
    """Breaks if a branch on a buffer is refused, or goes on as it was when the buffer says something else."""
    batch = {"x": torch.randn(8, 8)}
    for scale, other in ((1.0, 2.0), (2.0, 1.0)):
        model = Scaled(scale)
        assert planned(model, **batch).verify().ok
        torch.testing.assert_close(ran(model, batch, batch), model(**batch))
        program = capture(model, batch)
        (region,) = program.regions
        model.get_buffer("scale").fill_(other)
        held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        module = torch.fx.GraphModule(nn.Module(), region.graph)
        assert module(*(held[slot.name] for slot in region.slots), batch["x"])[0].isnan()


class Begins(nn.Module):
    """Does something else in its first step."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(8, 8), how
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("centers", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        steps, centers = self.get_buffer("steps"), self.get_buffer("centers")
        if steps == 0 if self.how == "counts" else not centers.any():
            x = x * 2
            centers[0] = x.detach().mean()
        steps += 1
        return self.linear(x).square().mean()


@pytest.mark.moderate
@pytest.mark.parametrize(("how", "name"), [("counts", "steps"), ("written in part", "centers")])
def test_a_buffer_that_forward_changes_decides_nothing(how: str, name: str) -> None:
    """Breaks if a program that cannot say which way it goes is for the first step alone, or one that can is refused."""
    batch = {"x": torch.randn(8, 8)}
    with pytest.raises(
        AutoparError, match=rf"the value of {name}, which forward\(\) changes, .*\(test_usual_buffers\.py:\d+\)"
    ):
        capture(Begins(how), batch)
    ((way, line),) = capture(Begins(how), batch, tells_ways=True).branches
    assert way == (how == "counts") and line.startswith("test_usual_buffers.py:")
