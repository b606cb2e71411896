"""Values that a forward writes down, compares or hands to a check."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.base.errors import AutoparError
from autopar.passes.capture import capture


class Net(nn.Module):
    """A layer; `does` says what is done with what it gives."""

    def __init__(self, does: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.does = does

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if self.does == "prints":
            print(f"norm {y.norm():.3f}")
        elif self.does == "names":
            y = y * len(f"{y.norm():.3f}")
        elif self.does == "keys":
            name = f"norm {y.norm():.3f}"
            y = {name: y}[name]
        elif self.does == "explains":
            said = f"norm {y.norm():.3f}"
            _whole(y.isfinite().all(), f"{y.norm():.3f} is odd: {said}")
        elif self.does == "checks":
            torch._check(y.abs().sum().item() > 0)
        elif self.does == "compares":
            if not torch.allclose(y, y * 1):
                raise ValueError("not close")
            if not torch.equal(y, y + 0):
                raise ValueError("not the same")
        return y.square().mean()


def _whole(passes: Tensor, said: str) -> None:
    """A check of one's own, with a message."""
    assert said
    torch._check(bool(passes.item()))


def test_a_value_that_is_printed_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    """Breaks if a model that prints its norms cannot be planned, or a text of which something comes is made up."""
    program = capture(Net("prints"), {"x": torch.randn(3, 4)})
    assert "norm ?" in capsys.readouterr().out
    assert any("writes down a value (test_written_down.py:" in note for note in program.notes)
    with pytest.raises(AutoparError, match=r"writes down a value of a tensor.*test_written_down\.py:\d+.*return the"):
        capture(Net("names"), {"x": torch.randn(3, 4)})
    with pytest.raises(AutoparError, match=r"writes down a value of a tensor.*test_written_down\.py:\d+"):
        capture(Net("keys"), {"x": torch.randn(3, 4)})


def test_a_check_may_say_what_values_are() -> None:
    """Breaks if a message of a check that passes, as LLaVA's about its image tokens, stands in the way of a plan."""
    capture(Net("explains"), {"x": torch.randn(3, 4)})


@pytest.mark.parametrize("does", ["checks", "compares"])
def test_a_check_of_torchs_passes_and_is_guarded(does: str) -> None:
    """Breaks if `torch._check` of a value, or an assertion of `allclose` and `equal`, is refused, or not computed."""
    program = capture(Net(does), {"x": torch.randn(3, 4)}, tells_ways=True)
    asked = [*program.granted, *(line for _, line in program.branches)]
    assert len(asked) == (2 if does == "compares" else 1) and all("test_written_down.py:" in each for each in asked)
