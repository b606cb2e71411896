"""fold_loops: a loop that a trace spells out becomes one operator, where its rounds do the same to one value.

Requires: phase `outlined`.
Ensures: the same phase and numbers. A round is made of pointwise operators, reductions and views of a dim; it reads
    what the round before made, tensors that all rounds read, and nothing else; what it makes on the way nobody else
    reads. Along the first dim rounds leave apart what lies apart, and what they do not leave apart is small, so that no
    split is lost that a strategy might want. Not where `Hardware.compiled` says that a compiler makes more of what is
    spelled out.

    s = sum(x); a = s + eps; x1 = x / a; s1 = sum(x1); a1 = s1 + eps; x2 = x1 / a1; …, twenty times
    →  x20 = iterate(x, [], "div(x, add(sum(x, [-1], True), 1e-06))", 20)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import fx

from autopar.base.errors import AutoparError
from autopar.ir.nodes import NAME, copy_graph, drop_dead, frozen, map_nodes, type_of
from autopar.ir.op_call import TensorSpec
from autopar.ir.program import Program
from autopar.ir.region import Region
from autopar.ir.rounds import LEAST_ROUNDS, stretches
from autopar.machine.mesh import Mesh
from autopar.operators.iterated import may_be_called, parsed
from autopar.operators.rules.iterated import dims_of_values
from autopar.strategies.axis import AxisStrategy

_OVERLOAD = type(torch.ops.aten.add.Tensor)
logger = logging.getLogger("autopar.fold_loops")

MOST_TOGETHER = 4096
"""Elements that rounds do not leave apart: a loop over more of them (rows and columns of all tokens) may be worth a
split of its own in each round.
"""


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop: the value that its first round is given, tensors that all read, the text of a round, how many there are,
    and what the last one makes.
    """

    start: fx.Node
    others: tuple[fx.Node, ...]
    body: str
    times: int
    result: fx.Node


def fold_loops(program: Program, *, mesh: Mesh, strategies: Sequence[AxisStrategy] = ()) -> Program:
    """Fold what can be; the program itself where nothing is."""
    if mesh.hardware.compiled or any(strategy.grid for strategy in strategies):
        return program
    regions: dict[str, Region] = {}
    for region in program.regions:
        if found := loops(region.graph):
            regions[region.name] = _rewrite(region, found)
            logger.info("%s: %d loops are one operator each", region.name, len(found))
    return program.with_regions(regions) if regions else program


def loops(graph: fx.Graph) -> list[Loop]:
    """Those of a graph that one operator can stand for, apart from each other."""
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    if len(nodes) < 2 * LEAST_ROUNDS:
        return []
    known: dict[object, int] = {}
    kinds = np.array([known.setdefault(_kind(node), len(known)) for node in nodes])
    free = np.ones(len(nodes), dtype=bool)
    found: list[Loop] = []
    for _, length, start, end in sorted(stretches(kinds), key=lambda each: (-each[0], each[1], each[2])):
        best: tuple[int, int, Loop] | None = None
        for first in range(start, min(start + length, end)):
            times = (end - first) // length
            stop = first + times * length
            if times < LEAST_ROUNDS or (best is not None and times < best[0]) or not free[first:stop].all():
                continue
            if (loop := _loop(nodes[first:stop], length)) is not None:
                best = times, first, loop
        if best is not None:
            times, first, loop = best
            free[first : first + times * length] = False
            found.append(loop)
    return found


def _kind(node: fx.Node) -> object:
    """Equal for nodes that may do the same in two rounds."""
    made = type_of(node)
    if node.op != "call_function" or made is None or not _may_be_called(node.target):
        return node
    args = map_nodes((node.args, node.kwargs), type_of)
    return node.target, frozen(args), made


def _may_be_called(target: Any) -> bool:
    return isinstance(target, _OVERLOAD) and may_be_called(target)


# -------------------------------------------------------------------------------------------------- from rounds to text


def _loop(nodes: Sequence[fx.Node], length: int) -> Loop | None:
    """The loop whose rounds these are, of so many operators each."""
    place = {node: divmod(number, length) for number, node in enumerate(nodes)}
    times = len(nodes) // length
    template = [_reads(nodes[length + step], 1, place) for step in range(length)]
    carried = {step for each in template for round_, step in each if round_ == -1 and isinstance(step, int)}
    if len(carried) != 1 or any(round_ is None for each in template for round_, _ in each):
        return None
    (last,) = carried
    starts: set[fx.Node] = set()
    for number, node in enumerate(nodes):
        round_, step = divmod(number, length)
        reads = _reads(node, round_, place)
        if round_ == 0:
            if len(reads) != len(template[step]):
                return None
            for read, wanted in zip(reads, template[step]):
                if wanted[0] == -1 and isinstance(read[1], fx.Node):
                    starts.add(read[1])
                elif read != wanted:
                    return None
        elif reads != template[step]:
            return None
    result = nodes[(times - 1) * length + last]
    if len(starts) != 1 or any(user not in place for node in nodes if node is not result for user in node.users):
        return None
    (start,) = starts
    others = tuple(
        dict.fromkeys(n for each in template for round_, n in each if round_ == 0 and isinstance(n, fx.Node))
    )
    if type_of(start) != type_of(result) or any(type_of(other) is None for other in others) or start in others:
        return None
    first = tuple(nodes[:length])
    body = _text(first, first[last], {start: "x", **{other: f"y{i}" for i, other in enumerate(others)}})
    if body is None or not _is_apart(body, (start, *others)) or not _agrees(body, first, first[last], start, others):
        return None
    return Loop(start, others, body, times, result)


def _reads(
    node: fx.Node, round_: int, place: Mapping[fx.Node, tuple[int, int]]
) -> list[tuple[int | None, int | fx.Node]]:
    """What a node reads, in order: 0 and the step of its own round, -1 and that of the one before, 0 and a node from
    outside; None and something else.
    """
    found: list[tuple[int | None, int | fx.Node]] = []

    def note(source: fx.Node) -> fx.Node:
        if source not in place:
            found.append((0, source))
        else:
            of, step = place[source]
            found.append((of - round_ if of - round_ in (0, -1) else None, step))
        return source

    map_nodes((node.args, node.kwargs), note)
    return found


def _text(nodes: Sequence[fx.Node], result: fx.Node, names: dict[fx.Node, str]) -> str | None:
    """A round as text; None for what is not said in it."""
    inside = set(nodes)
    said: dict[fx.Node, str] = dict(names)
    statements: list[str] = []
    for node in nodes:
        words = [*map(_Words(said).of, node.args)]
        words += [f"{key}={word}" if (word := _Words(said).of(each)) else word for key, each in node.kwargs.items()]
        if any(word is None for word in words):
            return None
        text = f"{node.target.overloadpacket.__name__}({', '.join(map(str, words))})"  # type: ignore[union-attr]
        reads = sum(_times_read(user, node) for user in node.users if user in inside)
        if reads == (node is not result):
            said[node] = text
        else:
            said[node] = f"t{len(statements)}"
            statements.append(f"{said[node]} = {text}")
    return "; ".join([*statements, said[result]])


def _times_read(user: fx.Node, node: fx.Node) -> int:
    count = 0

    def note(source: fx.Node) -> fx.Node:
        nonlocal count
        count += source is node
        return source

    map_nodes((user.args, user.kwargs), note)
    return count


@dataclass(frozen=True, slots=True)
class _Words:
    said: Mapping[fx.Node, str]

    def of(self, value: Any) -> str | None:
        """An argument as text."""
        if isinstance(value, fx.Node):
            return self.said.get(value)
        if isinstance(value, list | tuple):
            words = [self.of(each) for each in value]
            return None if None in words else f"[{', '.join(map(str, words))}]"
        if isinstance(value, float) and not math.isfinite(value):
            return None
        return repr(value) if value is None or type(value) in (bool, int, float, str) else None


def _specs(nodes: Sequence[fx.Node]) -> list[TensorSpec]:
    return [TensorSpec(tuple(node.meta["val"].shape), node.meta["val"].dtype) for node in nodes]


def _is_apart(body: str, operands: Sequence[fx.Node]) -> bool:
    """Whether rounds leave apart what lies apart along the first dim, and all but a few elements."""
    specs = [TensorSpec(tuple(max(size, 2) for size in s.shape), s.dtype) if i == 0 else s
             for i, s in enumerate(_specs(operands))]  # fmt: skip
    try:
        names = dims_of_values(specs, body)
    except RuntimeError:  # one of the others is as long as it is there, and no longer
        specs = _specs(operands)
        names = dims_of_values(specs, body)
    together = math.prod(size for name, size in zip(names[0], specs[0].shape) if not name.startswith("d"))
    return bool(names[0]) and names[0][0].startswith("d") and together <= MOST_TOGETHER


def _agrees(body: str, first: Sequence[fx.Node], result: fx.Node, start: fx.Node, others: Sequence[fx.Node]) -> bool:
    """Whether the text does to a few numbers what the operators do."""
    specs = _specs((start, *others))
    generator = torch.Generator().manual_seed(0)
    values: dict[fx.Node, torch.Tensor] = {}
    for node, spec, names in zip((start, *others), specs, dims_of_values(specs, body)):
        cut = [min(size, 2) if name.startswith("d") else size for name, size in zip(names, spec.shape)]
        values[node] = (torch.rand(cut, generator=generator) + 0.5).to(spec.dtype)
    try:
        text = parsed(body)(values[start], [values[other] for other in others])
        made: dict[fx.Node, Any] = dict(values)
        for node in first:
            args, kwargs = map_nodes((node.args, node.kwargs), made.__getitem__)
            made[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    except (AutoparError, RuntimeError, TypeError, ValueError, NotImplementedError, IndexError):
        return False
    return isinstance(text, torch.Tensor) and torch.equal(text.nan_to_num(), made[result].nan_to_num())


# ---------------------------------------------------------------------------------------------------------- the graph


def _rewrite(region: Region, found: Sequence[Loop]) -> Region:
    graph, copies = copy_graph(region.graph)
    origins = dict(region.origins)
    for loop in found:
        result = copies[loop.result]
        with graph.inserting_before(result):
            others = [copies[other] for other in loop.others]
            node = graph.call_function(
                torch.ops.autopar.iterate.default, (copies[loop.start], others, loop.body, loop.times)
            )
        node.meta["val"] = loop.result.meta["val"]
        node.meta |= {key: loop.result.meta[key] for key in (NAME,) if key in loop.result.meta}
        origins[node.name] = region.origins.get(loop.result.name, "")
        result.replace_all_uses_with(node)
        copies[loop.result] = node
    drop_dead(graph)
    graph.lint()
    return replace(region, graph=graph, origins=origins)
