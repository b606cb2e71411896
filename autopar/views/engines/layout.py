"""What the axes of a plan's mesh are for, in the words that engines use: sizes of tensor, data, pipeline, experts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.base.errors import AutoparError
from autopar.ir.sharding import Shard

if TYPE_CHECKING:
    from autopar.ir.placement import ParameterLayout
    from autopar.planner.plan.record import PlanRecord

HEADS = 1
"""The dim of a cache with its heads, or channels."""
EXPERT_DIMS = 3
"""Of a parameter of all experts together: experts, and a matrix each."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes. tensor: of the axes that split matrices; data: of those that split requests and nothing of what computes;
    experts: of those that split experts, 1 where there are none; folded: whether these split requests, too.

    tensor_axes: their places in the mesh of a stage. gathered: names of axes over which parameters are stored in pieces
    and gathered for use.
    """

    tensor: int
    data: int
    pipeline: int
    experts: int
    folded: bool
    tensor_axes: tuple[int, ...]
    gathered: tuple[str, ...]

    @staticmethod
    def of(plan: PlanRecord) -> Layout:
        """Raises AutoparError for axes that split sequences."""
        layouts = plan.decisions.placement.parameters
        axes, sizes = plan.interface.axes, plan.interface.sizes
        tensor, data, experts, gathered = [], [], [], []
        folded = False
        for place, (axis, size) in enumerate(zip(axes, sizes, strict=True)):
            if size == 1:
                continue
            rows, others = _inputs(plan, place)
            if others or any(axis == each for each, *_ in plan.context):
                raise AutoparError(
                    f"the axis {axis} splits sequences, which no engine here is told",
                    remedy="plan that axis as `tensor`, or without it",
                )
            kinds = {_kind(plan, name, layout, place) for name, layout in layouts.items()} - {None}
            if "expert" in kinds:
                experts.append(place)
                folded = folded or rows
            if "matrix" in kinds and not rows:
                tensor.append(place)
            elif rows or not kinds:
                data.append(place)
            if any(each.stored[place] != each.compute[place] for each in layouts.values()):
                gathered.append(axis)
        stages = 1 if plan.asked is None else math.prod(plan.mesh.sizes) // math.prod(sizes)

        def product(places: list[int]) -> int:
            return math.prod(sizes[place] for place in places)

        found = tuple(tensor)
        return Layout(product(tensor), product(data), stages, product(experts), folded, found, tuple(gathered))

    @property
    def devices(self) -> int:
        """Of all replicas."""
        return self.tensor * self.data * self.pipeline


def _inputs(plan: PlanRecord, place: int) -> tuple[bool, bool]:
    """Whether an axis splits the rows of inputs, and whether another dim of them: of a cache one behind its heads or
    channels, which lie as the weights of its layer.
    """
    rows = others = False
    for each in plan.interface.inputs:
        placement = each.sharding[place]
        if isinstance(placement, Shard):
            rows = rows or placement.dim == 0
            others = others or placement.dim > (HEADS if each.name in plan.interface.states else 0)
    return rows, others


def _kind(plan: PlanRecord, name: str, layout: ParameterLayout, place: int) -> str | None:
    """What an axis splits of a parameter in use: experts, a matrix (or what goes with one), nothing."""
    placement = layout.compute[place]
    if not isinstance(placement, Shard):
        return None
    shape = plan.interface.parameter(name).shape
    return "expert" if len(shape) >= EXPERT_DIMS and placement.dim == 0 else "matrix"
