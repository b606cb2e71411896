"""What strategies ask of the experts of mixtures: some experts a rank, to which tokens may be sent, or a part of each
expert's width.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autopar.base.errors import AutoparError
from autopar.cost.exchanges import exchange_axis
from autopar.ir.choices import Choice
from autopar.ir.classes import Key
from autopar.ir.graphs import operands_of
from autopar.ir.program import Program
from autopar.ir.region import NodeStrategy, Region
from autopar.machine.mesh import Mesh
from autopar.passes.placement.gathers import WHOLE
from autopar.strategies.axis import AxisStrategy, ParameterMode

_FACTORS = {"whole": "e", "widths": "f"}
_SOME = ("whole", "exchange")
"""What strategies ask by which each rank has some experts."""


def is_experts(node: fx.Node) -> bool:
    """Whether a node is a layer of experts, or its gradient."""
    return str(node.target).startswith("autopar.experts")


def has_experts(program: Program) -> bool:
    """Whether the program has layers of experts."""
    return any(is_experts(node) for region in program.regions for node in region.graph.nodes)


def allowed(region: Region, node: fx.Node, strategies: Sequence[AxisStrategy], mesh: Mesh) -> list[int] | None:
    """Which of the node's options do with each axis what its strategy asks; None where all do. Widths that an axis does
    not divide are left to the solver. An exchange is asked for, or left to the solver.

    Raises:
        AutoparError: an axis does not divide the experts that it is to split.
    """
    if not is_experts(node):
        return None
    options: Sequence[NodeStrategy] = region.options[node.name].strategies
    kept = [i for i, option in enumerate(options) if not _is_unasked_exchange(option, strategies)]
    for axis, each in enumerate(strategies):
        if each.experts == "free" or mesh.sizes[axis] == 1:
            continue
        found = [i for i in kept if _does(options[i].choices[axis], each.experts)]
        if not found and each.experts in _SOME:
            raise _cannot(region, node, each, axis, mesh)
        kept = found or kept
    return kept if len(kept) < len(options) else None


def _does(choice: Choice, asked: str) -> bool:
    if asked == "exchange":
        return choice.kind == "exchange"
    return choice.kind == "factor" and choice.factor == _FACTORS[asked]


def _is_unasked_exchange(option: NodeStrategy, strategies: Sequence[AxisStrategy]) -> bool:
    axis = exchange_axis(option.choices)
    if axis is None:
        return False
    strategy = strategies[axis]
    return strategy.experts != "exchange" and not (strategy.experts == "free" and strategy.leaves_storage)


def are_exchanged(program: Program, strategy: AxisStrategy, uses: Sequence[Key]) -> bool:
    """Whether a parameter, of which these are the slots, is of experts that an axis of this strategy exchanges."""
    return strategy.experts == "exchange" and any(_is_of_experts(program.region(name), at) for _, name, at in uses)


def modes(program: Program, strategy: AxisStrategy, uses: Sequence[Key]) -> frozenset[ParameterMode]:
    """What an axis may do to a parameter, of which these are the slots."""
    return frozenset({"shard"}) if are_exchanged(program, strategy, uses) else strategy.parameters


def _is_of_experts(region: Region, slot: int) -> bool:
    """Whether a layer of experts reads it as their parameter."""
    holder = [node for node in region.graph.nodes if node.op == "placeholder"][slot]
    return any(is_experts(user) and holder in operands_of(user)[3:] for user in holder.users)


def _cannot(region: Region, node: fx.Node, strategy: AxisStrategy, axis: int, mesh: Mesh) -> AutoparError:
    _, rule = region.ops[node.name]
    name, size = mesh.axis_names[axis], mesh.sizes[axis]
    return AutoparError(
        f"{strategy.name}: {rule.sizes['e']} experts do not divide over {name}={size}",
        where=region.origins.get(node.name, "") or region.module,
        values=f"mesh: {mesh}",
        remedy=f"give {name} a size that divides {rule.sizes['e']}, or strategy tensor, which splits experts' widths",
    )


def notes_of_whole_experts(program: Program, strategies: Sequence[AxisStrategy]) -> tuple[str, ...]:
    """What the user is told of strategies that give each rank some experts, where the model has none, or none that is
    an operator: the axis does what they say of all else.
    """
    axes = zip(program.on_mesh.axes, strategies, strict=True)
    asked = [(axis, each) for (axis, size), each in axes if each.experts in _SOME and size > 1]
    if not asked or has_experts(program):
        return ()
    return tuple(
        f"{each.name} finds no experts that are recognized (layers as transformers has them, ALL_EXPERTS_FUNCTIONS): "
        f"what the model has of them {WHOLE} of {axis}, "
        + ("for its rows of the batch" if each.experts == "exchange" else "but for what tensor would split")
        for axis, each in asked
    )
