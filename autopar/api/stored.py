"""What later plans of one compiled model keep of earlier ones: where parameters and states (caches) lie, as pins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from autopar.base.torch_compat import tracing
from autopar.ir.interface import ProgramInterface, TensorInterface
from autopar.strategies.names import Pin


def pins_of(interface: ProgramInterface) -> list[Pin]:
    """The stored shardings of a first plan, as pins for the next."""
    return [_pin(parameter, interface.axes) for parameter in interface.parameters]


def states_of(interface: ProgramInterface) -> dict[tuple[str, tuple[int, ...]], Pin]:
    """The shardings of its states, by name and shape."""
    return {(each.name, each.shape): _pin(each, interface.axes) for each in states_among(interface)}


def states_among(interface: ProgramInterface) -> list[TensorInterface]:
    """Inputs that are returned under the same name: caches, in order."""
    returned = {(each.name, each.shape, each.dtype) for each in interface.outputs}
    return [each for each in interface.inputs if (each.name, each.shape, each.dtype) in returned]


def pins_for(states: Mapping[tuple[str, tuple[int, ...]], Pin], inputs: Mapping[str, Any]) -> list[Pin]:
    """Of known states those that a batch brings, so that no phase has to move what another left."""
    leaves = tracing.tree_leaves_with_path(dict(inputs))
    keys = [(path, tuple(leaf.shape)) for path, leaf in leaves if isinstance(leaf, Tensor)]
    return [states[key] for key in keys if key in states]


def _pin(entry: TensorInterface, axes: tuple[str, ...]) -> Pin:
    return Pin(entry.name, tuple(zip(axes, entry.sharding, strict=True)), taken=True)
