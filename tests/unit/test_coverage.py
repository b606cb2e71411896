"""A slice of the matrix in docs/coverage.md: every model, strategy and mesh of it at least once.

The whole matrix is run by `python benchmarks/proofs/models.py`.
"""

from __future__ import annotations

import pytest

import autopar
from autopar.cli.models import catalogue
from autopar.machine.mesh import Mesh
from autopar.strategies.names import parse
from benchmarks.proofs.cells import Cell, Column, run
from benchmarks.proofs.models import CASES, SUBJECTS, page

BY_LABEL = {subject.label: subject for subject in SUBJECTS}
BY_COLUMN = {column.label: column for column in CASES}

SLICE = {
    "llama": (
        ("zero3+keep", "dp=2,tp=2"), ("dp=zero2,tp=tensor+sequence", "dp=2,tp=2"), ("hsdp", "dp=2,tp=2"),
        ("dp=zero3,tp=tensor", "dp=2,tp=2"),
    ),
    "gpt2, no dropout": (("tensor2d", "tp0=2,tp1=2"),),
    "gpt2, dropout 0.1": (("dp=zero2,tp=tensor+sequence", "dp=2,tp=2, 4 parts"), ("zero1", "dp=2, 4 parts")),
    "bert, no dropout": (("zero1", "dp=3, batch 9"), ("zero3", "dp=2, 4 parts")),
    "bert, dropout 0.1": (("dp=zero1,tp=tensor", "dp=2,tp=2"), ("dp=zero2,tp=tensor+sequence", "dp=2,tp=2")),
    "qwen3": (("tensor+sequence", "tp=4"),),
    "gemma2": (("dp=zero3,tp=tensor+sequence", "dp=2,tp=2"),),
    "phi3": (("tensor", "tp=2"),),
    "phi3, grouped heads": (("tensor", "tp=4"),),
    "t5, no dropout": (("zero2", "dp=2"),),
    "t5, dropout 0.1": (("ddp", "dp=2"),),
    "t5-3b, heads wider than the hidden state": (("tensor", "tp=2"),),
    "whisper": (("dp=zero3,tp=tensor", "dp=2,tp=2"),),
    "vit": (("tensor2d", "tp0=2,tp1=2"), ("dp=zero2,cp=auto", "dp=2,cp=2")),
    "clip": (("zero3", "dp=2"),),
    "mlp": (
        ("dp=zero3,cp=tensor+sequence", "dp=2,cp=2"), ("zero3", "dp=2,cp=2,tp=2"), ("auto", "dp=2,tp=2, 4 parts"),
        ("dp=zero2,cp=ddp,tp=tensor+sequence", "dp=2,cp=2,tp=2"), ("ddp", "dp=3, batch 9"),
    ),
    "cnn": (("auto", "dp=2,tp=2"), ("ddp", "dp=2, 4 parts")),
    "resnet": (("zero3", "dp=2"),),
}  # fmt: skip

REFUSED = (
    ("vit", "tensor+sequence", "tp=2", "the sequence cannot split over tp=2"),
    ("mlp", "hsdp", "dp=2", "hsdp takes two axes, the mesh gives it 1"),
    ("mlp", "tensor2d", "dp=2", "tensor2d takes two axes, the mesh gives it 1"),
)


def test_the_slice_meets_every_model_strategy_and_mesh() -> None:
    """Breaks when the matrix grows and the slice does not."""
    chosen = [each for cells in SLICE.values() for each in cells]
    assert set(SLICE) == set(BY_LABEL)
    assert {strategy for strategy, _ in chosen} == {name for names in CASES.values() for name in names}
    assert {mesh for _, mesh in chosen} == set(BY_COLUMN)
    assert all(strategy in CASES[BY_COLUMN[mesh]] for strategy, mesh in chosen)


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("label", SLICE)
def test_equal_to_eager(label: str) -> None:
    """Breaks if a rule, a placement, a lowering or a loop gives a wrong number: an output, a gradient, a buffer."""
    for strategy, mesh in SLICE[label]:
        cell = run(BY_LABEL[label], parse(strategy), BY_COLUMN[mesh])
        assert cell.status == "ok", f"{strategy} on {mesh}: {cell.message}"
        assert cell.error < 1e-9


@pytest.mark.moderate
@pytest.mark.parametrize(("label", "strategy", "mesh", "words"), REFUSED)
def test_what_a_strategy_does_not_admit_is_said(label: str, strategy: str, mesh: str, words: str) -> None:
    """Breaks if a case without a plan gets a wrong one, or an error that does not say what stands in the way."""
    cell = run(BY_LABEL[label], parse(strategy), BY_COLUMN[mesh])
    assert cell.status == "refused"
    assert words in cell.message


@pytest.mark.slow
def test_a_batch_that_couples_its_rows_is_refused() -> None:
    """Breaks if microbatches of a model with batch norm are planned as if each row stood alone."""
    cell = run(BY_LABEL["resnet"], "ddp", Column("dp=2", microbatches=4))
    assert cell.status == "refused" and "does not follow from those of its microbatches" in cell.message


@pytest.mark.slow
def test_verify_runs_the_microbatches() -> None:
    """Breaks if `plan.verify` proves the whole batch at once, where the plan runs it in parts: a wrong weight of the
    parts, whose numbers of labels differ, has to be seen.
    """
    loaded = catalogue.load("bert", tiny=True, device="cpu", dropout=0.0)
    mesh = Mesh({"dp": 2}, hardware="cpu")
    plan = autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, strategy="zero2", microbatches=4)
    assert plan.verify().ok
    before, begins, weight = plan.source.partition("def loss_weight(inputs):\n")
    assert begins
    body, returns, rest = weight.partition("    return ")
    wrong = plan.with_source(f"{before}{begins}{body}    return torch.ones(())  # was {rest}")
    assert returns and not wrong.verify().ok


def test_the_page_has_every_cell() -> None:
    """Breaks if a result is lost on the way to the page."""
    results = {
        "mlp | ddp | dp=2": {"status": "ok", "error": 5e-16, "message": ""},
        "mlp | hsdp | dp=2": {"status": "refused", "error": 0.0, "message": "hsdp takes two axes, the mesh gives it 1"},
        "mlp | zero3 | dp=2": {"status": "failed", "error": 1.0, "message": "2 of 9 tensors differ"},
    }
    text = page(results, "now")
    assert "1 cells are equal to eager, 1 are not admitted, 1 failed" in text
    assert "| ddp | 5.0e-16 |" in text
    assert "**failed** [1](#notes)" in text and "two axes [2](#notes)" in text
    assert "2. hsdp takes two axes" in text


def test_a_bug_is_a_failed_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a crash of ours ends the run, or looks like a case that is rightly refused."""

    def crash(*_: object, **__: object) -> None:
        raise KeyError("q_proj")

    monkeypatch.setattr("benchmarks.proofs.cells.place", crash)
    cell: Cell = run(BY_LABEL["mlp"], "ddp", Column("dp=2"))
    assert cell.status == "failed" and "KeyError: 'q_proj'" in cell.message
