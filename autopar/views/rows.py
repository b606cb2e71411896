"""Rows of the report's tables: operators by class, collectives, parameters, regions, memory."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autopar.base.trace import MemoryCurve
from autopar.cost.collectives import Collective
from autopar.ir.interface import TensorInterface
from autopar.ir.interface_text import format_tensor
from autopar.ir.sharding import format_shape
from autopar.ir.tensor_type import dtype_name
from autopar.planner.plan.drawn import Views
from autopar.planner.plan.record import PlanRecord
from autopar.views.explain.breakdown import ACCUMULATION
from autopar.views.hidden import hidden_shares
from autopar.views.holds import splits_of, stages_of

_MODULE = re.compile(r": (.*?)(?: \([^()]*\))?\Z", re.DOTALL)


def operator_rows(plan: PlanRecord) -> Iterator[dict[str, Any]]:
    """Operators by class and phase, over a step of the rank that computes most; dearest first."""
    hardware = plan.mesh.hardware
    launch_s = hardware.launch_overhead_s
    found: dict[tuple[str, str], list[float]] = {}
    counts = _calls_of_busiest(plan)
    for region in plan.drawn.regions:
        times = counts.get(region.name, 0) * plan.interface.runs
        for op in region.ops if times else ():
            if op.kind == "collective" or not op.seconds:
                continue
            row = found.setdefault((op.op_class or op.kind, op.phase), [0.0] * 6)
            moving_s = op.moved_bytes / hardware.memory_bytes_per_s(op.moved_bytes, op.op_class or "elementwise", op.op)
            waits = op.kind == "compute" and op.seconds <= (launch_s + moving_s) * (1 + 1e-9)
            launches = launch_s * (op.kind == "compute")
            own = (1, op.flops, op.moved_bytes, op.seconds, op.seconds * waits, min(launches, op.seconds))
            for place, each in enumerate(own):
                row[place] += each * times
    adding_s = plan.cost.compute_s - sum(row[3] for row in found.values())
    if plan.training and plan.interface.runs > 1 and adding_s > 0:  # the rest of what is computed
        found[(ACCUMULATION, "backward")] = [0.0, 0.0, 0.0, adding_s, adding_s, 0.0]
    for (op_class, phase), row in sorted(found.items(), key=lambda each: -each[1][3]):
        names = ("times", "flops", "moved_bytes", "seconds", "memory_bound_s", "launch_s")
        yield {"op_class": op_class, "phase": phase, **dict(zip(names, row, strict=True))}


def _calls_of_busiest(plan: PlanRecord) -> dict[str, int]:
    """How often the busiest rank calls each region in a microbatch."""
    views = plan.drawn
    seconds = {r.name: sum(op.seconds for op in r.ops) for r in views.regions}
    rank_of = plan.pipeline.schedule.rank_of if plan.pipeline is not None else (0,)
    ranks: dict[int, dict[str, int]] = {}
    for call in views.calls:
        own = ranks.setdefault(rank_of[call.stage], {})
        own[call.region] = own.get(call.region, 0) + 1
    return max(ranks.values(), key=lambda own: sum(seconds[name] * count for name, count in own.items()), default={})


def collective_rows(plan: PlanRecord, items: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every collective, with the item that a click on it leads to. hidden: the share of it that runs beside calls."""
    made = _made_by(plan.drawn, plan.collectives)
    rows = []
    for number, (row, hidden) in enumerate(zip(plan.collectives, hidden_shares(plan), strict=True)):
        where = _of_all_calls(plan.drawn, row.where)
        match = _MODULE.search(where)
        key = made.get(number)
        rows.append(
            {
                "kind": row.kind, "axis": row.axis, "tensor": row.tensor, "bytes_sent": row.bytes_sent,
                "seconds": row.seconds, "times": row.times, "phase": row.phase, "where": where, "why": row.why,
                "hidden": hidden, "module": match[1] if match else where,
                "item": key if key in items else _slot_key(plan.drawn, row, items),
            }
        )  # fmt: skip
    return rows


def _of_all_calls(views: Views, where: str) -> str:
    """`layer: model.layers.*.mlp.up_proj.weight` where the layer is called several times; a bucket names its first."""
    region = next((each for each in views.regions if where.startswith((f"{each.name}:", f"{each.name} "))), None)
    return re.sub(r"\.\d+(?=\.)", ".*", where, count=1) if region is not None and region.calls > 1 else where


def _made_by(views: Views, rows: Sequence[Collective]) -> dict[int, str]:
    """For each row of a collective inside a region its number and its key: rows and operators come in one order."""
    found: dict[int, str] = {}
    for region in views.regions:
        for phase in ("forward", "backward"):
            ops = [op for op in region.ops if op.kind == "collective" and op.phase == phase]
            own = [number for number, row in enumerate(rows) if row.where.startswith(f"{region.name} {phase}:")]
            for number, op in zip(own, ops, strict=bool(own)):
                found[number] = f"op:{region.name}.{op.name}"
    return found


def _slot_key(views: Views, row: Collective, items: Mapping[str, Any]) -> str | None:
    """The parameter whose bucket a collective moves."""
    if row.why not in ("gather parameter", "reduce gradient"):
        return None
    tensor = row.where.split(": ")[-1]
    for region in views.regions:
        for slot in region.slots:
            if slot.tensor == tensor and f"p:{region.name}.{slot.name}" in items:
                return f"p:{region.name}.{slot.name}"
    return None


def region_row(plan: PlanRecord, name: str) -> dict[str, Any]:
    """A region, with the stages that run it."""
    row = next(each for each in plan.regions if each.name == name)
    stages = sorted({call.stage for call in (plan.views.calls if plan.views else ()) if call.region == name})
    return {
        "name": row.name, "module": row.module or "(around the blocks)", "calls": row.calls,
        "forward": row.forward_operators, "backward": row.backward_operators, "saved_bytes": row.saved_bytes,
        "stage": ", ".join(map(str, stages)) if plan.pipeline is not None else "",
    }  # fmt: skip


def parameter_row(plan: PlanRecord, name: str, members: Sequence[TensorInterface]) -> dict[str, Any]:
    """Parameters that lie alike."""
    first, axes = members[0], plan.interface.axes
    layout = plan.decisions.placement.parameters.get(first.name)
    dtype = (
        dtype_name(plan.precision or first.dtype)
        if first.dtype.startswith(("float", "bfloat"))
        else dtype_name(first.dtype)
    )
    stored = format_tensor(first, axes)
    key, region = _key_of(plan.views, {member.name for member in members})
    held = Counter(stage for member in members for stage in stages_of(plan, member.name) or ())
    most = max(held.values(), default=len(members))  # on the rank of the pipeline that has most of them
    itemsize = int(re.sub(r"\D", "", dtype_name(first.dtype)) or 8) // 8
    pieces = math.prod(split.size for split in splits_of(plan, first) if split.dim is not None)
    local = math.prod(first.shape) // pieces if first.block is None else math.prod(first.block)
    return {
        "name": name,
        "count": len(members),
        "members": [each for member in members for each in (member.name, *member.aliases)],
        "aliases": [alias for member in members for alias in member.aliases],  # of the members' names: not tensors more
        "dtype": dtype_name(first.dtype),
        "shape": list(first.shape),
        "stored": stored,
        "used": stored if layout is None else format_shape(dtype, first.shape, layout.compute, axes),
        "gradient": None
        if layout is None or not plan.training
        else format_shape(dtype, first.shape, layout.gradient, axes),
        "bytes_a_rank": local * itemsize * most,
        "elements": math.prod(first.shape) * len(members),
        "region": region,
        "item": key,
        "placement": {
            "shape": list(first.shape),
            "axes": [
                {"name": s.axis, "size": s.size, "dim": s.dim, "outer": s.outer, "zigzag": s.zigzag}
                for s in splits_of(plan, first)
            ],
        },
        "stages": sorted(held) or None,
        "held": {str(stage): count for stage, count in sorted(held.items())} or None,
    }


def _key_of(views: Views | None, names: set[str]) -> tuple[str | None, str | None]:
    for region in views.regions if views is not None else ():
        for slot in region.slots:
            if slot.tensor in names:
                return f"p:{region.name}.{slot.name}", region.name
    return None, None


def memory_parts(plan: PlanRecord) -> list[dict[str, Any]]:
    """Of the fullest rank when it is fullest, as its curve has it; else as the plan's table."""
    if plan.drawn.memory:
        fullest = max(plan.drawn.memory, key=lambda curve: curve.peak_bytes)
        sums = [sum(values) for values in zip(*fullest.series.values(), strict=True)]
        at = sums.index(max(sums))
        return [{"what": what, "bytes": values[at]} for what, values in fullest.series.items() if values[at]]
    memory = plan.cost.memory
    parts = (
        ("parameters", memory.parameters), ("gradients", memory.gradients),
        ("optimizer states", memory.optimizer_states), ("cache", memory.states), ("activations", memory.activations),
    )  # fmt: skip
    return [{"what": what, "bytes": size} for what, size in parts if size]


def curve_row(plan: PlanRecord, curve: MemoryCurve) -> dict[str, Any]:
    """What one rank holds over time."""
    name = "every rank" if plan.pipeline is None else f"{plan.pipeline.axis} rank {curve.rank}"
    return {
        "name": name, "rank": curve.rank, "times_s": list(curve.times_s), "peak_bytes": curve.peak_bytes,
        "series": {what: list(values) for what, values in curve.series.items()},
    }  # fmt: skip
