"""What a rank holds of a model and its optimizers, by name: what it has to write, and what it is to read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import Run, is_split, local_boxes, local_tensor
from autopar.ir.told import Held as Number
from autopar.runtime.checkpoint.boxes import Box
from autopar.runtime.checkpoint.manifest import StoredGroup, StoredOptimizer
from autopar.runtime.checkpoint.tree import encode
from autopar.runtime.engine import Engine
from autopar.runtime.expert_layers import ExpertLayer, is_by_slots, layer_of
from autopar.runtime.holders import holders

EXTRA_STATE = "_extra_state"
"""How torch calls what a module's `get_extra_state()` gives, behind the module's name."""
NUMBERS = "python numbers"
"""Beside them: numbers of Python's that steps leave on modules, each with its module's path, its name and keys."""
_PLAIN = (bool, int, float)


Boxes = tuple[tuple[Box, tuple[slice, ...]], ...]
"""Of a whole tensor, each with its slices of the local one."""


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A rank's part of a tensor. boxes: those of the whole that it has. writes: whether this
    rank, of those that hold the same, is to write it.
    """

    name: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    local: Tensor
    boxes: Boxes
    writes: bool


def boxes_of(tensor: Tensor) -> Boxes:
    """Those that a rank has."""
    if isinstance(tensor, DTensor):
        runs = local_boxes(tensor)
    else:
        runs = [tuple(Run(0, 0, size) for size in tensor.shape)] if tensor.numel() else []
    return tuple(
        (
            Box(tuple(run.start for run in box), tuple(run.length for run in box)),
            tuple(slice(run.place, run.place + run.length) for run in box),
        )
        for box in runs
    )


def _in_order(boxes: Boxes, order: Sequence[int]) -> Boxes:
    """Boxes of which each row along dim 0 is that of another expert. order: slot -> expert."""
    return tuple(
        (
            Box((order[box.offsets[0] + row], *box.offsets[1:]), (1, *box.sizes[1:])),
            (slice(place[0].start + row, place[0].start + row + 1), *place[1:]),
        )
        for box, place in boxes
        for row in range(box.sizes[0])
    )


class Turns:
    """Which of the ranks that hold the same writes it: the one that has least to write yet. All ranks of a mesh count
    alike, without asking.
    """

    def __init__(self) -> None:
        self._loads: dict[tuple[Any, ...], np.ndarray[Any, Any]] = {}

    def mine(self, tensor: Tensor, mesh: DeviceMesh) -> bool:
        """Whether it is this rank's turn. mesh: all of whose ranks hold a plain tensor."""
        split = [is_split(p) for p in tensor.placements] if isinstance(tensor, DTensor) else [False] * mesh.ndim
        if all(split):  # each rank has a piece of its own, of one size but for the last ones
            return True
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else mesh
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        key = (mesh.mesh_dim_names, tuple(mesh.shape))
        loads = self._loads.setdefault(key, np.zeros(tuple(mesh.shape)))
        totals = loads.sum(axis=tuple(axis for axis, is_cut in enumerate(split) if is_cut), keepdims=True)
        turn = np.unravel_index(int(totals.argmin()), totals.shape)
        pieces = int(np.prod([mesh.size(axis) for axis, is_cut in enumerate(split) if is_cut] or [1]))
        at = tuple(slice(None) if is_cut else turn[axis] for axis, is_cut in enumerate(split))
        loads[at] += tensor.numel() * tensor.element_size() / pieces
        return all(is_cut or turn[axis] == coordinate[axis] for axis, is_cut in enumerate(split))


class Contents:
    """Of a compiled model, as this rank holds it."""

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        self.model, self.engine = model, engine
        self.mesh: DeviceMesh = engine.inner.device_mesh
        interface = engine.interface
        self.place = 0 if interface is None else engine.place_along(interface)
        self.turns = Turns()
        self._boxes: dict[Any, Boxes] = {}  # of many tensors alike, worked out once
        self.names_of: dict[int, tuple[str, ...]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.names_of[id(parameter)] = (*self.names_of.get(id(parameter), ()), name)
        found = {} if interface is None or interface.pipeline is None else holders(interface)
        aliases = [] if interface is None else interface.parameters
        self.ranks_of = {name: found[e.name] for e in aliases if e.name in found for name in (e.name, *e.aliases)}

    def is_first_stage(self, name: str) -> bool:
        """Whether no stage before this rank's holds the parameter."""
        return self.ranks_of.get(name, (self.place,))[0] == self.place

    def is_first_rank(self) -> bool:
        """Whether this is the first of the ranks that hold this stage."""
        return not any(self.mesh.get_coordinate() or ())

    def of_model(self) -> list[Held]:
        """Parameters and persistent buffers.

        Raises:
            AutoparError: values that are still to be made.
        """
        return [
            self._held(names[0], names, tensor, self.is_first_stage(names[0]) if is_parameter else self.place == 0)
            for names, tensor, is_parameter in tensors_of(self.model)
        ]

    def other(self, name: str, tensor: Tensor) -> Held:
        """A tensor of nobody's: one in pieces is written by all, else rank 0's is."""
        if isinstance(tensor, DTensor):
            return self._held(name, (name,), tensor, True)
        return Held(name, (name,), tuple(tensor.shape), tensor.detach(), boxes_of(tensor), dist.get_rank() == 0)

    def of_rank(self, name: str, tensor: Tensor) -> Held:
        """A tensor that this rank alone has."""
        if isinstance(tensor, DTensor):
            raise AutoparError(f"{name} is in pieces, and is to be this rank's alone", remedy="Hand it in as extra=")
        return Held(name, (name,), tuple(tensor.shape), tensor.detach(), boxes_of(tensor), True)

    def _held(self, name: str, names: tuple[str, ...], tensor: Tensor, here: bool, like: Tensor | None = None) -> Held:
        """like: the parameter as which it lies, if it is none itself."""
        local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
        if local.is_meta:
            raise AutoparError(
                f"{name} has no values yet",
                remedy="Call init_weights, load_pretrained or load first, and give autopar.compile example_inputs",
            )
        is_turn = self.turns.mine(tensor, self.mesh)
        boxes = self._boxes_of(tensor, layer_of(tensor) if like is None else layer_of(like))
        return Held(name, names, tuple(tensor.shape), local.detach(), boxes, here and is_turn)

    def _boxes_of(self, tensor: Tensor, layer: ExpertLayer | None) -> Boxes:
        places = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        order = layer.order if layer is not None and is_by_slots(tensor, layer) else None
        key = (tuple(tensor.shape), places, order)
        found = self._boxes.get(key)
        if found is None:
            found = self._boxes[key] = boxes_of(tensor) if order is None else _in_order(boxes_of(tensor), order)
        return found

    def optimizer(self, optimizer: Optimizer, where: str, put: Callable[[Held], None]) -> StoredOptimizer:
        """An optimizer's groups and states, those of the parameters that this rank is first to hold. put: takes the
        tensors.

        Raises:
            AutoparError: parameters that are none of the model's, states that are no data.
        """
        groups = []
        for number, group in enumerate(optimizer.param_groups):
            options = {name: value for name, value in group.items() if name != "params"}
            names = [name for name, _ in self.trained(group["params"], optimizer)]
            at = f"{where}.param_groups[{number}]"
            groups.append(StoredGroup(encode(options, at, lambda at, x: self._put(at, x, None, put)), names))
        states: dict[str, Any] = {}
        for group in optimizer.param_groups:
            for name, parameter in self.trained(group["params"], optimizer):
                held = optimizer.state.get(parameter)
                if held is None:
                    continue

                def keep(at: str, x: Tensor, parameter: Tensor = parameter) -> dict[str, Any]:
                    return self._put(at, x, parameter, put)

                states[name] = {key: encode(value, f"{where}.{name}.{key}", keep) for key, value in held.items()}
        is_first = self.is_first_rank()
        mine = {name: state for name, state in states.items() if is_first and self.is_first_stage(name)}
        return StoredOptimizer(type(optimizer).__name__, groups, mine)

    def _put(self, at: str, x: Tensor, parameter: Tensor | None, put: Callable[[Held], None]) -> dict[str, Any]:
        if parameter is None:
            put(self.other(at, x))
        else:
            here = self.is_first_stage(self.names_of[id(parameter)][0])
            put(self._held(at, (at,), x, here, parameter))
        is_like = parameter is not None and x.shape == parameter.shape and (isinstance(x, DTensor) or x.ndim > 0)
        return {"$like" if is_like else "$at": at}

    def trained(self, parameters: Sequence[Tensor], optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
        """The parameters of a group by name; without those that only other stages hold.

        Raises:
            AutoparError: one that is none of the model's.
        """
        for parameter in parameters:
            if id(parameter) in self.names_of:
                yield self.names_of[id(parameter)][0], parameter
            elif parameter.numel():  # the empty ones stand for parameters of other stages
                raise AutoparError(
                    f"this {type(optimizer).__name__} trains a parameter {tuple(parameter.shape)} that is none of the "
                    "model's",
                    remedy="Save it with the model whose parameters it was made from; one optimizer for each model",
                )


def tensors_of(model: nn.Module) -> list[tuple[tuple[str, ...], Tensor, bool]]:
    """Each parameter and persistent buffer once: all its names, itself, and whether it is a parameter."""
    persistent = set(model.state_dict(keep_vars=True))
    names_of: dict[int, tuple[str, ...]] = {}
    found: dict[int, tuple[Tensor, bool]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for entries, is_parameter in ((module._parameters, True), (module._buffers, False)):
            for name, tensor in entries.items():
                full_name = f"{prefix}.{name}" if prefix else name
                if tensor is not None and full_name in persistent:
                    names_of[id(tensor)] = (*names_of.get(id(tensor), ()), full_name)
                    found[id(tensor)] = tensor, is_parameter
    return [(names_of[key], *found[key]) for key in found]


def extra_states(model: nn.Module) -> Mapping[str, Any]:
    """What modules say of themselves beside their tensors, by name."""
    state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if name.rpartition(".")[2] == EXTRA_STATE}


def numbers_left(model: nn.Module, left: Collection[Number]) -> list[Any]:
    """The numbers of Python's that steps left on modules (`self.step += 1`), as they are now."""
    now = [(each, each.of(model)) for each in sorted(left, key=str)]
    return [[each.path, each.name, list(each.keys), value] for each, value in now if type(value) in _PLAIN]


def put_numbers(model: nn.Module, entries: Any) -> None:
    """Have them be there again: where a number is, or nothing yet.

    Raises:
        AutoparError: a module has something else there.
    """
    for entry in entries if isinstance(entries, list) else [entries]:
        try:
            path, name, keys, value = entry
            held = Number(path, name, tuple(keys))
            before = getattr(model.get_submodule(path), name, 0) if not keys else held.of(model)
            if type(value) not in _PLAIN or type(before) not in (*_PLAIN, type(None)):
                raise TypeError(f"{value!r} for {before!r}")
            held.put(model, value)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise AutoparError(
                f"{NUMBERS} cannot be loaded",
                values=f"{entry!r}: {error}"[:300],
                remedy="Load the checkpoint of this model",
            ) from error


def set_extra_states(model: nn.Module, states: Mapping[str, Any]) -> None:
    """Hand it back to them.

    Raises:
        AutoparError: a module that takes none.
    """
    for name, value in states.items():
        if name == NUMBERS:
            continue
        try:
            model.get_submodule(name.rpartition(".")[0]).set_extra_state(value)
        except (AttributeError, RuntimeError) as error:
            raise AutoparError(
                f"{name} cannot be loaded", values=str(error)[:300], remedy="Load the checkpoint of this model"
            ) from error
