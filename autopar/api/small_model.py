"""The copy of a model that is proven: on the CPU, with small random weights, and a random batch beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from autopar.api import interpret
from autopar.api.promote import in_dtype
from autopar.base.copies import copied
from autopar.base.errors import AutoparError
from autopar.base.huggingface import huggingface
from autopar.base.stored_weights import fill, unrounded
from autopar.base.torch_compat import tracing
from autopar.planner.inputs import changed_numbers
from autopar.planner.with_loss import has_own_forward


def small_model(
    model: nn.Module, inputs: Mapping[str, Any], dtype: torch.dtype, seed: int
) -> tuple[nn.Module, dict[str, Any]]:
    """A copy on the CPU with seeded random weights, and a random batch where the given one is on meta. Parameters that
    are whole numbers (codes that somebody decodes, places in another tensor) stay what they are.
    """
    with torch.random.fork_rng(devices=()):  # a model on meta draws its values; the script's draws stay as they were
        clone = _on_cpu(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in clone.parameters():
            scale = 0.5 / max(1, parameter.shape[-1] if parameter.dim() > 1 else 4) ** 0.5
            drawn = torch.complex64 if parameter.is_complex() else None
            noise = torch.randn(parameter.shape, generator=generator, dtype=drawn) * scale
            if parameter.dim() == 1:
                noise += 0.5
            if parameter.is_floating_point() or parameter.is_complex():
                parameter.copy_(noise)
    for original, module in zip(model.modules(), clone.modules(), strict=True):
        module.training = original.training  # each its own: a frozen batch norm stays frozen
    _cast(clone, dtype)
    vars(clone)[_DRAWN] = fill(
        clone, lambda shape: torch.randn(shape, generator=generator, dtype=dtype) * 0.5 / shape[-1] ** 0.5
    )
    named, (_, spec) = tracing.tree_leaves_with_path(dict(inputs)), tracing.tree_flatten(dict(inputs))
    batch = tracing.tree_unflatten([_real(name, value, generator, clone, dtype) for name, value in named], spec)
    return clone, batch


SMALL = 2_000_000
LARGEST = 100_000_000
"""Parameters of a model that runs on the CPU in little time, and in some."""


_DRAWN = "_autopar_drawn"


def as_drawn(clone: nn.Module) -> AbstractContextManager[None]:
    """Inside, a model of `small_model` has weights as they were drawn where it stores them as codes."""
    return unrounded(vars(clone)[_DRAWN])


def twin_of(model: nn.Module, loss: Callable[[nn.Module], nn.Module], tokens: int) -> nn.Module:
    """A model that does what this one does and runs on the CPU: itself, or of transformers' one with small sizes.

    loss: gives a model the user's loss. tokens: the longest sequence wanted.

    Raises:
        AutoparError: it is too large, and no smaller one is known.
    """
    num = sum(parameter.numel() for parameter in model.parameters())
    if num <= SMALL:
        return model
    is_as_made = huggingface.is_hf(model) and not has_own_forward(model) and not changed_numbers(model)
    if is_as_made and (small := huggingface.twin_of(model, tokens)) is not None:
        return loss(small)
    if num > LARGEST:
        raise AutoparError(f"{type(model).__name__} has {num / 1e9:.3g} billion parameters: too many to run on the CPU")
    return model


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Have parameters and buffers in this dtype, and each what it is: a cast leaves parameters the same tensors, and
    buffers, which other modules may have, too, or code in a list, are made anew.
    """
    buffers = [(module, name, x) for module in model.modules() for name, x in module._buffers.items()]
    model._apply(lambda x: x.to(in_dtype(x.dtype, dtype)))  # `to` makes complex numbers real
    for module, name, x in buffers:
        cast = module._buffers[name]
        if x is not None and cast is not None and cast is not x:
            x.data, module._buffers[name] = cast, x


def _on_cpu(model: nn.Module) -> nn.Module:
    if not any(t.is_meta for t in [*model.parameters(), *model.buffers()]):
        held = [x for module in model.modules() for x in vars(module).values() if isinstance(x, torch.Tensor)]
        made = {id(x): x.detach().clone() for x in held if not x.is_leaf}  # by hooks: the next forward makes them anew
        return copied(model, made).cpu()
    return interpret.materialized(model)


def _real(name: str, value: Any, generator: torch.Generator, model: nn.Module, dtype: torch.dtype) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if not value.is_meta:
        return value.cpu().to(in_dtype(value.dtype, dtype))
    if value.is_floating_point() or value.is_complex():
        drawn = torch.complex64 if value.is_complex() else None
        return torch.randn(value.shape, generator=generator, dtype=drawn).to(in_dtype(value.dtype, dtype))
    if "mask" in name:
        return torch.ones(value.shape, dtype=value.dtype)
    high = huggingface.max_token(model) if huggingface.is_hf(model) else 2
    return torch.randint(0, high, value.shape, generator=generator).to(value.dtype)
