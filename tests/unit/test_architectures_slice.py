"""A slice of the sweep over every architecture of transformers: other models with each version of autopar.

The whole sweep is benchmarks/coverage/architectures.py; its results are kept, and what was proven there must be proven
here, what was refused refused.
"""

from __future__ import annotations

import random

import pytest
import torch

import autopar
from benchmarks.coverage import eager
from benchmarks.coverage.cells import proven
from benchmarks.coverage.discovery import Pair
from benchmarks.coverage.kept import chosen, load

pytestmark = pytest.mark.slow

pytest.importorskip("transformers")


@pytest.mark.sampled(12)
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
            found, _, said = proven(eager.subject(pair), column)
    finally:
        random.setstate(state)
    assert found == wanted, said
