"""name_values: every value gets the name that the model gives it, or one that says what it is.

Requires: phase `differentiated`.
Ensures: the same phase and graphs; names of nodes and ports are what a person would call them, legal in Python, unique
    in their region, and no names that the generated functions use for something else. Equal regions get equal names.

    linear_3 = linear(view_4, w)   →   o_proj = linear(attn_output, w)
    mul_11 = mul(linear_grad_input, silu)   →   grad_up_proj = mul(grad_mul, act_fn)

Where the model has no word for a value (`passes/outlining/`), a view is called as what it is a view of, a result of
several as its operator's schema says, anything else as its operator. It stands right behind `differentiate`: decisions
are kept by these names, and what is computed again later does not change those of other values.
"""

from __future__ import annotations

import builtins
import keyword
import operator
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import fx

from autopar.ir.graphs import is_view
from autopar.ir.names import RESERVED
from autopar.ir.nodes import COPY_OF, NAME, TERM, map_nodes
from autopar.ir.program import Program
from autopar.ir.region import Region
from autopar.ir.values import ValueRef

aten = torch.ops.aten


_CASTS = ("aten._to_copy.", "aten.clone.", "aten.to.", "aten.squeeze.")
_GENERIC = frozenset({"out", "y"})
"""Names of results that say no more than the operator's own."""
_TELLING = frozenset({"lse"})
"""Names of results that say by themselves what they are."""


def name_values(program: Program) -> Program:
    """Rename the nodes and ports of every region."""
    program = _with_words_for_results(program)
    result_names = _output_names(program)
    inputs = {region.name: _input_names(program, region, result_names) for region in program.regions}
    return program.with_regions({r.name: _renamed(r, inputs[r.name], result_names[r.name]) for r in program.regions})


def _with_words_for_results(program: Program) -> Program:
    """What a block returns is to others what the first block that is given it calls it: `hidden_states`."""
    words: dict[tuple[str, int], str] = {}
    for call in program.calls:
        for ref, port in zip(call.arguments, program.region(call.region).inputs, strict=True):
            if ref.call >= 0 and port.word and program.region_of(ref).module:
                words.setdefault((program.calls[ref.call].region, ref.index), _identifier(port.word))

    def named(region: Region) -> Region:
        ports = (replace(port, word=words.get((region.name, i), "")) for i, port in enumerate(region.outputs))
        return replace(region, outputs=tuple(ports))

    return program.with_regions({region.name: named(region) for region in program.regions})


def _output_names(program: Program) -> dict[str, list[str]]:
    """What the results of each region are called: as the model's outputs, where they are such, as the block that reads
    them has it, else as in the model.
    """
    outputs = {(program.calls[ref.call].region, ref.index): name for name, ref in _outputs(program)}
    for name, ref in program.updates:
        outputs.setdefault((program.calls[ref.call].region, ref.index), name.rpartition(".")[2])
    found: dict[str, list[str]] = {}
    for region in program.regions:
        results = _results(region)[: len(region.outputs)]
        found[region.name] = [
            outputs.get((region.name, index)) or port.word or _called(node) or port.name
            for index, (node, port) in enumerate(zip(results, region.outputs, strict=True))
        ]
    return found


def _called(node: fx.Node) -> str:
    """What the model calls a value, or what it is a view or a cast of; "" where it has no word for either."""
    while NAME not in node.meta and node.op == "call_function" and len(node.all_input_nodes) == 1:
        if not (is_view(node) or str(node.target).startswith(_CASTS)):
            break
        node = node.all_input_nodes[0]
    return node.name if node.op == "placeholder" else str(node.meta.get(NAME, ""))


def _outputs(program: Program) -> Iterator[tuple[str, ValueRef]]:
    """Outputs by name, but for unnamed ones: the place in a tuple is no name."""
    for name, ref in zip(program.output_names, program.outputs, strict=True):
        if ref.call >= 0 and name.isidentifier() and name != "output" and not program.region_of(ref).module:
            yield name, ref


def _input_names(program: Program, region: Region, results: Mapping[str, list[str]]) -> list[str]:
    """What a region's inputs are called: as its module's `forward` has it, else as what it makes for itself, else as
    its first caller's.
    """
    calls = [call for _, call in program.calls_of(region.name)]
    found: list[str] = []
    for position, port in enumerate(region.inputs):
        refs = [call.arguments[position] for call in calls]
        own = [ref for ref in refs if ref.call >= 0 and program.calls[ref.call].region == region.name]
        ref = (own or refs)[0]
        if port.word:
            found.append(port.word)
        elif ref.call < 0:
            found.append(ref.name)
        else:
            word = program.port(ref).word
            found.append(word or results[program.calls[ref.call].region][ref.index] or port.name)
    return found


def _results(region: Region) -> list[fx.Node]:
    output = next(node for node in region.graph.nodes if node.op == "output")
    return list(output.args[0])


def _renamed(region: Region, inputs: list[str], outputs: list[str]) -> Region:
    """The region with new names."""
    stems = _stems(region, inputs, outputs)
    names = _unique_names(region, stems)
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in region.graph.nodes:
        if node.op == "output":
            graph.output(map_nodes(node.args[0], copies.__getitem__))
            continue
        name = names[node.name]
        target = name if node.op == "placeholder" else node.target
        args, kwargs = map_nodes((node.args, node.kwargs), copies.__getitem__)
        copies[node] = graph.create_node(node.op, target, args, kwargs, name=name)
        assert copies[node].name == name, f"{name} became {copies[node].name}"
        copies[node].meta = {**node.meta, NAME: stems[node]}
        if COPY_OF in node.meta:
            copies[node].meta[COPY_OF] = names[node.meta[COPY_OF]]
    holders = [node for node in graph.nodes if node.op == "placeholder"][len(region.slots) :]
    made = _results(replace(region, graph=graph))
    return replace(
        region,
        graph=graph,
        inputs=tuple(replace(port, name=node.name) for port, node in zip(region.inputs, holders, strict=False)),
        outputs=tuple(replace(port, name=node.name) for port, node in zip(region.outputs, made, strict=False)),
        forward_nodes=frozenset(names[name] for name in region.forward_nodes),
        origins={names[name]: origin for name, origin in region.origins.items() if name in names},
    )


def _unique_names(region: Region, stems: Mapping[fx.Node, str]) -> dict[str, str]:
    """Each node's name by its old one. Of a value that is brought into shape step by step, the last gets the name
    itself, as where it is written as one line; of one that something is done to, such as adding a bias, the first.
    """
    nodes = [node for node in region.graph.nodes if node.op != "output"]
    steps = [node for node in nodes if _is_step(node, stems)]
    plain = [node for node in nodes if node not in set(steps)]
    later = [node for node in plain if _goes_on(node, stems, set(steps))]
    first, taken = [node for node in plain if node not in set(later)], set[str]()
    return {node.name: _unique(stems[node], taken) for node in (*first, *later, *steps)}


def _is_step(node: fx.Node, stems: Mapping[fx.Node, str]) -> bool:
    """Whether a value is a view, and all that reads it is what it is brought into shape for, which is called alike."""
    (user,) = node.users if len(node.users) == 1 else (node,)
    is_shape = node.op == "call_function" and node.target is not operator.getitem and is_view(node)
    return is_shape and user is not node and stems.get(user) == stems[node]


def _goes_on(node: fx.Node, stems: Mapping[fx.Node, str], steps: set[fx.Node]) -> bool:
    """Whether a value is what became of another that is called alike, that nothing else reads, and that is no step."""
    alike = [each for each in node.all_input_nodes if len(each.users) == 1 and stems[each] == stems[node]]
    is_plain = node.op == "call_function" and node.target is not operator.getitem
    return is_plain and any(each.op == "call_function" and each not in steps for each in alike)


def _stems(region: Region, inputs: list[str], outputs: list[str]) -> dict[fx.Node, str]:
    """What each node is called before names are made unique."""
    holders = [node for node in region.graph.nodes if node.op == "placeholder"]
    first = len(region.slots)
    found = {node: node.name for node in holders}
    found.update(zip(holders[first:], inputs, strict=False))
    found.update(zip(holders[len(holders) - len(region.tangents) :], (f"grad_{outputs[i]}" for i in region.tangents)))
    results = _results(region)
    named = dict(zip(results[: len(outputs)], outputs, strict=True))
    gradients = results[len(outputs) :]
    slots = [f"grad_{slot.name}" for slot in region.trainable_slots]
    flowing = [f"grad_{name}" for name, port in zip(inputs, region.inputs, strict=True) if port.differentiable]
    own = dict(zip(gradients, [*slots, *flowing], strict=False))
    counts = Counter(node.meta.get(NAME) for node in region.graph.nodes if node.name in region.forward_nodes)
    alone = {node: name for node, name in named.items() if counts[node.meta.get(NAME)] == 1}
    renamed = {f"grad_{node.meta[NAME]}": f"grad_{name}" for node, name in alone.items() if NAME in node.meta}
    for node in region.graph.nodes:
        if node.op == "call_function" and node not in found:
            wanted = str(node.meta.get(NAME, ""))
            wanted = wanted if node.name in region.forward_nodes else renamed.get(wanted, wanted)
            found[node] = named.get(node) or wanted or own.get(node) or _plain(node, found, renamed)
    for node in reversed(found):
        if _is_inner_sum(node) and NAME not in node.meta:
            found[node] = found[next(iter(node.users))]
    return {node: _identifier(stem) for node, stem in found.items()}


def _is_inner_sum(node: fx.Node) -> bool:
    """Whether a sum of gradients is but a term of a larger one."""
    users = list(node.users)
    sums = [each.target is aten.add.Tensor and each.op == "call_function" for each in (node, *users)]
    return len(users) == 1 and all(sums) and NAME not in node.meta and TERM not in node.meta


def _plain(node: fx.Node, stems: Mapping[fx.Node, str], renamed: Mapping[str, str]) -> str:
    """A name for what the model has none for."""
    target, source = str(node.target), node.all_input_nodes[0] if node.all_input_nodes else None
    user = next(iter(node.users)) if len(node.users) == 1 else node
    if wanted := str(user.meta.get(NAME, "")):
        # What becomes of it has a name: it is the same thing, not yet in shape, or before something is added to it.
        if user is not node and (is_view(user) or (_is_plain_sum(user) and not is_view(node))):
            return renamed.get(wanted, wanted)
    if TERM in node.meta:
        return str(node.meta[TERM])
    if node.target is operator.getitem and source is not None:
        first = next((user for user in source.users if user.args[1] == 0), node)
        made, result = str(first.meta.get(NAME, "")), _result_name(source, node.args[1])
        if made.startswith("grad_") and result.startswith("d"):
            return f"grad_{result.removeprefix('d')}"
        if result in _TELLING or not made:
            return result
        return made if result in _GENERIC else f"{made}_{result}"
    if source is not None and (target.startswith(_CASTS) or (is_view(node) and ".slice." not in target)):
        return stems[source]
    return target.split(".")[1].strip("_") if "." in target else target


def _is_plain_sum(node: fx.Node) -> bool:
    """Whether a node adds something to a value of its own type."""
    return node.target is aten.add.Tensor and node.op == "call_function" and not node.kwargs


_RESULTS = {
    "aten.native_layer_norm.default": ("out", "mean", "rstd"),
    "aten.native_group_norm.default": ("out", "mean", "rstd"),
    "aten.max_pool2d_with_indices.default": ("out", "indices"),
    "aten.native_batch_norm.default": ("out", "mean", "rstd"),
}
"""What results are that their schema has no names for."""


def _result_name(node: fx.Node, index: object) -> str:
    """As an operator's schema calls a result."""
    schema = getattr(node.target, "_schema", None)
    base = str(node.target).split(".")[1].strip("_") if "." in str(node.target) else "value"
    if not isinstance(index, int):
        return base
    if str(node.target) in _RESULTS:
        return _RESULTS[str(node.target)][index]
    return (schema.returns[index].name if schema is not None and index < len(schema.returns) else "") or base


def _identifier(text: str) -> str:
    """In Python's way, and fx's: `layer_norm` for `LayerNorm`."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", text).lower()
    plain = re.sub(r"\W+", "_", words, flags=re.ASCII).lstrip("_") or "value"
    return f"_{plain}" if plain[0].isdigit() else plain


def _unique(stem: str, taken: set[str]) -> str:
    """The stem itself where it is free, else with a number behind it."""
    free = not (keyword.iskeyword(stem) or hasattr(builtins, stem) or stem in RESERVED or stem in taken)
    number = 1
    name = stem
    while not free:
        name, number = f"{stem}_{number}", number + 1
        free = name not in taken
    taken.add(name)
    return name
