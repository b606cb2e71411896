"""What ranks hold alike, sampled at every forward that records gradients: numbers that go with what ranks compare
anyway (`agreement.py`).

A parameter that lies whole on an axis over which its gradient is summed last has the same bits on all ranks of that
axis, by construction: each gets the same sum, and does the same step. Some elements of some such parameters are looked
at in each forward, others in the next. A rank that edits its weights or gradients, or leaves a step out, changes most
of them, and is named at the next forward; every element of everything is compared by `autopar.watch`.

A frozen parameter that lies whole on an axis never changes there: some elements of some of these are looked at, too.

What differs by rounding alone (a norm of gradients that was summed over several axes in another order) is told once,
and looked at no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.base.torch_compat.distributed import local_tensor
from autopar.ir.interface import ProgramInterface, TensorInterface
from autopar.ir.sharding import Replicate
from autopar.runtime.pieces import coordinates

PARAMETERS, ELEMENTS = 4, 8
"""In each forward, of each axis: how many parameters, and how many elements of each."""
ULPS = 4
"""Of the largest element of a sample: what rounding makes of it between two forwards."""
Values = Mapping[str, Sequence[float]]


class _Held(NamedTuple):
    name: str
    module: nn.Module
    key: str


class Alike:
    """The parameters of one model that ranks of an axis hold alike. axes: of the program that have such parameters."""

    def __init__(self, model: nn.Module, interface: ProgramInterface, here: Sequence[TensorInterface]) -> None:
        """here: the parameters that this rank holds; axes are those of all ranks' parameters."""
        self.axes = tuple(dict.fromkeys(filter(None, (axis_of(entry, interface) for entry in interface.parameters))))
        self._held: dict[str, list[_Held]] = {axis: [] for axis in self.axes}
        self._frozen: dict[str, list[_Held]] = {axis: [] for axis in self.axes}
        for entry in here:
            if axis := axis_of(entry, interface):
                path, _, key = entry.name.rpartition(".")
                into = self._held if entry.summed_over else self._frozen
                into[axis].append(_Held(entry.name, model.get_submodule(path), key))

    def keep(self, interface: ProgramInterface) -> None:
        """Look no longer at what another program of the model does not sum over the same axis, if it trains."""
        if not any(output.differentiable for output in interface.outputs):
            return
        same = {entry.name: entry.summed_over for entry in interface.parameters}
        for axis, held in self._held.items():
            self._held[axis] = [each for each in held if same.get(each.name) == axis]
        frozen = {entry.name: axis_of(entry, interface) for entry in interface.parameters if not entry.differentiable}
        for axis, held in self._frozen.items():
            self._frozen[axis] = [each for each in held if frozen.get(each.name) == axis]

    def leave_out(self, module: nn.Module) -> None:
        """Look no longer at the parameters of a module that is called by itself: each rank computes a part of their
        gradients.
        """
        inside = set(map(id, module.modules()))
        for axis, held in self._held.items():
            self._held[axis] = [each for each in held if id(each.module) not in inside]

    def forget(self, axis: str) -> None:
        """Look no longer at what ranks of an axis hold."""
        self._held[axis], self._frozen[axis] = [], []

    def numbers(self, number: int) -> list[Tensor | int]:
        """For each axis what tells the elements of a forward apart, by its number: int64 scalars, not waited for."""
        return [self._number((self._held[axis], self._frozen[axis]), number) for axis in self.axes]

    def _number(self, kinds: Iterable[Sequence[_Held]], number: int) -> Tensor | int:
        samples = []
        for held in kinds:
            for place in range(min(PARAMETERS, len(held))):
                turn, which = divmod(number * PARAMETERS + place, len(held))
                taken = _sample(held[which], turn)
                if taken is not None:
                    samples.append(taken)
        return digest(torch.cat(samples)) if samples else 0

    def values(self, axis: str, number: int) -> Values:
        """The elements of a forward, of all parameters of an axis."""
        samples = {
            each.name: _sample(each, number * PARAMETERS // len(held))
            for held in (self._held[axis], self._frozen[axis])
            for each in held
        }
        return {name: taken.tolist() for name, taken in samples.items() if taken is not None}

    def eps(self, name: str) -> float:
        """Of the dtype of a parameter."""
        known = (*self._held.values(), *self._frozen.values())
        held = next(each for some in known for each in some if each.name == name)
        parameter = held.module._parameters[held.key]
        return torch.finfo(parameter.dtype).eps if parameter is not None and parameter.is_floating_point() else 0.0


def axis_of(entry: TensorInterface, interface: ProgramInterface) -> str:
    """The axis on which ranks hold the same bits of a parameter; "" where there is none."""
    if entry.summed_over or entry.differentiable:
        return entry.summed_over
    whole = zip(interface.axes, interface.sizes, entry.sharding, strict=True)
    return next((axis for axis, size, placement in whole if size > 1 and isinstance(placement, Replicate)), "")


def _sample(held: _Held, turn: int) -> Tensor | None:
    """Some elements, others in another turn; float64."""
    parameter = held.module._parameters.get(held.key)
    if parameter is None or parameter.is_meta or parameter.is_complex():
        return None
    local = (local_tensor(parameter) if isinstance(parameter, DTensor) else parameter).detach()
    row = local.view(-1) if local.is_contiguous() else local[(0,) * (local.dim() - 1)]
    step = max(1, row.numel() // ELEMENTS)
    return row[turn % step :: step][:ELEMENTS].double()


def digest(values: Tensor) -> Tensor:
    """A hash of float64 numbers, an int64 scalar on their device; nothing waits for it. What is no number is one."""
    bits = values.nan_to_num(nan=0.5, posinf=1.5, neginf=2.5).view(torch.int64)
    odd = torch.arange(1, 2 * len(bits), 2, device=bits.device) * 0x9E3779B97F4A7
    return (bits * odd).sum()


def first_of(rank: int, axis: str, axes: Sequence[str], sizes: Sequence[int]) -> int:
    """The rank that one of an axis is compared with: the first of those that differ from it by their place there."""
    stride = 1
    for name, size in zip(reversed(axes), reversed(sizes), strict=True):
        if name == axis:
            return rank - coordinates(rank, sizes)[list(axes).index(axis)] * stride
        stride *= size
    return rank


def differing(here: Values, there: Values, eps: Mapping[str, float]) -> tuple[list[str], bool]:
    """The parameters whose samples differ, and whether by rounding alone. eps: of a parameter's dtype."""
    names = [name for name in here if here[name] != there.get(name)]
    count = total = 0
    is_rounding = True
    for name in here:
        pairs = list(zip(here[name], there.get(name, ()), strict=False))
        total += len(pairs)
        count += sum(one != other for one, other in pairs)
        largest = max((abs(value) for pair in pairs for value in pair), default=0.0)
        # No number is never near another.
        is_rounding &= all(
            one == other or abs(one - other) <= ULPS * eps.get(name, 0.0) * largest for one, other in pairs
        )
    return names, is_rounding and 2 * count <= total
