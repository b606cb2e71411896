"""Plain modules that are drawn, under every strategy: a slice of what benchmarks/proofs/modules.py runs, and what was
found by it, each by the name of what broke.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import autopar
from benchmarks.proofs.drawn_lines import TOKENS, Values
from benchmarks.proofs.drawn_modules import INPUTS, ROWS, Drawing, Made, batch, drawings, drawn, made
from benchmarks.proofs.drawn_operations import TABLE, attention, clipped
from benchmarks.proofs.modules import CELLS, OTHERS, run, shrunk

FEW = settings(
    max_examples=14, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
)  # the script shrinks, in seconds


@pytest.mark.moderate
@FEW
@given(drawing=drawings(), cell=st.sampled_from(sorted({*CELLS, *OTHERS})))
def test_a_slice_of_drawn_modules(drawing: Drawing, cell: tuple[str, str]) -> None:
    """Breaks if an operator, a loss or a way to put them together is refused, wrong, or no longer captured."""
    subject = made(drawing)
    assume(subject is not None)
    assert subject is not None
    outcome = run(subject, *cell)
    assert outcome.startswith("ok"), outcome


@pytest.mark.parametrize("name", TABLE)
def test_every_operation_suits_some_value(name: str) -> None:
    """Breaks if a line of the table is never drawn: it suits nothing, or gives no value with the batch's rows."""
    torch.manual_seed(0)
    values = Values([batch()[each] for each in INPUTS], [], [nn.Linear(8, 8), nn.Embedding(TOKENS, 8)])
    for number, line in enumerate(TABLE[name]):
        made = line(values)
        assert made is not None, number
        result = made.module(*(values.tensors[i] for i in made.reads))
        assert result.shape[0] == ROWS and result.dim() >= 2, number


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


BROKE: dict[str, Callable[[Tensor], Tensor]] = {
    "a number written through a mask is a tensor that nothing reads": clipped,
    "the root of a whole number is as precise as the proof": lambda x: x / torch.tensor(8).sqrt().to(x.dtype),
}


@pytest.mark.moderate
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


class Attending(nn.Module):
    """A block whose value nothing reads, and two that attend."""

    def __init__(self) -> None:
        super().__init__()
        values = Values([torch.randn(8, 6, 8)], [])
        lines = (TABLE["product"][8], attention("fused", 2), attention("fused", 2))
        self.layers = nn.ModuleList(made.module for line in lines if (made := line(values)) is not None)
        self.head = nn.Linear(48, 6)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        product, *others = self.layers
        product(x)
        for layer in others:
            x = layer(x)
        return F.mse_loss(self.head(x.flatten(1)), target)


@pytest.mark.moderate
@pytest.mark.parametrize(("strategy", "mesh"), [("auto", "dp=2,tp=2"), ("tensor+sequence", "tp=2"), ("ring", "cp=2")])
def test_what_blocks_hand_on_lies_somehow(strategy: str, mesh: str) -> None:
    """Breaks if a strategy that splits what flows between blocks allows it no layout, where the user sees such a value
    (never zigzag) or hands it in (whole, as what is asked of inputs says): an IndexError under auto.
    """
    given = {"x": torch.randn(8, 6, 8), "target": torch.randn(8, 6)}
    assert run(Made(Attending(), given), strategy, mesh).startswith("ok")


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


@pytest.mark.moderate
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("strategy", "mesh"), [("ddp", "dp=2"), ("zero3", "dp=2,tp=2"), ("auto", "dp=2,tp=2")])
def test_gradients_pass_through_complex_numbers(strategy: str, mesh: str, apart: bool) -> None:
    """Breaks if a block whose gradient is complex on its way to the weights has none: it was silently zero."""
    plan = autopar.plan(
        Filters(apart), autopar.Mesh.parse(mesh, hardware="cpu"), example_inputs={"x": torch.randn(8, 6, 8)},
        strategy=strategy,
    )  # fmt: skip
    plan.verify().raise_on_failure()
