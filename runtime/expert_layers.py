"""Where the experts of a layer lie, which tokens chose them, and how rows of tensors move with them.

An expert has a number, the model's, and a slot: its place among those of all ranks of the axis over which tokens go.
At home they are the same. Pieces of the experts' parameters, of their gradients and of what optimizers keep of them
have their rows (dim 0) by slots; whole tensors have the model's order, wherever they are seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import dtensor_like, local_tensor
from autopar.base.torch_compat.mixed import take_plain
from autopar.ir.interface import ExpertsInterface, ProgramInterface
from autopar.runtime.communicator import Communicator

LAYER = "_autopar_experts"
"""What a parameter that has experts' rows has its layer under."""
_away: set[int] = set()
"""Layers that are not at home: beside their parameters a plain tensor's rows would be taken for those of others."""


class ExpertLayer:
    """One layer of experts, of all copies of a model. name: its module. num: of its experts. comm: of the ranks that
    have them, ranks of its axis. slots: expert -> slot. guests: rank -> the experts that visit it (`visitors.py`).
    loads[num]: the tokens of this rank that chose each expert, where that is counted.
    """

    def __init__(self, planned: ExpertsInterface, num: int, comm: Communicator) -> None:
        self.planned, self.num, self.comm, self.ranks = planned, num, comm, comm.size(planned.axis)
        self.slots: tuple[int, ...] = tuple(range(num))
        self.guests: tuple[tuple[int, ...], ...] = ((),) * self.ranks
        self.loads: Tensor | None = None
        self._tensors: tuple[Tensor, Tensor] | None = None

    @property
    def name(self) -> str:
        """The module that has its parameters."""
        return self.planned.name

    @property
    def is_home(self) -> bool:
        """Whether each expert lies in the slot of its number."""
        return self.slots == tuple(range(self.num))

    @property
    def order(self) -> tuple[int, ...]:
        """slot -> expert."""
        return inverse(self.slots)

    def place(self, slots: Sequence[int], guests: Sequence[Sequence[int]] = ()) -> None:
        """Say that experts lie so from now on."""
        self.slots, self._tensors = tuple(slots), None
        self.guests = tuple(map(tuple, guests)) or ((),) * self.ranks
        if not self.is_home and id(self) not in _away:
            _away.add(id(self))
            weakref.finalize(self, _come_home, id(self)).atexit = False
        elif self.is_home:
            _away.discard(id(self))
        take_plain(not _away)

    @property
    def spare(self) -> int:
        """How many places for guests each rank has."""
        return max(map(len, self.guests))

    def numbers(self, indices: Tensor) -> Tensor:
        """The slots of experts indices[T, K], by their numbers; a number of no expert stays one. Where there are guests
        a rank has slots for them behind its own, and the tokens of an expert take turns.
        """
        if (self.is_home and not self.spare) or indices.device.type == "meta":
            return indices
        places, counts = self._places(indices.device)
        is_expert = (indices >= 0) & (indices < self.num)
        chosen = indices.long().clamp(0, self.num - 1)
        if not self.spare:
            return torch.where(is_expert, places[chosen, 0].to(indices.dtype), indices)
        turn = torch.arange(indices.shape[0], device=indices.device)[:, None] + self.comm.index(self.planned.axis)
        return torch.where(is_expert, places[chosen, turn % counts[chosen]].to(indices.dtype), -1)

    def _places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """[num, hosts] the slots of each expert, its own first; [num] how many it has."""
        if self._tensors is None or self._tensors[0].device != device:
            room, spare = self.num // self.ranks, self.spare
            found = [[slot // room * (room + spare) + slot % room] for slot in self.slots]
            for rank, own in enumerate(self.guests):
                for place, expert in enumerate(own):
                    found[expert].append(rank * (room + spare) + room + place)
            most = max(map(len, found))
            places = torch.tensor([each + each[:1] * (most - len(each)) for each in found], device=device)
            self._tensors = places, torch.tensor(list(map(len, found)), device=device)
        return self._tensors

    def count(self, indices: Tensor) -> None:
        """Add the choices of these tokens to the loads, if they are counted; nobody waits for it."""
        if self.loads is None or indices.device.type == "meta":
            return
        flat = indices.reshape(-1).long()
        is_expert = (flat >= 0) & (flat < self.num)
        self.loads.scatter_add_(0, flat.clamp(0, self.num - 1), is_expert.long())


def _come_home(layer: int) -> None:
    _away.discard(layer)
    take_plain(not _away)


def mark_layers(comm: Communicator, interface: ProgramInterface, parameters: Mapping[str, Tensor]) -> None:
    """Have a communicator know a plan's layers, and those of these parameters that have experts' rows their own."""
    known = dict(comm.experts)
    comm.experts.clear()
    for each in interface.experts:
        movable = bool(each.parameters) and each.where not in comm.experts
        num = interface.parameter(each.parameters[0]).shape[0] if movable else 0
        layer = known.get(each.where)  # of the model of which this one is a copy
        if layer is None or layer.planned != each:
            layer = ExpertLayer(each, num, comm) if movable else None
        comm.experts[each.where] = layer
    for layer in filter(None, comm.experts.values()):
        for name in layer.planned.parameters:
            if name in parameters:
                setattr(parameters[name], LAYER, layer)


def check_same_layers(comm: Communicator, interface: ProgramInterface) -> None:
    """Raises an AutoparError where experts are placed, and a program for another batch does not send tokens to them."""
    sent = {each.where: (each.axis, each.parameters) for each in interface.experts}
    for where, layer in comm.experts.items():
        if layer is None or layer.is_home or sent.get(where) == (layer.planned.axis, layer.planned.parameters):
            continue
        raise AutoparError(
            f"the experts of {layer.name} are placed by load, and this batch's program does not send tokens to them",
            values="experts were taken for those of a plan that exchanges them over " + layer.planned.axis,
            remedy="Call compiled.experts_home() before batches of this kind",
        )


def is_placed(comm: Communicator) -> bool:
    """Whether any experts, of any stage, lie otherwise than at home."""
    return any(layer is not None and not layer.is_home for layer in comm.experts.values())


def has_guests(comm: Communicator) -> bool:
    """Whether any experts visit other ranks."""
    return any(layer is not None and layer.spare for layer in comm.experts.values())


def layer_at(comm: Communicator) -> tuple[ExpertLayer | None, bool]:
    """The layer whose exchange the program is at, if its experts may lie otherwise or are counted, and whether it goes
    forward.

    Raises:
        AutoparError: experts lie otherwise, and the program does not say at which layer it is.
    """
    if not comm.experts:
        return None, False
    call, _, phase = comm.where.partition(" ")
    if call not in comm.experts and is_placed(comm):
        raise AutoparError(
            "a program exchanges experts at a place that its plan does not know, and experts are placed by load",
            where=comm.where or None,
            remedy="leave its comm.at(…) as autopar wrote it, or call compiled.experts_home() first",
        )
    return comm.experts.get(call), phase == "forward"


def layer_of(x: Any) -> ExpertLayer | None:
    """Of a parameter whose experts are not at home, its layer."""
    layer: ExpertLayer | None = getattr(x, "__dict__", {}).get(LAYER)
    return None if layer is None or layer.is_home else layer


def is_by_slots(x: Any, layer: ExpertLayer) -> bool:
    """Whether what an optimizer keeps of a layer's parameter has rows by slots: it lies in pieces of the experts."""
    if type(x) is not DTensor or not x.ndim or x.shape[0] != layer.num:
        return False
    names = x.device_mesh.mesh_dim_names or ()
    placement = x.placements[names.index(layer.planned.axis)]
    return type(placement) is Shard and placement.dim == 0


def inverse(slots: Sequence[int]) -> tuple[int, ...]:
    """slot -> expert of expert -> slot, and the other way round."""
    return tuple(sorted(range(len(slots)), key=slots.__getitem__))


def to_slots(x: Tensor, like: Any) -> Tensor:
    """A whole tensor with its rows as those of the parameter `like` lie."""
    layer = layer_of(like)
    return x if layer is None else x.index_select(0, torch.tensor(layer.order, device=x.device))


def from_slots(x: Tensor, like: Any) -> Tensor:
    """The inverse: a whole tensor of rows that lie by slots, in the model's order. Differentiable."""
    layer = layer_of(like)
    return x if layer is None else x.index_select(0, torch.tensor(layer.slots, device=x.device))


def moved(x: Tensor, comm: Communicator, axis: str, before: Sequence[int], after: Sequence[int]) -> Tensor:
    """The rows of this rank, x[num / n, …], when experts have gone from their slots `before` to those `after`.
    Collective over the axis; what stays on its rank is not sent.
    """
    here, room, experts = comm.index(axis), x.shape[0], range(len(before))
    ranks = range(comm.size(axis))
    rows = [[0] * len(ranks) for _ in ranks]
    for expert in experts:
        rows[before[expert] // room][after[expert] // room] += 1
    by_goal = sorted(experts, key=after.__getitem__)
    leave = [before[expert] % room for expert in by_goal if before[expert] // room == here]
    come = sorted((e for e in by_goal if after[e] // room == here), key=lambda expert: before[expert] // room)
    sent = x.index_select(0, torch.tensor(leave, device=x.device))
    received = comm.exchange_rows(sent, axis, rows)
    place = torch.tensor([after[expert] % room for expert in come], device=x.device)
    return torch.empty_like(x, memory_format=torch.contiguous_format).index_copy_(0, place, received)


def at_home(x: DTensor, layer: ExpertLayer) -> DTensor:
    """A copy of a tensor that lies as a layer's parameters, with its rows at home. Collective."""
    home = range(layer.num)
    return dtensor_like(x, moved(local_tensor(x).detach(), layer.comm, layer.planned.axis, layer.slots, home))
