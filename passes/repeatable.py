"""Calls that any stage of a pipeline may run for itself."""

from __future__ import annotations

import torch
from torch import fx

from autopar.ir.program import Program
from autopar.passes.mutation import writes


def repeatable_calls(program: Program) -> frozenset[int]:
    """Calls that any stage may run for itself: their results depend on the program's inputs and on buffers alone.

    Such a call has no parameter, draws no random number, changes no buffer and reads none that changes, and what it
    reads are inputs of the program, but for states that one rank keeps, and results of such calls.
    """
    kept = kept_states(program)
    may = {region.name: not region.uses_dropout and not _draws(region.graph) for region in program.regions}
    changed = {name for name, _ in program.updates}
    writers = {ref.call for _, ref in program.updates}
    fixed = {variable.name for variable in program.variables if not variable.is_parameter} - changed
    found: set[int] = set()
    for index, call in enumerate(program.calls):
        reads = all(ref.name not in kept if ref.call < 0 else ref.call in found for ref in call.arguments)
        if reads and may[call.region] and index not in writers and all(name in fixed for name in call.slots):
            found.add(index)
    return frozenset(found)


def kept_states(program: Program) -> frozenset[str]:
    """The states that the rank keeps whose stage makes them: all but single numbers, which every rank gets."""
    states = program.states
    return frozenset(port.name for port in program.inputs if port.name in states and port.type.shape)


def is_repeatable(program: Program, call_index: int) -> bool:
    """Whether any stage may run this call for itself (`repeatable_calls`)."""
    return call_index in repeatable_calls(program)


def _draws(graph: fx.Graph) -> bool:
    return any(node.op == "call_function" and (_is_random(node) or writes(node)) for node in graph.nodes)


def _is_random(node: fx.Node) -> bool:
    """Whether an operator may draw random numbers; attention and dropout are said to, whatever their probability."""
    if node.target is torch.ops.autopar.attention.default:
        return bool(node.kwargs.get("dropout_p"))
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
