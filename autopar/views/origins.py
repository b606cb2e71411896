"""Which module an operator of the backward belongs to. What it was traced from says the one of its first operand, where
it says nothing better: here it is the one of what it differentiates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.planner.plan.drawn import OpView


def with_origins(forward: Sequence[OpView], backward: Sequence[OpView], module: str) -> list[OpView]:
    """The backward's ops: `silu_backward` gets module and source line of the `silu` that reads the same; a sum of
    gradients the module that holds all that they come from; what only passes on a gradient, its maker's module.

    module: of the region.
    """
    before = {op.name: op for op in backward}
    found: dict[str, OpView] = {}
    for op in backward:
        twin = _twin(op, forward)
        first = next((read for read in op.reads if read in before), None)
        has_slot = any(read.startswith("p:") for read in op.reads)
        if twin is not None:
            op = replace(op, module=twin.module, source=twin.source)
        elif op.op == "add" and len(op.reads) > 1:
            op = replace(op, module=_common([found[r].module if r in found else module for r in op.reads]))
        elif first is not None and not has_slot and not op.source and op.module == before[first].module:
            op = replace(op, module=found[first].module)
        found[op.name] = op
    return list(found.values())


def _twin(op: OpView, forward: Sequence[OpView]) -> OpView | None:
    """The operator that a `…_backward` differentiates; None where there is none, or several modules have one."""
    if not op.op.endswith("_backward"):
        return None
    name = op.op.removesuffix("_backward")
    reads = {read.removeprefix("saved:") for read in op.reads}
    twins = [each for each in forward if each.op == name and reads.intersection(each.reads)]
    return twins[0] if len({each.module for each in twins}) == 1 else None


def _common(modules: Sequence[str]) -> str:
    """The path of the module that holds all of these."""
    shared = []
    for parts in zip(*(module.split(".") for module in modules), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
