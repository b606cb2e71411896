"""What strategies ask of the experts of mixtures: some experts a rank, or a part of each expert's width."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autopar.base.errors import AutoparError
from autopar.ir.program import Program
from autopar.ir.region import NodeStrategy, Region
from autopar.machine.mesh import Mesh
from autopar.strategies.axis import AxisStrategy

_FACTORS = {"whole": "e", "widths": "f"}


def is_experts(node: fx.Node) -> bool:
    """Whether a node is a layer of experts, or its gradient."""
    return str(node.target).startswith("autopar.experts")


def allowed(region: Region, node: fx.Node, strategies: Sequence[AxisStrategy], mesh: Mesh) -> list[int] | None:
    """Which of the node's options do with each axis what its strategy asks; None where all do. Widths that an axis does
    not divide are left to the solver.

    Raises:
        AutoparError: an axis does not divide the experts that it is to split.
    """
    if not is_experts(node):
        return None
    options: Sequence[NodeStrategy] = region.options[node.name].strategies
    kept = list(range(len(options)))
    for axis, each in enumerate(strategies):
        if each.experts == "free" or mesh.sizes[axis] == 1:
            continue
        wanted = _FACTORS[each.experts]
        found = [
            i for i in kept if options[i].choices[axis].kind == "factor" and options[i].choices[axis].factor == wanted
        ]
        if not found and each.experts == "whole":
            raise _cannot(region, node, each, axis, mesh)
        kept = found or kept
    return kept if len(kept) < len(options) else None


def _cannot(region: Region, node: fx.Node, strategy: AxisStrategy, axis: int, mesh: Mesh) -> AutoparError:
    _, rule = region.ops[node.name]
    name, size = mesh.axis_names[axis], mesh.sizes[axis]
    return AutoparError(
        f"{strategy.name}: {rule.sizes['e']} experts do not divide over {name}={size}",
        where=region.origins.get(node.name, "") or region.module,
        values=f"mesh: {mesh}",
        remedy=f"give {name} a size that divides {rule.sizes['e']}, or strategy tensor, which splits experts' widths",
    )


def require_experts(program: Program, strategies: Sequence[AxisStrategy], mesh: Mesh) -> None:
    """Whether strategies that split experts find any.

    Raises:
        AutoparError: the model has none, or none that is an operator.
    """
    named = zip(strategies, mesh.sizes, strict=True)
    asked = [each.name for each, size in named if each.experts == "whole" and size > 1]
    if not asked or any(is_experts(node) for region in program.regions for node in region.graph.nodes):
        return
    raise AutoparError(
        f"{asked[0]} splits the experts of mixtures, and the model has none that are recognized",
        values="recognized are layers of experts as transformers has them (ALL_EXPERTS_FUNCTIONS)",
        remedy="use another strategy for that axis, such as tensor, zero3 or auto",
    )
