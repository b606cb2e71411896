"""The cross entropy kernels, interpreted, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.operators.basic import cross_entropy_grad, sum_exp
from tests.unit.kernels.interpreted import assert_near
from tests.unit.kernels.interpreted import load as kernels


@pytest.mark.moderate
@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 5), st.integers(1, 300), st.integers(0, 200),
    st.sampled_from([torch.float32, torch.float16]), st.booleans(),
)  # fmt: skip
def test_equal_to_float64(batch: int, rows: int, vocabulary: int, start: int, dtype: torch.dtype, padded: bool) -> None:
    """Breaks if a row's sum takes in another's columns, or the label is looked for at the wrong place."""
    generator = torch.Generator().manual_seed(batch + rows + vocabulary + start)
    x = (3 * torch.randn(batch, rows, vocabulary, generator=generator)).to(dtype)
    if padded and vocabulary > 1:
        x[..., -1] = -math.inf
    m = x.amax(-1)
    target = torch.randint(-1, 2 * vocabulary + start, (batch, rows), generator=generator)
    g = torch.randn(batch, rows, generator=generator)
    module = kernels("cross_entropy")
    total = module.sum_exp(x, m)
    assert_near(total, sum_exp(x.double(), m.double()))
    lse = x.double().logsumexp(-1)
    dx = module.cross_entropy_grad(g, x, target, lse.float(), start)
    assert_near(dx, cross_entropy_grad(g.double(), x.double(), target, lse, start))


def test_many_columns_and_strided_rows() -> None:
    """Breaks if a row of several tiles misses one, or the rows of a slice are read as neighbours."""
    x = torch.randn(3, 2 * 4096 + 70)[:, 9:-11]
    module = kernels("cross_entropy")
    m, target = x.amax(-1), torch.tensor([5000, 17, 8200])
    assert_near(module.sum_exp(x, m), sum_exp(x.double(), m.double()))
    g, lse = torch.ones(3), x.logsumexp(-1)
    expected = cross_entropy_grad(g.double(), x.double(), target, x.double().logsumexp(-1))
    assert_near(module.cross_entropy_grad(g, x, target, lse), expected)
