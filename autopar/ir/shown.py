"""Which masks of a program's inputs a region is handed, and how many positions of a cache these show."""

from __future__ import annotations

import math

from torch import fx

from autopar.ir.graphs import is_view, placeholders
from autopar.ir.op_call import name_of
from autopar.ir.program import Program
from autopar.ir.region import Region
from autopar.ir.values import ValueRef

_SAME = ("aten._to_copy", "aten.to", "aten.clone", "aten.contiguous", "aten.alias", "aten.detach")


def origin(value: object) -> object:
    """What a value is a view, a part, or a copy of."""
    while isinstance(value, fx.Node) and value.op == "call_function" and len(value.all_input_nodes) == 1:
        if not (is_view(value) or name_of(value.target).startswith(_SAME)):
            return value
        value = value.all_input_nodes[0]
    return value


def shown_to(program: Program, region: Region) -> tuple[tuple[float, ...], ...]:
    """`Region.shown`: a mask that is not known to show few shows all."""
    if not program.shown:
        return ()
    calls = [call for _, call in program.calls_of(region.name)]

    def of(place: int) -> tuple[float, ...]:
        known = [program.shown.get(_input(program, call.arguments[place]), math.inf) for call in calls]
        return tuple(known) if min(known) < math.inf else ()

    return tuple(map(of, range(len(region.inputs))))


def _input(program: Program, value: ValueRef) -> str:
    """The program's input that a value is a view of; nothing where it is of none."""
    while value.call >= 0:
        call = program.calls[value.call]
        region = program.region(call.region)
        output = next(node for node in reversed(region.graph.nodes) if node.op == "output")
        given = placeholders(region.graph)
        source = origin(output.args[0][value.index])
        place = next((at for at, node in enumerate(given) if node is source), -1) - len(region.slots)
        if not 0 <= place < len(call.arguments):
            return ""
        value = call.arguments[place]
    return value.name
