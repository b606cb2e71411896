"""Real values beside a trace: what torch's modes would record, or make fake, is computed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

# huggingface/unknown_values: tensors without data that are asked which of their elements are set.
from torch.fx.experimental import _config as fx_config
from torch.utils import _pytree as pytree

# capture: what is made of known values is computed while the model is traced.
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

tree_map = pytree.tree_map


class NotKnown(Exception):
    """An operator gives another value every time, or none that is said."""


@contextlib.contextmanager
def computed() -> Iterator[None]:
    """Outside of all tracing. Raises NotKnown in place of a random draw, or of memory as it is found."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), _Same():
        yield


class _Same(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags or func.name().split(".")[0] in _UNSAID:
            raise NotKnown(func.name())
        return func(*args, **(kwargs or {}))


_UNSAID = frozenset({"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided"})


def lifted(value: torch.Tensor) -> torch.Tensor:
    """A tensor with values, in the trace that goes on: a constant of the program."""
    traced: torch.Tensor = torch.ops.aten.lift_fresh_copy.default(value)
    return traced


def all_nonzero() -> contextlib.AbstractContextManager[None]:
    """Inside, `nonzero` of a tensor on meta says that all of it is set, where it is refused otherwise."""
    config: Any = fx_config
    patched: contextlib.AbstractContextManager[None] = config.patch(meta_nonzero_assume_all_nonzero=True)
    return patched


@contextlib.contextmanager
def checking_tensors() -> Iterator[None]:
    """Inside, `torch._check` asks a tensor whether it is so, as `assert` does; torch's own takes no tensors."""
    original = torch._check

    def check(cond: Any, *args: Any, **kwargs: Any) -> Any:
        return original(bool(cond) if isinstance(cond, torch.Tensor) else cond, *args, **kwargs)

    torch._check = check
    try:
        yield
    finally:
        torch._check = original
