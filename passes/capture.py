"""capture: an unmodified model and a batch become a program of one region.

Requires: a `torch.nn.Module` and the keyword arguments of one call of its `forward`.
Ensures: phase `captured`; one region `model`, one call; ATen operators before dispatch (attention is still one node);
    everything on the meta device; no in-place operators: buffers that forward changes are `updates`; nothing of the
    user's model is changed.

    forward(input_ids) of LlamaForCausalLM  →  region model: embedding, linear, …; call 0: model@-(%input_ids)
"""

from __future__ import annotations

import copy
import functools
import keyword
import logging
import random
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from autopar.base.errors import AutoparError
from autopar.base.huggingface import caches, huggingface
from autopar.base.torch_compat import tracing as compat
from autopar.ir.program import Program
from autopar.ir.region import Call, Region
from autopar.ir.tensor_type import TensorType
from autopar.ir.values import Port, Slot, ValueRef, Variable
from autopar.operators import own_gradients
from autopar.passes import mutation, substitutes
from autopar.passes.avoidable import argument_instead
from autopar.passes.blocks import words
from autopar.passes.blocks.hollow import NotRepeated
from autopar.passes.blocks.trace import Blocks
from autopar.passes.blocks.write import Written
from autopar.passes.by_value import ByValue, candidates
from autopar.passes.checks import ChecksPass
from autopar.passes.experts import as_operators
from autopar.passes.exported import clean_graph, origin_of
from autopar.passes.indices import simplify_batched_index, simplify_masked_write, simplify_pieces
from autopar.passes.usual import Checked, Usual

logger = logging.getLogger("autopar.capture")

LEAST_BLOCKS = 2
"""Blocks for which it is worth looking whether one repeats another."""


def capture(
    model: nn.Module, inputs: Mapping[str, Any], *, precision: torch.dtype | None = None, training: bool = True
) -> Program:
    """Trace `model(**inputs)` on fake tensors: nothing is computed but what the model makes of Python's own numbers.

    Args:
        inputs: keyword arguments; the global batch. Tensors may be on any device; everything else is a constant.
        precision: compute dtype of the floating-point parameters and inputs; None keeps the model's own.
        training: whether gradients are wanted (dropout follows each module's own mode).

    Raises:
        AutoparError: control flow that depends on the data (names the model's line), or a model that will not trace.
    """
    flat, spec = compat.tree_flatten(dict(inputs))
    names = _input_names(inputs)

    def batch(mode: compat.FakeTensorMode) -> Mapping[str, Any]:
        arguments: Mapping[str, Any] = compat.tree_unflatten([_emptied(x, precision, mode) for x in flat], spec)
        return arguments

    def trace() -> Program:
        program = None
        # What a block does to an object that all are given, a cache, is not seen of the block that stands for others.
        with suppress(AutoparError):  # the whole trace says it, if it is not the usual case that it takes
            program = None if caches.states_among(inputs) else _with_repeated_blocks(model, precision, batch, names)
        return _whole(model, precision, batch, names, inputs) if program is None else program

    with compat.exclusive(), own_gradients.kept() if training else nullcontext():
        before = _generators()
        program = trace()
        drew = [name for name, state in _generators().items() if state != before.get(name, state)]
        if drew and not say_the_same(program, trace()):
            raise AutoparError(
                f"{type(model).__name__} draws from {drew[0]} generator in forward(): a program would repeat one draw",
                remedy="draw with torch (torch.rand, torch.randn, …), or outside of forward(), and pass the numbers in",
            )
    return replace(program, training=training)


def _generators() -> dict[str, object]:
    """The states of the generators that are not torch's; other threads may draw from them, too."""
    states: dict[str, object] = {"Python's random": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        states["NumPy's"] = str(numpy.random.get_state())
    return states


def say_the_same(one: Program, other: Program) -> bool:
    """Whether two traces say the same: what Python computed meanwhile stands in them as numbers."""
    same = one.constants.keys() == other.constants.keys() and str(one) == str(other)
    return same and all(torch.equal(value, other.constants[name]) for name, value in one.constants.items())


def _with_repeated_blocks(
    model: nn.Module,
    precision: torch.dtype | None,
    batch: Callable[[compat.FakeTensorMode], Mapping[str, Any]],
    names: list[str | None],
) -> Program | None:
    """The program, each distinct block traced once; None where the model has no such blocks, or is to be traced whole:
    where buffers change, and what does not trace, so that the whole trace tells what is wrong.
    """
    blocks = Blocks(model)
    if len(blocks.paths) < LEAST_BLOCKS:
        return None
    while True:
        try:
            mode = compat.fake_mode()
            clone, arguments = traced_copy(model, precision, mode, blocks.stand_ins()), batch(mode)
            with blocks.watched(clone), words.noted(clone), huggingface.training_capture(clone), as_operators(clone):
                with ChecksPass():
                    exported = torch.export.export(clone, (), dict(arguments), strict=False)
                written = [
                    n for module in _graph_modules(exported.graph_module) for n in module.graph.nodes
                    if mutation.writes(n)
                ]  # fmt: skip
                if written:
                    blocks.check_written(written)
                    exported = _without_writes(exported, arguments)
            return _to_program(model, precision, exported, names, blocks)
        except AutoparError as error:
            raise _with_line(error) from error.__cause__
        except Exception as error:
            if not blocks.learns():
                logger.info("tracing the model whole: %s", error)
                return None
            logger.info("tracing the model again: %s", error)


def _whole(
    model: nn.Module,
    precision: torch.dtype | None,
    batch: Callable[[compat.FakeTensorMode], Mapping[str, Any]],
    names: list[str | None],
    inputs: Mapping[str, Any],
) -> Program:
    """The program, everything traced. Where values of inputs decide what is done, it is for these alone, or for the
    usual case.
    """
    mode, values = compat.fake_mode(), candidates(inputs)
    clone = traced_copy(model, precision, mode)
    usual, known = Usual(_measured(inputs)), ByValue(values) if values else None
    clone.forward = usual.guarding(clone.forward)
    if known is None:
        return usual.noted(_to_program(model, precision, _export(clone, batch(mode), usual, Checked(usual)), names))
    clone.forward = _given(known, clone.forward)
    exported = _export(clone, batch(mode), usual, known, Checked(usual))
    if chosen := known.looked_up & known.decided.keys():
        name = min(chosen)
        raise AutoparError(
            f"{type(model).__name__} chooses what to do by the values of {name}, which differ in every batch",
            where=known.decided[name],
            remedy="replace the branch by torch.where or torch.cond, or keep the decision out of forward()",
        )
    program = usual.noted(_to_program(model, precision, exported, names))
    notes = tuple(
        f"for these values of {name}, which decide what is done ({line}): others are planned for anew"
        for name, line in sorted(known.decided.items())
    )
    return replace(program, by_value=tuple(sorted(known.decided)), notes=(*program.notes, *notes))


def _given(known: ByValue, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that tells which tensors its inputs are."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        for name, leaf in compat.tree_leaves_with_path(kwargs):
            known.give(name, leaf)
        return forward(*args, **kwargs)

    return run


def traced_copy(
    model: nn.Module,
    precision: torch.dtype | None,
    mode: compat.FakeTensorMode | None = None,
    instead: Mapping[nn.Module, nn.Module] | None = None,
) -> nn.Module:
    """What is traced in the place of the model; arguments as of `meta_clone`."""
    return substitutes.layers(mutation.without_counting_in_python(meta_clone(model, precision, mode, instead)))


def meta_clone(
    model: nn.Module,
    precision: torch.dtype | None = None,
    mode: compat.FakeTensorMode | None = None,
    instead: Mapping[nn.Module, nn.Module] | None = None,
) -> nn.Module:
    """A copy whose parameters and buffers have no data: nothing is computed, nothing of the user's model is touched.

    mode: whose fake tensors they are; None: they are on meta. instead: what the copy has in place of some modules;
    changed in place.
    """
    left_out = {id(tensor) for module in instead or () for tensor in (*module.parameters(), *module.buffers())}
    memo = _Memo(left_out)
    memo.update((id(module), other) for module, other in (instead or {}).items())
    for parameter in model.parameters():
        if id(parameter) not in left_out:
            empty = _emptied(parameter, precision, mode)
            memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        if id(buffer) not in left_out:
            memo[id(buffer)] = _emptied(buffer, None, mode)
    for module in model.modules():
        # What a hook makes of parameters (torch.nn.utils.weight_norm) is made anew; torch copies leaves alone.
        results = [x for x in vars(module).values() if isinstance(x, torch.Tensor) and not x.is_leaf]
        memo.update((id(x), _emptied(x, precision, mode)) for x in results)
    clone = copy.deepcopy(model, memo)
    for other in (instead or {}).values():  # what these share with the model, they share with the copy
        vars(other).update({name: memo.get(id(value), value) for name, value in vars(other).items()})
    return clone


class _Memo(dict[int, Any]):
    """What a copy has of each object by its `id`, as `copy.deepcopy` keeps it. left_out: what it is to do without."""

    def __init__(self, left_out: Collection[int]) -> None:
        super().__init__()
        self._left_out = left_out

    def get(self, key: int, default: Any = None) -> Any:
        """As of a dict."""
        if key in self._left_out:
            raise NotRepeated("a tensor of a block is held outside of it")
        return super().get(key, default)


def _seen_dtype(parameter: torch.Tensor, precision: torch.dtype | None) -> torch.dtype:
    """The dtype in which operators see a parameter or an input."""
    return precision if precision and parameter.is_floating_point() else parameter.dtype


def _emptied(value: Any, precision: torch.dtype | None, mode: compat.FakeTensorMode | None) -> Any:
    """A tensor as operators see it, without its data."""
    if not isinstance(value, torch.Tensor):
        return value
    dtype = _seen_dtype(value, precision)
    if mode is None:
        return torch.empty(value.shape, dtype=dtype, device="meta")
    with mode:
        return torch.empty(value.shape, dtype=dtype, device="cpu")


def _measured(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The inputs of floating-point numbers that have values: pixels, not tokens, labels and padding, which differ."""
    named = compat.tree_leaves_with_path(dict(inputs))
    return {
        name: leaf.detach()
        for name, leaf in named
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and not leaf.is_meta
    }


def empty_batch(inputs: Mapping[str, Any], precision: torch.dtype | None) -> dict[str, Any]:
    """The batch as operators see it, on meta."""
    flat, spec = compat.tree_flatten(dict(inputs))
    found: dict[str, Any] = compat.tree_unflatten([_emptied(x, precision, None) for x in flat], spec)
    return found


def _export(model: nn.Module, arguments: Mapping[str, Any], *modes: TorchFunctionMode) -> torch.export.ExportedProgram:
    """modes: of functions, entered in this order."""
    try:
        with ExitStack() as entered:
            entered.enter_context(words.noted(model))
            entered.enter_context(huggingface.training_capture(model))
            entered.enter_context(as_operators(model))
            for mode in (ChecksPass(), *modes):
                entered.enter_context(mode)
            exported = torch.export.export(model, (), dict(arguments), strict=False)
    except AutoparError as error:
        raise _with_line(error) from error.__cause__
    except Exception as error:
        raise _capture_error(model, error) from error
    if any(mutation.writes(node) for module in _graph_modules(exported.graph_module) for node in module.graph.nodes):
        parameters = {spec.arg.name for spec in exported.graph_signature.input_specs if spec.kind.name == "PARAMETER"}
        mutation.check_hidden_writes(exported.graph_module, parameters, origin_of)
        try:
            exported = _without_writes(exported, arguments)
        except AutoparError:
            raise
        except Exception as error:
            raise _capture_error(model, error) from error
    return exported


def _without_writes(
    exported: torch.export.ExportedProgram, arguments: Mapping[str, Any]
) -> torch.export.ExportedProgram:
    names = [str(spec.target) for spec in exported.graph_signature.input_specs if spec.target]
    # torch writes a program of its own here and runs it, with these names as they are.
    unsafe = [name for name in names if not name.isprintable() or set(name) & {'"', "\\"}]
    if unsafe := unsafe + [name for name in arguments if not name.isidentifier() or keyword.iskeyword(name)]:
        raise AutoparError(
            "a model that writes into its buffers cannot be traced with names that torch cannot write down",
            values=", ".join(repr(name[:80]) for name in unsafe[:3]),
            remedy="rename its modules and inputs: no quotes, backslashes or line ends in names",
        )
    for module in _graph_modules(exported.graph_module):
        mutation.detach_operands(module)
    exported = exported.run_decompositions({})
    mutation.check(exported.graph_module.graph, origin_of)
    return exported


def _graph_modules(module: fx.GraphModule) -> list[fx.GraphModule]:
    return [m for m in module.modules() if isinstance(m, fx.GraphModule)]


def _capture_error(model: nn.Module, error: Exception) -> AutoparError:
    """Name the model's own line: the innermost frame that is not the tracer's, outside torch."""
    where = compat.model_line(error) or type(model).__name__
    if compat.is_data_dependent(error):
        what = f"{type(model).__name__} chooses what to do by the value of a tensor, so one program cannot stand for it"
        remedy = "replace the branch by torch.where or torch.cond, or keep the decision out of forward()"
        if instead := argument_instead(error, model.forward):
            name, line = instead
            remedy = f"make {name} yourself and hand it in with the batch: forward makes it where it is None ({line})"
    else:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        what = f"{type(model).__name__} cannot be traced: {reason}"
        remedy = "check that model(**batch) runs in eager mode on this batch; the cause is chained below"
        if "meta" in str(error) and "cpu" in str(error):
            remedy = (
                "a tensor that the model holds in a plain attribute, or makes, is on meta and has no values: build the "
                "model on the CPU, or register the tensor as a buffer"
            )
    return AutoparError(what, where=where, remedy=remedy)


def _with_line(error: AutoparError) -> AutoparError:
    """The error, with the model's line that it was raised under, if it says none itself."""
    if error.where is None and (line := compat.model_line(error)):
        error.where = line
        error.args = (str(error),)
    return error


def _input_names(inputs: Mapping[str, Any]) -> list[str | None]:
    """A name per leaf of the inputs: `input_ids`, `images.0`; None for leaves that are no tensors."""
    names: list[str | None] = []
    for path, value in compat.tree_leaves_with_path(dict(inputs)):
        names.append(path if isinstance(value, torch.Tensor) else None)
    return names


def _to_program(
    model: nn.Module,
    precision: torch.dtype | None,
    exported: torch.export.ExportedProgram,
    names: list[str | None],
    blocks: Blocks | None = None,
) -> Program:
    _check_autocast(exported.graph_module, precision)
    graph, origins, placeholders = clean_graph(exported)
    written = Written()
    if blocks is not None:
        targets = [(spec.arg.name, str(spec.target)) for spec in exported.graph_signature.input_specs if spec.target]
        known = {placeholders[name]: target for name, target in targets}
        lifted = {s.target for s in exported.graph_signature.input_specs if s.kind.name == "CONSTANT_TENSOR"}
        written = blocks.write_out(graph, origins, known, {str(target) for target in lifted})
    words.take_notes(graph)
    held = dict(written.holders)
    simplify_batched_index(graph, origins)
    simplify_masked_write(graph, origins)
    simplify_pieces(graph, origins)
    variables = _variables(model, precision)
    tied = {alias: name for name, variable in variables.items() for alias in variable.aliases}
    inputs, input_nodes, constants = [], [], {}
    leaf = iter(names)
    for spec in exported.graph_signature.input_specs:
        if spec.kind.name == "USER_INPUT":
            name = next(leaf)
            node = placeholders.get(getattr(spec.arg, "name", ""))
            if name is not None and node is not None:
                inputs.append(Port(name, TensorType.of(node.meta["val"])))
                input_nodes.append(node)
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
    slots = [
        Slot(name, each.type, each.trainable, each.is_parameter) for name, each in variables.items() if name in held
    ]
    _reorder_placeholders(graph, [held[slot.name] for slot in slots] + input_nodes)
    outputs, output_names, output_leaves, changed = _outputs(exported, graph)
    updated = [(tied.get(name, name), ValueRef(0, len(output_names) + i)) for i, name in enumerate(changed)]
    region = Region("model", "", graph, tuple(slots), tuple(inputs), outputs, origins=origins)
    call = Call("model", "", tuple(slot.name for slot in slots), tuple(ValueRef(name=p.name) for p in inputs))
    return Program(
        "captured",
        (region,),
        (call,),
        tuple(inputs),
        tuple(ValueRef(0, i) for i in range(len(output_names))),
        output_names,
        tuple(variables.values()),
        output_spec=exported.call_spec.out_spec,
        output_leaves=output_leaves,
        constants=constants,
        updates=tuple(updated),
        folded=written.folded,
    )


def _check_autocast(module: fx.GraphModule, precision: torch.dtype | None) -> None:
    """Raises an AutoparError where forward enters autocast: on fake tensors it casts nothing, so that the program would
    compute in other types than eager.
    """
    for each in _graph_modules(module):
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
    if isinstance(value, torch.Tensor) and not value.is_meta:
        return value.detach()
    raise AutoparError(
        "a tensor that is neither a parameter nor a buffer has no values: it is on meta",
        where=next((origins[user.name] for user in node.users if origins.get(user.name)), node.name),
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
        dtype = _seen_dtype(tensor, precision) if is_parameter else tensor.dtype
        trainable = is_parameter and tensor.requires_grad
        type_ = TensorType(tuple(tensor.shape), dtype)
        found[name] = Variable(name, type_, tensor.dtype, trainable, is_parameter, tuple(others))
    return found


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
    exported: torch.export.ExportedProgram, graph: fx.Graph
) -> tuple[tuple[Port, ...], tuple[str, ...], tuple[int | None, ...], tuple[str, ...]]:
    """The values returned, the names of those that are outputs, and for every leaf of the output pytree its number, or
    None; then the names of the buffers that the remaining values replace.
    """
    output = next(node for node in graph.nodes if node.op == "output")
    results: list[fx.Node] = []
    leaves: list[int | None] = []
    changed: dict[str, fx.Node] = {}
    for spec, value in zip(exported.graph_signature.output_specs, output.args[0], strict=True):
        if spec.kind.name == "USER_INPUT_MUTATION":
            raise AutoparError(
                f"the model changes its own input {spec.target} in forward()", remedy="work on a copy: x = x.clone()"
            )
        if spec.kind.name == "BUFFER_MUTATION" and isinstance(value, fx.Node):
            changed[str(spec.target)] = value
            continue
        if spec.kind.name != "USER_OUTPUT":
            raise AutoparError(
                f"the model changes its own parameter {spec.target} in forward()",
                remedy="keep what forward() changes in a buffer, or change the parameter outside of it",
            )
        if value is None:
            leaves.append(None)
            continue
        if not isinstance(value, fx.Node):
            raise AutoparError(
                f"output {len(leaves)} of the model is {value!r}, neither a tensor nor None", remedy="return tensors"
            )
        # What is returned under two names is two outputs, each with a gradient; what only came in is made anew.
        if value in results or value.op == "placeholder":
            with graph.inserting_before(output):
                copied = graph.call_function(torch.ops.aten.clone.default, (value,))
            copied.meta, value = dict(value.meta), copied
        leaves.append(len(results))
        results.append(value)
    every = compat.output_names(exported.call_spec.out_spec, len(leaves))
    names = tuple(name for name, leaf in zip(every, leaves, strict=True) if leaf is not None)
    graph.erase_node(output)
    returned = [*results, *mutation.private(graph, changed.values(), results)]
    graph.output(tuple(returned))
    titles = (*names, *changed)
    ports = tuple(Port(n, TensorType.of(r.meta["val"])) for n, r in zip(titles, returned, strict=True))
    return ports, names, tuple(leaves), tuple(changed)
