"""Work for test_script_arrays: what scripts do with arrays, and addresses, of what a model holds."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.base.errors import AutoparError


class Layers(nn.Module):
    """Two layers of one size, whose copies may lie at one address, and one weight with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(64, 64) for _ in range(3))
        self.third.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x)).tanh()).square().mean()


def _layers(strategy: str) -> tuple[Any, Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(4, 64)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    return autopar.compile(model, mesh, strategy=strategy, example_inputs=x), x, state


def saved(folder: str, strategy: str) -> dict[str, bool]:
    """Whether a file has a model's numbers: all of them, after a step, by both of the functions of safetensors."""
    model, x, _ = _layers(strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = {}
    for step in range(2):
        whole = {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}
        for how in ("model", "state"):
            path = Path(folder, f"{how}-{strategy}-{dist.get_rank()}.safetensors")
            if how == "model":
                safetensors.torch.save_model(model, str(path))
            else:
                state = {name: value for name, value in model.state_dict().items() if name in whole}
                safetensors.torch.save_file(state, path)
            read = safetensors.torch.load_file(path)
            found[f"{how} {step}"] = read.keys() == whole.keys() and all(read[n].equal(whole[n]) for n in whole)
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict()
    before = state["second.weight"].untyped_storage()
    held = torch.empty(0).set_(before, 0, (64, 64), (64, 1))
    with torch.no_grad():
        model.second.weight.mul_(2)
    state["second.weight"].data_ptr()
    found["an address of what is now"] = held.equal(model.second.weight.full_tensor())
    return found


def _by_array(model: Any) -> None:
    model.state_dict()["first.weight"].numpy()[:] = 0.5


def _by_asarray(model: Any) -> None:
    np.asarray(model.first.weight.detach())[0] = 0.5


def _by_data(model: Any) -> None:
    array = model.first.weight.data.cpu().numpy()
    array *= 0.5


def _by_row(model: Any) -> None:
    model.first.weight.data[0].numpy()[:] = 0.5


def _by_tensor(model: Any) -> None:
    torch.from_numpy(model.state_dict()["first.weight"].numpy()).mul_(0.5)


def _by_kept_tensor(model: Any) -> None:
    held = torch.from_numpy(model.first.weight.data.numpy())
    model(torch.ones(4, 64))
    held.copy_(held.flip(0))
    del held


def _by_view(model: Any) -> None:
    model.state_dict()["first.weight"].view(-1).numpy()[:] = 0.5


def _by_address(model: Any) -> None:
    held = model.state_dict()["first.weight"]
    torch.empty(0).set_(held.untyped_storage(), 0, (64, 64), (64, 1)).mul_(0.5)


def _by_refilled_address(model: Any) -> None:
    held = model.state_dict()["first.weight"]
    torch.empty(0).set_(held.untyped_storage(), 0, (64, 64), (64, 1)).mul_(0.5)
    held.data_ptr()


def _by_dlpack(model: Any) -> None:
    torch.from_dlpack(model.first.weight.data).mul_(0.5)


def _by_dlpack_of_state(model: Any) -> None:
    torch.from_dlpack(model.state_dict()["first.weight"]).mul_(0.5)


WAYS: tuple[Callable[[Any], None], ...] = (
    _by_array, _by_asarray, _by_data, _by_row, _by_tensor, _by_kept_tensor, _by_view, _by_address, _by_refilled_address,
    _by_dlpack, _by_dlpack_of_state,
)  # fmt: skip


def written(strategy: str) -> dict[str, tuple[bool, str]]:
    """By way: whether the weight is another one after a script wrote so, and what was said by the next forward."""
    warnings.simplefilter("ignore")  # torch's, of arrays that are read-only
    model, x, state = _layers(strategy)
    found = {}
    for way in WAYS:
        said = ""
        try:
            way(model)
            model(x)
        except (AutoparError, ValueError) as error:
            said = str(error)
        now = model.first.weight.full_tensor().detach()
        found[way.__name__.removeprefix("_by_")] = not now.equal(state["first.weight"]), said
        with torch.no_grad():
            model.first.weight.copy_(state["first.weight"])
    return found


def read(strategy: str) -> list[bool]:
    """Whether arrays of what lies in pieces have the numbers, may be copied and written, and nothing is told then."""
    model, x, state = _layers(strategy)
    held = model.state_dict()
    array = held["second.weight"].numpy().copy()
    found = [bool((array == state["second.weight"].numpy()).all())]
    array[:] = 0
    halves = np.asarray(held["second.weight"], dtype=np.float16)
    halves[0] = 1
    loss = model(x)
    loss.backward()
    gradient = model.second.weight.grad
    found.append(np.array_equal(gradient.numpy(), gradient.full_tensor().numpy()))
    found.append(np.array_equal(model.second.weight.numpy(force=True), state["second.weight"].numpy()))
    try:
        model.second.weight.numpy()
    except RuntimeError as error:
        found.append("requires grad" in str(error))
    model(x)
    return found
