"""The numerics interpreter: run a program of any phase before `lowered` in one process, on whole tensors.

It shows that a pass changed no number: the same state and inputs must give the same outputs and gradients after every
pass. A lowered program runs by `autopar.runtime.simulate` instead, for all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from autopar import operators
from autopar.base.copies import copied
from autopar.base.huggingface import huggingface
from autopar.base.torch_compat import tracing
from autopar.ir.program import Program
from autopar.ir.region import Region
from autopar.ir.values import ValueRef, gradient_key

Results = tuple[tuple[Tensor, ...], dict[str, Tensor]]


def run(program: Program, state: Mapping[str, Tensor], inputs: Mapping[str, Tensor], *, seed: int = 0) -> Results:
    """Outputs (in the program's order) and, in training, gradients by parameter name, and by `gradient_key` those of
    inputs that are wanted, with 1 as every root's gradient.

    Args:
        state: parameters and buffers by name, whole. inputs: the global batch by input name.
    """
    return run_with_updates(program, state, inputs, seed=seed)[:2]


def run_with_updates(
    program: Program,
    state: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    *,
    seed: int = 0,
    roots: Mapping[ValueRef, float] | None = None,
) -> tuple[tuple[Tensor, ...], dict[str, Tensor], dict[str, Tensor]]:
    """As `run`, and the new values of the buffers that forward changes, by name; `state` stays as it is.

    roots: what to fill the gradients of a differentiated program's roots with, instead of 1.
    """
    assert not program.folded, "what a captured program leaves out comes back when it is outlined"
    if program.phase in ("captured", "outlined"):
        (outputs, gradients), values = _run_forward_graphs(program, state, inputs, seed)
    else:
        (outputs, gradients), values = _run_joint_graphs(program, state, inputs, seed, roots or {})
    return outputs, gradients, {name: values[ref].detach() for name, ref in program.updates}


def state_of(model: nn.Module, program: Program) -> dict[str, Tensor]:
    """The tensors of a model under the program's names, lifted constants included; of buffers that forward changes,
    copies.
    """
    changed = {name for name, _ in program.updates}
    named = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
    state: dict[str, Tensor] = {}
    for variable in program.variables:
        tensor = named.get(variable.name, program.constants.get(variable.name))
        assert tensor is not None, f"the model has no {variable.name}"
        state[variable.name] = tensor.detach().clone() if variable.name in changed else tensor.detach()
    return state


def input_tensors(program: Program, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The program's inputs out of a batch, by input name."""
    found = dict(tracing.tree_leaves_with_path(dict(inputs)))
    return {port.name: found[port.name] for port in program.inputs}


def _names_by_parameter(model: nn.Module) -> list[list[str]]:
    """All names of every parameter, tied ones together."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def materialized(model: nn.Module) -> nn.Module:
    """A copy on the CPU with initialized weights and buffers, for a model built on meta."""
    clone = copied(model)
    tied = [names for names in _names_by_parameter(clone) if len(names) > 1]
    clone = clone.to_empty(device="cpu")  # unties: each place of a parameter gets a tensor of its own
    for first, *others in tied:
        for name in others:
            path, _, own = name.rpartition(".")
            setattr(clone.get_submodule(path), own, clone.get_parameter(first))
    with torch.no_grad():
        for parameter in clone.parameters():
            if not parameter.is_floating_point():  # codes, and places in another tensor: what memory held is none
                parameter.zero_()
        for module in reversed(list(clone.modules())):
            huggingface.initialize_module(module, clone)
    return clone


def _run_forward_graphs(
    program: Program, state: Mapping[str, Tensor], inputs: Mapping[str, Tensor], seed: int
) -> tuple[Results, dict[ValueRef, Tensor]]:
    trainable = [v.name for v in program.variables if v.trainable and program.training]
    leaves = {name: tensor.detach().clone().requires_grad_(name in trainable) for name, tensor in state.items()}
    seen = padded(program, leaves)
    values: dict[ValueRef, Tensor] = {ValueRef(name=name): tensor for name, tensor in inputs.items()}
    for name in sorted(program.wanted if program.training else ()):
        leaf = inputs[name].detach().clone().requires_grad_()
        values[ValueRef(name=name)] = leaves[gradient_key(name)] = leaf
        trainable.append(gradient_key(name))
    for index, call in enumerate(program.calls):
        region = program.region(call.region)
        arguments = [seen[name] for name in call.slots] + [values[ref] for ref in call.arguments]
        with operators.tracing_seed(torch.tensor(seed + index)):
            results = _Composite(fx.GraphModule({}, region.graph)).run(*arguments)
        values.update({ValueRef(index, i): result for i, result in enumerate(results)})
    outputs = [values[ref] for ref in program.outputs]
    gradients: dict[str, Tensor] = {}
    if trainable:
        roots = [
            output for output, ref in zip(outputs, program.outputs, strict=True) if _is_root(program, ref, outputs)
        ]
        found = torch.autograd.grad(
            roots, [leaves[n] for n in trainable], [torch.ones_like(r) for r in roots], allow_unused=True
        )
        gradients = {n: torch.zeros_like(leaves[n]) if g is None else g for n, g in zip(trainable, found, strict=True)}
    return (_trimmed_outputs(program, outputs), gradients), values


def padded(program: Program, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state as operators see it: with rows of zeros behind the parameters that the program pads."""
    shapes = {variable.name: variable.padded for variable in program.variables if variable.padded is not None}
    return {name: _padded(tensor, shapes.get(name)) for name, tensor in state.items()}


def _padded(tensor: Tensor, shape: tuple[int, ...] | None) -> Tensor:
    missing = [] if shape is None else [n for a, b in zip(shape, tensor.shape, strict=True) for n in (a - b, 0)][::-1]
    return functional.pad(tensor, missing) if any(missing) else tensor


def trimmed(tensor: Tensor, shape: tuple[int, ...] | None) -> Tensor:
    """A tensor without its padding: the first `shape` elements of each dim."""
    return tensor if shape is None else tensor[tuple(slice(0, size) for size in shape)]


def _trimmed_outputs(program: Program, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    shapes = [program.port(ref).logical for ref in program.outputs]
    return tuple(trimmed(output.detach(), shape) for output, shape in zip(outputs, shapes, strict=True))


def _is_root(program: Program, ref: ValueRef, outputs: Sequence[Tensor]) -> bool:
    """Before `differentiate` has named them: the loss, or every differentiable output."""
    if program.roots:
        return ref in program.roots
    names = dict(zip(program.outputs, program.output_names, strict=True))
    if "loss" in names.values():
        return names[ref] == "loss"
    return outputs[program.outputs.index(ref)].requires_grad


_DRAW = (
    torch.ops.aten.dropout.default,
    torch.ops.aten.native_dropout.default,
    torch.ops.aten.scaled_dot_product_attention.default,
)


class _Composite(fx.Interpreter):
    """ATen before dispatch, on real tensors; dropout by position, as in the traced program."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.aten.view.default:
            target = torch.ops.aten.reshape.default
        ours = target in _DRAW or getattr(target, "namespace", "") == "autopar"  # no derivative of their own
        function: Any = operators.AUTOGRAD.get(target, target) if ours else target
        args = tuple(torch.device("cpu") if isinstance(arg, torch.device) else arg for arg in args)
        return function(*args, **on_cpu(kwargs))


class _Plain(fx.Interpreter):
    """A differentiated graph on real tensors: strides may differ from the traced ones, so views may copy."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
            target = torch.ops.aten.reshape.default
        return target(*args, **on_cpu(kwargs))


def on_cpu(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Captured on meta, run on the CPU."""
    return {key: torch.device("cpu") if key == "device" else value for key, value in kwargs.items()}


def _run_joint_graphs(
    program: Program,
    state: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    seed: int,
    roots: Mapping[ValueRef, float],
) -> tuple[Results, dict[ValueRef, Tensor]]:
    values: dict[ValueRef, Tensor] = {ValueRef(name=name): tensor for name, tensor in inputs.items()}
    state = padded(program, state)
    for index, call in enumerate(program.calls):
        region = program.region(call.region)
        results = _call(program, region, index, state, values, {}, seed)
        values.update({ValueRef(index, i): results[i] for i in range(len(region.outputs))})
    outputs = _trimmed_outputs(program, [values[ref] for ref in program.outputs])
    gradients: dict[str, Tensor] = {}
    if program.training:
        flowing = {ref: torch.full_like(values[ref], roots.get(ref, 1.0)) for ref in program.roots}
        for index in reversed(range(len(program.calls))):
            _add_gradients(program, index, state, values, flowing, gradients, seed)
        for name in sorted(program.wanted):
            value = values[ValueRef(name=name)]
            gradients[gradient_key(name)] = flowing.get(ValueRef(name=name), torch.zeros_like(value))
    shapes = {v.name: v.type.shape for v in program.variables if v.padded is not None}
    return (outputs, {name: trimmed(gradient, shapes.get(name)) for name, gradient in gradients.items()}), values


def _call(
    program: Program,
    region: Region,
    index: int,
    state: Mapping[str, Tensor],
    values: Mapping[ValueRef, Tensor],
    flowing: Mapping[ValueRef, Tensor],
    seed: int,
) -> Sequence[Tensor]:
    call = program.calls[index]
    arguments = [state[name] for name in call.slots] + [values[ref] for ref in call.arguments]
    arguments += [torch.tensor(seed + index)] * region.seeds
    for position in region.tangents:
        type_ = region.outputs[position].type
        known = flowing.get(ValueRef(index, position))
        arguments.append(torch.zeros(type_.shape, dtype=type_.dtype) if known is None else known)
    return _Plain(fx.GraphModule({}, region.graph)).run(*arguments)


def _add_gradients(
    program: Program,
    index: int,
    state: Mapping[str, Tensor],
    values: Mapping[ValueRef, Tensor],
    flowing: dict[ValueRef, Tensor],
    gradients: dict[str, Tensor],
    seed: int,
) -> None:
    call = program.calls[index]
    region = program.region(call.region)
    found = iter(_call(program, region, index, state, values, flowing, seed)[len(region.outputs) :])
    for slot, name in zip(region.slots, call.slots, strict=True):
        if slot.trainable:
            gradient = next(found)
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
    for port, ref in zip(region.inputs, call.arguments, strict=True):
        if port.differentiable:
            gradient = next(found)
            flowing[ref] = flowing[ref] + gradient if ref in flowing else gradient
