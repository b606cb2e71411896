"""Configurations with their predicted seconds and bytes, and why one is faster than another: by their numbers alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import autopar
from autopar.base.errors import AutoparError, DoesNotFit
from autopar.machine.mesh import Mesh
from autopar.strategies.names import Strategy
from autopar.strategies.pipelining.spec import AXIS

NO_LIMIT = 1e15
"""Bytes: memory is predicted, and bends nothing."""
SHOWN = 0.1
"""The part of a difference from which on what causes it is named."""
COUNTED = 0.2
"""The part of all parameters from which on what is done to them is named."""
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Priced:
    """A configuration as its plan predicts it: seconds of a step, bytes of the fullest rank.

    traits: what it does, in words (`traits_of`). fits: within limit_bytes. reason: why there is no prediction.
    """

    name: str
    mesh: str
    strategy: str = ""
    traits: tuple[str, ...] = ()
    compute_s: float = 0.0
    communication_s: float = 0.0
    hidden_s: float = 0.0
    waiting_s: float = 0.0
    optimizer_s: float = 0.0
    peak_bytes: float = 0.0
    limit_bytes: float = 0.0
    microbatches: int = 1
    rematerialize: str = "none"
    reason: str = ""

    @property
    def exposed_s(self) -> float:
        """Communication that nothing hides."""
        return self.communication_s - self.hidden_s

    @property
    def step_s(self) -> float:
        return self.compute_s + self.exposed_s + self.waiting_s + self.optimizer_s

    @property
    def fits(self) -> bool:
        return not self.reason and self.peak_bytes <= self.limit_bytes


def of_data(data: Mapping[str, Any]) -> Priced:
    """The inverse of `dataclasses.asdict`, read from JSON."""
    return Priced(**{**data, "traits": tuple(data["traits"])})


def of_plan(name: str, plan: autopar.Plan, limit_bytes: float) -> Priced:
    """What a plan predicts."""
    cost = plan.cost
    return Priced(
        name,
        ",".join(f"{axis}={size}" for axis, size in plan.mesh.axes),
        plan.strategy,
        traits_of(plan),
        cost.compute_s,
        cost.communication_s,
        cost.hidden_s,
        cost.waiting_s,
        cost.optimizer_s,
        cost.peak_memory_bytes,
        limit_bytes,
        plan.interface.microbatches,
        plan.rematerialize,
    )


def price(
    name: str,
    model: Any,
    mesh: Mesh,
    strategy: Strategy,
    *,
    limit_bytes: float,
    microbatches: int | None = None,
    rematerialize: str = "auto",
) -> Priced:
    """Plan a configuration; of one that does not fit, what it takes at least, with everything recomputed.

    model: an `autopar.cli.models.catalogue.LoadedModel`.
    """

    def planned(limit: float, mode: str) -> autopar.Plan:
        return autopar.plan(
            model.model, mesh, example_inputs=model.batch, strategy=strategy, precision="bf16", memory_limit=limit,
            rematerialize=mode, microbatches=microbatches,
        )  # fmt: skip

    try:
        try:
            plan = planned(limit_bytes, rematerialize)
        except DoesNotFit:
            plan = planned(NO_LIMIT, "full" if rematerialize == "auto" else rematerialize)
        return of_plan(name, plan, limit_bytes)
    except AutoparError as error:
        return Priced(name, ",".join(f"{axis}={size}" for axis, size in mesh.axes), reason=str(error).splitlines()[0])


# -- what a plan does


def traits_of(plan: autopar.Plan) -> tuple[str, ...]:
    """What parameters do on each axis, inside a node or across nodes: whole, zero2 (gathered once a step), zero3 (for
    each use), tensor; and pipelines, what becomes of long sequences, what is recomputed.
    """
    mesh, found = plan.mesh, []
    for axis, modes in modes_of(plan).items():
        if mesh.size(axis) > 1:
            found += [f"{mode} {'across' if mesh.crosses_nodes(axis) else 'inside'}" for mode in modes]
    if AXIS in mesh.axis_names:
        found.append(f"pipeline {'across' if mesh.crosses_nodes(AXIS) else 'inside'}")
    words = {"go round": "ring", "all-to-all": "ulysses", "keys and values gathered": "allgather_kv"}
    found += [name for _, _, text in plan.context for said, name in words.items() if said in text]
    if plan.rematerialize != "none":
        found.append(f"recompute {plan.rematerialize}")
    return tuple(dict.fromkeys(found))


def modes_of(plan: autopar.Plan) -> dict[str, list[str]]:
    """By axis of a stage, what becomes of parameters, most bytes first; less than `COUNTED` of them is left out."""
    shapes = {each.name: each.shape for each in plan.interface.parameters}
    axes = plan.stage_mesh.axis_names
    sizes: dict[str, Counter[str]] = {axis: Counter() for axis in axes if axis in plan.mesh.axis_names}
    for name, layout in plan.decisions.placement.parameters.items():
        for axis, *lies in zip(axes, layout.stored, layout.held, layout.compute, strict=True):
            if axis in sizes:
                sizes[axis][mode_of(*map(str, lies))] += math.prod(shapes[name]) if name in shapes else 0
    return {
        axis: [mode for mode, size in own.most_common() if size >= COUNTED * own.total()] for axis, own in sizes.items()
    }


def mode_of(stored: str, held: str, compute: str) -> str:
    """What an axis does with a parameter, from how it lies between steps, during one, and in use (`R`: whole)."""
    if stored == "R":
        return "whole"
    if stored == compute:
        return "tensor"
    return "zero2" if held == compute else "zero3"


# -- why


def why(chosen: Priced, other: Priced) -> str:
    """What makes the other one slower (or faster) than the chosen one, as signed seconds of each kind that makes up a
    tenth of the difference; memory where it does not fit.
    """
    if other.reason:
        return other.reason
    parts = []
    if not other.fits:
        parts.append(f"needs {other.peak_bytes / GIB:.3g} GiB of {other.limit_bytes / GIB:.3g}")
    kinds = ("compute", "exposed communication", "waiting", "optimizer")
    names = ("compute_s", "exposed_s", "waiting_s", "optimizer_s")
    changes = {kind: getattr(other, name) - getattr(chosen, name) for kind, name in zip(kinds, names, strict=True)}
    most = max(map(abs, changes.values()))
    told = [
        f"{kind} {seconds(change, signed=True)}" for kind, change in changes.items() if abs(change) > SHOWN * most > 0
    ]
    ratio = other.step_s / chosen.step_s - 1
    if told and abs(ratio) >= 5e-4:
        parts.append(f"{ratio:+.1%}: {', '.join(told)}")
        hidden = other.hidden_s - chosen.hidden_s
        if abs(hidden) > SHOWN * most and "exposed communication" in " ".join(told):
            parts.append(f"hidden {seconds(hidden, signed=True)}")
    elif told or not parts:
        parts.append("as fast")
    return "; ".join(parts)


def seconds(value: float, *, signed: bool = False) -> str:
    """`12.3 ms`, `+1.20 s`"""
    sign = "+" if signed else ""
    return f"{value:{sign}.3g} s" if abs(value) >= 1 else f"{1e3 * value:{sign}.3g} ms"


def cells(each: Priced) -> Mapping[str, str]:
    """For a table."""
    if each.reason:
        return {"configuration": f"{each.name} ({each.mesh})", "step": "–", "GiB": "–", "of it": each.reason}
    count = f", {each.microbatches} microbatches" if each.microbatches > 1 else ""
    mode = f", recompute {each.rematerialize}" if each.rematerialize != "none" else ""
    parts = {
        "compute": each.compute_s, "exposed": each.exposed_s, "hidden": each.hidden_s, "waiting": each.waiting_s,
        "optimizer": each.optimizer_s,
    }  # fmt: skip
    return {
        "configuration": f"{each.name}: {each.mesh}, {each.strategy}{count}{mode}",
        "step": seconds(each.step_s),
        "GiB": f"{each.peak_bytes / GIB:.3g}" + ("" if each.fits else " (too much)"),
        "of it": ", ".join(f"{kind} {seconds(value)}" for kind, value in parts.items() if value > 1e-9),
    }
