"""Configurations that are drawn: a slice of what benchmarks/proofs/configurations.py runs."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from benchmarks.proofs.configurations import CELLS, outcome_of
from benchmarks.proofs.drawn_configurations import FAMILIES, Drawn, configurations, drawn

pytestmark = pytest.mark.slow
FEW = settings(
    max_examples=5, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
)


@FEW
@given(drawing=configurations(), cell=st.sampled_from(CELLS))
def test_a_slice_of_drawn_configurations(drawing: Drawn, cell: tuple[str, str]) -> None:
    """Breaks if a combination of heads, widths, biases, rotary embeddings, windows or dropout is wrong or crashes.

    Named tensor strategies may say that they cannot split.
    """
    outcome = outcome_of(drawing, *cell)
    allowed = ("ok", "refused") if cell[0].startswith("tensor") else ("ok",)
    assert outcome.startswith(allowed), (drawing, outcome)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_draws_differ_and_come_again(family: str) -> None:
    """Breaks if a seed gives another configuration each time, or all give one."""
    seeds = [seed for seed in range(60) if drawn(seed)[0] == family]
    assert len(seeds) == 6 and all(drawn(seed) == drawn(seed) for seed in seeds)
    assert len({str(drawn(seed)) for seed in seeds}) > 1
