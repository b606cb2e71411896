"""A plain model again: of the class it had, with whole tensors, on one process' terms."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.base.copies import without_own_hooks
from autopar.base.errors import AutoparError
from autopar.runtime.meeting import meet


def uncompiled(model: Any, what: str) -> nn.Module:
    """A copy of a compiled model as it was before, with the parameters of now, whole, on the CPU of every rank. What
    happens to it happens to it alone. Collective.

    what: that it is made for, as the user calls it.

    Raises:
        AutoparError: a rank came alone, or ranks of other stages hold parameters.
    """
    engine = model.autopar
    original: Any = type(model).__mro__[2]
    if engine.absent:
        raise AutoparError(
            f"{what} needs the whole model, and other ranks hold stages of it",
            remedy="Save the model, and do it to what from_pretrained reads",
        )
    meet(what, engine.comm.timeout_s, f"Call {what} on every rank: each hands in its pieces")
    copied = original.__new__(original)
    memo: dict[int, Any] = {id(model): copied}
    for tensor in (*dict.fromkeys(model.parameters()), *dict.fromkeys(model.buffers())):
        memo[id(tensor)] = _whole(tensor)
    own = {name: value for name, value in vars(model).items() if name not in ("autopar", "plan")}
    vars(copied).update(copy.deepcopy(own, memo))
    return without_own_hooks(copied)


def reduced(model: Any, protocol: int) -> Any:
    """What `pickle` and `torch.save(model)` write: the plain model, in words that need no autopar to be read (its own
    class is not this one's, which pickle asks for). Collective; raises as `uncompiled` does.
    """
    return copy.copy, (uncompiled(model, "torch.save(model)"),)


def beside(model: Any) -> Any:
    """What `copy.copy` gives: a model that shares everything, as of any module."""
    kind: Any = type(model)
    other = kind.__new__(kind)
    vars(other).update(vars(model))
    return other


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    held = tensor.detach()
    found = (held.full_tensor() if isinstance(held, DTensor) else held).to("cpu", copy=True)
    return nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found
