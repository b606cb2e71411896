"""What a script reads and clips of a compiled model, on a mesh of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autopar

pytestmark = [pytest.mark.unit, pytest.mark.moderate]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


def test_the_number_in_an_output_that_has_a_gradient(mesh: DeviceMesh) -> None:
    """Breaks if `value.item()` of a critic's one number, on whose gradient the loss behind is, finds no DTensor."""
    model: Any = autopar.compile(nn.Linear(4, 1), mesh)
    value = model(torch.ones(4))
    wanted = model.weight.full_tensor().sum() + model.bias.full_tensor()[0]
    assert value.requires_grad and value.item() == float(value) == pytest.approx(wanted.item())
    assert f"{value.squeeze():.3f}" == f"{wanted.item():.3f}" and value.tolist() == [value.item()]


class Turned(nn.Module):
    """Complex weights, and none but these."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).abs().square().sum()


@pytest.mark.parametrize("dtype", [torch.cfloat, torch.cdouble])
def test_gradients_of_complex_numbers_are_clipped(mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Breaks if the norm is of real parts, or none at all, which torch refuses."""
    model: Any = autopar.compile(Turned(dtype), mesh)
    model(torch.ones(4, dtype=dtype)).backward()
    wanted = torch.linalg.vector_norm(2 * model.weight.full_tensor()).item()
    assert model.clip_grad_norm_(1e9).item() == pytest.approx(wanted)
