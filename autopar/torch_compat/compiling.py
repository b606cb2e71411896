"""What runtime/regions.py needs of torch.compile that has no public name."""

from __future__ import annotations

from typing import Any


def lookup_backend(name: str) -> Any:
    """The compiler behind a backend's name: (graph module, example inputs) -> callable. Imports torch._dynamo.

    Raises:
        Exception: there is none of that name.
    """
    from torch._dynamo.backends.registry import lookup_backend as lookup

    return lookup(name)


def compiler_errors() -> tuple[type[Exception], ...]:
    """What torch.compile raises when it, and not the function, fails."""
    from torch._dynamo.exc import InternalTorchDynamoError, TorchDynamoException

    return (TorchDynamoException, InternalTorchDynamoError)
