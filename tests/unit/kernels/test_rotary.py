"""The rotary kernel, interpreted, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.operators.rotary import rotary as reference
from autopar.operators.rotary import rotary_backward as reference_backward
from tests.unit.kernels.interpreted import assert_near
from tests.unit.kernels.interpreted import load as kernels

SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 40), st.integers(1, 20).map(lambda n: 2 * n))


@pytest.mark.moderate
@settings(max_examples=30, deadline=None)
@given(SHAPES, st.sampled_from([torch.float32, torch.float16]), st.booleans(), st.booleans())
def test_equal_to_float64(shape: tuple[int, ...], dtype: torch.dtype, shared: bool, heads_inside: bool) -> None:
    """Breaks if a table meets another row, position or head than its own, or the halves are turned the wrong way."""
    batch, _, positions, size = shape
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator).to(dtype)
    if heads_inside:
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    # Not the cosines of one angle for both halves: the gradient must use the right ones.
    cos, sin = torch.randn(2, 1 if shared else batch, positions, size, generator=generator).to(dtype)
    module = kernels("rotary")
    y = module.rotary(x, cos, sin)
    assert_near(y, reference(x.double(), cos.double(), sin.double()))
    assert y.stride() == x.stride() or x.numel() < 2 or 1 in shape
    dx = module.rotary_backward(x, cos, sin)
    assert_near(dx, reference_backward(x.double(), cos.double(), sin.double()))


def test_rounds_as_pytorch() -> None:
    """Breaks if products are kept in float32 before they are added: half precision would differ from eager."""
    x, cos, sin = torch.randn(2, 3, 5, 8).half(), torch.randn(1, 5, 8).half(), torch.randn(1, 5, 8).half()
    assert torch.equal(kernels("rotary").rotary(x, cos, sin), reference(x, cos, sin))
    assert torch.equal(kernels("rotary").rotary_backward(x, cos, sin), reference_backward(x, cos, sin))


def test_slices() -> None:
    """Breaks if a rotated part of the heads (partial rotary) is read or written with the strides of the whole."""
    x, cos, sin = torch.randn(2, 3, 5, 12)[..., :8], torch.randn(1, 5, 8), torch.randn(1, 5, 8)
    assert_near(kernels("rotary").rotary(x, cos, sin), reference(x.double(), cos.double(), sin.double()))


@pytest.mark.parametrize("shared", [True, False])
def test_reference_gradient(shared: bool) -> None:
    """Breaks if `rotary_backward` is not the gradient of `rotary`."""
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True)
    cos, sin = torch.randn(2, 1 if shared else 2, 5, 8, dtype=torch.float64)
    g = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    (expected,) = torch.autograd.grad(reference(x, cos, sin), x, g)
    torch.testing.assert_close(reference_backward(g, cos, sin), expected)
