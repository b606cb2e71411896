"""Rows that a mask chooses, as many in each sequence: seen as a dim of their own, and one of them by its number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.api import interpret
from autopar.base.errors import AutoparError
from autopar.passes.capture import capture
from tests.unit.passes.test_chosen_rows import assert_serves

B, T, H = 4, 6, 4


class Marked(nn.Module):
    """Of whose positions marked with 2 `how` makes numbers of each sequence."""

    def __init__(self, how: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.places = nn.Embedding(9, H), nn.Linear(H, H), nn.Parameter(torch.randn(T, H))
        self.how = how

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        h = self.second(self.first(ids) + self.places).tanh()
        return (self.how(h, ids == 2) * weights).sum()


def _last(h: Tensor, mask: Tensor) -> Tensor:
    """As transformers' BART classifies by the last end of a sequence."""
    if len(torch.unique_consecutive(mask.sum(1))) > 1:
        raise ValueError("all sequences must have as many ends")
    return h[mask, :].view(h.size(0), -1, h.size(-1))[:, -1, :]


def _checked(h: Tensor, mask: Tensor) -> Tensor:
    torch._check(torch.unique_consecutive(mask.sum(1)).numel() == 1)
    rows = h[mask]
    torch._check(rows.shape[0] // h.shape[0] >= 1)
    return rows.view(B, rows.shape[0] // B, H)[..., 0, :]


def _shares(h: Tensor, mask: Tensor) -> Tensor:
    """Attention over the marked positions of each sequence, and of all."""
    rows = h[mask].view(B, -1, H)
    weights = rows.mean(-1).softmax(1)
    of_all = h[mask].mean(-1)
    return (weights[..., None] * rows).sum(1) + (of_all.softmax(0) * of_all.log_softmax(0)).sum()


HOW: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "last": _last,
    "checked": _checked,
    "mean": lambda h, mask: h[mask].reshape(B, -1, H).mean(1),
    "heads": lambda h, mask: h[mask].square().view(B, -1, 2, H // 2).amax(1).flatten(1),
    "two": lambda h, mask: h[mask].view(B, 2, H)[:, 1] - h.mean(1),
    "number": lambda h, mask: h[mask][-1] * h[mask].select(0, 1),
    "rest": lambda h, mask: h[mask].view(B, 2, -1)[:, 0],
    "groups": lambda h, mask: h[mask].view(-1, 2, H)[:, 1],
    "unflattened": lambda h, mask: h[mask].unflatten(0, (B, -1)).sum(1),
    "shares": _shares,
    "of several": lambda h, mask: h[:, None][mask[:, None]].view(B, 1, 2, H)[:, 0, 0],
}


def _batch(seed: int, each: int = 2) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 9, (B, T), generator=made)
    for row in ids:
        row[torch.randperm(T, generator=made)[:each]] = 2
    return {"ids": ids, "weights": torch.rand(B, 1, generator=made, dtype=torch.float64)}


@pytest.mark.moderate
@pytest.mark.parametrize("name", HOW)
def test_the_program_for_one_batch_serves_others(name: str) -> None:
    """Breaks if rows are others than eager's, of other places or of another number in each sequence."""
    model = Marked(HOW[name]).double()
    program = capture(model, _batch(0))
    for seed, each in ((1, 2), (2, 2), (3, 1), (4, 3)):
        if each == 2 or name not in ("two", "number", "rest", "groups", "of several"):
            assert_serves(model, program, _batch(seed, each))


@pytest.mark.parametrize(("name", "words"), [("two", "as many rows in each sequence"), ("number", "enough rows"),
                                             ("mean", "as many rows in each"), ("last", "the check at")])  # fmt: skip
def test_another_number_of_rows_gives_no_numbers(name: str, words: str) -> None:
    """Breaks if a row that is not there, or one of the next sequence, is another row, silently."""
    model = Marked(HOW[name]).double()
    program = capture(model, _batch(0))
    assert any(words in each for each in program.granted)
    batch = _batch(1, 0 if name == "number" else 3)
    if name != "number":
        batch["ids"][0, batch["ids"][0] == 2] = 5
    (found, *_), _ = interpret.run(program, interpret.state_of(model, program), interpret.input_tensors(program, batch))
    assert found.isnan().all()


@pytest.mark.moderate
@pytest.mark.parametrize("name", ["last", "two", "number", "shares"])
def test_sequences_are_split_with_the_batch(name: str) -> None:
    """Breaks if a rank counts the rows of its own sequences alone."""
    plan = autopar.plan(Marked(HOW[name]), autopar.Mesh({"dp": 2}), example_inputs=_batch(0), strategy="zero3")
    assert plan.verify().ok


def test_a_shape_of_all_rows_is_refused_in_words() -> None:
    """Breaks if who sees them as so many numbers of a sequence is sent to eager, which runs."""
    model = Marked(lambda h, mask: h[mask].view(B, -1)[:, :H]).double()
    with pytest.raises(AutoparError, match=r"in the shape \[4, -1\].*test_chosen_apart\.py:.*view\(4, -1, \*rows"):
        capture(model, _batch(0))
