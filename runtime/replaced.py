"""A model's own parameters, and the DTensors that take their places."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.runtime.hooks import for_pieces, keep_hooks
from autopar.runtime.placements import as_parameter


def replace_parameters(model: nn.Module, device_mesh: DeviceMesh) -> None:
    """Parameter(DTensor), replicated, for every parameter; one object for all places of a tied one."""
    new: dict[int, nn.Parameter] = {}
    old: list[nn.Parameter] = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or isinstance(parameter, DTensor):
                continue
            if id(parameter) not in new:
                old.append(parameter)
                new[id(parameter)] = as_parameter(parameter.data, device_mesh, None, parameter)
                for_pieces(parameter)
                keep_hooks(parameter, new[id(parameter)])
            module._parameters[name] = new[id(parameter)]
    for parameter in old:
        # Whoever still holds the old parameter (an optimizer) is told, and does not keep its memory alive.
        parameter._autopar_replaced = True  # type: ignore[attr-defined]
        parameter.data = parameter.data.new_empty(0)
