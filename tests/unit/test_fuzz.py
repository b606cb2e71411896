"""A sample of what `benchmarks/fuzz` does to the readers of files: each is taken, or refused with an error of ours."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.fuzz import mutations
from benchmarks.fuzz.readers import run
from benchmarks.fuzz.targets import TARGETS, outcome_of

COUNTS = {"plans": 60, "profiles": 300, "schedules": 200, "indices": 300, "manifests": 200, "configurations": 50}
FIRST = 1_000_000
"""Other inputs than those of the benchmark."""


@pytest.mark.moderate
@pytest.mark.parametrize("name", TARGETS)
def test_mutated_files(name: str) -> None:
    """Breaks if a file that is nearly right is a traceback, has no end, or makes its reader run or write something."""
    counts = run(name, range(FIRST, FIRST + COUNTS[name]))
    assert not counts.failures
    assert counts.refused > counts.taken > 0


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.moderate
@pytest.mark.parametrize("name", ["plans", "indices", "configurations"])
@given(value=values, seed=st.integers(0, 1 << 32))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_arbitrary_values(name: str, value: Any, seed: int, tmp_path: Path) -> None:
    """Breaks if any JSON in the place of a file, or of what it holds, is anything but an AutoparError."""
    target = TARGETS[name]
    whole = {"plans": {"format": 3, "plan": value}, "indices": {"weight_map": value}}.get(name, value)
    for content in (value, whole):
        (tmp_path / target.file).write_text(json.dumps(content))
        assert outcome_of(target, tmp_path / target.file, random.Random(seed)) == "refused"


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=50, deadline=None)
def test_inputs_are_made_of_their_number(seed: int) -> None:
    """Breaks if an input that went wrong cannot be made again from its number, or changes what it is made of."""
    value = {"a": [1, 2.5, "x"], "b": {"c": None}}
    first, again = (mutations.mutated(random.Random(seed), value) for _ in range(2))
    assert repr(first) == repr(again)
    assert value == {"a": [1, 2.5, "x"], "b": {"c": None}}
