"""Layers of experts to which tokens go over an axis, as the runtime must know them to move experts."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator

from torch import fx

from autopar.ir.interface import ExpertsInterface
from autopar.ir.program import Program
from autopar.ir.region import Call, Region
from autopar.ir.rings import EXCHANGES
from autopar.ir.sharding import Shard

_FORWARD = EXCHANGES["autopar.experts.default"]
_TOKENS, _PARAMETERS = 2, 5
"""Where in an exchange's arguments tokens stand, and where its parameters begin."""


def exchanged_experts(program: Program) -> tuple[ExpertsInterface, ...]:
    """Those of a lowered program, in the order of its calls; none of one that is not lowered."""
    uses = Counter(name for call in program.calls for name in set(call.slots))
    return tuple(layer for call in program.calls for layer in _of_call(program, call, uses))


def _of_call(program: Program, call: Call, uses: Counter[str]) -> Iterator[ExpertsInterface]:
    assert program.mesh is not None
    region, mesh = program.region(call.region), program.mesh
    lowered = region.lowered.get("forward")
    of_each = [] if lowered is None else [node for node in lowered.graph.nodes if node.target == _FORWARD]
    # Of microbatches that go together, each has an exchange with the same experts.
    exchanges = list({tuple(node.args[_PARAMETERS:]): node for node in reversed(of_each)}.values())[::-1]
    for node in exchanges:
        axis = str(node.args[1])
        if mesh.size(axis) == 1:
            continue
        found = [_slot(each, program.together) for each in node.args[_PARAMETERS:] if each is not None]
        names = tuple(_named(region, call, slot) for slot in found if slot)
        is_movable = len(exchanges) == 1 and len(names) == len(found) and not node.kwargs.get("storage")
        is_movable = is_movable and all(uses[each] == 1 and _is_split(program, each, axis) for each in names)
        sharding = node.args[_TOKENS].meta["sharding"]
        split = [each for each, how in zip(mesh.axis_names, sharding, strict=True) if isinstance(how, Shard)]
        yield ExpertsInterface(call.path or call.region, axis, names if is_movable else (), tuple(split))


def _slot(node: fx.Node, num: int) -> str:
    """The name inside its region of a parameter that `num` exchanges read, and nothing else; "" of any other value."""
    is_slot = node.target is operator.getitem and node.args[0].name == "p"  # type: ignore[union-attr]
    return str(node.args[1]) if is_slot and len(node.users) == num else ""


def _named(region: Region, call: Call, slot: str) -> str:
    return next(name for own, name in zip(region.slots, call.slots, strict=True) if own.name == slot)


def _is_split(program: Program, name: str, axis: str) -> bool:
    """Whether the axis, and no other one, splits the first dim of a stored parameter, evenly and in one stripe."""
    assert program.mesh is not None and program.placement is not None
    sharding, mesh = program.placement.parameters[name].stored, program.mesh
    first = [
        each for each, how in zip(mesh.axis_names, sharding, strict=True) if isinstance(how, Shard) and how.dim == 0
    ]
    own = sharding[mesh.axis_names.index(axis)]
    return first == [axis] and own == Shard(0) and program.variable(name).type.shape[0] % mesh.size(axis) == 0
