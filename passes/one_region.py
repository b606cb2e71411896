"""What torch.export made of a model becomes a program of one region: its graph, variables, constants and outputs."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from autopar.base.errors import AutoparError
from autopar.base.torch_compat import tracing as compat
from autopar.ir.program import BRANCH, Branch, Program
from autopar.ir.region import Call, Region
from autopar.ir.tensor_type import TensorType
from autopar.ir.told import Carried
from autopar.ir.values import Port, Slot, ValueRef, Variable
from autopar.passes import inner_gradients, mutation
from autopar.passes.blocks import words
from autopar.passes.blocks.trace import Blocks
from autopar.passes.blocks.write import Written
from autopar.passes.chosen_experts import simplify_expert_loops
from autopar.passes.chosen_rows import keep_rows
from autopar.passes.dense_experts import simplify_dense_experts
from autopar.passes.dense_gradients import make_gradients_dense
from autopar.passes.emptied import seen_dtype
from autopar.passes.exported import clean_graph, graph_modules, origin_of
from autopar.passes.grouped_experts import simplify_grouped_experts
from autopar.passes.indices import simplify_batched_index, simplify_masked_write, simplify_pieces
from autopar.passes.reshapes import simplify_reshapes
from autopar.passes.strided import simplify_strided
from autopar.passes.triangular import simplify_substitution
from autopar.passes.unsorted import number_parts, simplify_sorted


def to_program(
    model: nn.Module,
    precision: torch.dtype | None,
    exported: torch.export.ExportedProgram,
    names: list[str | None],
    blocks: Blocks | None = None,
    branches: Sequence[Branch] = (),
    carried: Sequence[Carried] = (),
) -> Program:
    """names: of the leaves of the batch, None for those that are no tensors. blocks: those that were traced once, whose
    repetitions are written out. branches: where there are any, the number of the first that goes another way is
    returned beside the results. carried: what forward leaves on modules, returned beside them likewise.

    Raises:
        AutoparError: what a program cannot say: autocast in forward, inputs and parameters that change, outputs that
            are no tensors, tensors without values.
    """
    _check_autocast(exported.graph_module, precision)
    graph, origins, placeholders = clean_graph(exported)
    written = Written() if blocks is None else _written_out(exported, graph, origins, placeholders, blocks, names)
    words.take_notes(graph)
    inner_gradients.write_out(graph, origins)
    notes = make_gradients_dense(graph, origins)
    simplify_batched_index(graph, origins)
    simplify_masked_write(graph, origins)
    number_parts(graph, origins)
    simplify_expert_loops(graph, origins)
    keep_rows(graph, origins)
    simplify_sorted(graph, origins)
    simplify_grouped_experts(graph, origins)
    simplify_dense_experts(graph, origins)
    simplify_pieces(graph, origins)
    simplify_substitution(graph, origins)
    simplify_strided(graph, origins)
    simplify_reshapes(graph, origins)
    variables = _variables(model, precision)
    tied = {alias: name for name, variable in variables.items() for alias in variable.aliases}
    inputs, input_nodes = _inputs(exported, placeholders, names)
    held, constants = dict(written.holders), {}
    for spec in exported.graph_signature.input_specs:
        if spec.kind.name == "USER_INPUT":
            continue
        node = placeholders[spec.arg.name]
        name = str(spec.target) if spec.target else spec.arg.name
        name = tied.get(name, name)
        if name not in variables:
            if not node.users:
                continue  # a tensor that forward makes, of which only the number is left
            type_ = TensorType.of(node.meta["val"])
            variables[name] = Variable(name, type_, type_.dtype, False, False)
        if node.users:
            held[name] = node
            if spec.kind.name == "CONSTANT_TENSOR":
                constants[name] = _with_values(exported.constants[str(spec.target)], node, origins)
    for name, source in written.copies.items():
        if source in constants:
            variables[name] = replace(variables[source], name=name)
            constants[name] = constants[source]
    slots = tuple(Slot(n, each.type, each.trainable, each.is_parameter) for n, each in variables.items() if n in held)
    _reorder_placeholders(graph, [held[slot.name] for slot in slots] + input_nodes)
    row_of = {place: number for number, row in enumerate(written.rows) for place in row.results}
    buffers = {alias: variables[name].type.dtype for alias, name in (*zip(variables, variables), *tied.items())}
    frozen = _frozen(variables)
    outputs, output_names, output_leaves, changed, places = _outputs(
        exported, graph, row_of, buffers, frozen, bool(branches), len(carried)
    )
    for name in {tied.get(name, name) for name in changed}:  # as a buffer: whole on every rank, in its own dtype
        variables[name] = replace(variables[name], is_parameter=False)
    slots = tuple(replace(slot, is_parameter=variables[slot.name].is_parameter) for slot in slots)
    folded = tuple(
        replace(row.folded, outputs={places[place]: again for place, again in row.results.items()})
        for row in written.rows
    )
    updated = [(tied.get(name, name), ValueRef(0, len(output_names) + i)) for i, name in enumerate(changed)]
    return Program(
        "captured",
        (Region("model", "", graph, slots, inputs, outputs, origins=origins),),
        (Call("model", "", tuple(slot.name for slot in slots), tuple(ValueRef(name=p.name) for p in inputs)),),
        inputs,
        tuple(ValueRef(0, i) for i in range(len(output_names))),
        output_names,
        tuple(variables.values()),
        output_spec=_spec_of(exported, bool(branches), bool(carried)),
        output_leaves=output_leaves,
        constants=constants,
        updates=tuple(updated),
        folded=folded,
        notes=notes,
        branches=tuple(branches),
        carried=tuple(carried),
    )


def _spec_of(exported: torch.export.ExportedProgram, has_branches: bool, has_carried: bool) -> Any:
    """The spec of what the model returns."""
    spec: Any = exported.call_spec.out_spec
    spec = spec.child(0) if has_branches else spec
    return spec.child(0) if has_carried else spec


def _written_out(
    exported: torch.export.ExportedProgram,
    graph: fx.Graph,
    origins: dict[str, str],
    placeholders: Mapping[str, fx.Node],
    blocks: Blocks,
    names: list[str | None],
) -> Written:
    """The graph with every repetition of a block that was traced once."""
    specs = exported.graph_signature.input_specs
    known = {placeholders[spec.arg.name]: str(spec.target) for spec in specs if spec.target}
    lifted = {str(spec.target) for spec in specs if spec.kind.name == "CONSTANT_TENSOR"}
    given = [spec for spec in specs if spec.kind.name == "USER_INPUT"]
    found = [(placeholders.get(getattr(spec.arg, "name", "")), name) for spec, name in zip(given, names, strict=True)]
    inputs = {node: name for node, name in found if node is not None and name is not None}
    return blocks.write_out(graph, origins, known, lifted, inputs)


def _inputs(
    exported: torch.export.ExportedProgram, placeholders: Mapping[str, fx.Node], names: list[str | None]
) -> tuple[tuple[Port, ...], list[fx.Node]]:
    """The tensors of the batch that forward was traced with, and their placeholders."""
    specs = [spec for spec in exported.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    found = [(name, placeholders.get(getattr(spec.arg, "name", ""))) for spec, name in zip(specs, names, strict=True)]
    ports = [(Port(name, TensorType.of(node.meta["val"])), node) for name, node in found if name and node is not None]
    return tuple(port for port, _ in ports), [node for _, node in ports]


def _check_autocast(module: fx.GraphModule, precision: torch.dtype | None) -> None:
    """Raises an AutoparError where forward enters autocast: on fake tensors it casts nothing, so that the program would
    compute in other types than eager.
    """
    for each in graph_modules(module):
        for node in each.graph.nodes:
            if getattr(node.target, "__name__", "") != "wrap_with_autocast":
                continue
            _, dtype, enabled, *_ = node.args
            if enabled and dtype not in (precision, torch.float32):
                name = str(dtype).removeprefix("torch.")
                raise AutoparError(
                    f"the model enters torch.autocast({name}) in forward(), which a program does not have",
                    where=_line_within(each, node),
                    remedy=f'plan with precision="{"bf16" if name == "bfloat16" else "fp16"}", or cast in the model: '
                    f"x.to(torch.{name})",
                )


def _line_within(module: fx.GraphModule, node: fx.Node) -> str | None:
    """The first line of a model inside of what a node wraps."""
    for argument in node.args:
        if isinstance(argument, fx.Node) and argument.op == "get_attr":
            body = getattr(module, str(argument.target), None)
            if isinstance(body, fx.GraphModule):
                return next(filter(None, (origin_of(each) for each in body.graph.nodes)), None)
    return None


def _with_values(value: Any, node: fx.Node, origins: Mapping[str, str]) -> torch.Tensor:
    """A tensor that the model made, or holds, beside its parameters and buffers.

    Raises:
        AutoparError: it is on meta.
    """
    lost = isinstance(value, torch.Tensor) and compat.is_stand_in(value)
    if isinstance(value, torch.Tensor) and not (value.is_meta or lost):
        return value.detach()
    where = next((origins[user.name] for user in node.users if origins.get(user.name)), node.name)
    if lost:
        raise AutoparError(
            "forward() uses a tensor that the trace has lost: what torch.autograd.grad gives inside of forward()",
            where=where,
            values=f"a tensor of shape {tuple(value.shape)}",
            remedy="write that gradient out by operators, or take it outside of the model that is compiled",
        )
    raise AutoparError(
        "a tensor that is neither a parameter nor a buffer has no values: it is on meta",
        where=where,
        remedy="build the model on the CPU, or register the tensor as a buffer",
    )


def _variables(model: nn.Module, precision: torch.dtype | None) -> dict[str, Variable]:
    """The parameters and buffers of a model by name, in its order; tied ones have the first name."""
    names: dict[int, list[str]] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
    found: dict[str, Variable] = {}
    for name, tensor in named:
        first, *others = names[id(tensor)]
        if name != first:
            continue
        is_parameter = isinstance(tensor, nn.Parameter)
        dtype = seen_dtype(tensor, precision) if is_parameter else tensor.dtype
        trainable = is_parameter and tensor.requires_grad
        type_ = TensorType(tuple(tensor.shape), dtype)
        found[name] = Variable(name, type_, tensor.dtype, trainable, is_parameter, tuple(others))
    return found


def _frozen(variables: Mapping[str, Variable]) -> frozenset[str]:
    """Parameters that are not trained and are computed with as they are stored, by every name: a forward may change
    them as it does buffers (a teacher that follows, `k.mul_(m).add_(q, alpha=1 - m)`).
    """
    found = [
        (name, *each.aliases)
        for name, each in variables.items()
        if each.is_parameter and not each.trainable and each.type.dtype == each.stored_dtype
    ]
    return frozenset(name for names in found for name in names)


def _reorder_placeholders(graph: fx.Graph, order: list[fx.Node]) -> None:
    """Placeholders in the given order; unused ones go."""
    by_name = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    wanted = {node.name for node in order}
    first = next(iter(graph.nodes))
    anchor = graph.create_node("placeholder", "anchor_")
    first.prepend(anchor)
    for node in order:
        anchor.prepend(by_name[node.name])
    graph.erase_node(anchor)
    for name, node in by_name.items():
        if name not in wanted and not node.users:
            graph.erase_node(node)


def _outputs(
    exported: torch.export.ExportedProgram,
    graph: fx.Graph,
    repeated: Container[int],
    buffers: Mapping[str, torch.dtype],
    frozen: Container[str],
    has_branches: bool,
    num_carried: int,
) -> tuple[tuple[Port, ...], tuple[str, ...], tuple[int | str | None, ...], tuple[str, ...], dict[int, str]]:
    """The values returned, the names of those that are outputs, and for every leaf of the output pytree its number, a
    text, or None; then the names of the buffers that the remaining values replace; and the names of outputs by their
    places.

    repeated: places of values that stand for those of blocks that were left out, each for another. buffers: their
    dtypes, by every name. What replaces one has it: statistics of a norm in bfloat16 are float32, torch's fakes say.
    frozen: parameters that may change as buffers do, by every name.
    """
    output = next(node for node in graph.nodes if node.op == "output")
    specs = exported.graph_signature.output_specs
    count = sum(spec.kind.name == "USER_OUTPUT" for spec in specs) - has_branches - num_carried
    every = (
        *compat.output_names(_spec_of(exported, has_branches, num_carried > 0), count),
        *(f"left_{number}" for number in range(num_carried)),
        *((BRANCH,) if has_branches else ()),
    )
    results: list[fx.Node] = []
    leaves: list[int | str | None] = []
    changed: dict[str, fx.Node] = {}
    leaf_at: dict[int, int] = {}
    for place, (spec, value) in enumerate(zip(specs, output.args[0], strict=True)):
        if spec.kind.name == "USER_INPUT_MUTATION":
            raise AutoparError(
                f"the model changes its own input {spec.target} in forward()", remedy="work on a copy: x = x.clone()"
            )
        is_state = spec.kind.name == "BUFFER_MUTATION" or str(spec.target) in frozen
        if spec.kind.name != "USER_OUTPUT" and is_state and isinstance(value, fx.Node):
            name = str(spec.target)
            changed[name] = mutation.of_dtype(graph, output, value, buffers.get(name, value.meta["val"].dtype))
            continue
        if spec.kind.name != "USER_OUTPUT":
            raise AutoparError(
                f"the model changes its own parameter {spec.target} in forward()",
                remedy="keep it in a buffer, or in a parameter whose requires_grad is False and that is computed with "
                "as it is stored; or change it outside of forward()",
            )
        if value is None or isinstance(value, str):
            leaves.append(value)
            continue
        if not isinstance(value, fx.Node):  # a number may be one of rows, of which a rank or a microbatch has fewer
            raise AutoparError(
                f"the model returns {every[len(leaves)]}={value!r}, neither a tensor nor a text",
                remedy="return it as a tensor (torch.tensor(…), x.new_tensor(…)), or leave it out of the output",
            )
        # What is returned under two names is two outputs, each with a gradient; what only came in is made anew.
        if (value in results and place not in repeated) or value.op == "placeholder":
            with graph.inserting_before(output):
                copied = graph.call_function(torch.ops.aten.clone.default, (value,))
            copied.meta, value = dict(value.meta), copied
        leaf_at[place] = len(leaves)
        leaves.append(len(results))
        results.append(value)
    names = tuple(name for name, leaf in zip(every, leaves, strict=True) if isinstance(leaf, int))
    graph.erase_node(output)
    returned = [*results, *mutation.private(graph, changed.values(), results)]
    graph.output(tuple(returned))
    titles = (*names, *changed)
    ports = tuple(Port(n, TensorType.of(r.meta["val"])) for n, r in zip(titles, returned, strict=True))
    return (
        ports,
        names,
        tuple(leaves[: len(leaves) - has_branches - num_carried]),
        tuple(changed),
        {place: every[leaf] for place, leaf in leaf_at.items()},
    )
