"""What splitting the sequence is worth at best, before anything is placed: which ways deserve to be tried."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from autopar.cost.operator_time import exposed_seconds, operator_seconds
from autopar.cost.roofline import CollectiveKind, collective_time_s
from autopar.ir.choices import NONE, Choice, shardings
from autopar.ir.graphs import is_attention, op_call
from autopar.ir.op_call import OpCall, TensorSpec, name_of
from autopar.ir.program import Program
from autopar.ir.region import NodeStrategy, Region
from autopar.ir.rule import Rule
from autopar.ir.sharding import Sharding, num_pieces, replicated
from autopar.ir.tensor_type import TensorType
from autopar.machine.links import Link
from autopar.machine.mesh import Mesh
from autopar.operators.rules.attention_cost import share_of_slowest
from autopar.operators.rules.lookup import rule_for
from autopar.strategies.axis import AxisStrategy

LEAST = 0.01
"""The part of a step's computing that equal work has to save before stripes are dealt zigzag."""


def zigzag_axes(program: Program, mesh: Mesh, axes: Sequence[str]) -> frozenset[str]:
    """Those of `axes` on which zigzag could save enough to be offered to the solver. The program is differentiated."""
    if not axes or not any(_is_one_sided(node) for region in program.regions for node in region.graph.nodes):
        return frozenset()
    computing = _seconds(program, mesh)
    return frozenset(axis for axis in axes if _saved(program, mesh, mesh.size(axis)) > LEAST * computing)


def attending_regions(program: Program) -> frozenset[str]:
    """Names of the regions whose attention, of what the rules know, strategies that split the sequence speak of.

    Those of repeated blocks, as what stands beside these is often of another kind (a pooling, a few queries); where
    they have none (a model of one layer, layers that the model's own forward spells out) all that have it.
    """
    found = [region for region in program.regions if any(map(is_attention, region.graph.nodes))]
    return frozenset(region.name for region in [region for region in found if region.module] or found)


def has_attention(program: Program) -> bool:
    """Whether there is attention that the rules know."""
    return bool(attending_regions(program))


def computing_seconds(program: Program, mesh: Mesh) -> float:
    """What one rank would compute alone in a step, but for the attention that strategies speak of."""
    attending = attending_regions(program)
    return sum(
        _region_seconds(region, mesh, attention=region.name not in attending)
        * program.num_calls(region.name)
        * program.microbatches
        for region in program.regions
    )


def seconds_in_attention(program: Program) -> float:
    """What the fullest rank computes in a step in the attention that strategies speak of, of a placed program."""
    found, attending = 0.0, attending_regions(program)
    for region in program.regions:
        times = program.num_calls(region.name) * program.microbatches
        for node in region.graph.nodes:
            if region.name in attending and is_attention(node) and node.name in region.strategies:
                call, rule = region.ops[node.name]
                found += operator_seconds(call, rule, region.strategies[node.name], program.on_mesh) * times
    return found


def least_seconds(program: Program, computing_s: float, strategies: Sequence[AxisStrategy], mesh: Mesh) -> float:
    """Less than a step can take under these strategies, some of which split the sequence: all ranks compute equally
    much, but for attention; what attention reads and gives is moved; gradients are summed over axes that split data.
    Infinite where attention cannot be split so.

    program: differentiated, and prepared for these strategies. computing_s: its `computing_seconds`.
    """
    attention = least_in_attention(program, strategies, mesh)
    return computing_s / mesh.num_devices + attention + _gradient_seconds(program, strategies, mesh)


def least_in_attention(program: Program, strategies: Sequence[AxisStrategy], mesh: Mesh) -> float:
    """Of the attention that strategies speak of alone: computed, and what it reads and gives moved."""
    found, attending = 0.0, attending_regions(program)
    for region in program.regions:
        times = program.num_calls(region.name) * program.microbatches
        for node in region.graph.nodes:
            if region.name in attending and is_attention(node):
                found += _attention_seconds(op_call(node), strategies, mesh) * times
    return found


def _attention_seconds(call: OpCall, strategies: Sequence[AxisStrategy], mesh: Mesh) -> float:
    rule = rule_for(call)
    least = math.inf
    for stripes in (1, 2):
        choices = [_choice(each, size, rule, stripes) for each, size in zip(strategies, mesh.sizes, strict=True)]
        placed = shardings(rule, choices, mesh.sizes)
        if placed is not None:
            strategy = NodeStrategy(tuple(choices), *placed)
            own = operator_seconds(call, rule, strategy, mesh) + exposed_seconds(call, rule, strategy, mesh)
            least = min(least, own + _moving_seconds(call, strategy, strategies, mesh))
    return least


def _choice(strategy: AxisStrategy, size: int, rule: Rule, stripes: int) -> Choice:
    """What a strategy does with attention."""
    zigzag = stripes > 1 and strategy.zigzag
    if size == 1:
        return NONE
    if strategy.attention == "keys":
        return Choice("factor", "p") if "p" in rule.sizes else NONE
    if strategy.attention == "ring":
        return Choice("ring", "s", stripes if zigzag else 1, zigzag=zigzag)
    if strategy.attention == "queries":
        return Choice("factor", "s", stripes if zigzag else 1, zigzag=zigzag)
    wanted = "h" if strategy.attention == "heads" or strategy.required == "shard_matrices" else "b"
    return Choice("factor", wanted) if rule.sizes[wanted] % size == 0 else NONE


def _moving_seconds(call: OpCall, strategy: NodeStrategy, strategies: Sequence[AxisStrategy], mesh: Mesh) -> float:
    """All-to-alls of queries, keys, values and result; or gathers of keys and values, scatters of their gradients."""
    is_forward = call.name == "autopar.attention.default"
    inside = [*zip(call.operands, strategy.operands, strict=True)][: 3 if is_forward else 1]
    outside = [*zip(call.results, strategy.results, strict=True)][: 1 if is_forward else 3]
    found = 0.0
    for axis, each in enumerate(strategies):
        if each.attention in ("heads", "queries") and mesh.sizes[axis] > 1:
            keys = (inside if is_forward else outside)[1:]
            moved = [*inside, *outside] if each.attention == "heads" else keys
            kind: CollectiveKind = "all_to_all" if each.attention == "heads" else "all_gather"
            found += math.fsum(_move_seconds(kind, spec, layout, axis, mesh) for spec, layout in moved)
    return found


def _move_seconds(
    kind: CollectiveKind, spec: TensorSpec | None, layout: Sharding | None, axis: int, mesh: Mesh
) -> float:
    assert spec is not None and layout is not None
    size = TensorType(spec.shape, spec.dtype).num_bytes / num_pieces(layout, mesh.sizes)
    link = mesh.link(mesh.axis_names[axis])
    return collective_time_s(kind, size, mesh.sizes[axis], link, mesh.hardware.collective_launch_s)


def _gradient_seconds(program: Program, strategies: Sequence[AxisStrategy], mesh: Mesh) -> float:
    """Gradients are scattered and parameters gathered, over one axis after the other, in the cheapest order; where each
    use gathers, once more.
    """
    tensor = math.prod(n for each, n in zip(strategies, mesh.sizes, strict=True) if each.required == "shard_matrices")
    size = sum(variable.type.num_bytes for variable in program.variables if variable.trainable) / tensor
    axes = [
        axis
        for axis, each in enumerate(strategies)
        if mesh.sizes[axis] > 1 and (each.attention != "free" or each.inputs == "batch")
    ]

    def seconds(order: Sequence[int]) -> float:
        left, found = size, 0.0
        for axis in order:
            num, link = mesh.sizes[axis], mesh.link(mesh.axis_names[axis])
            found += _least_gradient_seconds(left, num, link, gathers=strategies[axis].required == "gather")
            left /= num
        return found

    return min(map(seconds, itertools.permutations(axes))) if program.training else 0.0


def _least_gradient_seconds(size: float, num: int, link: Link, *, gathers: bool) -> float:
    """Of gradients of so many bytes, over one axis, without latencies: scattered and gathered, or reduced at once;
    gathers: each use gathers, once more.
    """
    free = replace(
        link,
        latency_s=0.0,
        nvls_latency_s=0.0,
        peer_latency_s=0.0,
        peer_rank_s=0.0,
        measured=tuple(replace(m, latency_s=0.0) for m in link.measured),
    )
    scatter, gather, reduce = (
        collective_time_s(kind, size, num, free, 0.0) for kind in ("reduce_scatter", "all_gather", "all_reduce")
    )
    return scatter + 2 * gather if gathers else min(scatter + gather, reduce)


def _is_one_sided(node: fx.Node) -> bool:
    """Whether attention lets queries see fewer keys on one side than on the other."""
    return is_attention(node) and bool(node.kwargs.get("left") != node.kwargs.get("right"))


def _saved(program: Program, mesh: Mesh, size: int) -> float:
    """Seconds that all ranks together would compute less, if none had more to do than others, times the ranks."""
    saved, attending = 0.0, attending_regions(program)
    for region in program.regions:
        for node in region.graph.nodes:
            if region.name in attending and _is_one_sided(node):
                call = op_call(node)
                rule = rule_for(call)
                if rule.sizes["s"] % (2 * size) == 0:
                    shares = [share_of_slowest(call, rule, [choice], [size]) for choice in _CHOICES]
                    unsplit = _unsplit_seconds(call, mesh)
                    saved += max(0.0, shares[0] - shares[1]) * size * unsplit * program.num_calls(region.name)
    return saved


_CHOICES = (Choice("factor", "s"), Choice("factor", "s", 2, zigzag=True))


def _seconds(program: Program, mesh: Mesh) -> float:
    """What one rank would compute alone."""
    return sum(_region_seconds(region, mesh) * program.num_calls(region.name) for region in program.regions)


def _region_seconds(region: Region, mesh: Mesh, *, attention: bool = True) -> float:
    """What one rank would compute alone in one call; attention: this, too."""
    nodes = [
        node for node in region.graph.nodes if node.op == "call_function" and "getitem" not in name_of(node.target)
    ]
    return sum(_unsplit_seconds(op_call(node), mesh) for node in nodes if attention or not is_attention(node))


def _unsplit_seconds(call: OpCall, mesh: Mesh) -> float:
    rule = rule_for(call)
    whole = replicated(len(mesh.sizes))
    results = tuple(None if result is None else whole for result in call.results)
    alone = NodeStrategy((NONE,) * len(mesh.sizes), (whole,) * len(call.operands), results)
    return operator_seconds(call, rule, alone, mesh)
