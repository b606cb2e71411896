"""Say why nothing can be placed: which limit or constraint stands in the way, where in the model, and the nearest
remedy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autopar.base.errors import AutoparError, DoesNotFit
from autopar.ir.program import Program
from autopar.passes.placement.gathers import operator_text
from autopar.passes.placement.problem import PlacementProblem
from autopar.solver.problem import Solution
from autopar.solver.solve import minimum_peak, solve
from autopar.strategies.axis import AxisStrategy
from autopar.strategies.names import Pin, describe

MAX_INVOLVED = 5


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
    names = {index: key for key, (index, _) in reversed(built.operators.items())}  # of a loop the first round
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
    detail = "; ".join(dict.fromkeys(f"{_size(size)} {text}" for size, text in largest))
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
