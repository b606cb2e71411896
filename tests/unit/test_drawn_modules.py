"""Plain modules that are drawn, under every strategy: a slice of what benchmarks/proofs/modules.py runs, and what was
found by it, each by the name of what broke.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import autopar
from benchmarks.proofs.drawn_modules import Drawing, Made, drawings, drawn, made
from benchmarks.proofs.drawn_operations import OPERATIONS
from benchmarks.proofs.modules import CELLS, OTHERS, run, shrunk

FEW = settings(
    max_examples=25, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
)  # the script shrinks, in seconds


@FEW
@given(drawing=drawings(), cell=st.sampled_from(sorted({*CELLS, *OTHERS})))
def test_a_slice_of_drawn_modules(drawing: Drawing, cell: tuple[str, str]) -> None:
    """Breaks if an operator, a loss or a way to put them together is refused, wrong, or no longer captured. `tensor`
    may say that nothing splits.
    """
    subject = made(drawing)
    assume(subject is not None)
    assert subject is not None
    outcome = run(subject, *cell)
    assert outcome.startswith("ok") or (cell[0] == "tensor" and "can be split over tp=2" in outcome), outcome


def test_draws_have_every_operation() -> None:
    """Breaks if an operation suits no value, so that it is never drawn."""
    random.seed(0)
    used = set[str]()
    for seed in range(400):
        drawing = drawn(seed)
        steps = [*drawing.before, *drawing.after]
        for name in {name for name, _ in steps} - used:
            without = [made(Drawing(after=(step,), ends=(0, 0, 1))) for step in steps if step[0] == name]
            used |= {name} if any(without) else set()
    assert used >= set(OPERATIONS) - {"again", "tied"}  # what they use comes before


def test_what_fails_is_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if of a module that fails more is shown than what fails."""
    whole = drawn(3)
    bad = whole.after[0][0]

    def failing(subject: Made, strategy: str, mesh: str) -> str:
        return "wrong: y" if subject is not None and seen[-1] else "ok"

    seen: list[bool] = []

    def noted(drawing: Drawing) -> Made | None:
        seen.append(any(name == bad for name, _ in (*drawing.before, *drawing.block, *drawing.after)))
        return made(drawing)

    monkeypatch.setattr("benchmarks.proofs.modules.run", failing)
    monkeypatch.setattr("benchmarks.proofs.modules.made", noted)
    small = shrunk(whole, "ddp", "dp=2", "wrong: y")
    assert len(small.before) + len(small.block) + len(small.after) <= 2


# -------------------------------------------------------------------------------------------------------- what broke


class Of(nn.Module):
    """The mean of the squares of what a function gives for a linear layer's result."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.function(self.linear(x))
        return y.square().mean()


def clipped(x: Tensor) -> Tensor:
    """A number is written where a mask is set."""
    y = x * 1
    y[y > 0.5] = 0.5
    return y


BROKE: dict[str, Callable[[Tensor], Tensor]] = {
    "a number written through a mask is a tensor that nothing reads": clipped,
    "the root of a whole number is as precise as the proof": lambda x: x / torch.tensor(8).sqrt().to(x.dtype),
}


@pytest.mark.parametrize("name", BROKE)
@pytest.mark.parametrize(("strategy", "mesh"), [("ddp", "dp=2"), ("auto", "dp=2,tp=2")])
def test_what_broke(name: str, strategy: str, mesh: str) -> None:
    """Breaks if what a drawn module found is back."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = autopar.plan(
            Of(BROKE[name]), autopar.Mesh.parse(mesh, hardware="cpu"), example_inputs={"x": torch.randn(8, 6, 8)},
            strategy=strategy,
        )  # fmt: skip
    plan.verify().raise_on_failure()


def test_what_blocks_hand_on_and_the_user_sees_may_lie_somehow() -> None:
    """Breaks if a strategy that prefers zigzag between blocks takes it for a value that leaves the program, which may
    not be: no layout was left, an IndexError under auto.
    """
    attention = ("attention", (123, 1024, 1, 399, 757, 81, 705, 407))
    product = ("product", (708, 157, 1, 341, 565, 117, 336, 126))
    subject = made(Drawing(after=(product, attention, attention), ends=(691, 736, 302)))
    assert subject is not None
    assert run(subject, "auto", "dp=2,tp=2").startswith("ok")


class Filters(nn.Module):
    """Complex weights, and nothing else that is trained before the last layer; complex values between blocks too."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.apart, self.last = apart, nn.Linear(8, 8)
        self.layers = nn.ModuleList(Filter(apart) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        values = torch.fft.rfft(x) if self.apart else x
        for layer in self.layers:
            values = layer(values)
        y: Tensor = self.last(torch.fft.irfft(values, n=8) if self.apart else values)
        return y.square().mean()


class Filter(nn.Module):
    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.apart, self.filter = apart, nn.Parameter(torch.randn(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.view_as_complex(self.filter)
        return x + x * weights if self.apart else x + torch.fft.irfft(torch.fft.rfft(x) * weights, n=8)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("strategy", "mesh"), [("ddp", "dp=2"), ("zero3", "dp=2,tp=2"), ("auto", "dp=2,tp=2")])
def test_gradients_pass_through_complex_numbers(strategy: str, mesh: str, apart: bool) -> None:
    """Breaks if a block whose gradient is complex on its way to the weights has none: it was silently zero."""
    plan = autopar.plan(
        Filters(apart), autopar.Mesh.parse(mesh, hardware="cpu"), example_inputs={"x": torch.randn(8, 6, 8)},
        strategy=strategy,
    )  # fmt: skip
    plan.verify().raise_on_failure()
