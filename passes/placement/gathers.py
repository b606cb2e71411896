"""Operators that no split of the batch serves: where in the model they are, and what it takes to compute them whole.

Strategies that split the batch and nothing else move no activations, so an operator whose rule cannot split the rows
(a sort along them, a product of rows with rows) leaves them without any placement. So do those that split the sequence,
outside of attention: a router's sort of tokens, a recurrence along them. What each value looks like where
all operators before it go by rows follows from the rules, one operator after the other; an operator that has no
strategy for its operands as they come is *blocked*. Its operands, and no others, may then be gathered, and every rank
computes it whole. PyTorch's DDP would compute it on each rank's own rows, which is another function.

    x S(0) ─ linear: b ─► S(0) ─ cumsum over b: blocked, R ◄ gather ─► R ─ slice ─► S(0) …
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.base.spoken import operator_word
from autopar.base.text import format_bytes
from autopar.ir.classes import Classes, Key, placeholder_keys, result_keys, value_classes
from autopar.ir.graphs import operands_of, source_of
from autopar.ir.program import Program
from autopar.ir.region import NodeStrategy, Region
from autopar.ir.sharding import REPLICATE, Partial, Placement, Replicate, Shard
from autopar.ir.tensor_type import TensorType
from autopar.passes.placement import columns
from autopar.strategies.axis import AxisStrategy

WHOLE = "is computed whole on every rank"
ROWS, SEQUENCE = "all rows of the batch", "the whole sequence"


@dataclass(frozen=True, slots=True)
class Blocked:
    """An operator that cannot be split by rows, or along the sequence, on some axis. received: bytes that a rank gets a
    step, to have all of its operands. origin: module and source line. needs: what it has to have, in words.
    """

    region: str
    node: str
    operator: str
    origin: str
    is_backward: bool
    received: float
    needs: str = ROWS

    def __str__(self) -> str:
        return _at(self.operator, self.origin)


def operator_text(region: Region, node: str) -> str:
    """An operator as the model knows it: `cumsum at model.py:12`."""
    return _at(_operator(region, node), region.origins.get(node, "") or region.module)


def _operator(region: Region, node: str) -> str:
    return operator_word(region.ops[node][0].name.split(".")[1])


def _at(operator: str, origin: str) -> str:
    line = line_of(origin) or origin
    return f"{operator} at {line}" if line else operator


def line_of(origin: str) -> str:
    """The source line of an origin, `model.layers.0 (model.py:12)`; empty where it has none."""
    return origin.rpartition("(")[2].rstrip(")") if "(" in origin else ""


def data_axes(program: Program, strategies: Sequence[AxisStrategy]) -> list[int]:
    """The axes that split the batch, or the sequence, and may move no activations, attention's own apart."""
    sizes = program.on_mesh.sizes
    return [
        axis
        for axis, each in enumerate(strategies)
        if each.inputs in ("batch", "sequence") and sizes[axis] > 1 and "all_gather" not in _inside(each)
    ]


def _inside(strategy: AxisStrategy) -> frozenset[str]:
    """What may be moved inside blocks."""
    return strategy.collectives if strategy.inside_blocks is None else strategy.inside_blocks


def blocked_operators(
    program: Program, strategies: Sequence[AxisStrategy], facts: dict[tuple[str, ...], Any] | None = None
) -> tuple[Blocked, ...]:
    """The operators of an annotated program that some axis which splits the batch cannot split, forward ones first.

    facts: as of `build_problem`; strategies that do the same with values are asked once.
    """
    found: dict[tuple[str, str], Blocked] = {}
    for axis in data_axes(program, strategies):
        strategy = strategies[axis]
        key = ("blocked", str(axis), strategy.inputs, str("all_reduce" in _inside(strategy)))
        walked = None if facts is None else facts.get(key)
        if walked is None:
            walked = list(_Walk(program, axis, strategy).blocked())
            if facts is not None:
                facts[key] = walked
        _add(found, walked, strategy)
    return tuple(sorted(found.values(), key=lambda each: each.is_backward))


def jointly_blocked(program: Program, strategies: Sequence[AxisStrategy]) -> tuple[Blocked, ...]:
    """As `blocked_operators`, and those that each axis could split by itself, but not all of them together: 8 rows that
    are taken apart in fours, over 2 × 2.
    """
    found: dict[tuple[str, str], Blocked] = {}
    before: list[_Walk] = []
    for axis in data_axes(program, strategies):
        walk = _Walk(program, axis, strategies[axis], before)
        _add(found, list(walk.blocked()), strategies[axis])
        before.append(walk)
    return tuple(sorted(found.values(), key=lambda each: each.is_backward))


def _add(
    found: dict[tuple[str, str], Blocked], walked: Sequence[tuple[Region, fx.Node, float]], strategy: AxisStrategy
) -> None:
    """What one axis cannot split, beside what others cannot."""
    for region, node, received in walked:
        place = (region.name, node.name)
        before = found[place].received if place in found else 0.0
        needs = SEQUENCE if _is_sequence(strategy) else ROWS
        if place in found and found[place].needs != needs:
            needs = f"{ROWS} and {SEQUENCE}"
        found[place] = _described(region, node, before + received, needs)


def _is_sequence(strategy: AxisStrategy) -> bool:
    return strategy.inputs == "sequence"


def _described(region: Region, node: fx.Node, received: float, needs: str) -> Blocked:
    origin = region.origins.get(node.name, "") or region.module
    name = _operator(region, node.name)
    return Blocked(region.name, node.name, name, origin, node.name not in region.forward_nodes, received, needs)


def notes_of(blocked: Sequence[Blocked]) -> tuple[str, ...]:
    """What the user is told of operators that are computed whole: one line for each place in the model."""
    by_line: dict[str, list[Blocked]] = {}
    for each in blocked:
        by_line.setdefault(each.origin, []).append(each)
    notes = []
    for line in by_line.values():
        price = format_bytes(int(sum(each.received for each in line)))
        notes.append(f"{line[0]} needs {line[0].needs}: it {WHOLE}, which then receives {price} more a step")
    return tuple(notes)


class _Walk:
    """What one axis makes of every value, where all goes by rows; other axes do nothing, but for those that were
    walked before: they do as they did.

    chosen: what the axis does with each operator, by region and node; None: nothing.
    """

    def __init__(self, program: Program, axis: int, strategy: AxisStrategy, before: Sequence[_Walk] = ()) -> None:
        self.program, self.axis, self.size = program, axis, program.on_mesh.sizes[axis]
        self.before = tuple(before)
        self.chosen: dict[tuple[str, str], NodeStrategy | None] = {}
        self.known: Classes = value_classes(program)
        self.classes: dict[Key, Placement] = {}
        self.sums = "all_reduce" in _inside(strategy)
        self.dim = int(_is_sequence(strategy))
        is_zigzag = program.on_mesh.axis_names[axis] in program.zigzag
        for port in program.inputs:
            shape, dim = port.type.shape, self.dim
            size = self.size * math.prod(walk.size for walk in self.before if walk.dim == dim)
            splits = len(shape) > dim and shape[dim] % ((1 + is_zigzag) * size) == 0
            pieces = Shard(dim, 2, True) if is_zigzag else Shard(dim)
            self.classes[self.known.of.get(("program", port.name, 0), ("program", port.name, 0))] = (
                pieces if splits else REPLICATE
            )

    def blocked(self) -> Iterator[tuple[Region, fx.Node, float]]:
        done: set[str] = set()
        for call in self.program.calls:
            if call.region not in done:
                done.add(call.region)
                yield from self._region(self.program.region(call.region))

    def _region(self, region: Region) -> Iterator[tuple[Region, fx.Node, float]]:
        state: dict[tuple[str, int], Placement] = {}
        holders = [node for node in region.graph.nodes if node.op == "placeholder"]
        gradients: dict[str, tuple[str, int]] = {}  # of which values: they come as those went
        for holder, key in zip(holders, placeholder_keys(region), strict=True):
            if key[0] == "gout":
                gradients[holder.name] = self._output(region, key[2])
            state[holder.name, 0] = self.classes.get(self.known.of.get(key, key), REPLICATE)
        in_backward = False
        for node in region.graph.nodes:
            if node.name not in region.ops:
                continue
            if not in_backward and node.name not in region.forward_nodes:
                in_backward = True
                state |= {(name, 0): _between(state, value) for name, value in gradients.items()}
            operands = [state.get((source.name, i), REPLICATE) for source, i in map(source_of, operands_of(node))]
            strategy = self.chosen[region.name, node.name] = self._strategy(region, node, operands)
            if strategy is None:
                yield region, node, self._received(region, node, operands)
            for index in range(len(region.ops[node.name][0].results)):
                result = None if strategy is None else strategy.results[index]
                state[node.name, index] = REPLICATE if result is None else result[self.axis]
        output = next(node for node in region.graph.nodes if node.op == "output")
        for value, key in zip(output.args[0], result_keys(region), strict=False):
            if key[0] != "slot":
                source, index = source_of(value)
                self.classes.setdefault(self.known.of[key], _between(state, (source.name, index)))

    def _output(self, region: Region, index: int) -> tuple[str, int]:
        output = next(node for node in region.graph.nodes if node.op == "output")
        source, result = source_of(output.args[0][index])
        return source.name, result

    def _strategy(self, region: Region, node: fx.Node, operands: Sequence[Placement]) -> NodeStrategy | None:
        """What the axis does with an operator whose operands come so: it leaves as many as it can as they are; None:
        nothing.
        """
        best, most = None, (-1, -1)
        for strategy in self._choices(region, node):
            wanted = [each[self.axis] for each in strategy.operands]
            pairs = list(zip(operands, wanted, strict=True))
            if not all(self._may_become(have, want) for have, want in pairs):
                continue
            split = sum(isinstance(have, Shard) for have, _ in pairs)
            kept = sum(have == want for have, want in pairs)
            rank = (kept, 0 if split else int(strategy.choices[self.axis].kind == "none"))
            if rank > most:
                best, most = strategy, rank
        return best

    def _choices(self, region: Region, node: fx.Node) -> Sequence[NodeStrategy]:
        """What the axis may do with an operator."""
        options, place = region.options[node.name], (region.name, node.name)
        did = {walk.axis: found.choices[walk.axis] for walk in self.before if (found := walk.chosen[place]) is not None}
        if not any(choice.kind != "none" for choice in did.values()):
            return columns.of_axis(options, self.axis)
        return [
            each
            for each in options.strategies
            if all(
                axis == self.axis or (choice == did[axis] if axis in did else choice.kind == "none")
                for axis, choice in enumerate(each.choices)
            )
        ]

    def _may_become(self, have: Placement, want: Placement) -> bool:
        """Whether a value may be read so where nothing is gathered: slices are free, terms may be summed, where the
        axis sums at all.
        """
        if have == want or isinstance(have, Replicate):
            return not isinstance(want, Partial) or have == want
        return self.sums and isinstance(have, Partial) and isinstance(want, Replicate)

    def _received(self, region: Region, node: fx.Node, operands: Sequence[Placement]) -> float:
        """Bytes that a rank gets of the operands' pieces that others have, in all calls of a step."""
        types = [TensorType.of(source.meta["val"]) for source in operands_of(node)]
        pieces = (t.num_bytes for t, have in zip(types, operands, strict=True) if isinstance(have, Shard))
        times = self.program.num_calls(region.name) * self.program.microbatches
        return times * sum(pieces) * (self.size - 1) / self.size


def _between(state: Mapping[tuple[str, int], Placement], value: tuple[str, int]) -> Placement:
    """What a value is between calls, where there are no terms."""
    found = state.get(value, REPLICATE)
    return found if isinstance(found, Shard) else REPLICATE
