"""Which collectives of a plan are there because of one parameter, input, output or operator."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import fx

from autopar.cost.collectives import Collective, before_moves
from autopar.ir.classes import value_classes
from autopar.ir.collectives import COLLECTIVES
from autopar.ir.program import Program
from autopar.ir.region import Region
from autopar.ir.rings import TAKE, sends_inside
from autopar.views.explain.subjects import Subject

Move = tuple[str, str, str, str, str]
"""Region, phase, the value that is moved, kind, axis: what a row of `Plan.collectives` says of a move in a region."""


def collectives_of(program: Program, rows: Sequence[Collective], subject: Subject) -> list[tuple[Collective, float]]:
    """The rows that are there because of the subject, in their order, with the share of their bytes that is its own.

    Of a parameter: its gathers and the reduction of its gradient (which may travel in a bucket with others: then the
    share is below 1), the sums of what operators that read it (or make its gradient) leave in terms, and the moves that
    these ask of their operands. Of the others: the moves of the value itself, and those that the operator
    asks of its operands.

    Of attention: its ring, and the moves of all that it and its gradient read and give.

    Args:
        program: lowered.
    """
    moves = set(_moves_of(program, subject))
    places = sorted({(region, phase) for region, phase, *_ in moves})
    buckets = dict(_buckets_of(program, subject)) if subject.kind == "parameter" else {}
    found = []
    for row in rows:
        where = [place for place in places if row.where.startswith(f"{place[0]} {place[1]}: ")]
        if (row.where, row.why, row.phase) in buckets:
            found.append((row, buckets[row.where, row.why, row.phase]))
        elif any((*place, row.tensor, row.kind, row.axis) in moves for place in where):
            found.append((row, 1.0))
    return found


def _buckets_of(program: Program, subject: Subject) -> Iterator[tuple[tuple[str, str, str], float]]:
    """(where, why, phase) of the rows of buckets that carry the parameter, with its share of their bytes."""
    for region in program.regions:
        _, call = next(program.calls_of(region.name))
        for which, buckets in region.transfers.items():
            for bucket in buckets:
                names = [call.slots[move.slot] for move in bucket.moves]
                yield from _rows_of(program, region.name, which, names, subject)
    for shared in program.shared:
        for which in ("gather", "gather_for_backward", "reduce"):
            yield from _rows_of(program, "several calls", which, [shared.name], subject)


def _rows_of(
    program: Program, where: str, which: str, names: Sequence[str], subject: Subject
) -> Iterator[tuple[tuple[str, str, str], float]]:
    sizes = []
    for variable in (program.variable(name) for name in names):
        layout = program.placed.parameters[variable.name]
        # All tensors of a bucket go through the same steps, so shares stay what they are at the first.
        sizes.append(math.prod(before_moves(variable, layout, program.on_mesh.sizes, which == "reduce")))
    own = sum(size for name, size in zip(names, sizes, strict=True) if name in subject.members)
    if own:
        why = "reduce gradient" if which == "reduce" else "gather parameter"
        yield (f"{where}: {names[0]}", why, "forward" if which == "gather" else "backward"), own / sum(sizes)


def _moves_of(program: Program, subject: Subject) -> Iterator[Move]:
    if subject.kind == "attention":
        yield from moves_of_attention(program.region(subject.region), subject.nodes)
        return
    if subject.kind == "operator":
        yield from _around(program.region(subject.region), {subject.node})
        return
    for kind, name, index in value_classes(program).members[subject.key]:
        if kind == "slot":
            region = program.region(name)
            yield from _around(region, _readers(region, index), sums_of_operands=False)
        elif kind == "in":
            region = program.region(name)
            yield from _after(region, _placeholders(region)[len(region.slots) + index].name)
        elif kind == "out":
            yield from _before_result(program.region(name), index)


def _placeholders(region: Region) -> list[fx.Node]:
    return [node for node in region.graph.nodes if node.op == "placeholder"]


def _readers(region: Region, slot: int) -> set[str]:
    """The operators that read a slot, through views of it, and the one that makes its gradient."""
    found: set[str] = set()
    stack = list(_placeholders(region)[slot].users)
    while stack:
        node = stack.pop()
        if node.name in region.ops and node.name not in found:
            found.add(node.name)
            stack += list(node.users) if region.ops[node.name][1].alias else []
    output: Any = next(node for node in region.graph.nodes if node.op == "output")
    trainable = [i for i, each in enumerate(region.slots) if each.trainable]
    gradients = output.args[0][len(region.outputs) :]
    if slot in trainable and len(gradients) > trainable.index(slot):
        made = gradients[trainable.index(slot)]
        found.add(made.args[0].name if made.target is operator.getitem else made.name)
    return found


def _around(region: Region, names: set[str], *, sums_of_operands: bool = True) -> Iterator[Move]:
    """The moves of what these operators make and read. A sum is due to the operator that made the terms."""
    for phase, node in _lowered(region, names):
        if sends_inside(node):
            yield _ring(region, phase, node)
        for source in node.all_input_nodes:
            for move in _chain(source):
                if sums_of_operands or move.target not in ("all_reduce", "reduce_scatter"):
                    yield _move(region, phase, move)
        yield from _moves_after(region, phase, node)


def moves_of_attention(region: Region, names: Sequence[str]) -> Iterator[Move]:
    """The rings of these operators, and the moves of what they read and give, through views too: heads are turned
    there.
    """
    for phase, node in _lowered(region, names):
        if sends_inside(node):
            yield _ring(region, phase, node)
        for near in (*_through(region, node, down=False), *_through(region, node, down=True)):
            if _is_move(near):
                yield _move(region, phase, near)


def _lowered(region: Region, names: Collection[str]) -> Iterator[tuple[str, fx.Node]]:
    """Phases, and the calls or rings that these operators are there."""
    for phase, lowered in region.phases.items():
        for node in lowered.graph.nodes:
            if sends_inside(node):
                if node.meta["operator"] in names:
                    yield phase, node
            elif node.op == "call_function" and node.name in names:
                yield phase, node


def _through(region: Region, node: fx.Node, *, down: bool) -> Iterator[fx.Node]:
    """What a value is moved and viewed by, towards its readers or its maker."""
    for near in node.users if down else node.all_input_nodes:
        is_view = near.op == "call_function" and (
            near.target is operator.getitem or (near.name in region.ops and region.ops[near.name][1].alias)
        )
        if is_view or (near.op == "call_method" and near.target in (*COLLECTIVES, "slice")):
            yield near
            yield from _through(region, near, down=down)


def _after(region: Region, name: str) -> Iterator[Move]:
    for phase, lowered in region.phases.items():
        for node in lowered.graph.nodes:
            if node.op == "placeholder" and node.name == name:
                yield from _moves_after(region, phase, node)


def _moves_after(region: Region, phase: str, node: fx.Node) -> Iterator[Move]:
    for user in node.users:
        if _is_move(user):
            yield _move(region, phase, user)
        if _is_move(user) or user.target is operator.getitem or user.target in ("slice", TAKE) or "joins" in user.meta:
            yield from _moves_after(region, phase, user)


def _before_result(region: Region, index: int) -> Iterator[Move]:
    output: Any = next(node for node in region.lowered["forward"].graph.nodes if node.op == "output")
    for move in _chain(output.args[0][index]):
        yield _move(region, "forward", move)


def _chain(node: fx.Node) -> Iterator[fx.Node]:
    """The collectives that a value has just come through, the last first."""
    current: Any = node
    while True:
        if current.target is operator.getitem and "joins" in current.args[0].meta:
            yield current.args[0]
            current = current.args[0].args[1].args[0][current.args[1]]
        elif current.op == "call_method" and current.target in (*COLLECTIVES, "slice"):
            if _is_move(current):
                yield current
            current = current.args[1]
        else:
            return


def _is_move(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target in COLLECTIVES


def _ring(region: Region, phase: str, node: fx.Node) -> Move:
    return region.name, phase, node.meta["operator"], "ring", str(node.args[1])


def _move(region: Region, phase: str, node: fx.Node) -> Move:
    source: Any = node.args[1]
    return (region.name, phase, source.name, str(node.target), str(node.args[2]))
