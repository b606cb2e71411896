"""autopar: a compiler that turns an unmodified PyTorch model into a distributed program.

``autopar.compile(model, mesh)`` is the whole of it; ``autopar.plan`` answers the same question without devices.
Everything here is loaded at first use, so that ``import autopar`` (and ``autopar --help``) need not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar import pipeline, strategies
    from autopar.api import compile, pin, plan
    from autopar.backends import backend
    from autopar.errors import AutoparError
    from autopar.mesh import Mesh
    from autopar.plans import Plan
    from autopar.proof import Proof
    from autopar.searching.cluster import Cluster
    from autopar.searching.result import SearchResult
    from autopar.searching.run import search
    from autopar.sharding import Partial, Replicate, Shard

__version__ = "0.1.0"

__all__ = [
    "AutoparError",
    "Cluster",
    "Mesh",
    "Partial",
    "Plan",
    "Proof",
    "Replicate",
    "SearchResult",
    "Shard",
    "__version__",
    "backend",
    "compile",
    "pin",
    "pipeline",
    "plan",
    "search",
    "strategies",
]

_MODULE_OF_NAME = {
    "AutoparError": "autopar.errors",
    "Mesh": "autopar.mesh",
    "Partial": "autopar.sharding",
    "Plan": "autopar.plans",
    "Proof": "autopar.proof",
    "Replicate": "autopar.sharding",
    "Shard": "autopar.sharding",
    "backend": "autopar.backends",
    "compile": "autopar.api",
    "pin": "autopar.api",
    "plan": "autopar.api",
    "Cluster": "autopar.searching.cluster",
    "SearchResult": "autopar.searching.result",
    "search": "autopar.searching.run",
}
_SUBMODULES = ("pipeline", "strategies")


def __getattr__(name: str) -> object:
    if name in _MODULE_OF_NAME:
        value = getattr(importlib.import_module(_MODULE_OF_NAME[name]), name)
        globals()[name] = value
        return value
    if name in _SUBMODULES:
        return importlib.import_module(f"autopar.{name}")
    raise AttributeError(f"module 'autopar' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
