"""Say why nothing can be placed: which limit or constraint stands in the way, where in the model, and the nearest
remedy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import fx

from autopar.base.errors import AutoparError, DoesNotFit
from autopar.ir.nodes import shape_of
from autopar.ir.program import Program
from autopar.ir.region import Region
from autopar.ir.sharding import Shard
from autopar.ir.values import Slot
from autopar.passes.heads import may_stay_whole
from autopar.passes.placement.gathers import operator_text
from autopar.passes.placement.problem import PlacementProblem, build_problem
from autopar.solver.problem import Solution
from autopar.solver.solve import minimum_peak, solve
from autopar.strategies.axis import AxisStrategy
from autopar.strategies.names import Pin, describe

MAX_INVOLVED = 5
STEPS_TO_HEADS = 7
"""Operators from a projection to the view of its heads: the product, a bias, views, a split of q, k and v."""


def infeasible(
    program: Program,
    built: PlacementProblem,
    solution: Solution,
    strategies: Sequence[AxisStrategy],
    pins: Sequence[Pin],
    memory_limit_bytes: float | None,
) -> AutoparError:
    """The error for a placement problem without a solution."""
    name = describe(strategies, program.on_mesh)
    unlimited = replace(built.problem, usage_limit=None)
    if memory_limit_bytes is not None and solve(unlimited, gap=0.5).choice:
        return _memory_error(program, built, name, memory_limit_bytes)
    culprit = _uneven_heads(program, strategies) or _unsplittable(program, strategies, pins)
    if culprit is not None:
        return culprit
    blocking, involved = _conflicting(program, built, solution)
    return AutoparError(
        f"strategy {name} cannot be carried out on {program.on_mesh}",
        where=blocking,
        values=f"what it allows does not go together for {', '.join(involved)}" if involved else None,
        remedy='try strategy="auto", smaller axes, or fewer pins',
    )


def _conflicting(program: Program, built: PlacementProblem, solution: Solution) -> tuple[str | None, list[str]]:
    """The operator at which what a strategy allows ends, and all that takes part, as the model knows them.

    A conflict begins at what is given (inputs, parameters), and its last operator is the first that cannot do with it.
    """
    nodes = solution.conflict.nodes if solution.conflict else ()
    names = {index: key for key, (index, _) in built.operators.items()}
    relays = {index for index, _ in built.relays.values()}
    involved, operators = [], []
    for index in nodes:
        if index in names:
            region, node = names[index]
            text = operator_text(program.region(region), node)
            operators.append(text)
        elif index in relays:
            continue
        else:
            text = built.descriptions[index]
        involved.append(text)
    return (operators[-1] if operators else None), list(dict.fromkeys(involved))[:MAX_INVOLVED]


def _memory_error(program: Program, built: PlacementProblem, name: str, limit: float) -> DoesNotFit:
    smallest = minimum_peak(built.problem)
    largest = sorted(
        (
            (max(float(usage.bytes[smallest.choice[index]]) for usage in node.usages), built.descriptions[index])
            for index, node in enumerate(built.problem.nodes)
            if node.usages and smallest.choice
        ),
        reverse=True,
    )[:3]
    detail = "; ".join(f"{_size(size)} {text}" for size, text in largest)
    what = f"strategy {name} on {program.mesh} does not fit: the memory limit is {_size(limit)} a rank"
    where = f"largest: {detail}" if detail else None
    if program.share is not None:
        what += f", where a rank has 1/{program.share.ranks} of the model"
    if not smallest.choice:
        known = f"at least {_size(smallest.bound)} would be needed; no placement was found in the time allowed"
        return DoesNotFit(what, values=known, remedy="use more ranks, a smaller batch, or strategy='auto'")
    needed = math.ceil(smallest.bytes)
    error = DoesNotFit(
        what,
        where=where,
        values=f"the smallest limit that would do is {_size(needed)} ({needed} bytes)",
        remedy=f"set memory_limit to {needed} or more, use more ranks, a smaller batch, or strategy='auto'",
    )
    error.needed_bytes = needed
    return error


def _size(size_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.4g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.4g} GiB"


def _uneven_heads(program: Program, strategies: Sequence[AxisStrategy]) -> AutoparError | None:
    """The first projection into heads that a tensor-parallel axis does not divide."""
    for axis, size in _tensor_axes(program, strategies):
        for region in program.regions:
            for slot, node, heads, width in _projections(region):
                if heads % size == 0 or may_stay_whole(program, ("slot", region.name, region.slots.index(slot)), size):
                    continue
                name = slot.name.rsplit(".", 1)[0]
                path, _, line = region.origins.get(node.name, "").partition(" (")
                fits = math.gcd(heads, size)
                smaller = f"use {axis}={fits}" if fits > 1 else f"use {axis}=1"
                return AutoparError(
                    f"{name.rsplit('.', 1)[-1]}: {heads} heads cannot split over {axis}={size}",
                    where=", ".join(filter(None, (path or f"{region.module}.{name}", line.rstrip(")")))),
                    values=f"{slot.name} is {slot.type}, its result {heads} heads of {width}",
                    remedy=f"{smaller}, or strategy='auto', which may keep it whole",
                )
    return None


def _tensor_axes(program: Program, strategies: Sequence[AxisStrategy]) -> list[tuple[str, int]]:
    named = zip(strategies, program.on_mesh.axis_names, program.on_mesh.sizes, strict=True)
    return [(axis, size) for strategy, axis, size in named if strategy.required == "shard_matrices" and size > 1]


def _projections(region: Region) -> Iterator[tuple[Slot, fx.Node, int, int]]:
    """Matrices of repeated blocks whose product is seen as [batch, sequence, heads, width]: slot, product, both."""
    holders = [node for node in region.graph.nodes if node.op == "placeholder"]
    for slot, holder in zip(region.slots, holders, strict=False):
        products = [user for user in holder.users if user.name in region.forward_nodes]
        if not region.module or len(slot.type.shape) != 2 or not products:
            continue
        reached = [products[0]]
        for _ in range(STEPS_TO_HEADS):
            views = [node for node in reached if len(shape_of(node)) == 4]
            if views:
                _, _, heads, width = shape_of(views[0])
                yield slot, products[0], heads, width
                break
            users = [user for node in reached for user in node.users]
            reached = [n for n in users if n.op == "call_function" and not str(n.target).startswith("autopar.linear")]


def _unsplittable(program: Program, strategies: Sequence[AxisStrategy], pins: Sequence[Pin]) -> AutoparError | None:
    """Which weight matrix a tensor-parallel axis cannot split: drop the demand for one parameter at a time."""
    axes = [i for i, s in enumerate(strategies) if s.required == "shard_matrices" and program.on_mesh.sizes[i] > 1]
    if not axes:
        return None
    relaxed = [replace(s, required="none", parameters=s.parameters) for s in strategies]
    for variable in program.variables:
        slots = [
            (region, slot)
            for region in program.regions
            for slot in region.slots
            if region.module and variable.name.endswith(slot.name) and len(slot.type.shape) == 2
        ]
        if not slots:
            continue
        names = [program.on_mesh.axis_names[axis] for axis in axes]
        demand = [Pin(variable.name, ((name, Shard(dim)),)) for name in names for dim in (0, 1)]
        if any(_solvable(program, relaxed, [*pins, each]) for each in demand):
            continue
        region, slot = slots[0]
        axis = axes[0]
        return AutoparError(
            f"{slot.name.rsplit('.', 1)[0]} cannot split over "
            f"{program.on_mesh.axis_names[axis]}={program.on_mesh.sizes[axis]}",
            where=f"{region.module}.{slot.name}, {_source_line(region.origins, slot.name)}",
            values=f"{slot.type}: no dim of it divides in a way that the operators after it understand",
            remedy=f"use a smaller {program.on_mesh.axis_names[axis]}, or strategy='auto', which may keep it whole",
        )
    return None


def _solvable(program: Program, strategies: Sequence[AxisStrategy], pins: Sequence[Pin]) -> bool:
    try:
        built = build_problem(program, strategies, pins, None)
    except AutoparError:
        return False
    return bool(solve(built.problem, gap=0.5, time_limit_s=10).choice)


def _source_line(origins: Mapping[str, str], slot: str) -> str:
    module = slot.rsplit(".", 1)[0]
    found = [text for text in origins.values() if module in text and "(" in text]
    return found[0].rsplit("(", 1)[-1].rstrip(")") if found else "weight"
