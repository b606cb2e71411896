"""A slice of the sweep over every architecture of transformers: other models with each version of autopar.

The whole sweep is benchmarks/coverage/architectures.py; its results are kept, and what was proven there must be proven
here, what was refused refused. Before the version that was swept, transformers may write a model otherwise.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

import autopar
from benchmarks.coverage import eager, sources
from benchmarks.coverage.cells import proven
from benchmarks.coverage.discovery import Pair
from benchmarks.coverage.kept import chosen, load

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")


@pytest.mark.sampled(20)
@pytest.mark.parametrize(
    ("pair", "column", "wanted"),
    [pytest.param(*each, id=f"{each[0].architecture}-{each[1]}") for each in chosen(load(), autopar.__version__)],
)
def test_a_tiny_model_gives_what_the_sweep_found(pair: Pair, column: str, wanted: str) -> None:
    """Breaks if an architecture that was proven computes something else, is refused or crashes; or if a refused one is
    proven now, so that the table is out of date.
    """
    state = random.getstate()
    try:
        with torch.random.fork_rng():
            subject = _subject(pair)
            found, _, said = proven(subject, column)
    finally:
        random.setstate(state)
    if (found, wanted) in (("refused", "ok"), ("ok", "refused")) and sources.is_older():
        others = sources.written_otherwise(subject.model)
        if others:
            pytest.skip(f"transformers {transformers.__version__} has another {others[0]}: {said or found}")
    assert found == wanted, said


def _subject(pair: Pair) -> eager.Subject:
    try:
        return eager.subject(pair)
    except eager.NotEager as error:
        if not sources.is_older():
            raise
        pytest.skip(f"does not run eagerly on transformers {transformers.__version__}: {error}")


def test_a_model_that_another_version_writes_otherwise_is_told_by_its_files(tmp_path: Path) -> None:
    """Breaks if files of transformers are not those that a model's modules are from, or a digest tells nothing."""
    kept = tmp_path / "sources.json"
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16))
    names = ["gpt2/modeling_gpt2.py"]
    kept.write_text(json.dumps({sources.VERSION: "99.1.0", names[0]: "another"}))
    assert sources.written_otherwise(model, kept) == names
    assert sources.is_older(kept)
    sources.write(kept)
    assert sources.written_otherwise(model, kept) == []
    assert not sources.is_older(kept)
