"""torch's private parts that functions with gradients of their own (`torch.autograd.Function`) need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import _SingleLevelFunction


def has_setup_context(kind: Any) -> bool:
    """Whether what backward needs is put away by a method of its own, and forward has no `ctx`."""
    return kind.setup_context is not _SingleLevelFunction.setup_context


def backward_of(kind: Any) -> Callable[..., Any]:
    """A function's backward, by either of its names."""
    found: Callable[..., Any] = kind.vjp if kind.backward is _SingleLevelFunction.backward else kind.backward
    return found


def set_grad_enabled(mode: bool) -> None:
    """As torch.set_grad_enabled, but a trace does not see it: as where torch itself does it, around a forward."""
    with torch._C.DisableTorchFunction():
        torch._C._set_grad_enabled(mode)
