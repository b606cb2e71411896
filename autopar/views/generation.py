"""What `print` shows of a plan for `generate()`: what it comes to, and then each phase's plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autopar.base.text import format_bytes, format_count, format_time, new_table, plain_text, plural
from autopar.planner.plan.record import PlanRecord
from autopar.views.text import plan_tables


def phases_text(data: Mapping[str, Any], phases: Mapping[str, PlanRecord]) -> str:
    """The tables of `phases_tables` as plain text, 120 columns wide."""
    return plain_text(phases_tables(data, phases))


def phases_tables(data: Mapping[str, Any], phases: Mapping[str, PlanRecord]) -> RenderableType:
    """What all comes to, and the tables of each phase.

    data: as `GenerationPlan.to_data` gives it.
    """
    table = new_table(
        "Phases",
        "phase",
        ">tokens a call",
        ">a call",
        ">tokens/s",
        ">collectives a call",
        ">bytes sent",
        ">cache",
        ">peak",
    )
    for row in phase_rows(data, phases):
        rate = format_count(row["tokens_per_s"]) if row["tokens_per_s"] is not None else "-"
        table.add_row(
            row["phase"], str(row["tokens"]), format_time(row["seconds"]), rate, str(row["collectives"]),
            format_bytes(int(row["bytes_sent"])), format_bytes(row["cache_bytes"]), format_bytes(row["peak_bytes"]),
        )  # fmt: skip
    parts: list[RenderableType] = [_header(data), Text(""), table]
    for name, plan in phases.items():
        parts += [Text(""), Text(f"==== {name} " + "=" * 60), plan_tables(plan)]
    return Group(*parts)


def phase_rows(data: Mapping[str, Any], phases: Mapping[str, PlanRecord]) -> list[dict[str, Any]]:
    """A row for each phase: what one call of it takes, on all ranks and on the fullest one; seconds and bytes."""
    asked = data["generation"]
    chunk = min(asked["chunk"] or asked["prompt"], asked["prompt"])
    counts = {"prefill": asked["batch"] * chunk, "decode": asked["batch"]}
    return [
        {
            "phase": name,
            "tokens": counts[name],
            "seconds": plan.cost.step_time_s,
            "tokens_per_s": counts[name] / plan.cost.step_time_s if plan.cost.step_time_s else None,
            "collectives": sum(row.times for row in plan.collectives),
            "bytes_sent": sum(row.bytes_sent for row in plan.collectives),
            "cache_bytes": plan.cost.memory.states,
            "peak_bytes": plan.cost.peak_memory_bytes,
        }
        for name, plan in phases.items()
    ]


def phases_line(data: Mapping[str, Any]) -> str:
    """The result in one line, for the end of a command."""
    return (
        f"{format_time(data['time_to_first_token_s'])} to the first token, {format_time(data['time_per_token_s'])} a "
        f"token, {format_count(data['tokens_per_s'])} tokens/s predicted; cache {format_bytes(data['cache_bytes'])} of "
        f"{format_bytes(data['peak_memory_bytes'])} a rank"
    )


def _header(data: Mapping[str, Any]) -> Table:
    asked = data["generation"]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    beams = f", {asked['beams']} beams each" if asked["beams"] > 1 else ""
    chunks = f" in chunks of {asked['chunk']}" if asked["chunk"] else ""
    sequences = plural(asked["batch"], "sequence", "sequences")
    table.add_row(
        "generate", f"{sequences} of {asked['prompt']} tokens{chunks}{beams}, {asked['new_tokens']} new tokens each"
    )
    table.add_row("first token", f"after {format_time(data['time_to_first_token_s'])} predicted")
    table.add_row("each token", f"{format_time(data['time_per_token_s'])} predicted, with the cache at its full length")
    rate, each = data["tokens_per_s"], data["tokens_per_s_per_device"]
    table.add_row(
        "rate", f"{format_count(rate)} tokens/s, {format_count(each)} a device; {format_time(data['total_s'])} in all"
    )
    stored = f", keys and values in {asked['cache']}" if asked.get("cache") else ""
    table.add_row("cache", f"{format_bytes(data['cache_bytes'])} a rank ({data['cache_bytes']} bytes){stored}")
    return table
