"""What a script reads and clips of a compiled model, on a mesh of one rank."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.flop_counter import FlopCounterMode

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


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping_beside_a_loss_with_parameters_of_its_own(mesh: DeviceMesh, norm_type: float) -> None:
    """Breaks if torch's clipping and GradScaler take no compiled model's gradients beside plain ones (centers, a
    temperature), or count some of them twice, or leave some out.
    """
    plain, own = nn.Linear(4, 3), nn.Parameter(torch.ones(3))
    model: Any = autopar.compile(copy.deepcopy(plain), mesh)
    found: list[list[Tensor]] = []
    for each, weight in ((plain, own), (model, copy.deepcopy(own))):
        both = [*each.parameters(), weight]
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = torch.optim.SGD(both, lr=0.1)
        scaler.scale((each(torch.ones(2, 4)) * weight).pow(2).sum()).backward()
        scaler.unscale_(optimizer)
        norms = [torch.nn.utils.clip_grad_norm_(both, 0.5, norm_type=norm_type)]
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in both]))
        torch.nn.utils.clip_grad_value_(both, 0.1)
        scaler.step(optimizer)
        found.append([getattr(x, "full_tensor", lambda x=x: x)().detach() for x in (*norms, *both)])
    torch.testing.assert_close(found[1], found[0])


def test_initialisations_draw_what_one_process_draws(mesh: DeviceMesh) -> None:
    """Breaks if orthogonal_ ends in an operator that DTensor lacks."""
    plain = nn.Linear(6, 4)
    model: Any = autopar.compile(copy.deepcopy(plain), mesh)
    for each in (plain, model):
        torch.manual_seed(1)
        nn.init.orthogonal_(each.weight, 1.5)
    torch.testing.assert_close(model.weight.full_tensor(), plain.weight)


def test_a_saved_model_is_the_plain_one(mesh: DeviceMesh) -> None:
    """Breaks if torch.save(model) asks pickle for a class that no module has, or a shallow copy is another model."""
    model: Any = autopar.compile(nn.Linear(4, 3), mesh)
    wanted = model(torch.ones(2, 4)).full_tensor()
    file = io.BytesIO()
    torch.save({"model": model}, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)["model"]
    assert type(read) is nn.Linear
    torch.testing.assert_close(read(torch.ones(2, 4)), wanted)
    assert copy.copy(model).weight is model.weight


@pytest.mark.parametrize("of", ["inputs", "parameters", "gradients"])
def test_second_derivatives_by_name_are_refused(mesh: DeviceMesh, of: str) -> None:
    """Breaks if a gradient that came of x is said not to: torch would then give None, and a penalty be left out."""
    model: Any = autopar.compile(nn.Linear(4, 3), mesh)
    x = torch.ones(2, 4, requires_grad=True)
    output = model(x)
    came = torch.ones(2, 3, requires_grad=True)
    (first,) = torch.autograd.grad(output, x, came, create_graph=True)
    asked = {"inputs": x, "parameters": model.weight, "gradients": came}[of]
    with pytest.raises(autopar.AutoparError, match="differentiated again"):
        torch.autograd.grad(first.sum(), asked, allow_unused=True)


def test_anomalies_are_looked_for(mesh: DeviceMesh) -> None:
    """Breaks if a trace looks for NaNs among tensors without values, or a gradient in pieces cannot be asked."""
    model: Any = autopar.compile(nn.Linear(4, 3), mesh)
    with torch.autograd.set_detect_anomaly(True):
        model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(RuntimeError, match="returned nan values"):
            model(torch.full((2, 4), float("nan"))).sum().backward()
    assert model.weight.grad.full_tensor().isfinite().all()


def test_torch_compile_around_a_backward(mesh: DeviceMesh) -> None:
    """Breaks if torch's compiler looks into a program's backward."""
    model: Any = autopar.compile(nn.Linear(4, 3), mesh)

    def gradients() -> None:
        model(torch.ones(2, 4)).sum().backward()

    torch.compile(gradients, backend="eager")()
    torch.testing.assert_close(model.weight.grad.full_tensor(), torch.full((3, 4), 2.0))


def test_operations_are_counted_around_the_first_call(mesh: DeviceMesh) -> None:
    """Breaks if a trace runs what torch hooks on all modules, which asks gradients of each, or drops it for good."""
    model = autopar.compile(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), mesh, strategy="ddp")
    counts = []
    for _ in range(2):
        with FlopCounterMode(display=False) as counter:
            before = len(torch.nn.modules.module._global_forward_pre_hooks)
            model(torch.ones(3, 4)).sum().backward()
            assert len(torch.nn.modules.module._global_forward_pre_hooks) == before > 0
        counts.append(counter.get_total_flops())
    assert counts[1] > 0
