"""One placement for batches of many sizes: what is read off is what is traced, and nothing else is read off."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.api.added_rows import rows_added
from autopar.api.planning import written
from autopar.base.errors import AutoparError, DoesNotFit
from autopar.cli.models import catalogue
from autopar.ir.sized import NotAlike, Readings, Size
from autopar.machine.mesh import Mesh
from autopar.planner.family import Family
from autopar.runtime.added import Grown
from autopar.runtime.checker.program import check_types

MESH = Mesh.parse("dp=2", hardware="h100")
ROWS, LENGTH = ("x", 0), ("x", 1)


def _read(known: list[tuple[int, int]], values: tuple[float, ...], wanted: tuple[int, int]) -> float:
    sizes: list[Mapping[Size, int]] = [{ROWS: rows, LENGTH: length} for rows, length in known]
    return Readings.of(sizes, {ROWS: wanted[0], LENGTH: wanted[1]}).read(values)


def test_numbers_are_read_as_polynomials_of_sizes() -> None:
    """Breaks if a number is taken for another function of the sizes that it fits by chance."""
    lengths = [(4, 16), (4, 24), (4, 40)]
    assert _read(lengths, (64, 96, 160), (4, 50)) == 200
    assert _read(lengths, (256, 576, 1600), (4, 50)) == 2500
    assert _read(lengths, (15, 23, 39), (4, 50)) == 49
    assert _read(lengths, (1 / 16, 1 / 24, 1 / 40), (4, 32)) == 1 / 32
    both = [(4, 16), (4, 24), (4, 40), (2, 40)]
    assert _read(both, (64, 96, 160, 80), (8, 10)) == 80
    assert _read(both, (16, 24, 40, 40), (8, 10)) == 10


@pytest.mark.parametrize(
    ("known", "values", "wanted", "why"),
    [
        ([(4, 16), (4, 24)], (16, 24), (4, 40), "2 readings"),
        ([(4, 16), (4, 24), (4, 40)], (16, 24, 32), (4, 50), "0 readings"),
        ([(4, 16), (4, 24), (4, 40)], (8, 12, 20), (4, 17), "no whole number"),
        ([(4, 16), (4, 24), (4, 40)], (64, 96, 160), (2, 40), "did not vary"),
        ([(4, 16), (2, 32)], (64, 64), (4, 32), "product of sizes"),
        ([(4, 16), (4, 24), (4, 40)], (1.0, math.inf, math.nan), (4, 50), "0 readings"),
    ],
)
def test_what_does_not_follow_is_said(
    known: list[tuple[int, int]], values: tuple[int, ...], wanted: tuple[int, int], why: str
) -> None:
    """Breaks if a number is guessed: from too few programs, by no law, or of a size that was always the same."""
    with pytest.raises(NotAlike, match=why):
        _read(known, values, wanted)


class Branching(nn.Module):
    """Does something else for long batches, and for those of 20; counts its rows in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        if x.shape[1] > 24:
            x = x * 2
        if x.shape[1] == 20:
            x = x + 1
        return self.second(x).sum() / len(x)


def _batch(rows: int, length: int) -> dict[str, Tensor]:
    return {"x": torch.ones(rows, length, 8)}


def _text(family: Family, model: nn.Module, batch: Mapping[str, Any]) -> tuple[str, object]:
    plan = written(family.plan(model, batch))
    check_types(plan.source, plan.interface)
    return plan.source, plan.interface


@pytest.mark.moderate
def test_what_a_model_does_for_some_sizes_is_done_for_these() -> None:
    """Breaks if a program is read off for a size at which the model branches: what it says would be wrong, and fit."""
    model = Branching()
    solved = autopar.plan(model, MESH, example_inputs=_batch(4, 8), strategy="ddp")
    family = Family.of(solved)
    for length in (10, 12, 14, 22, 20, 24, 18, 25, 30, 26):
        own = Family.of(solved)
        try:
            expected = _text(own, model, _batch(4, length))
        except AutoparError:  # other operators: another placement
            with pytest.raises(AutoparError, match="another program"):
                family.plan(model, _batch(4, length))
            continue
        assert _text(family, model, _batch(4, length)) == expected, length
    assert family.read >= 4


class Marking(nn.Module):
    """Marks what counts for nothing by a number that is none, as TRL's metrics do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y.masked_fill(x < 0, math.nan).nan_to_num(0.0, math.inf, -math.inf).sum()


@pytest.mark.moderate
def test_constants_that_are_no_numbers_stay() -> None:
    """Breaks if NaN, which equals nothing, is taken for a number that changes with the sizes."""
    model = Marking()
    family = Family.of(autopar.plan(model, MESH, example_inputs=_batch(4, 8), strategy="ddp"))
    for length in (10, 12, 14, 22):
        own = Family.of(autopar.plan(model, MESH, example_inputs=_batch(4, 8), strategy="ddp"))
        assert _text(family, model, _batch(4, length)) == _text(own, model, _batch(4, length))
    assert family.read


@lru_cache(maxsize=1)
def _llama() -> tuple[nn.Module, Any]:
    loaded = catalogue.load("llama", tiny=True)
    return loaded.model, autopar.plan(loaded.model, MESH, example_inputs=_tokens(4, 12), strategy="zero3")


def _tokens(rows: int, length: int) -> dict[str, Tensor]:
    ids = torch.zeros(rows, length, dtype=torch.int64)
    return {"input_ids": ids, "attention_mask": ids + 1, "labels": ids}


@pytest.mark.slow
def test_programs_that_are_read_off_are_those_that_are_traced() -> None:
    """Breaks if a number in a program of another size is not the one that a trace gives: text, border and meaning."""
    model, solved = _llama()
    family = Family.of(solved)
    for rows, length in ((4, 10), (4, 16), (4, 11), (2, 11), (6, 13), (8, 15)):
        assert _text(family, model, _tokens(rows, length)) == _text(Family.of(solved), model, _tokens(rows, length))
    assert (family.traced, family.read) == (4, 2), "two more lengths and two more numbers of rows"


@pytest.mark.slow
def test_a_longer_batch_must_fit() -> None:
    """Breaks if a program of another size is not held against the memory limit."""
    model, solved = _llama()
    peak = solved.cost.peak_memory_bytes
    loaded = autopar.plan(model, MESH, example_inputs=_tokens(4, 12), strategy="zero3", memory_limit=peak * 1.2)
    family = Family.of(loaded)
    family.plan(model, _tokens(4, 8))
    with pytest.raises(DoesNotFit, match="zero3 on dp=2 does not fit"):
        family.plan(model, _tokens(4, 64))


class Scores(nn.Module):
    """A loss of several kinds."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(8, 5), kind

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        scores = self.linear(x)
        if labels is None:
            return {"scores": scores}
        flat, wanted = scores.view(-1, 5), labels.view(-1)
        losses = {
            "mean": lambda: F.cross_entropy(flat, wanted),
            "sum": lambda: F.cross_entropy(flat, wanted, reduction="sum") / 7,
            "counted": lambda: F.cross_entropy(flat, wanted, reduction="sum") / (labels != -100).sum(),
            "smoothed": lambda: F.cross_entropy(flat, wanted, label_smoothing=0.1),
            "flattened": lambda: F.cross_entropy(
                scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1
            ),
            "by places": lambda: F.cross_entropy(scores[:, :-1].transpose(1, 2), labels[:, 1:]),
            "of logarithms": lambda: F.nll_loss(scores[:, :-1].flatten(0, 1).log_softmax(-1), labels[:, 1:].flatten()),
            "masked": lambda: (
                (F.cross_entropy(flat, wanted, reduction="none") * (wanted != -100)).sum() / (wanted != -100).sum()
            ),
            "masked otherwise": lambda: (F.cross_entropy(flat, wanted, reduction="none") * (wanted != 0)).sum(),
            "by another label": lambda: F.cross_entropy(flat, wanted, ignore_index=0),
            "and a square": lambda: F.cross_entropy(flat, wanted) + scores.pow(2).mean(),
            "probabilities": lambda: F.cross_entropy(flat, wanted.view(-1, 1).expand(-1, 5).to(flat.dtype)),
            "shifted labels": lambda: F.cross_entropy(flat, (labels + 1).view(-1)),
            "of all rows": lambda: F.cross_entropy((scores - scores.mean(0)).view(-1, 5), wanted),
        }
        return {"loss": losses[self.kind](), "scores": scores}


@pytest.mark.moderate
@pytest.mark.parametrize(
    "kind", ["mean", "sum", "counted", "smoothed", "flattened", "by places", "of logarithms", "masked"]
)
def test_rows_that_have_no_part_in_a_loss(kind: str) -> None:
    """Breaks if rows are not added that may be, or if those that are change a loss or a gradient."""
    model = Scores(kind).double()
    batch = {"x": torch.randn(3, 6, 8).double(), "labels": torch.randint(0, 5, (3, 6))}
    added = rows_added(model, batch, 4, precision=None, training=True)
    grown = {"x": (Grown(0, 3, 4),), "labels": (Grown(0, 3, 4, -100),)}
    assert (dict(added.inputs), added.outputs) == (grown, ((), ((0, 3),)))
    found = []
    for own in (batch, added.pad(batch)):
        out = model(**own)
        found.append([out["loss"], out["scores"][:3], *torch.autograd.grad(out["loss"], list(model.parameters()))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    alone = rows_added(model, {"x": batch["x"]}, 2, precision=None, training=False)
    assert (dict(alone.inputs), alone.outputs) == ({"x": (Grown(0, 3, 4),)}, (((0, 3),),))


@pytest.mark.moderate
@pytest.mark.parametrize(
    "kind",
    ["masked otherwise", "by another label", "and a square", "shifted labels", "of all rows", "probabilities"],
)
def test_rows_that_would_have_a_part_are_not_added(kind: str) -> None:
    """Breaks if rows are added that count in a loss, or that change other rows."""
    batch = {"x": torch.randn(3, 6, 8), "labels": torch.randint(0, 5, (3, 6))}
    with pytest.raises(AutoparError):
        rows_added(Scores(kind), batch, 4, precision=None, training=True)
