"""Tests of whether a mask chooses rows: nothing comes of what they leave out, or rows are taken for granted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.api import interpret
from autopar.base.errors import AutoparError
from autopar.passes.capture import capture

EXPERTS, WIDTH = 4, 8


class Chooses(nn.Module):
    """Rows that choose one of some experts, of which `how` makes a number."""

    def __init__(self, how: Callable[[Chooses, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x, self.router(x).argmax(-1))


def _adds(model: Chooses, x: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for number, expert in enumerate(model.experts):
        (rows,) = torch.where(chosen == number)
        if rows.numel() == 0:
            continue
        made = expert(x[rows])
        out.index_add_(0, rows, made)
    return out.square().mean()


def _adds_by_index(model: Chooses, x: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for number, expert in enumerate(model.experts):
        (rows,) = torch.where(chosen == number)
        if len(rows) > 0:
            out[rows] += expert(x[rows])
    return out.square().mean()


def _assigns_by_mask(model: Chooses, x: Tensor, chosen: Tensor) -> Tensor:
    out = x * 0.5
    for number, expert in enumerate(model.experts):
        mask = chosen == number
        picked = x[mask]
        count = picked.shape[0]
        if count != 0:
            out[mask] = expert(picked)
    return out.square().mean()


def _counts_rounds(model: Chooses, x: Tensor, chosen: Tensor) -> Tensor:
    out, used = torch.zeros_like(x), 0
    for number, expert in enumerate(model.experts):
        (rows,) = torch.where(chosen == number)
        if rows.numel() == 0:
            continue
        used += 1
        out.index_add_(0, rows, expert(x[rows]))
    return (out / used).square().mean()


def _adds_means(model: Chooses, x: Tensor, chosen: Tensor) -> Tensor:
    loss = x.sum() * 0
    for number, expert in enumerate(model.experts):
        rows = x[chosen == number]
        if rows.shape[0] > 0:
            loss = loss + expert(rows).square().mean()
    return loss


def _collects_losses(model: Chooses, x: Tensor, chosen: Tensor) -> Tensor:
    losses = []
    for number, expert in enumerate(model.experts):
        rows = x[chosen == number]
        if len(rows):
            losses.append(F.mse_loss(expert(rows), rows, reduction="sum"))
    return torch.stack(losses).mean()


def _writes_to_a_place(model: Chooses, x: Tensor, chosen: Tensor) -> Tensor:
    found = torch.ones(EXPERTS)
    for number, expert in enumerate(model.experts):
        rows = x[chosen == number]
        if len(rows) > 0:
            found[number] = expert(rows).sum()
    return found.sum()


def _one_or_the_other(model: Chooses, x: Tensor, chosen: Tensor) -> Tensor:
    rows = x[chosen == 0]
    return model.experts[0](rows).square().sum() if rows.size(0) else model.experts[1](x).sum()


def _skips_what_follows(model: Chooses, x: Tensor, chosen: Tensor) -> Tensor:
    loss = x.mean()
    rows = x[chosen == 0]
    number = rows.shape[0]
    if not number:
        loss = loss * 3
    return loss + model.experts[0](rows).sum()


def _writes_if_there_is_none(model: Chooses, x: Tensor, chosen: Tensor) -> Tensor:
    out, rows, others = model.experts[1](x), x[chosen == 0], chosen == 1
    if len(rows) == 0:
        out[others] = 3.0
    return out.sum() + model.experts[0](rows).sum()


def _means_by_number(model: Chooses, x: Tensor, chosen: Tensor) -> Tensor:
    loss = x.sum() * 0
    for number, expert in enumerate(model.experts):
        rows = x[chosen == number]
        loss = loss + expert(rows).square().sum() / max(int(rows.shape[0]), 1)
    return loss


def _asks_in_a_function(model: Chooses, x: Tensor, chosen: Tensor) -> Tensor:
    def has_any(number: int) -> bool:
        return number > 0

    rows = x[chosen == 0]
    return model.experts[0](rows).sum() if has_any(rows.shape[0]) else x.sum()


def _asks_for_any_group(model: Chooses, x: Tensor, chosen: Tensor) -> Tensor:
    groups = [x[chosen == number] for number in range(EXPERTS)]
    if any(len(rows) == 0 for rows in groups):
        return x.sum()
    return torch.stack([expert(rows).sum() for expert, rows in zip(model.experts, groups, strict=True)]).sum()


def _asks_of_one_writes_another(model: Chooses, x: Tensor, chosen: Tensor) -> Tensor:
    mask = chosen == 0
    rows, mask, out = x[mask], chosen == 1, x * 0.5
    if rows.shape[0] > 0:
        out[mask] = model.experts[1](x[mask])
    return out.sum()


def _as_many_as_others(model: Chooses, x: Tensor, chosen: Tensor) -> Tensor:
    one, other = x[chosen == 0], x[chosen == 1]
    return one.mean() if one.shape[0] == other.shape[0] else one.sum() - other.sum()


def _at_most_a_capacity(model: Chooses, x: Tensor, chosen: Tensor) -> Tensor:
    rows = x[chosen == 0]
    if rows.shape[0] > 2:
        rows = rows * 2
    return model.experts[0](rows).sum()


def _of_an_odd_number(model: Chooses, x: Tensor, chosen: Tensor) -> Tensor:
    rows = x[chosen == 0]
    return rows.sum() * 3 if rows.shape[0] % 2 == 1 else rows.sum()


def _of_the_largest_group(model: Chooses, x: Tensor, chosen: Tensor) -> Tensor:
    return max((x[chosen == number] for number in range(EXPERTS)), key=lambda rows: rows.shape[0]).sum()


def _looks_up(model: Chooses, x: Tensor, chosen: Tensor) -> Tensor:
    return x.sum() * {1: 2.0, 2: 3.0}.get(x[chosen == 0].shape[0], 1.0)


def _of_a_share(model: Chooses, x: Tensor, chosen: Tensor) -> Tensor:
    kept = 4
    kept = kept + 1
    share = kept / int(x[chosen == 0].shape[0])
    return x.sum() if share > 2 else x.mean()


def _of_three_at_least(model: Chooses, x: Tensor, chosen: Tensor) -> Tensor:
    rows = x[chosen == 0]
    return model.experts[0](rows).sum() / max(int(rows.shape[0]), 3)


def _program_and_eager(how: Callable[..., Tensor], empty: bool) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """empty: whether nobody chooses expert 0."""
    torch.manual_seed(0)
    model, x = Chooses(how), torch.randn(8, WIDTH)
    with torch.no_grad():  # row i chooses expert i % 4
        model.router.weight.copy_(torch.eye(EXPERTS, WIDTH) * 100)
        x[:, :EXPERTS] = torch.eye(EXPERTS).repeat(2, 1)
        model.router.bias.copy_(torch.tensor([-1000.0 * empty, 0, 0, 0]))
    program = capture(model, {"x": torch.empty(8, WIDTH, device="meta")})
    (found, *_), _ = interpret.run(
        program, interpret.state_of(model, program), interpret.input_tensors(program, {"x": x})
    )
    return found, model(x), program.granted


@pytest.mark.moderate
@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("how", [_adds, _adds_by_index, _assigns_by_mask])
def test_rows_that_are_written_are_so_for_any_number(how: Callable[..., Tensor], empty: bool) -> None:
    """Breaks if experts that nobody chose are refused, or change what others give."""
    found, eager, granted = _program_and_eager(how, empty)
    torch.testing.assert_close(found, eager)
    assert not granted


@pytest.mark.moderate
@pytest.mark.parametrize(
    "how",
    [
        _counts_rounds, _adds_means, _collects_losses, _writes_to_a_place, _one_or_the_other, _skips_what_follows,
        _writes_if_there_is_none,
    ],
)  # fmt: skip
def test_what_more_is_done_is_guarded(how: Callable[..., Tensor]) -> None:
    """Breaks if a number of another case is silently given where a mask chooses no rows, or rows are refused."""
    found, eager, granted = _program_and_eager(how, empty=False)
    torch.testing.assert_close(found, eager)
    assert granted and all("that a mask chooses rows at all (test_counted_rows.py:" in each for each in granted)
    found, eager, _ = _program_and_eager(how, empty=True)
    assert found.isnan() and not eager.isnan()


@pytest.mark.moderate
@pytest.mark.parametrize(
    "how", [_means_by_number, _asks_in_a_function, _asks_for_any_group, _asks_of_one_writes_another]
)
def test_who_asks_does_not_matter(how: Callable[..., Tensor]) -> None:
    """Breaks if a test in a function, a generator, or of another mask than what is written, is not seen."""
    found, eager, _ = _program_and_eager(how, empty=False)
    torch.testing.assert_close(found, eager)
    found, eager, _ = _program_and_eager(how, empty=True)
    assert found.isnan() and not eager.isnan()


@pytest.mark.moderate
def test_numbers_of_two_masks_that_are_equal_are_another_case() -> None:
    """Breaks if what is done for as many rows is done for others, or the other way round."""
    found, eager, granted = _program_and_eager(_as_many_as_others, empty=True)
    torch.testing.assert_close(found, eager)
    assert granted and "another number of rows" in granted[0]
    assert _program_and_eager(_as_many_as_others, empty=False)[0].isnan()


@pytest.mark.parametrize(
    "how",
    [_at_most_a_capacity, _of_an_odd_number, _of_the_largest_group, _looks_up, _of_a_share, _of_three_at_least],
)
def test_what_else_numbers_of_rows_decide_is_refused(how: Callable[..., Tensor]) -> None:
    """Breaks if a capacity, a remainder, an order or a dict decides as for the traced number, whatever there is."""
    with pytest.raises(AutoparError, match="how many rows a mask chooses.*test_counted_rows.py"):
        _program_and_eager(how, empty=False)
