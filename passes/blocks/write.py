"""The nodes of traced blocks in place of calls of them."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from autopar.ir.names import block_path
from autopar.ir.nodes import ROW, map_nodes
from autopar.passes.blocks.cached import Kept
from autopar.passes.blocks.fold import Row, fold
from autopar.passes.blocks.hollow import NotRepeated
from autopar.passes.blocks.marks import AGAIN_ONE, ENTER, GIVEN, LEAVE, MARKS, REPEATS
from autopar.passes.blocks.recording import Place


@dataclass(slots=True)
class Traced:
    """A block that was traced: its path, what its forward read, how it was called, what it calls the tensors among its
    arguments, and what it gave.

    plain: how many of the tensors that it is given are no states of a cache. kept: what it keeps in one. values: what
    those that it is given hold, by their place, whose values its forward went by. sets: the attributes that it sets.
    results: one is a tensor that was made (shape, stride, dtype, device), one that was given (its place), the cache, or
    plain; what it sets stands behind what it returns, the states come last.
    """

    key: int
    path: str
    call: tuple[object, ...]
    reads: tuple[tuple[str, str], ...]
    words: list[str]
    plain: int
    kept: Kept | None = None
    values: dict[int, Tensor] = field(default_factory=dict)
    sets: tuple[Place, ...] = ()
    result: Any = None
    results: list[tuple[str, Any]] = field(default_factory=list)

    @property
    def made_states(self) -> range:
        """Which of the tensors that it made are states."""
        kinds = [kind for kind, _ in self.results]
        count = self.result.num_leaves + len(self.sets) if self.kept is not None else len(kinds)
        return range(kinds[:count].count("made"), kinds.count("made"))


@dataclass(frozen=True, slots=True)
class Written:
    """What writing blocks out gave: the placeholders of tensors that the tracer did not see, by name; what was left
    out; and of which traced block's constant each other block's own is a copy, by name.
    """

    holders: Mapping[str, fx.Node] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)


def write_out(
    graph: fx.Graph,
    origins: dict[str, str],
    names: Mapping[fx.Node, str],
    traced: list[Traced],
    constants: set[str],
    inputs: Mapping[fx.Node, str],
) -> Written:
    """Replace every call of a block in the graph by the block, but for those of long rows, which are left out.

    Args:
        names: of the placeholders that are parameters, buffers and constants. constants: those that the tracer made
            tensors of. inputs: the names of the placeholders of the batch.

    Raises:
        NotRepeated: a block reads or gives more than what it is called with and returns.
    """
    repeats = [node for node in graph.nodes if node.target in REPEATS]
    enters = {node.args[1]: node for node in graph.nodes if node.target is ENTER}
    leaves = {node.args[1]: node for node in graph.nodes if node.target is LEAVE}
    # Of a block that nobody reads nothing is left in the graph, so nothing is written.
    bodies = {key: _body(graph, traced[key], enter, leaves.get(key), names) for key, enter in enters.items()}
    if unseen := [node for node in repeats if node.args[1] not in bodies]:
        raise NotRepeated(f"{unseen[0].args[2]} repeats a block of which nothing is left")
    whole = {key for key, body in bodies.items() if _is_one_piece(traced[key], body)}
    copies: dict[str, str] = {}
    for node in repeats:
        found = traced[node.args[1]]
        own = {name for name in constants if name.startswith(f"{found.path}.")}
        copies.update((_moved(name, found.path, str(node.args[2])), name) for name in own)
    blocks: dict[Any, Traced] = {found.key: found for found in traced if found.key in whole}
    rows = fold(repeats, lambda node: blocks.get(node.args[1]), inputs)
    holders = _Holders(graph, {name: node for node, name in names.items()})
    for node in list(graph.nodes):
        if node.target in REPEATS:
            _name_arguments(graph, node, str(node.args[2]), traced[node.args[1]])
            _insert(origins, node, traced[node.args[1]], bodies[node.args[1]], names, holders)
    for node in reversed(list(graph.nodes)):
        if node.target is ENTER:
            _name_arguments(graph, node, traced[node.args[1]].path, traced[node.args[1]])
        if node.target in (ENTER, LEAVE):
            _pass_through(graph, node, node.args[0])
    return Written(holders.made, rows, copies)


def _name_arguments(graph: fx.Graph, call: fx.Node, path: str, found: Traced) -> None:
    """Mark what a block calls its arguments, as where it is traced whole."""
    if any(found.words):
        with graph.inserting_before(call):
            graph.call_function(GIVEN, (call.args[0], path, found.words))


class _Holders:
    """The placeholders of parameters and buffers by name; new ones for those that have none."""

    def __init__(self, graph: fx.Graph, known: Mapping[str, fx.Node]) -> None:
        self._graph, self._known = graph, known
        self.made: dict[str, fx.Node] = {}

    def get(self, name: str, like: fx.Node) -> fx.Node:
        if name in self._known:
            return self._known[name]
        if name not in self.made:
            with self._graph.inserting_before(next(iter(self._graph.nodes))):
                self.made[name] = self._graph.placeholder("p_" + re.sub(r"\W", "_", name).lower())
            self.made[name].meta = dict(like.meta)
        return self.made[name]


def _is_one_piece(found: Traced, body: _Body) -> bool:
    """Whether the block will be one call once the graph is cut (passes/outline.py)."""
    paths = [[where.split("@")[0] for where, _ in (n.meta.get("nn_module_stack") or {}).values()] for n in body.nodes]
    deep = any(path.startswith(f"{found.path}.") for own in paths for path in own)
    return deep and block_path(found.path) == found.path and all(found.path in own for own in paths)


@dataclass(frozen=True, slots=True)
class _Body:
    """The nodes of a traced block, in order, what it was given, and what it made."""

    nodes: list[fx.Node]
    given: list[fx.Node]
    made: list[fx.Node]


def _body(graph: fx.Graph, found: Traced, enter: Any, leave: Any, names: Mapping[fx.Node, str]) -> _Body:
    """enter, leave: nodes of the marks around it; None where it makes nothing."""
    made: list[fx.Node] = list(leave.args[0]) if leave is not None else []
    inside: set[fx.Node] = set()
    waiting = list(made)
    while waiting:
        node = waiting.pop()
        if node in inside or node is enter:
            continue
        if node.op == "placeholder":
            _check_parameter(found, names.get(node, ""))
            continue
        if node.target in MARKS:
            raise NotRepeated(f"{found.path} reads what another block made")
        inside.add(node)
        waiting += node.all_input_nodes
    # What lies inside is read inside alone.
    picks = set(enter.users)
    for node in [*inside, enter]:
        for user in node.users:
            if user not in inside and user is not leave and user not in picks:
                raise NotRepeated(f"{user} reads {node}, inside {found.path}")
    order = [node for node in graph.nodes if node in inside and node not in picks]
    return _Body(order, list(enter.args[0]), made)


def _check_parameter(found: Traced, name: str) -> None:
    blocks, own = found.path.rpartition(".")[0] + ".", found.path + "."
    if name.startswith(blocks) and not name.startswith(own):
        raise NotRepeated(f"{found.path} reads {name}")


def _insert(
    origins: dict[str, str], call: fx.Node, found: Traced, body: _Body, names: Mapping[fx.Node, str], holders: _Holders
) -> None:
    """The block's nodes in place of a call of it, with the call's own parameters and arguments."""
    path, own = str(call.args[2]), found.path + "."
    graph, env = call.graph, dict[fx.Node, fx.Node]()

    def lookup(node: fx.Node) -> fx.Node:
        if node in env:
            return env[node]
        if node.op == "placeholder":
            name = names.get(node, "")
            return holders.get(f"{path}.{name.removeprefix(own)}", node) if name.startswith(own) else node
        if node.target is operator.getitem and node.args[0].target is ENTER:  # type: ignore[union-attr]
            return call.args[0][node.args[1]]  # type: ignore[index,return-value]
        raise NotRepeated(f"{found.path} reads {node}")

    with graph.inserting_before(call):
        for node in body.nodes:
            new = graph.create_node(
                node.op,
                node.target,
                map_nodes(node.args, lookup),
                map_nodes(node.kwargs, lookup),
                name=_base(node.name),
            )
            new.meta = dict(node.meta)
            if ROW in call.meta:
                new.meta[ROW] = call.meta[ROW]
            stack = node.meta.get("nn_module_stack") or {}
            new.meta["nn_module_stack"] = {
                _moved(key, found.path, path): (_moved(where, found.path, path), kind)
                for key, (where, kind) in stack.items()
            }
            origins[new.name] = _moved(origins.get(node.name, ""), found.path, path)
            env[node] = new
    made = [lookup(node) for node in body.made]
    if call.target is AGAIN_ONE:
        call.replace_all_uses_with(made[0])
        graph.erase_node(call)
    else:
        _pass_through(graph, call, made)


def _pass_through(graph: fx.Graph, node: fx.Node, values: Any) -> None:
    """Whoever picks a result of `node` gets the value at that place."""
    for pick in list(node.users):
        pick.replace_all_uses_with(values[pick.args[1]])
        graph.erase_node(pick)
    graph.erase_node(node)


def _moved(text: str, source: str, target: str) -> str:
    """`model.layers.0.mlp` → `model.layers.7.mlp`."""
    if text == source or text.startswith((f"{source}.", f"{source} ", f"{source}@")):
        return target + text.removeprefix(source)
    return text


def _base(name: str) -> str:
    head, _, tail = name.rpartition("_")
    return head if head and tail.isdigit() else name
