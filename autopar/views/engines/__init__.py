"""A plan told to other engines: how many devices do what, and how each weight is split, in their own formats."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.base.errors import AutoparError
from autopar.base.text import did_you_mean
from autopar.views.engines import servers, transformers_plan
from autopar.views.engines.layout import Layout
from autopar.views.engines.servers import Served

if TYPE_CHECKING:
    from torch import nn

    from autopar.planner.plan.record import PlanRecord

SERVERS: Mapping[str, Callable[[Layout, str, Served], str]] = {
    "vllm": servers.vllm,
    "sglang": servers.sglang,
    "tensorrt-llm": servers.tensorrt_llm,
}
"""Engines that split weights by rules of their own: they are told sizes."""
TARGETS = ("transformers-tp-plan", *SERVERS)
OWN = "autopar"
"""Not an engine: weights cut as the plan stores them, which `compiled.load` reads."""


class Raw(str):
    """A name of weights that a shell is to read."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Exported:
    """text: a file, or a command. notes: what of the plan the engine is not told, and what it does otherwise.

    folder: with weights, what was written. bytes_by_rank: what each rank of the plan reads of it, parameters as
    predicted, and buffers.
    """

    text: str
    notes: tuple[str, ...] = ()
    folder: Path | None = None
    bytes_by_rank: tuple[int, ...] = ()


def export(
    plan: PlanRecord, to: str, model: nn.Module | None, name: str = "MODEL", served: Served | None = None
) -> Exported:
    """A plan for another engine.

    to: one of `TARGETS`. model: what the plan was made for (on meta will do), of which `transformers-tp-plan` reads the
    kinds of modules. name: of the weights to serve, a path or a hub's name. served: what a plan for `generate()` says.

    Raises:
        AutoparError: an unknown target; what the engine cannot do, by axis or parameter.
    """
    if to not in TARGETS:
        raise AutoparError(
            f"unknown engine {to!r}{did_you_mean(to, (*TARGETS, OWN))}",
            remedy=f"use one of {', '.join(TARGETS)}; {OWN} with weights",
        )
    layout = Layout.of(plan)
    if to in SERVERS:
        served = served or Served()
        if not name.isprintable():
            raise AutoparError(f"{name!r} names no weights", remedy="name a path or a hub's name, in one line")
        named = name if isinstance(name, Raw) else shlex.quote(name)
        return Exported(SERVERS[to](layout, named, served), servers.notes(layout, to, served))
    if model is None:
        raise AutoparError(
            "a plan for transformers names modules, and this one was loaded without its model",
            remedy="name the model: --model MODEL, or export the plan where it was made",
        )
    return Exported(transformers_plan.text(plan, layout, model))
