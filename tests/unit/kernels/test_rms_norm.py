"""The RMSNorm kernels, interpreted, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autopar.operators.rms_norm import rms_norm as reference
from autopar.operators.rms_norm import rms_norm_backward as reference_backward
from tests.unit.kernels.interpreted import assert_near
from tests.unit.kernels.interpreted import load as kernels
from tests.unit.tiers import mostly_slow

DTYPES = st.sampled_from([torch.float32, torch.float16])
SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 300))
FORMS = st.sampled_from([(0.0, True), (1.0, False), (0.0, False)])


@pytest.mark.moderate
@settings(max_examples=30, deadline=None)
@given(SHAPES, DTYPES, FORMS, st.booleans())
def test_equal_to_float64(
    shape: tuple[int, ...], dtype: torch.dtype, form: tuple[float, bool], has_weight: bool
) -> None:
    """Breaks if a mask lets a column of another row in, a row is left out, or the weight meets the wrong column."""
    check(shape, dtype, *form, has_weight)


@pytest.mark.moderate
@pytest.mark.parametrize("columns", mostly_slow([9000, 16500], 9000))
def test_wide_rows(columns: int) -> None:
    """Breaks if rows that are read in chunks miss one, or dw of wide rows sums the wrong ones."""
    check((70, columns), torch.float32, 1.0, False, True)


def test_strided_rows() -> None:
    """Breaks if the rows of a slice are read as if they lay next to each other."""
    x = torch.randn(6, 40)[:, 4:36]
    y, rstd = kernels("rms_norm").rms_norm(x, None, 1e-6)
    expected = reference(x.double(), None, 1e-6)
    assert_near(y, expected[0])
    assert_near(rstd, expected[1])


def test_dtypes_of_results() -> None:
    """Breaks if a float32 weight with half rows gives another dtype than PyTorch's product."""
    x, w = torch.randn(4, 16, dtype=torch.float16), torch.randn(16)
    for round_first in (False, True):
        y, _ = kernels("rms_norm").rms_norm(x, w, 1e-6, round_first=round_first)
        assert y.dtype == reference(x, w, 1e-6, round_first=round_first)[0].dtype


def check(shape: tuple[int, ...], dtype: torch.dtype, offset: float, round_first: bool, has_weight: bool) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator).to(dtype)
    g = torch.randn(shape, generator=generator).to(dtype)
    w = torch.randn(shape[-1], generator=generator).to(dtype) if has_weight else None
    form = {"offset": offset, "round_first": round_first}
    module = kernels("rms_norm")
    y, rstd = module.rms_norm(x, w, 1e-5, **form)
    expected, expected_rstd = reference(x.double(), double(w), 1e-5, **form)
    assert_near(y, expected)
    assert_near(rstd, expected_rstd)
    dx, dw = module.rms_norm_backward(g, x, w, rstd, **form)
    expected_dx, expected_dw = reference_backward(g.double(), x.double(), double(w), expected_rstd, **form)
    assert_near(dx, expected_dx)
    assert dw.shape == expected_dw.shape
    assert_near(dw, expected_dw)


def double(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.double()


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("has_weight", [True, False])
def test_reference_gradients(offset: float, has_weight: bool) -> None:
    """Breaks if `rms_norm_backward` is not the gradient of `rms_norm`."""
    x, g = torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True), torch.randn(2, 3, 5, 8).double()
    w = torch.randn(8, dtype=torch.float64, requires_grad=True) if has_weight else None
    normal = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    expected = torch.autograd.grad(normal if w is None else normal * (w + offset), (x, w) if has_weight else x, g)
    with torch.no_grad():
        _, rstd = reference(x, w, 1e-5, offset=offset)
        actual = reference_backward(g, x, w, rstd, offset=offset)
    for one, other in zip(actual, expected):
        torch.testing.assert_close(one, other)


def test_every_kernel_has_an_operator() -> None:
    """Breaks if a kernel is registered under a name that is none of autopar's operators, or takes other arguments."""
    import inspect

    from autopar import operators  # noqa: F401 (defines torch.ops.autopar)

    for name, kernel in kernels("registration_elementwise")._KERNELS.items():
        schema = getattr(torch.ops.autopar, name).default._schema
        assert [argument.name for argument in schema.arguments] == list(inspect.signature(kernel).parameters)
