"""What is traced in place of the model and its batch: the same without data, of the types that operators see.

Nothing is computed, and nothing of the user's model is touched.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autopar.base.copies import copied, copied_value, without_own_hooks
from autopar.base.errors import AutoparError
from autopar.base.torch_compat import tracing as compat
from autopar.passes import mutation, seeds, substitutes
from autopar.passes.blocks.alike import PLAIN
from autopar.passes.blocks.hollow import Unshown, attributes_of


def traced_copy(
    model: nn.Module,
    precision: torch.dtype | None,
    mode: compat.FakeTensorMode | None = None,
    instead: Mapping[nn.Module, nn.Module] | None = None,
) -> nn.Module:
    """What is traced in the place of the model; arguments as of `meta_clone`."""
    return substitutes.layers(mutation.without_counting_in_python(meta_clone(model, precision, mode, instead)))


_VALUES = "_autopar_values"


def _check_parts(model: nn.Module) -> None:
    """Raises an AutoparError where a part of the model has no forward that can be traced, or a parameter no shape."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise AutoparError(
                f"{name or type(model).__name__} is compiled by torch.jit: its forward is no Python to trace, and "
                "its parameters cannot be cut",
                remedy="hand in the module before torch.jit.script or torch.jit.trace (functions that are scripted may "
                "stay)",
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise AutoparError(
                f"{name} has no shape yet: its layer is made at the first forward",
                remedy="run the model once before (model(**batch), without gradients)",
            )


def has_values_of(clone: nn.Module, model: nn.Module) -> None:
    """Buffers that decide what a copy without data does are looked up in this model, which is not kept alive."""
    vars(clone)[_VALUES] = weakref.ref(model)


def values_of(model: nn.Module) -> nn.Module:
    """The model that has a copy's values; one that is no copy itself."""
    found = vars(model).get(_VALUES, lambda: None)()
    return model if found is None else found


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
    _check_parts(model)
    left_out = {id(tensor) for module in instead or () for tensor in (*module.parameters(), *module.buffers())}
    memo = _Memo(left_out)
    memo.update((id(module), other) for module, other in (instead or {}).items())
    for parameter in model.parameters():
        if id(parameter) not in left_out:
            empty = emptied(parameter, precision, mode)
            memo[id(parameter)] = _kept(compat.parameter(empty, parameter.requires_grad), mode)
    for name, buffer in model.named_buffers():
        if buffer.layout is not torch.strided:
            raise AutoparError(
                f"the buffer {name} is of layout {str(buffer.layout).removeprefix('torch.')}: no rank can have a part",
                remedy="hold it as an attribute (self.graph = graph): products with it are computed from its elements",
            )
        if id(buffer) not in left_out:
            memo[id(buffer)] = _kept(emptied(buffer, None, mode), mode)
    for module in model.modules():
        # What a hook makes of parameters (torch.nn.utils.weight_norm) is made anew; torch copies leaves alone.
        results = [x for x in vars(module).values() if isinstance(x, torch.Tensor) and not x.is_leaf]
        memo.update((id(x), emptied(x, precision, mode)) for x in results)
    memo.update((id(generator), generator) for generator in seeds.held(model).values())  # whose draws are to be seen
    clone = without_own_hooks(copied(model, memo))
    for other in (instead or {}).values():  # they hold what the copy would
        for own, name, value in attributes_of(other):
            own[name] = value if isinstance(value, PLAIN) else _held_by_copy(value, memo)
    return clone


def _held_by_copy(value: Any, memo: dict[int, Any]) -> Any:
    """What the copy of a module has for a value; tensors that are no buffers are only read."""
    return memo.get(id(value), value) if isinstance(value, torch.Tensor) else copied_value(value, memo)


def empty_batch(inputs: Mapping[str, Any], precision: torch.dtype | None) -> dict[str, Any]:
    """The batch as operators see it, on meta."""
    flat, spec = compat.tree_flatten(dict(inputs))
    found: dict[str, Any] = compat.tree_unflatten([emptied(x, precision, None) for x in flat], spec)
    return found


class _Memo(dict[int, Any]):
    """What a copy has of each object by its `id`, as `copy.deepcopy` keeps it. left_out: what it is to do without."""

    def __init__(self, left_out: Collection[int]) -> None:
        super().__init__()
        self._left_out = left_out

    def get(self, key: int, default: Any = None) -> Any:
        """As of a dict."""
        if key in self._left_out:
            raise Unshown("a tensor of a block is held outside of it")
        return super().get(key, default)


def emptied(value: Any, precision: torch.dtype | None, mode: compat.FakeTensorMode | None) -> Any:
    """A tensor as operators see it, without its data."""
    if not isinstance(value, torch.Tensor):
        return value
    dtype = seen_dtype(value, precision)
    empty = torch.empty(value.shape, dtype=dtype, device="meta")
    return empty if mode is None else compat.stand_in(empty, mode)


def put_buffer(clone: nn.Module, name: str, length: int, mode: compat.FakeTensorMode | None) -> None:
    """Give a copy that is traced a buffer that the model has not: float64 [length]."""
    empty = emptied(torch.empty(length, dtype=torch.float64, device="meta"), None, mode)
    clone.register_buffer(name, _kept(empty, mode))


def _kept(value: torch.Tensor, mode: compat.FakeTensorMode | None) -> torch.Tensor:
    """A parameter or a buffer that is traced as it is."""
    if mode is not None:
        compat.traced_itself(value, mode)
    return value


def seen_dtype(parameter: torch.Tensor, precision: torch.dtype | None) -> torch.dtype:
    """The dtype in which operators see a parameter or an input."""
    return precision if precision and parameter.is_floating_point() else parameter.dtype


def measured_values(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The inputs of floating-point numbers that have values: pixels, not tokens, labels and padding, which differ."""
    named = compat.tree_leaves_with_path(dict(inputs))
    return {
        name: leaf.detach()
        for name, leaf in named
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and not leaf.is_meta
    }


def held_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that have values."""
    named = values_of(model).named_buffers()
    return {name: buffer for name, buffer in named if not (buffer.is_meta or buffer.is_sparse)}


def marks_values(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The inputs that are no such numbers and have values: masks, tokens and labels."""
    named = compat.tree_leaves_with_path(dict(inputs))
    kept = [(name, leaf) for name, leaf in named if isinstance(leaf, torch.Tensor) and not leaf.is_meta]
    return {name: leaf.detach() for name, leaf in kept if not (leaf.is_floating_point() or leaf.is_complex())}
