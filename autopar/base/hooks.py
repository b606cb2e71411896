"""Forward hooks that users put on modules inside a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from autopar.base.copies import is_own_hook

TABLES = ("_forward_pre_hooks", "_forward_hooks")
_OF_FORWARD = ("torch.", "transformers.utils.output_capturing", "autopar.")
"""Modules whose hooks are a part of what forward computes, or of how it is traced."""


def hooks_inside(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, int, Any]]:
    """Of modules inside a model, the model's own left out: path, module, table, the handle's number, the hook."""
    for path, module in model.named_modules():
        for table in TABLES if module is not model else ():
            for number, hook in getattr(module, table).items():
                if not is_own_hook(hook) and not is_of_forward(hook):
                    yield path, module, table, number, hook


def is_of_forward(hook: Any) -> bool:
    """Of weight_norm and its like, and of how transformers collects hidden states, which are forward's."""
    return str(getattr(hook, "__module__", None) or type(hook).__module__).startswith(_OF_FORWARD)


def name_of(hook: Any) -> str:
    """In words."""
    return str(getattr(hook, "__qualname__", type(hook).__name__))
