"""Seconds of one operator under a strategy: what it computes, and a ring that waits, or an exchange."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from autopar.cost import exchanges, expert_kernels, rings
from autopar.cost.coded import coded_seconds
from autopar.cost.fusion import fused_seconds
from autopar.cost.local_work import local_work
from autopar.cost.prompts import prompt_seconds
from autopar.cost.roofline import Work, compute_time_s
from autopar.cost.windows import window_seconds
from autopar.ir.op_call import OpCall
from autopar.ir.region import NodeStrategy, Region
from autopar.ir.rule import Rule
from autopar.machine.mesh import Mesh


def operator_seconds(call: OpCall, rule: Rule, strategy: NodeStrategy, mesh: Mesh) -> float:
    """Seconds that one operator computes, on the rank that has most to do."""
    if rule.alias:
        return mesh.hardware.view_s
    one = _block_seconds(call, rule, strategy, mesh)
    if rule.ring is None:
        split = (n for choice, n in zip(strategy.choices, mesh.sizes, strict=True) if choice.splits)
        share = mesh.hardware.expert_imbalance if exchanges.exchange_axis(strategy.choices) is not None else 1.0
        return one(share * rule.flops / math.prod(split))
    return rings.longest_s(call, rule, strategy.choices, mesh.sizes, one)


def exposed_seconds(call: OpCall, rule: Rule, strategy: NodeStrategy, mesh: Mesh) -> float:
    """Seconds that an operator communicates by itself, beside what it computes: a ring that waits, an exchange."""
    if exchanges.exchange_axis(strategy.choices) is not None:
        return exchanges.exposed_s(call, rule, strategy, mesh, mesh.hardware.expert_imbalance)
    if rings.ring_axis(strategy.choices) is None:
        return 0.0
    return rings.exposed_s(call, rule, strategy, mesh, _block_seconds(call, rule, strategy, mesh))


def seconds_of_each(call: OpCall, rule: Rule, strategies: Sequence[NodeStrategy], mesh: Mesh) -> Iterator[float]:
    """Seconds that an operator computes, and communicates by itself, under each of these strategies. Where nothing
    travels they do not depend on stripes, nor on which of two axes of one size does what: all ranks have equally much
    of a factor, however it is cut.
    """
    known: dict[object, float] = {}
    for each in strategies:
        key: object = each.choices
        if rule.pair is None:
            did = zip(each.choices, mesh.sizes, strict=True)
            key = tuple(sorted((c.kind, c.factor or "", c.group or 0, size) for c, size in did))
        if key not in known:
            known[key] = operator_seconds(call, rule, each, mesh) + exposed_seconds(call, rule, each, mesh)
        yield known[key]


def ways_of(call: OpCall, rule: Rule, strategy: NodeStrategy, mesh: Mesh) -> exchanges.Ways:
    """`exposed_seconds` of an exchange, way by way."""
    return exchanges.ways_of(call, rule, strategy, mesh, mesh.hardware.expert_imbalance)


def _block_seconds(call: OpCall, rule: Rule, strategy: NodeStrategy, mesh: Mesh) -> Callable[[float], float]:
    """Seconds of the floating point operations of one call of the kernel."""
    work = _local_work(call, rule, strategy, mesh)
    return lambda flops: compute_time_s(work(flops), mesh.hardware, in_step=True)


def region_seconds(region: Region, mesh: Mesh) -> dict[str, float]:
    """Seconds that each operator of a placed region computes. Where the hardware's regions are compiled, operators that
    become one kernel share its time (`autopar.fusion`); of an engine, products read weights that are codes as they are
    (`autopar.cost.coded`), and prompts see what is before them (`autopar.cost.prompts`). On CUDA a token's attention
    reads the positions that its mask shows (`autopar.cost.windows`).
    """
    alone = _alone(region, mesh)

    def work(name: str) -> Work:
        return operator_work(*region.ops[name], region.strategies[name], mesh)

    def seconds(done: Work) -> float:
        return compute_time_s(done, mesh.hardware, in_step=True)

    if mesh.hardware.engine:
        alone |= coded_seconds(region, mesh, work, seconds)
    if mesh.hardware.device == "cuda":
        alone |= window_seconds(region, mesh.sizes, work, seconds)
    if mesh.hardware.whole_prompts:
        alone |= prompt_seconds(region, work, seconds)
    return fused_seconds(region, alone, work, seconds, mesh.sizes) if mesh.hardware.compiled else alone


def _alone(region: Region, mesh: Mesh) -> dict[str, float]:
    """Seconds of each operator by itself: several ask for them of one placement."""
    assert region.placed is not None
    known = region.placed.seconds
    for ops, of, seconds in known:
        if ops is region.ops and of is mesh:
            return dict(seconds)
    found = {name: operator_seconds(*region.ops[name], each, mesh) for name, each in region.strategies.items()}
    known[:] = [(region.ops, mesh, found)]
    return dict(found)


def operator_work(call: OpCall, rule: Rule, strategy: NodeStrategy, mesh: Mesh) -> Work:
    """What an operator does on one rank; of a ring, all of its blocks."""
    split = (n for choice, n in zip(strategy.choices, mesh.sizes, strict=True) if choice.splits)
    return _local_work(call, rule, strategy, mesh)(rule.flops / math.prod(split))


def _local_work(call: OpCall, rule: Rule, strategy: NodeStrategy, mesh: Mesh) -> Callable[[float], Work]:
    grouped = expert_kernels.serves(call, mesh.hardware) or expert_kernels.serves_codes(call, mesh.hardware)
    return local_work(call, rule, strategy, mesh.sizes, in_place=mesh.hardware.graphs, grouped=grouped)
