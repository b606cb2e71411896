"""What a trace does not see of autograd: gradients within kernels, hooks of what is saved, inference mode."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from autopar.base.errors import AutoparError

_AUTOGRAD = [name for name in dir(torch._C.DispatchKey) if name.startswith(("Autograd", "ADInplaceOrView"))]


@contextmanager
def recording() -> Iterator[None]:
    """What runs inside is recorded for torch.autograd.grad, in a kernel that was dispatched below autograd, too."""
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for name in _AUTOGRAD:
        excluded = excluded.remove(getattr(torch._C.DispatchKey, name))
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


@contextmanager
def with_gradients(wanted: bool = True) -> Iterator[None]:
    """What runs inside is of a training step, whatever modes the script is in; where none is wanted, these stay."""
    if not wanted:
        yield
        return
    with torch.inference_mode(False), torch.enable_grad():
        yield


@contextmanager
def saving_unseen() -> Iterator[None]:
    """Inside, a trace in this thread sees nothing of what hooks of saved tensors do (torch.utils.checkpoint's, that of
    `save_on_cpu`): what is kept for backward, and what is computed again, is a plan's decision.

    torch runs these hooks without gradients, and switches them on again where no trace sees it: one that saw a hook
    switch them off would take them for off from there on.

    Raises:
        AutoparError: within, for a hook of a user's own, which may hand another tensor to backward than was saved.
    """
    owner, enter = threading.get_ident(), saved_tensors_hooks.__enter__

    def entered(self: Any) -> Any:
        if threading.get_ident() != owner:
            return enter(self)
        hook = self.pack_hook
        if not f"{getattr(hook, '__module__', '')}.".startswith("torch."):
            raise AutoparError(
                "forward() has hooks of its own on what is saved for backward (torch.autograd.graph."
                "saved_tensors_hooks), which a program does not have",
                values=f"{getattr(hook, '__qualname__', hook)}",
                remedy="leave them out: what is kept and what is computed again is planned; torch.utils.checkpoint and "
                "torch.autograd.graph.save_on_cpu may stay",
            )
        self.pack_hook = _unseen(hook)
        try:
            return enter(self)
        finally:
            self.pack_hook = hook

    saved_tensors_hooks.__enter__ = entered  # type: ignore[method-assign]
    try:
        yield
    finally:
        saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]


def _unseen(hook: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: torch.Tensor) -> Any:
        with torch._C.DisableTorchFunction():
            return hook(x)

    return run


@contextmanager
def inference_as_no_grad() -> Iterator[None]:
    """Inside, `torch.inference_mode` in this thread switches gradients off, and on again, where a trace sees it; torch
    does it where none does, and what is made there would have a gradient.
    """
    owner, kind = threading.get_ident(), torch.inference_mode
    enter, leave = kind.__enter__, kind.__exit__
    before: dict[int, bool] = {}

    def entered(self: Any) -> None:
        if threading.get_ident() != owner:
            enter(self)
            return
        before[id(self)] = torch.is_grad_enabled()
        torch._C._set_grad_enabled(not self.mode)

    def left(self: Any, *error: Any) -> None:
        if id(self) in before:
            torch._C._set_grad_enabled(before.pop(id(self)))
        else:
            leave(self, *error)

    kind.__enter__, kind.__exit__ = entered, left  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.__enter__, kind.__exit__ = enter, leave  # type: ignore[method-assign]
