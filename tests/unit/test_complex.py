"""Complex parameters and values: gradients are torch's, with conjugates, and the proof sees both parts of a number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.api.comparing import comparison
from autopar.api.small_model import small_model
from autopar.ir.forms import form_of
from autopar.ir.op_call import op_call


class Complex(nn.Module):
    """What a function makes of complex x[B, 3, 6] and a parameter of complex numbers."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(*shape, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(torch.view_as_complex(x), self.weight).abs().square().mean()


def _modes(x: Tensor, w: Tensor) -> Tensor:
    """As a Fourier neural operator keeps the lowest frequencies: a block of each corner."""
    out = torch.zeros(x.shape[0], 4, 6, dtype=x.dtype)
    out[:, :3, :2] = torch.einsum("btf,ft->btf", x[:, :, :2], w[:2])
    out[:, 3] = w[:, 0]
    return out


def _plan(function: Callable[[Tensor, Tensor], Tensor], *shape: int) -> autopar.Plan:
    given = {"x": torch.randn(4, 3, 6, 2)}
    return autopar.plan(Complex(function, *shape), autopar.Mesh({"dp": 2}), strategy="zero3", example_inputs=given)


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("function", "shape"),
    [(lambda x, w: F.linear(x * w[1], w) @ (x * w[0]).mT, (6, 6)), (_modes, (6, 3))],
    ids=["products", "writes"],
)
def test_gradients_of_complex_numbers(function: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...]) -> None:
    """Breaks if the gradient of a product is of its operands, not of their conjugates (models trained, otherwise than
    eager), if the proof draws, casts or compares real parts alone, or what is written into a slice has no gradient.
    """
    plan = _plan(function, *shape)
    assert plan.verify().ok
    assert plan.model is not None and plan.inputs is not None
    model, batch = small_model(plan.model, plan.inputs, torch.float64, 0)
    assert batch["x"].dtype == torch.float64
    assert all(weight.dtype == torch.complex128 and bool(weight.imag.abs().min() > 0) for weight in model.parameters())


def test_the_proof_compares_both_parts_of_a_number() -> None:
    """Breaks if imaginary parts are dropped before they are compared."""
    one, other = torch.tensor([1 + 1j]), torch.tensor([1 + 2j])
    assert (
        not comparison("x", one, other, 1e-9, 0.0, 0.0).ok and comparison("x", other, other.clone(), 0.0, 0.0, 0.0).ok
    )


def test_zeros_of_both_signs_are_one_number_in_a_text() -> None:
    """Breaks if `x * -1j`, which Python reads as (-0-1j), is another value than what was planned: convolutions of
    complex numbers were refused as wrong programs.
    """
    x = torch.empty(2, dtype=torch.cfloat, device="meta")
    numbers = (complex(0.0, -1.0), complex(-0.0, -1.0), complex(0.0, 1.0))
    one, same, other = (form_of(op_call(torch.ops.aten.mul.Scalar, (x, number), {}, x), 0) for number in numbers)
    assert one == same != other
