"""A call's batch by name, its precision, and what tells one kind of batch from another."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.base.errors import AutoparError
from autopar.base.huggingface import adapters, caches
from autopar.base.torch_compat import tracing
from autopar.passes.branches import WAYS

Batch = Mapping[str, Any] | Sequence[Any] | Tensor
"""An example of a call: arguments by keyword, in order, or the only one."""

PRECISIONS: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def to_dtype(precision: str | torch.dtype | None) -> torch.dtype | None:
    """A torch dtype for API.md's names."""
    if precision is None or isinstance(precision, torch.dtype):
        return precision
    if precision not in PRECISIONS:
        raise AutoparError(f"unknown precision {precision!r}", remedy=f"use one of {', '.join(PRECISIONS)}")
    return PRECISIONS[precision]


def bind_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The call's arguments by name, in the order of `forward`'s signature.

    Raises:
        AutoparError: arguments that `forward` does not take, or that cannot be named.
    """
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise AutoparError(
            f"{type(model).__name__}.forward cannot be called with this batch: {error}",
            values=f"given: {', '.join([f'{len(args)} positional'] * bool(args) + list(kwargs))}",
            remedy="pass a batch as model(**batch) would take it",
        ) from error
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            raise AutoparError(f"{type(model).__name__}.forward takes *{name}", remedy=_instead_of_places(model))
        else:
            named[name] = value
    for path, leaf in tracing.tree_leaves_with_path(named):
        if isinstance(leaf, Tensor) and leaf.is_nested:
            raise AutoparError(
                f"{path} is a nested tensor, of whose rows a program knows no size",
                remedy="hand it in padded, with a mask or lengths: torch.nested.to_padded_tensor(x, 0.0); a list of "
                "tensors may stay one",
            )
        if isinstance(leaf, Tensor) and leaf.layout is not torch.strided:
            raise AutoparError(
                f"{path} is of layout {str(leaf.layout).removeprefix('torch.')}, of which a program has no part",
                remedy="hand in its indices and values (a product is zeros.index_add(0, rows, values[:, None] * "
                "x[columns])), or its dense tensor; a matrix that stays may be the model's: self.graph = graph",
            )
    return named


def _instead_of_places(model: nn.Module) -> str:
    """The remedy where `forward` takes any number of inputs: what wraps one module names none of them."""
    parts = [name for name, _ in model.named_children()]
    if len(parts) == 1 and not model._parameters:
        return (
            f"compile what {type(model).__name__} wraps, model.{parts[0]}; torch.compile(compiled) leaves it as it is"
        )
    return "pass inputs by keyword"


def by_name(model: nn.Module, example: Batch) -> Mapping[str, Any]:
    """An example batch as keyword arguments of `forward`; one by keyword is left as it is.

    Raises:
        AutoparError: no batch at all, or one that `forward` does not take.
    """
    if isinstance(example, Mapping):
        return example
    if isinstance(example, Tensor):
        return bind_inputs(model, (example,), {})
    if isinstance(example, Sequence) and not isinstance(example, str | bytes):
        return bind_inputs(model, tuple(example), {})
    raise AutoparError(
        f"example_inputs is of type {type(example).__name__}",
        remedy=f"pass a mapping from the arguments of {type(model).__name__}.forward, as model(**batch) would take it, "
        "a tuple of them in order, or a single tensor",
    )


def without_graph(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The batch as planning needs it: inputs whose gradients are wanted are leaves that say so, of no other graph."""
    leaves, spec = tracing.tree_flatten(dict(inputs))
    found: dict[str, Any] = tracing.tree_unflatten([_without_graph(leaf) for leaf in leaves], spec)
    return caches.with_shown(found, caches.shown_among(inputs))


def _without_graph(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.requires_grad:
        return leaf
    if not torch.is_grad_enabled():
        return leaf.detach()
    in_pieces = isinstance(leaf, DTensor)  # whose values nobody looks at on one rank alone
    own = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if in_pieces else leaf.detach()
    return own.requires_grad_()


def kind_of(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The batch without its values, to plan for it once more."""
    leaves, spec = tracing.tree_flatten(dict(inputs))
    found: dict[str, Any] = tracing.tree_unflatten(
        [leaf.to("meta") if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
    )
    return caches.with_shown(found, caches.shown_among(inputs))


def wanted_in(inputs: Mapping[str, Any]) -> frozenset[str]:
    """The inputs whose gradients are wanted, by name: those that require one, as in eager."""
    leaves = tracing.tree_leaves_with_path(dict(inputs))
    return frozenset(path for path, value in leaves if isinstance(value, Tensor) and value.requires_grad)


def values_key(inputs: Mapping[str, Any], names: Collection[str]) -> tuple[Any, ...]:
    """The values of the inputs that a program is for by their values."""
    leaves = tracing.tree_leaves_with_path(dict(inputs))
    return tuple((path, repr(value.tolist())) for path, value in leaves if path in names)


def shapes_key(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells one program from another: shapes, dtypes and constants of the inputs, which of them want a gradient,
    training or not.
    """
    leaves: list[Any] = []
    for path, value in tracing.tree_leaves_with_path(dict(inputs)):
        if isinstance(value, Tensor):
            leaves.append((path, tuple(value.shape), str(value.dtype), value.requires_grad))
        else:
            leaves.append((path, repr(value)))
    return (modes_key(model), torch.is_grad_enabled(), *leaves, *caches.layouts_among(inputs))


def modes_key(model: nn.Module) -> tuple[Any, ...]:
    """What a forward does otherwise than by its inputs: each module in training or not, adapters on or off."""
    modes = tuple(module.training for module in model.modules())
    mode = True if all(modes) else modes if any(modes) else False
    return (mode, adapters.switches(model), vars(model).get(WAYS, ()), changed_numbers(model))


def changed_numbers(model: nn.Module) -> tuple[Any, ...]:
    """The numbers of modules that are others than when the model was compiled, and that programs may read."""
    found: tuple[Any, ...] = vars(model).get(NUMBERS, ())
    return found


NUMBERS = "_autopar_numbers"
"""The attribute that holds them."""


def input_sizes(inputs: Mapping[str, Any]) -> dict[tuple[str, int], int]:
    """Every size of a batch, by input and dim."""
    leaves = tracing.tree_leaves_with_path(dict(inputs))
    tensors = [(path, value) for path, value in leaves if isinstance(value, Tensor)]
    return {(path, dim): size for path, value in tensors for dim, size in enumerate(value.shape)}


def family_key(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Any, ...]:
    """What batches have in common that differ in sizes alone."""
    leaves: list[Any] = [modes_key(model), *caches.layouts_among(inputs)]
    for path, value in tracing.tree_leaves_with_path(dict(inputs)):
        is_tensor = isinstance(value, Tensor)
        leaves.append((path, value.dim(), str(value.dtype), value.requires_grad) if is_tensor else (path, repr(value)))
    return tuple(leaves)
