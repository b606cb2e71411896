"""autopar: a compiler that turns an unmodified PyTorch model into a distributed program.

``autopar.compile(model, mesh)`` is the whole of it; ``autopar.plan`` answers the same question without devices.
Everything here is loaded at first use, so that ``import autopar`` (and ``autopar --help``) need not wait for torch.
"""

from __future__ import annotations

import importlib
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

    from autopar import pipeline, strategies
    from autopar.api.backend import backend
    from autopar.api.checkpoints import load_checkpoint
    from autopar.api.coded_weights import store_weights
    from autopar.api.compile import compile
    from autopar.api.generation import GenerationPlan, plan_generation
    from autopar.api.hand_over import HandOver, hand_over
    from autopar.api.plan import Plan
    from autopar.api.planning import plan
    from autopar.api.proof import Proof
    from autopar.api.search import SearchResult, search
    from autopar.api.search_generation import GenerationSearch
    from autopar.base.errors import AutoparError
    from autopar.ir.sharding import Partial, Replicate, Shard
    from autopar.machine.imbalance import expert_imbalance
    from autopar.machine.mesh import Mesh
    from autopar.planner.generation import Generation
    from autopar.planner.search.cluster import Cluster
    from autopar.runtime.checkpoint.run import resume_or_start
    from autopar.runtime.serving.serve import Request, Served
    from autopar.runtime.watch.watching import Watch, watch
    from autopar.strategies.names import pin

__version__ = "0.1.0"

__all__ = [
    "AutoparError", "Cluster", "Generation", "GenerationPlan", "GenerationSearch", "HandOver", "Mesh", "Partial",
    "Plan", "Proof", "Replicate", "Request", "SearchResult", "Served", "Shard", "Watch", "__version__", "backend",
    "compile", "expert_imbalance", "hand_over", "load_checkpoint", "pin", "pipeline", "plan", "plan_generation",
    "resume_or_start", "search", "store_weights", "strategies", "watch",
]  # fmt: skip

_MODULE_OF_NAME = {
    "AutoparError": "autopar.base.errors", "Mesh": "autopar.machine.mesh", "Partial": "autopar.ir.sharding",
    "Plan": "autopar.api.plan", "Proof": "autopar.api.proof", "Replicate": "autopar.ir.sharding",
    "Shard": "autopar.ir.sharding", "backend": "autopar.api.backend", "compile": "autopar.api.compile",
    "pin": "autopar.strategies.names", "plan": "autopar.api.planning", "Cluster": "autopar.planner.search.cluster",
    "GenerationSearch": "autopar.api.search_generation", "SearchResult": "autopar.api.search",
    "search": "autopar.api.search",
    "Generation": "autopar.planner.generation", "GenerationPlan": "autopar.api.generation",
    "plan_generation": "autopar.api.generation", "load_checkpoint": "autopar.api.checkpoints",
    "expert_imbalance": "autopar.machine.imbalance",
    "HandOver": "autopar.api.hand_over", "hand_over": "autopar.api.hand_over",
    "resume_or_start": "autopar.runtime.checkpoint.run", "store_weights": "autopar.api.coded_weights",
    "Request": "autopar.runtime.serving.serve", "Served": "autopar.runtime.serving.serve",
    "Watch": "autopar.runtime.watch.watching", "watch": "autopar.runtime.watch.watching",
}  # fmt: skip
_SUBMODULES = ("pipeline", "strategies")


def __getattr__(name: str) -> object:
    if name in _MODULE_OF_NAME:
        value = getattr(_imported(_MODULE_OF_NAME[name]), name)
        globals()[name] = value
        return value
    if name in _SUBMODULES:
        return _imported(f"autopar.{name}")
    raise AttributeError(f"module 'autopar' has no attribute {name!r}")


def _imported(module: str) -> ModuleType:
    """A module. Libraries that draw numbers as they are imported (rich) leave the script's own draws as they were."""
    state = random.getstate()
    try:
        return importlib.import_module(module)
    finally:
        random.setstate(state)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
