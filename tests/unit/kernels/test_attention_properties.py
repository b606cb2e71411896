"""The attention kernels, interpreted, on calls that Hypothesis draws, against the formula in float64."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.kernels.attention_cases import Case, expected
from tests.unit.kernels.test_attention_kernels import assert_equal, computed


@st.composite
def runs(draw: st.DrawFn, name: str, most: int) -> tuple[int, dict[str, Any]]:
    """(length, starts): of one run at 0, or of up to three that overlap in no position."""
    length = draw(st.integers(1, most))
    if draw(st.booleans()):
        return length, {}
    count = draw(st.integers(1, 3))
    gaps = draw(st.lists(st.integers(0, 40), min_size=count, max_size=count))
    each = max(1, length // count)
    starts = [sum(gaps[: i + 1]) + i * each for i in range(count)]
    return each * count, {name: draw(st.permutations(starts))}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    queries, options = draw(runs("query_starts", 40))
    keys, key_options = draw(runs("key_starts", 56))
    options |= key_options
    limit = st.none() | st.integers(-4, 40)
    options |= {"left": draw(limit), "right": draw(st.just(0) | limit)}
    options |= {"prefix": draw(st.just(0) | st.integers(1, 70)), "softcap": draw(st.sampled_from([0.0, 0.0, 1.5]))}
    if draw(st.integers(0, 3)) == 0:
        options |= {"dropout_p": draw(st.floats(0.05, 0.9)), "salt": draw(st.integers(-(2**63), 2**63 - 1))}
    group, first = draw(st.integers(1, 3)), draw(st.integers(0, 3))
    heads = draw(st.integers(1, 3))
    batch = draw(st.integers(1, 2))
    wide = (batch, heads, queries, keys)
    bias = draw(st.none() | st.tuples(*(st.sampled_from([1, size]) for size in wide)))
    cuts = [(draw(st.integers(0, queries)), draw(st.integers(0, keys))) for _ in range(draw(st.integers(0, 2)))]
    ends = [sorted(side) for side in zip((0, 0), *cuts, (queries, keys), strict=True)]
    lengths = tuple([b - a for a, b in pairwise(side)] for side in ends)
    part = st.tuples(st.integers(0, keys), st.integers(0, keys)).map(lambda ends: (min(ends), max(ends)))
    return Case(
        B=batch, H=heads, G=-(-(first + heads) // group), S=queries, T=keys, D=draw(st.sampled_from([8, 16, 20])),
        E=draw(st.sampled_from([8, 16, 24])), dtype=draw(st.sampled_from([torch.float32, torch.float16])),
        bias=bias, bias_bool=draw(st.booleans()), sinks=draw(st.booleans()),
        keys=draw(st.none() | st.lists(part, min_size=batch, max_size=batch)),
        documents=(lengths[0], lengths[1]) if cuts else None, options=options | {"group": group, "first": first},
    )  # fmt: skip


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases())
def test_any_call_equals_float64(case: Case) -> None:
    """Breaks where features meet in a way that no fixed case has."""
    tensors = case.tensors()
    actual = computed(tensors, case.said())
    assert_equal(actual, expected(tensors, case.said(), actual["out"]))
