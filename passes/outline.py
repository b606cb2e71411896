"""outline: cut the graph of a model into regions that occur once or many times, and the calls between them.

Requires: phase `captured`.
Ensures: phase `outlined`; each element of an outermost `nn.ModuleList` is one call; elements with the same graph share
    one region, if they share parameters with the same calls; what lies between is a gap region (prologue, gap,
    epilogue), where the rounds of a long loop are calls, too (outlining/rounds.py). Results are unchanged.

    model: embedding, layer 0, layer 1, norm, loss  →  prologue, layer × 2, epilogue;  calls 0: prologue, 1: layer, 2:
    layer, 3: epilogue
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.ir.folded import unfolded
from autopar.ir.names import base_name, block_path
from autopar.ir.nodes import GIVEN, ROW
from autopar.ir.program import Program
from autopar.ir.region import Call, Region
from autopar.ir.tensor_type import TensorType
from autopar.ir.values import Port, Slot, ValueRef
from autopar.passes.outlining.apart import apart
from autopar.passes.outlining.finer import finer
from autopar.passes.outlining.rounds import rounds
from autopar.passes.outlining.wanted_names import library_modules, name_nodes


@dataclass(slots=True)
class _Run:
    """Consecutive nodes of one module-list element (`path`), or of none ("")."""

    path: str
    nodes: list[fx.Node]


@dataclass(slots=True)
class _Piece:
    """A run with its border."""

    run: _Run
    slots: list[str]
    inputs: list[fx.Node]
    outputs: list[fx.Node]


_RESERVED = frozenset({"comm", "p", "saved", "kept", "g", "torch", "F", "ops", "aten"})
"""What a region's functions call things of their own; a model's input may have any name."""


def outline(program: Program, *, pieces: int = 0, names: Collection[str] = ()) -> Program:
    """Cut the one captured region into regions and calls.

    Args:
        pieces: how many calls a pipeline needs at least; a model with fewer blocks is cut finer (outlining/finer.py).
        names: of modules before which a pipeline is to be cut.
    """
    (model,) = program.regions
    elements = _block_paths(model)
    holders = [node for node in model.graph.nodes if node.op == "placeholder"]
    slot_of = dict(zip(holders, model.slots, strict=False))
    runs = [part for run in _runs(model, elements) for part in _rounds(run, slot_of)]
    if pieces > 1:
        parameters = {holder for holder, slot in slot_of.items() if slot.is_parameter}
        left_out = sum(len(row.like) * len(row.left_out) for row in program.folded)
        named = () if program.folded else names
        runs = [_Run(*r) for r in finer([(r.path, r.nodes) for r in runs], parameters, pieces - left_out, named)]
    bordered = [_piece(run, slot_of, model) for run in runs]
    _name_apart(bordered, {slot.name for slot in slot_of.values() if slot.is_parameter})
    returned = next(node for node in model.graph.nodes if node.op == "output").args[0]
    count = len(program.outputs)
    changed = set(returned[count:])
    producers = {
        node: ValueRef(name=port.name) for node, port in zip(holders[len(model.slots) :], model.inputs, strict=True)
    }
    regions: dict[Any, Region] = {}
    calls: list[Call] = []
    for piece in bordered:
        region, key = _build(piece, slot_of, model, changed)
        if key not in regions:
            regions[key] = region
            results = next(node for node in region.graph.nodes if node.op == "output").args[0]
            name_nodes(
                region.graph.nodes, {r for r, node in zip(results, piece.outputs, strict=True) if node in changed}
            )
        producers.update({node: ValueRef(len(calls), index) for index, node in enumerate(piece.outputs)})
        arguments = tuple(producers[node] for node in piece.inputs)
        calls.append(Call(str(key), piece.run.path, tuple(piece.slots), arguments))
    names = _region_names(regions, calls)
    results = [producers[node] for node in returned]  # outputs, then updates, as in the one region
    updates = [(name, ref) for (name, _), ref in zip(program.updates, results[count:], strict=True)]
    outlined = replace(
        program,
        phase="outlined",
        regions=tuple(replace(region, name=names[str(key)]) for key, region in regions.items()),
        calls=tuple(replace(call, region=names[call.region]) for call in calls),
        outputs=tuple(results[:count]),
        updates=tuple(sorted(updates, key=lambda update: (update[1].call, update[1].index))),
    )
    rows = {
        node.meta[ROW]: place for place, run in reversed([*enumerate(runs)]) for node in run.nodes if ROW in node.meta
    }
    return apart(unfolded(outlined, rows))


def _block_paths(model: Region) -> set[str]:
    """Paths that look like elements of an outermost module list: the shortest `a.b.<number>` prefix that has a
    submodule path.
    """
    paths = {_module_path(node) for node in model.graph.nodes if node.op == "call_function"}
    blocks: set[str] = set()
    for path in paths:
        if block := block_path(path):
            blocks.add(block)
    lists = {block.rsplit(".", 1)[0] for block in blocks}
    counts = {name: sum(block.rsplit(".", 1)[0] == name for block in blocks) for name in lists}
    deep = {block for block in blocks if any(path.startswith(block + ".") for path in paths)}
    return {b for b in blocks if counts[b.rsplit(".", 1)[0]] > 1 and b in deep}


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    return list(stack.values())[-1][0].split("@")[0] if stack else ""


def _block_of(node: fx.Node, blocks: set[str]) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    for path, _ in stack.values():
        plain = path.split("@")[0]
        if plain in blocks:
            return plain
    return ""


def _runs(model: Region, blocks: set[str]) -> list[_Run]:
    runs: list[_Run] = []
    for node in model.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        path = _block_of(node, blocks)
        if runs and runs[-1].path == path:
            runs[-1].nodes.append(node)
        else:
            runs.append(_Run(path, [node]))
    return runs


def _rounds(run: _Run, slot_of: Mapping[fx.Node, Slot]) -> list[_Run]:
    """The rounds of a loop that lies around the blocks; a run of a block stays whole."""
    return [run] if run.path else [_Run("", nodes) for nodes in rounds(run.nodes, slot_of)]


def _piece(run: _Run, slot_of: Mapping[fx.Node, Slot], model: Region) -> _Piece:
    inside = set(run.nodes)
    slots: list[str] = []
    inputs: list[fx.Node] = []
    for node in run.nodes:
        for source in node.all_input_nodes:
            if source in slot_of:
                if (name := slot_of[source].name) not in slots:
                    slots.append(name)
            elif source not in inside and source not in inputs:
                inputs.append(source)
    outputs = [node for node in run.nodes if any(user not in inside for user in node.users)]
    return _Piece(run, slots, inputs, outputs)


def _name_apart(pieces: Sequence[_Piece], parameters: Container[str]) -> None:
    """A piece that alone uses a parameter of another module's name (a bias that is tied to it) is none of its block's:
    gradients of a block's own parameters are called by names inside the block.
    """
    uses = Counter(name for piece in pieces for name in piece.slots)
    for piece in pieces:
        own = [name for name in piece.slots if name in parameters and uses[name] == 1]
        if piece.run.path and not all(name.startswith(f"{piece.run.path}.") for name in own):
            piece.run.path = ""


def _build(
    piece: _Piece, slot_of: Mapping[fx.Node, Slot], model: Region, changed: Container[fx.Node]
) -> tuple[Region, str]:
    """The region of one piece and its structural key: equal keys compute the same thing on parameters of the same
    shapes, return it in the same order, and replace the same buffers by it (`changed`).
    """
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    by_name = {slot.name: (node, slot) for node, slot in slot_of.items()}
    prefix = piece.run.path + "."
    slots: list[Slot] = []
    for name in piece.slots:
        node, slot = by_name[name]
        relative = name.removeprefix(prefix) if piece.run.path else name
        slots.append(replace(slot, name=relative))
        env[node] = _placeholder(graph, _identifier(relative), node)
    inputs: list[Port] = []
    for node in piece.inputs:
        name = base_name(node)
        env[node] = _placeholder(graph, f"{name}_" if name in _RESERVED else name, node)
        word = node.meta.get(GIVEN, {}).get(piece.run.path, "")
        inputs.append(Port(env[node].name, TensorType.of(node.meta["val"]), word=word))
    origins: dict[str, str] = {}
    for node in piece.run.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
        env[node] = graph.create_node(node.op, node.target, args, kwargs, name=base_name(node))
        env[node].meta = dict(node.meta)
        origins[env[node].name] = _star(model.origins.get(node.name, ""), piece.run.path)
    graph.output(tuple(env[node] for node in piece.outputs))
    outputs = tuple(Port(env[node].name, TensorType.of(node.meta["val"])) for node in piece.outputs)
    module = _star(piece.run.path, piece.run.path)
    leaves = frozenset(_star(path, piece.run.path) for path in library_modules(piece.run.nodes))
    region = Region("", module, graph, tuple(slots), tuple(inputs), outputs, origins=origins, leaves=leaves)
    number = {node: i for i, node in enumerate(piece.run.nodes)}
    marks = [f"{number[node]}{' update' if node in changed else ''}" for node in piece.outputs]
    return region, "\n".join([_structural_key(region), *marks])


def _placeholder(graph: fx.Graph, name: str, source: fx.Node) -> fx.Node:
    node = graph.placeholder(name)
    node.target = node.name
    node.meta = {"val": source.meta["val"]}
    return node


def _identifier(name: str) -> str:
    plain = re.sub(r"\W", "_", name, flags=re.ASCII)
    return plain if plain[:1].isidentifier() else f"_{plain}"


def _star(text: str, path: str) -> str:
    """`model.layers.3.mlp` → `model.layers.*.mlp` for a block at model.layers.3."""
    return text.replace(path, re.sub(r"\d+$", "*", path), 1) if path and text.startswith(path) else text


def _structural_key(region: Region) -> str:
    number: dict[fx.Node, int] = {}
    lines = [f"{slot.name}:{slot.type}:{slot.trainable}" for slot in region.slots]
    lines += [str(port.type) for port in region.inputs]

    def text(value: Any) -> str:
        if isinstance(value, fx.Node):
            return f"%{number[value]}"
        if isinstance(value, (list, tuple)):
            return f"[{','.join(map(text, value))}]"
        if isinstance(value, slice):
            return f"slice({text(value.start)},{text(value.stop)},{text(value.step)})"
        return repr(value)

    for node in region.graph.nodes:
        number[node] = len(number)
        if node.op != "placeholder":
            arguments = text(list(node.args)) + text([[k, v] for k, v in sorted(node.kwargs.items())])
            lines.append(f"{node.target}{arguments}{_type_text(node)}")
    return "\n".join([region.module, *lines])


def _type_text(node: fx.Node) -> str:
    value = node.meta.get("val")
    return str(TensorType.of(value)) if isinstance(value, torch.Tensor) else ""


def _region_names(regions: Mapping[str, Region], calls: Sequence[Call]) -> dict[str, str]:
    """`layer` for `model.layers.*`, `prologue`, `loop`, `epilogue`, `gap`; numbered where a name would serve twice."""
    if len(regions) == 1:
        return dict.fromkeys(regions, "model")
    wanted: dict[str, str] = {}
    for key, region in regions.items():
        if region.module:
            wanted[key] = _block_name(region.module, [r.module for r in regions.values()])
        elif sum(call.region == key for call in calls) > 1:
            wanted[key] = "loop"
        elif calls[0].region == key:
            wanted[key] = "prologue"
        else:
            wanted[key] = "epilogue" if calls[-1].region == key else "gap"
    return _numbered(wanted)


def _block_name(module: str, modules: Iterable[str]) -> str:
    parts = [part.rstrip("*") for part in module.split(".") if part != "*" and not part.isdigit()] or ["layer"]
    last = {"h": "block", "layers": "layer", "layer": "layer"}.get(parts[-1], parts[-1].rstrip("s") or parts[-1])
    clash = any(other != module and other.split(".")[-2:] == module.split(".")[-2:] for other in modules)
    return _identifier(f"{parts[-2]}_{last}" if clash and len(parts) > 1 else last)


def _numbered(wanted: Mapping[str, str]) -> dict[str, str]:
    total = {name: list(wanted.values()).count(name) for name in wanted.values()}
    seen: dict[str, int] = {}
    names: dict[str, str] = {}
    for key, name in wanted.items():
        seen[name] = seen.get(name, 0) + 1
        names[key] = name if total[name] == 1 else f"{name}_{seen[name]}"
        while total[name] > 1 and names[key] in total:  # a module is called so
            names[key] += "_"
    return names
