"""CTC losses: targets in every form that torch takes, as one operator that rows split."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.api.plan import Plan
from autopar.base.errors import AutoparError

LENGTHS = (3, 9, 1, 0)


class Speech(nn.Module):
    """Hands targets in as `form` says; four rows of 20 steps."""

    def __init__(self, form: str, **options: object) -> None:
        super().__init__()
        self.linear, self.form, self.options = nn.Linear(6, 11), form, options

    def forward(self, x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
        log_probs = self.linear(x).log_softmax(-1).transpose(0, 1)
        steps = torch.full((4,), 20)
        if self.form == "numbers":
            pieces = [y[row, :length] for row, length in enumerate(LENGTHS)]
            return F.ctc_loss(log_probs, torch.cat(pieces), (20,) * 4, LENGTHS, **self.options)  # type: ignore[arg-type]
        if self.form == "selected":  # padding stands anywhere in a row
            mask = y != 7
            return F.ctc_loss(log_probs, y.masked_select(mask), steps, mask.sum(-1), **self.options)  # type: ignore[arg-type]
        if self.form == "others":
            return F.ctc_loss(log_probs, y.masked_select(y != 7), steps, lengths)
        if self.form == "flat":
            return F.ctc_loss(log_probs, y.flatten(), steps, lengths)
        return F.ctc_loss(log_probs, y, steps, lengths, **self.options)  # type: ignore[arg-type]


def planned(model: nn.Module, strategy: str = "ddp", mesh: str = "dp=2") -> Plan:
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 20, 6), "y": torch.randint(1, 11, (4, 9)), "lengths": torch.tensor(LENGTHS)}
    return autopar.plan(model, autopar.Mesh.parse(mesh, hardware="cpu"), example_inputs=batch, strategy=strategy)


@pytest.mark.moderate
@pytest.mark.parametrize("form", ["padded", "selected", "numbers"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_rows_split_in_every_form(form: str, reduction: str) -> None:
    """Breaks if a target is another row's, a mean counts something else, or rows are gathered for a loss of rows."""
    plan = planned(Speech(form, reduction=reduction))
    assert plan.verify().ok and plan.source is not None and "ops.ctc_loss_grad(" in plan.source
    if form != "numbers":
        assert not any("all rows of the batch" in note for note in plan.notes)


@pytest.mark.moderate
@pytest.mark.parametrize(("strategy", "mesh"), [("zero3", "dp=2"), ("auto", "dp=2"), ("tensor", "tp=2")])
def test_under_other_strategies(strategy: str, mesh: str) -> None:
    """Breaks if a class or a step is split under a recurrence that meets all of them."""
    assert planned(Speech("selected"), strategy, mesh).verify().ok


@pytest.mark.moderate
def test_targets_that_do_not_fit() -> None:
    """Breaks if an infinite loss, or its gradient, is not zero where that is asked."""

    class Short(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 11)

        def forward(self, x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
            log_probs = self.linear(x).log_softmax(-1).transpose(0, 1)
            return F.ctc_loss(log_probs, y, torch.tensor([20, 4, 20, 20]), lengths, reduction="sum", zero_infinity=True)

    assert planned(Short()).verify().ok


@pytest.mark.parametrize("form", ["flat", "others"])
def test_targets_one_after_the_other_need_a_word(form: str) -> None:
    """Breaks if rows are guessed where lengths of another kind might say otherwise."""
    with pytest.raises(AutoparError, match=r"targets that lie one after the other.*mask\.sum\(-1\)"):
        planned(Speech(form))


class FewLabels(Speech):
    """Asks for values of labels that are so few a row that they might be sizes."""

    def forward(self, x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
        if y.max() >= 11:
            raise ValueError("a label that is no class")
        return super().forward(x, y, lengths)


@pytest.mark.moderate
def test_few_labels_are_no_sizes() -> None:
    """Breaks if labels of few columns are taken for numbers that decide, so that each batch gets a program, or none."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 20, 6), "y": torch.randint(1, 11, (4, 5)), "lengths": torch.tensor(LENGTHS)}
    mesh = autopar.Mesh.parse("dp=2", hardware="cpu")
    plan = autopar.plan(FewLabels("selected"), mesh, example_inputs=batch, strategy="zero3")
    assert plan.verify().ok and not plan.interface.by_value
