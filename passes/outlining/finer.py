"""Pieces for the stages of a pipeline, where a model has fewer blocks than stages: calls of modules with parameters.

    net = nn.Sequential(Linear, GELU, LayerNorm, Linear, ...)   ->   net.0 with net.1,  net.2,  net.3, ...

What computes on parameters begins a piece, and what follows until the next one belongs to it. Modules are taken from
the outermost inwards, no deeper than there have to be pieces; operators that read parameters of their own come last.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import TypeAlias

from torch import Tensor, fx

from autopar.ir.nodes import ROW
from autopar.passes.mutation import writes

Piece: TypeAlias = tuple[str, list[fx.Node]]
"""The module whose call it begins with, "" for none, and its nodes."""

ROOMY = 2
"""Twice as many pieces as stages leave a choice where to cut."""


def finer(runs: Sequence[Piece], parameters: Collection[fx.Node], wanted: int, names: Collection[str]) -> list[Piece]:
    """At least `wanted` pieces: what lies around the blocks is cut first, then the blocks. As many as there are, where
    these are too few.

    names: of modules with which pieces should begin, too, if they can.
    """
    if names:
        found = _finer(runs, parameters, wanted, names)
        if _are_enough(found, wanted, names):
            return found
    return _finer(runs, parameters, wanted, ())


def _finer(runs: Sequence[Piece], parameters: Collection[fx.Node], wanted: int, names: Collection[str]) -> list[Piece]:
    found = list(runs)
    if _are_enough(found, wanted, names):
        return found
    for opened in _opened(runs):
        for depth in _depths(opened):
            pieces = [part for path, nodes in opened for part in _cut(path, nodes, parameters, depth)]
            if _are_enough(pieces, ROOMY * wanted, names):
                return pieces
            found = max(found, pieces, key=lambda each: (_are_enough(each, 0, names), len(each)))
        if _are_enough(found, wanted, names):
            break
    return found


def _are_enough(pieces: Sequence[Piece], wanted: int, names: Collection[str]) -> bool:
    return len(pieces) >= wanted and set(names) <= {path for path, _ in pieces}


def _opened(runs: Sequence[Piece]) -> Iterator[list[Piece]]:
    """The runs, then all nodes as one; a block that stands for others has to stay one."""
    yield list(runs)
    nodes = [node for _, own in runs for node in own]
    if any(path for path, _ in runs) and not any(ROW in node.meta for node in nodes):
        yield [("", nodes)]


def _depths(runs: Sequence[Piece]) -> Iterator[int | None]:
    """How deep modules are looked for; None for operators."""
    yield from range(1, max((len(_modules(node)) for path, nodes in runs if not path for node in nodes), default=0))
    yield None


def _modules(node: fx.Node) -> list[str]:
    """The calls of modules around a node, the model's first."""
    return [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]


def _cut(path: str, nodes: list[fx.Node], parameters: Collection[fx.Node], depth: int | None) -> list[Piece]:
    """A run that is no block, cut before each call of a module of this depth, or of less, that reads parameters."""
    if path:
        return [(path, nodes)]

    def reads(node: fx.Node) -> bool:
        return any(source in parameters for source in node.all_input_nodes)

    def called(node: fx.Node) -> str:
        around = _modules(node)[1:]
        return around[min(depth or len(around), len(around)) - 1] if around else ""

    joined = _joined(nodes)
    pieces: list[Piece] = [("", [])]
    is_first = True
    for _, group in itertools.groupby(nodes, reads if depth is None else called):
        own = list(group)
        place = 0 if called(own[0]) else next((i for i, node in enumerate(own) if reads(node)), 0)
        if not any(map(reads, own)) or own[place] in joined:
            pieces[-1][1].extend(own)
            continue
        pieces[-1][1].extend(own[:place])
        name = called(own[place]).split("@")[0]
        before = pieces.pop()[1] if is_first else []
        pieces.append((name, [*before, *own[place:]]))
        is_first = False
    return pieces


def _joined(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Nodes before which nothing can be cut: what is no tensor is behind them, or what is written in place."""
    number = {node: index for index, node in enumerate(nodes)}
    found = set[fx.Node]()
    for node in nodes:
        sources = [source for source in node.all_input_nodes if source in number]
        if not writes(node):
            sources = [source for source in sources if not isinstance(source.meta.get("val"), Tensor)]
        for source in sources:
            found.update(nodes[number[source] + 1 : number[node] + 1])
    return found
