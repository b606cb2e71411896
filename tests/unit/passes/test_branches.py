"""Branches that go by values: which way is traced first, which others may be asked for, what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.base.errors import AutoparError
from autopar.ir.program import BRANCH
from autopar.passes.branches import MOST_ROUNDS, put_ways
from autopar.passes.capture import capture


class Asks(nn.Module):
    """A layer, and what `decides` makes of it."""

    def __init__(self, decides: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.decides = nn.Linear(4, 4), decides

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.decides(self.linear(x)).square().mean()}


def _finite(y: Tensor) -> Tensor:
    if y.isnan().any() or torch.isinf(y).sum() > 0 or not torch.isfinite(y).all():
        return torch.zeros_like(y)
    return y


def check_numbers(is_wrong: bool) -> None:
    """Tells, and goes on."""


def _told(y: Tensor) -> Tensor:
    check_numbers(bool(y.isnan().any()))
    return y


def _rounds(y: Tensor) -> Tensor:
    while y.norm() > 1e-3:
        y = y / 2
    return y


def _breaks(y: Tensor) -> Tensor:
    for _ in range(3):
        y = y.tanh()
        if y.norm() < 0.1:
            break
    return y


def _large(y: Tensor) -> Tensor:
    return y / 2 if y.mean().item() > 1 else y


def _each(y: Tensor) -> Tensor:
    return y.sum() * [number for row in y.tolist() for number in row + row].count(0.0)


def _ways(decides: Callable[[Tensor], Tensor], ways: tuple[bool, ...] = ()) -> list[bool]:
    model = Asks(decides)
    if ways:
        put_ways(model, ways)
    program = capture(model, {"x": torch.randn(2, 4)}, tells_ways=True)
    assert program.output_names == ("loss", BRANCH) and program.output_leaves == (0,) and not program.granted
    assert all(line.startswith("test_branches.py:") for _, line in program.branches)
    return [way for way, _ in program.branches]


def test_the_first_program_is_of_finite_numbers_and_of_loops_that_go_on() -> None:
    """Breaks if a first program is for what is rare, or a way that is asked for is not traced."""
    assert _ways(_finite) == [False, False, True]
    assert _ways(_finite, (True,)) == [True]
    assert _ways(_breaks) == [False, False, False]
    assert _ways(_breaks, (False, True)) == [False, True]
    assert _ways(_large) == [False] and _ways(_large, (True,)) == [True]


def test_what_is_called_like_a_check_is_none_of_values() -> None:
    """Breaks if every batch is refused for which a function that only tells of wrong numbers is told of none."""
    assert _ways(_told) == [False]


def test_the_last_output_is_the_number_of_the_first_branch_that_goes_another_way() -> None:
    """Breaks if a later branch is told, or one that goes as it was traced."""
    model = Asks(_finite)
    (region,) = capture(model, {"x": torch.randn(2, 4)}, tells_ways=True).regions
    module = torch.fx.GraphModule(nn.Module(), region.graph)
    held = [model.get_parameter(slot.name) for slot in region.slots]
    numbers = [module(*held, x)[1].item() for x in (torch.ones(2, 4), torch.full((2, 4), torch.nan))]
    with torch.no_grad():
        model.linear.weight.zero_()
        model.linear.bias.fill_(torch.inf)
    assert [*numbers, module(*held, torch.ones(2, 4))[1].item()] == [3, 0, 1]


class Range(nn.Module):
    """Its first batch's largest number, and a mean from there on."""

    def __init__(self) -> None:
        super().__init__()
        self.most: Tensor
        self.register_buffer("most", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.most < 1e-5:
            self.most = self.most + x.detach().max()
        else:
            self.most = 0.9 * self.most + 0.1 * x.detach().max()
        return x / self.most


def test_a_line_that_each_of_many_modules_has_is_asked_in_all_of_them() -> None:
    """Breaks if what many modules ask once each is taken for what is asked of each row."""
    ranges = nn.Sequential(*(Range() for _ in range(20)))
    assert _ways(ranges) == [True] * 20


@pytest.mark.moderate
def test_what_no_program_can_follow_is_refused() -> None:
    """Breaks if a loop that values end is traced for ever, many draws decide a way, or what is taken for granted
    elsewhere gives numbers.
    """
    assert _ways(_rounds)[MOST_ROUNDS - 1 :] == [True, False]
    with pytest.raises(AutoparError, match=r"a tensor that is drawn.*test_branches\.py:\d+.*do both and choose"):
        _ways(lambda y: y if (torch.rand(9, 9) < 0.5).any() else 2 * y)
    for decides in (_each, _large):
        with pytest.raises(AutoparError, match=r"chooses what to do by the value .*test_branches\.py:\d+"):
            capture(Asks(decides), {"x": torch.randn(2, 4)}, tells_ways=decides is _each)
    program = capture(Asks(_finite), {"x": torch.randn(2, 4)})
    assert not program.branches and "numbers are finite" in program.granted[0] and program.output_names == ("loss",)


class Layer(nn.Module):
    """Halves what is large."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(x)))
        return x / 2 if x.abs().max() > 1.5 else x


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.moderate
def test_a_pipeline_is_told_by_all_its_stages_which_way_a_batch_goes() -> None:
    """Breaks if a branch of an early stage is not known where the step ends, or microbatches go their own ways."""
    mesh = autopar.Mesh.parse("pp=2", hardware="cpu")
    plan = autopar.plan(Layers(), mesh, example_inputs={"x": torch.randn(8, 4)}, strategy="pipeline(1f1b)")
    proof = plan.verify()
    assert proof.ok, str(proof)
    assert plan.interface.microbatches == 1 and len(plan.interface.branches) == 4
    assert any("by the value of a tensor that is of the whole batch" in note for note in plan.notes)
