"""Seconds of one operator under a strategy: what it computes, and a ring that waits."""

from __future__ import annotations

import math
from collections.abc import Callable

from autopar import rings
from autopar.cost import compute_time_s
from autopar.ir import (
    NodeStrategy,
)
from autopar.local_work import local_work
from autopar.mesh import Mesh
from autopar.rules.notation import Rule
from autopar.rules.registry import OpCall


def operator_seconds(call: OpCall, rule: Rule, strategy: NodeStrategy, mesh: Mesh) -> float:
    """Seconds that one operator computes, on the rank that has most to do."""
    if rule.alias:
        return mesh.hardware.view_s
    one = _block_seconds(call, rule, strategy, mesh)
    if rule.ring is None:
        split = (n for choice, n in zip(strategy.choices, mesh.sizes, strict=True) if choice.kind == "factor")
        return one(rule.flops / math.prod(split))
    return rings.longest_s(call, rule, strategy.choices, mesh.sizes, one)


def exposed_seconds(call: OpCall, rule: Rule, strategy: NodeStrategy, mesh: Mesh) -> float:
    """Seconds that an operator communicates by itself, beside what it computes: a ring that waits."""
    if rings.ring_axis(strategy.choices) is None:
        return 0.0
    return rings.exposed_s(call, rule, strategy, mesh, _block_seconds(call, rule, strategy, mesh))


def _block_seconds(call: OpCall, rule: Rule, strategy: NodeStrategy, mesh: Mesh) -> Callable[[float], float]:
    """Seconds of the floating point operations of one call of the kernel."""
    work = local_work(call, rule, strategy, mesh.sizes)
    return lambda flops: compute_time_s(work(flops), mesh.hardware)
