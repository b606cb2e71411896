"""`as_strided` reads memory; a program says what is read of the tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.api import interpret
from autopar.base.errors import AutoparError
from autopar.passes.capture import capture


class Strided(nn.Module):
    """Reads what a layer gives of [B, 12, 4], which may be turned before, or a part."""

    def __init__(
        self, size: tuple[int, ...], strides: tuple[int, ...], offset: int | None = None, how: str = ""
    ) -> None:
        super().__init__()
        self.linear, self.size, self.strides, self.offset, self.how = nn.Linear(4, 4), size, strides, offset, how

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.how:
            y = {"turned": y.transpose(0, 1), "part": y[1:], "gaps": y[:, :9]}[self.how]
        read = y.as_strided(self.size, self.strides, self.offset)
        return (read * torch.arange(read.numel()).reshape(read.shape)).sum()


READS: dict[str, tuple[Any, ...]] = {
    "windows": ((4, 5, 4, 4), (48, 8, 4, 1)),
    "fewer windows": ((4, 2, 4, 4), (48, 8, 4, 1)),
    "diagonal": ((4, 4), (48, 5)),
    "rows apart": ((4, 3, 2), (48, 16, 2)),
    "over rows": ((8, 20), (20, 1), 3),
    "turned": ((4, 4, 12), (48, 1, 4)),
    "turned before": ((4, 5, 4, 4), (48, 8, 4, 1), None, "turned"),
    "in another order": ((5, 4, 4, 4), (8, 48, 4, 1), None, "turned"),
    "with gaps": ((4, 3, 3, 4), (48, 12, 4, 1), None, "gaps"),
    "of a part": ((3, 2, 4), (48, 4, 1), None, "part"),
    "all": ((4, 48), (48, 1)),
}


@pytest.mark.parametrize("name", READS)
def test_what_is_read_is_said_of_the_tensor(name: str) -> None:
    """Breaks if other elements are read than eager reads, or an operator that reads memory stays."""
    model, x = Strided(*READS[name]).double(), torch.randn(4, 12, 4, dtype=torch.float64)
    program = capture(model, {"x": x})
    assert all("as_strided" not in str(node.target) for node in program.regions[0].graph.nodes)
    state = interpret.state_of(model, program)
    (found,), gradients = interpret.run(program, state, {"x": x})
    wanted = model(x)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(gradients["linear.weight"], torch.autograd.grad(wanted, model.linear.weight)[0])


@pytest.mark.moderate
def test_windows_split_with_the_batch() -> None:
    """Breaks if a rank needs the rows of others for what lies within a row."""
    mesh = autopar.Mesh.parse("dp=2", hardware="cpu")
    model = Strided(*READS["windows"])
    plan = autopar.plan(model, mesh, example_inputs={"x": torch.randn(4, 12, 4)}, strategy="ddp")
    assert plan.verify().ok and not any("needs all rows" in note for note in plan.notes)


@pytest.mark.moderate
def test_what_lies_otherwise_is_refused() -> None:
    """Breaks if what is read depends on how a program's tensors happen to lie."""
    for model in (
        Strided((4, 49), (48, 1), how="part"),
        Strided((3, 2, 4), (48, 4, 1), 0, "part"),
        Strided((4, 5, 4, 4), (48, 8, 4, 1), how="gaps"),
        Strided((10, 4), (4, 1), how="gaps"),
    ):
        with pytest.raises(AutoparError, match=r"may lie beside what it is given .*test_strided\.py:.*use unfold"):
            capture(model, {"x": torch.randn(4, 12, 4)})
