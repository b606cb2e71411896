"""The plan as tables: what `print(plan)` shows. Same plan, same text: fixed width, no colours, units a person reads."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autopar.base.text import format_bytes, format_count, format_time, microbatches_text, new_table, plain_text, plural
from autopar.cost.collectives import Collective
from autopar.cost.estimate import Cost, difference
from autopar.ir.interface import TensorInterface
from autopar.ir.interface_text import format_tensor, format_tensors
from autopar.ir.names import starred
from autopar.ir.program import AttentionSite
from autopar.ir.sharding import Shard, format_shape
from autopar.ir.tensor_type import dtype_name
from autopar.planner.plan.record import PlanRecord
from autopar.strategies.pipelining.summary import PipelineSummary
from autopar.views.explain import memory_price
from autopar.views.rates import Rates

MAX_PARAMETER_ROWS = 32
MAX_COLLECTIVE_ROWS = 24
MAX_STAGE_ROWS = 32

AGAIN = {
    "none": "nothing again",
    "selective": "all but products and attention again, to hold less",
    "full": "whole blocks again, to hold less",
}
"""What the backward computes, by how a plan recomputes."""


def step_terms(cost: Cost) -> str:
    """`1.2 s compute + 300 ms communication (200 ms more beside it) + 40 ms optimizer`."""
    waited_s = max(0.0, difference(cost.communication_s - cost.hidden_s, cost.step_time_s))
    beside = f" ({format_time(cost.hidden_s)} more beside the compute)" if cost.hidden_s > 0 else ""
    terms = [f"{format_time(cost.compute_s)} compute", f"{format_time(waited_s)} communication{beside}"]
    terms += [f"{format_time(cost.waiting_s)} waiting"] * (cost.waiting_s > 0)
    terms += [f"{format_time(cost.optimizer_s)} optimizer"] * (cost.optimizer_s > 0)
    terms += [f"{format_time(cost.host_s)} waiting for the host"] * (cost.host_s > 0)
    return " + ".join(terms)


def plan_text(plan: PlanRecord) -> str:
    """The tables of `plan_tables` as plain text, 120 columns wide."""
    return plain_text(plan_tables(plan))


def plan_tables(plan: PlanRecord) -> RenderableType:
    """Header, regions, parameters, collectives, memory, solver; for a rich console of any width."""
    parts = [_header(plan), _regions(plan), _parameters(plan)]
    if plan.pipeline is not None:
        parts += [
            _stages(plan, plan.pipeline),
            *([_considered(plan.pipeline)] if len(plan.pipeline.considered) > 1 else []),
        ]
    parts += [_collectives(plan), _memory(plan), _solver(plan)]
    notes = [Text(f"note: {note}") for note in plan.notes]
    return Group(*(item for part in parts for item in (part, Text(""))), *notes)


def one_line(plan: PlanRecord) -> str:
    """The result in one line, for the end of a command."""
    cost, limit = plan.cost, plan.memory_limit_bytes
    memory = format_bytes(cost.peak_memory_bytes) + (f" of {format_bytes(limit)}" if limit else "")
    gap = f"gap {plan.gap:.2%}" if math.isfinite(plan.gap) else "gap unknown"
    pipeline = ""
    if plan.pipeline is not None:
        schedule = plan.pipeline.schedule
        bubble = plan.pipeline.timeline.bubble_share
        parts = microbatches_text(schedule.num_microbatches, plan.interface.together)
        pipeline = f"{schedule.name} with {parts}, bubble {bubble:.1%}, "
    return (
        f"{plan.title} on {plan.mesh} ({plan.mesh.hardware.name}), {plan.strategy}: "
        f"{format_time(cost.step_time_s)} a step predicted, {pipeline}{memory} a rank, {gap}"
    )


def _header(plan: PlanRecord) -> RenderableType:
    interface, cost = plan.interface, plan.cost
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    size = sum(math.prod(parameter.shape) for parameter in interface.parameters)
    table.add_row("model", f"{plan.title}, {format_count(size)} parameters")
    hardware = plan.mesh.hardware.name
    table.add_row("mesh", f"{plan.mesh}: {plan.mesh.num_devices} ranks, hardware {hardware}")
    table.add_row("strategy", plan.strategy + _pins(plan))
    inputs = [f"{name} {kind}" for name, kind in format_tensors(interface.inputs, interface.axes)]
    parts = f", in each of {interface.microbatches} microbatches a step" if interface.microbatches > 1 else ""
    parts += ", two at a time" if interface.together > 1 else ""
    table.add_row("batch", ", ".join(inputs) + parts)
    compute = dtype_name(plan.precision) if plan.precision else "the model's own"
    table.add_row("precision", f"{compute}, {'training' if plan.training else 'inference'}")
    table.add_row(
        "step",
        f"{format_time(cost.step_time_s)} predicted = {step_terms(cost)}"
        + (", of the busiest pipeline rank" if plan.pipeline else ""),
    )
    if rates := _rates(plan):
        table.add_row("rate", rates)
    if plan.training:
        table.add_row("recompute", f"{plan.rematerialize}: the backward computes {AGAIN[plan.rematerialize]}")
    if plan.attention:
        table.add_row("attention", attention_line(plan.attention))
    names = dict(zip(plan.stage_mesh.axis_names, plan.strategies, strict=True))
    for number, (axis, where, text) in enumerate(plan.context):
        label = f"{axis}={names[axis].name}" + (f", {where}" if where else "")
        table.add_row("" if number else "context", f"{label}: {text}")
    if plan.pipeline is not None:
        table.add_row("pipeline", _pipeline(plan.pipeline, plan.interface.together))
    if text := _overlap(plan):
        table.add_row("overlap", text)
    return table


def _pins(plan: PlanRecord) -> str:
    taken = sum(pin.taken for pin in plan.pins)
    asked = f", {plural(len(plan.pins) - taken, 'pin', 'pins')}" if len(plan.pins) > taken else ""
    return asked + (f"; {plural(taken, 'tensor', 'tensors')} as in another program of the model" if taken else "")


def _rates(plan: PlanRecord) -> str:
    """`1.96 million tokens/s, 7,660 a device; 41.2% MFU`; empty where nothing is known."""
    rates = Rates.of(plan)
    parts = []
    if rates.tokens_per_s is not None and rates.tokens_per_s_per_device is not None:
        parts.append(
            f"{format_count(rates.tokens_per_s)} tokens/s, {format_count(rates.tokens_per_s_per_device)} a device"
        )
    elif rates.rows_per_s is not None:
        parts.append(f"{format_count(rates.rows_per_s)} rows/s")
    if rates.mfu is not None:
        parts.append(f"{rates.mfu:.1%} MFU (the model's own operations to the devices' peak)")
    return "; ".join(parts)


def attention_line(sites: Sequence[AttentionSite]) -> str:
    """`32 found, 32 fused: 16 × causal, window 4096; 16 × causal`; of documents, what is not known of them."""
    fused = Counter(site.what for site in sites if site.fused)
    kinds = "; ".join(f"{count} × {what}" for what, count in fused.items())
    whole = " (priced as if a row were one document)" if any("documents" in what for what in fused) else ""
    return f"{len(sites)} found, {fused.total()} fused" + (f": {kinds}" if kinds else "") + whole


def _pipeline(summary: PipelineSummary, together: int) -> str:
    schedule, timeline = summary.schedule, summary.timeline
    per_rank = schedule.num_stages // schedule.num_ranks
    stages = plural(schedule.num_stages, "stage", "stages")
    if schedule.num_ranks > 1:
        stages += f", {per_rank} on each of {schedule.num_ranks} ranks of {summary.axis}"
    return (
        f"{schedule.name}, {microbatches_text(schedule.num_microbatches, together)}, {stages}; simulated step "
        f"{format_time(timeline.makespan_s)}, of which ranks wait {timeline.bubble_share:.1%} on average"
    )


def _overlap(plan: PlanRecord) -> str:
    """When collectives of parameters run; empty where there are none."""
    found, kinds = plan.decisions.overlap, {row.why for row in plan.collectives}
    if found is None or not kinds & {"gather parameter", "reduce gradient"}:
        return ""
    if not found.prefetch:
        return "none: what is in flight would not fit the memory limit"
    parts = ["the next block's parameters are gathered while one computes"] * ("gather parameter" in kinds)
    if "reduce gradient" in kinds:
        late, beside = "gradients are reduced after the backward", "gradients are reduced beside the backward"
        parts.append(late if found.at_end else beside)
    return f"{'; '.join(parts)} (up to {format_bytes(found.extra_bytes)} in flight)"


def _regions(plan: PlanRecord) -> RenderableType:
    table = new_table("Regions", "region", "module", ">calls", ">operators forward", ">backward", ">saved a call")
    for region in plan.regions:
        backward = str(region.backward_operators) if plan.training else "-"
        saved = format_bytes(region.saved_bytes)
        module = region.module or "(around the blocks)"
        table.add_row(region.name, module, str(region.calls), str(region.forward_operators), backward, saved)
    return table


# -- parameters
# --------------------------------------------------------------------------------------------------------------


def parameter_groups(plan: PlanRecord) -> list[tuple[str, list[TensorInterface]]]:
    """Parameters of the same slot of a repeated region together, by name with `*`, where they lie alike."""
    layouts = plan.decisions.placement.parameters
    groups: dict[tuple[object, ...], list[TensorInterface]] = {}
    modules = [region.module for region in plan.regions if "*" in region.module]
    for parameter in plan.interface.parameters:
        key = (starred(parameter.name, modules), parameter.shape, parameter.dtype, parameter.sharding)
        groups.setdefault((*key, layouts.get(parameter.name)), []).append(parameter)
    return [(str(key[0]), members) for key, members in groups.items()]


def _parameters(plan: PlanRecord) -> RenderableType:
    table = new_table("Parameters", "parameter", ">×", "stored", "in use", ">bytes a rank")
    groups = parameter_groups(plan)
    layouts, axes = plan.decisions.placement.parameters, plan.interface.axes
    for name, members in groups[:MAX_PARAMETER_ROWS]:
        first = members[0]
        used = "same"
        if layout := layouts.get(first.name):
            dtype = first.dtype
            if plan.precision is not None and getattr(torch, dtype).is_floating_point:
                dtype = str(plan.precision).removeprefix("torch.")
            text = format_shape(dtype_name(dtype), first.shape, layout.compute, axes)
            used = text if text != format_tensor(first, axes) else "same"
            if layout.held != layout.stored and plan.training:
                used += ", gathered once"
        tied = f" = {', '.join(first.aliases)}" if first.aliases else ""
        size = sum(_local_bytes(plan, member) for member in members)
        table.add_row(name + tied, str(len(members)), format_tensor(first, axes), used, format_bytes(size))
    if rest := groups[MAX_PARAMETER_ROWS:]:
        tensors = [member for _, members in rest for member in members]
        size = sum(_local_bytes(plan, tensor) for tensor in tensors)
        table.add_row(f"({len(rest)} more groups)", str(len(tensors)), "…", "…", format_bytes(size))
    return table


def _local_bytes(plan: PlanRecord, tensor: TensorInterface) -> int:
    """Of the first rank's piece; where pieces are uneven no rank has more."""
    shape = list(tensor.shape)
    for placement, size in zip(tensor.sharding, plan.interface.sizes, strict=True):
        if isinstance(placement, Shard):
            shape[placement.dim] = -(-shape[placement.dim] // size)
    return math.prod(shape) * getattr(torch, tensor.dtype).itemsize


# -- collectives, memory, solver
# ---------------------------------------------------------------------------------------------


def collective_groups(rows: Sequence[Collective]) -> Iterator[tuple[Collective, int, float, float]]:
    """Rows with the same purpose, kind, axis and phase together: (the first, how many, bytes, seconds), costliest
    first.
    """
    groups: dict[tuple[str, str, str, str], list[Collective]] = {}
    for row in rows:
        groups.setdefault((row.why, row.kind, row.axis, row.phase), []).append(row)
    totals = [
        (group[0], sum(r.times for r in group), sum(r.bytes_sent for r in group), sum(r.seconds for r in group))
        for group in groups.values()
    ]
    yield from sorted(totals, key=lambda total: (-total[3], total[0].why, total[0].kind, total[0].axis, total[0].phase))


def _stages(plan: PlanRecord, summary: PipelineSummary) -> RenderableType:
    """A row for each rank of the pipeline, with all its stages."""
    together = plan.interface.together
    table = new_table(
        "Stages", f"{summary.axis} rank", "stages", "runs", ">parameters", ">forward", ">backward", ">in flight",
        ">waits", ">memory",
    )  # fmt: skip
    schedule, timeline = summary.schedule, summary.timeline
    ranks = list(range(schedule.num_ranks))
    half = MAX_STAGE_ROWS // 2
    for rank in ranks if len(ranks) <= MAX_STAGE_ROWS else [*ranks[:half], -1, *ranks[-half:]]:
        if rank < 0:
            table.add_row("…", *[""] * 8)
            continue
        numbers = schedule.stages_of(rank)
        stages = [summary.stages[number] for number in numbers]
        table.add_row(
            str(rank),
            " ".join(map(str, numbers)),
            "; ".join(stage.runs for stage in stages),
            format_count(sum(stage.parameters for stage in stages)),
            format_time(sum(stage.cost.forward_s for stage in stages)),
            format_time(sum(stage.cost.backward_s for stage in stages)),
            " ".join(str(schedule.in_flight[number]) for number in numbers),
            f"{timeline.bubble_shares[rank]:.1%}",
            format_bytes(timeline.peak_bytes[rank]),
        )
    pairs = "Microbatches go through a stage in pairs: seconds, and what is in flight, are of pairs" * (together > 1)
    lines = [text for text in (pairs, _between_stages(summary, together), _computed_again(summary)) if text]
    return Group(table, *(Text(line) for line in lines))


def _between_stages(summary: PipelineSummary, together: int) -> str:
    """What travels: the most that a stage sends, and what."""
    if len(summary.stages) < 2:
        return ""
    most = max(summary.stages[:-1], key=lambda stage: stage.cost.forward_bytes)
    each = "pair" if together > 1 else "microbatch"
    return (
        f"To the next stage, for each {each}: {format_bytes(most.cost.forward_bytes)} a rank at most "
        f"({most.sends}); its gradients come back"
    )


def _computed_again(summary: PipelineSummary) -> str:
    again = {stage.again for stage in summary.stages if stage.again}
    return f"Computed again by later stages: {'; '.join(sorted(again))}" if again else ""


def _considered(summary: PipelineSummary) -> RenderableType:
    """The schedules that were simulated."""
    table = new_table("Schedules, simulated", "schedule", ">stages a rank", ">step", ">waiting", ">fullest rank", "")
    for each in summary.considered:
        table.add_row(
            each.schedule, str(each.stages_per_rank), format_time(each.step_s), f"{each.bubble:.1%}",
            format_bytes(each.peak_bytes), "" if each.fits else "does not fit",
        )  # fmt: skip
    return table


def _collectives(plan: PlanRecord) -> RenderableType:
    groups = list(collective_groups(plan.collectives))
    if not groups:
        return Text("Collectives: none; no rank ever waits for another")
    table = new_table(
        "Collectives" if plan.pipeline is None else "Collectives of the busiest pipeline rank",
        "what for",
        "kind",
        "axis",
        "phase",
        ">times a step",
        ">bytes a rank and step",
        ">predicted",
    )
    for first, times, sent, seconds in groups[:MAX_COLLECTIVE_ROWS]:
        table.add_row(
            first.why, first.kind, first.axis, first.phase, str(times), format_bytes(sent), format_time(seconds)
        )
    if rest := groups[MAX_COLLECTIVE_ROWS:]:
        _total_row(table, f"({len(rest)} more kinds)", rest)
    table.add_section()
    _total_row(table, "all", groups)
    return table


def _total_row(table: Table, name: str, groups: Sequence[tuple[Collective, int, float, float]]) -> None:
    times, sent, seconds = (sum(group[i] for group in groups) for i in (1, 2, 3))  # type: ignore[misc]
    table.add_row(name, "", "", "", str(times), format_bytes(sent), format_time(seconds))


def memory_price_text(plan: PlanRecord) -> str:
    """`one more GiB a rank would save about 1.30 ms a step, to first order`; empty where memory has no price."""
    size, unit = memory_price.unit(plan.memory_limit_bytes or 0.0)
    least, most = (format_time(size * each) for each in memory_price.seconds_per_byte(plan))
    if not plan.solved.memory_price_s_per_byte:
        return ""
    saved = f"about {least}" if least == most else f"{least} to {most}"
    whose = " of each pipeline rank's work" if plan.pipeline is not None else ""
    when = "" if least == most else ": most where gathers are waited for"
    return f"one more {unit} a rank would save {saved}{whose} a step, to first order{when}"


def _memory(plan: PlanRecord) -> RenderableType:
    memory = plan.cost.memory
    cache = [("cache", memory.states)] if memory.states else []
    parts = [
        ("parameters", memory.parameters), ("gradients", memory.gradients),
        ("optimizer states", memory.optimizer_states), *cache, ("activations", memory.activations),
        ("peak", memory.peak),
    ]  # fmt: skip
    columns = (*(name for name, _ in parts), "limit")
    table = new_table(
        "Memory of one rank" if plan.pipeline is None else "Memory of the fullest rank",
        *(f">{column}" for column in columns),
    )
    limit = format_bytes(plan.memory_limit_bytes) if plan.memory_limit_bytes else "none"
    table.add_row(*(format_bytes(size) for _, size in parts), limit)
    price = memory_price_text(plan)
    return Group(table, Text(f"Memory binds: {price}")) if price else table


def _solver(plan: PlanRecord) -> RenderableType:
    solved = plan.solved
    if not math.isfinite(solved.gap):
        return Text("Solver: nothing was solved for this plan")
    named = "" if any(s.name == "auto" for s in plan.strategies) else " under the strategy's constraints"
    return Text(
        f"Solver: {solved.nodes} nodes, {solved.choices} choices, {solved.edges} edges{named}; objective "
        f"{format_time(solved.objective_s)}, proven within {solved.gap:.3%}; planned in {format_time(plan.planning_s)}"
    )
