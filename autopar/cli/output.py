"""What the commands of `autopar` print, for people and for machines, and the files that they write.

Nothing here imports torch before it is called: see `cli.py`.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from autopar.base.errors import AutoparError
from autopar.base.text import new_table

if TYPE_CHECKING:
    from autopar.api.generation import GenerationPlan
    from autopar.api.plan import Plan
    from autopar.api.proof import Proof
    from autopar.api.search import SearchResult
    from autopar.api.search_generation import GenerationSearch


def write(plan: Plan, save: Path | None, source: Path | None, picture: Path | None, trace: Path | None) -> list[Path]:
    """The files that were asked for; their paths."""
    written: list[Path] = []
    with writing():
        if save is not None:
            plan.save(save)
            written.append(save)
        if source is not None:
            source.write_text(plan.source, encoding="utf-8")
            written.append(source)
        if picture is not None:
            written.append(plan.visualize(picture))
        if trace is not None:
            written.append(plan.trace(trace))
    return written


@contextmanager
def writing() -> Iterator[None]:
    """What cannot be written is an AutoparError."""
    try:
        yield
    except OSError as error:
        raise AutoparError(f"cannot write: {error}", remedy="name a file in a folder that exists") from error


def next_command(model: str, plan: Plan, strategy: str) -> str:
    """Prove the same strategy, small: every axis and the microbatches shrunk to what a tiny batch can be split over.

    A pipeline keeps a block for each stage, and where its schedule is a file its ranks and microbatches.
    """
    sizes = {name: min(size, 2) for name, size in plan.mesh.axes}
    tiny = "" if ":" in model else " --tiny"
    named = "" if strategy == "auto" else f" --strategy {shlex.quote(strategy)}"
    parts = " --microbatches 2" if plan.interface.microbatches > 1 else ""
    parts += " --halves" if plan.interface.together > 1 else ""
    if plan.pipeline is not None and plan.asked is not None:
        schedule, together = plan.pipeline.schedule, plan.interface.together
        per_rank = schedule.num_stages // schedule.num_ranks
        parts = f" --microbatches {4 * together}" if schedule.num_microbatches > 1 else ""
        if plan.asked.is_file:
            rows = plan.interface.microbatches * math.prod(sizes.values())
            sizes["pp"], parts = schedule.num_ranks, f" --batch {rows}x16"
        elif together > 1:
            parts = f" --batch {8 * math.prod(sizes.values())}x16{parts or ' --microbatches 2'}"
        parts += " --halves" if together > 1 else ""
        if ":" not in model and sizes["pp"] * per_rank > 2:
            parts += f" --layers {sizes['pp'] * per_rank}"
    small = ",".join(f"{name}={size}" for name, size in sizes.items())
    return f"autopar verify {model}{tiny} --mesh {small}{named}{parts}"


def print_plan(plan: Plan, written: list[Path], following: str) -> None:
    """The plan, the files that were written, the command to try next."""
    from autopar.views.text import one_line, plan_tables, plan_text

    console = stdout()
    # What is piped is the same text on every machine; a terminal gets its own width and bold titles.
    if console.is_terminal:
        console.print(plan_tables(plan))
    else:
        print(plan_text(plan))
    for path in written:
        console.print(f"wrote {path}", soft_wrap=True)
    console.print(one_line(plan), style="bold", soft_wrap=True)
    console.print(f"Next: {following}", soft_wrap=True)


def print_generation(plan: GenerationPlan, written: list[Path], following: str) -> None:
    """The plan of both phases, the files that were written, the command to try next."""
    from autopar.views.generation import phases_line, phases_tables, phases_text

    console, data = stdout(), plan.to_data()
    if console.is_terminal:
        console.print(phases_tables(data, plan.phases))
    else:
        print(phases_text(data, plan.phases))
    for path in written:
        console.print(f"wrote {path}", soft_wrap=True)
    console.print(f"{plan.decode.title} on {plan.decode.mesh}: {phases_line(data)}", style="bold", soft_wrap=True)
    console.print(f"Next: {following}", soft_wrap=True)


def generation_data(plan: GenerationPlan, written: list[Path]) -> dict[str, Any]:
    """The plan of both phases as `--json` prints it."""
    phases = {name: plan_data(each, []) for name, each in plan.phases.items()}
    return plan.to_data() | {"phases": phases, "written": [str(path) for path in written]}


def write_generation(plan: GenerationPlan, save: Path | None, source: Path | None) -> list[Path]:
    """The files that were asked for; a program's file for each phase, with its name before the suffix."""
    written: list[Path] = []
    with writing():
        if save is not None:
            plan.save(save)
            written.append(save)
        if source is not None:
            for name, each in plan.phases.items():
                path = source.with_stem(f"{source.stem}_{name}")
                path.write_text(each.source, encoding="utf-8")
                written.append(path)
    return written


def print_proof(proof: Proof, plan: Plan, model: str, likeness: str = "") -> None:
    """The proof, and where it fails the tensors that differ most. likeness: of a small twin with the model itself."""
    console = stdout()
    console.print(str(proof), style="bold green" if proof.ok else "bold red", soft_wrap=True)
    if not proof.ok:
        wrong = sorted((each for each in proof.comparisons if not each.ok), key=lambda each: -each.error)
        for each in wrong[:10]:
            console.print(f"  {each.name}: relative error {each.error:.3g}", soft_wrap=True)
        return
    if not plan.collectives and plan.mesh.num_devices > 1:
        console.print(
            "Nothing is split at these sizes, so nothing moves; a named strategy or a larger --batch would.",
            soft_wrap=True,
        )
    if likeness:
        console.print(likeness, soft_wrap=True)
    mesh = ",".join(f"{name}={size}" for name, size in plan.mesh.axes)
    console.print(f"Next: autopar plan {model} --mesh {mesh} --source program.py, and read the program", soft_wrap=True)


def plan_data(plan: Plan, written: list[Path]) -> dict[str, Any]:
    """A plan as `--json` prints it."""
    from autopar.ir.interface_text import format_tensor
    from autopar.views.explain.memory_price import seconds_per_byte
    from autopar.views.rates import Rates

    memory, (least, most) = plan.cost.memory, seconds_per_byte(plan)
    rates = Rates.of(plan)
    return {
        "model": plan.title,
        "mesh": dict(plan.mesh.axes),
        "hardware": plan.mesh.hardware.name,
        "strategy": plan.strategy,
        "microbatches": plan.interface.microbatches,
        "together": plan.interface.together,
        "step_time_s": plan.cost.step_time_s,
        "compute_s": plan.cost.compute_s,
        "communication_s": plan.cost.communication_s,
        "hidden_s": plan.cost.hidden_s,
        "waiting_s": plan.cost.waiting_s,
        "optimizer_s": plan.cost.optimizer_s,
        "host_s": plan.cost.host_s,
        "rows_per_s": rates.rows_per_s,
        "tokens_per_s": rates.tokens_per_s,
        "tokens_per_s_per_device": rates.tokens_per_s_per_device,
        "mfu": rates.mfu,
        "recompute": plan.rematerialize if plan.training else None,
        "pipeline": _pipeline_data(plan),
        "memory_bytes": {**asdict(memory), "activations": memory.activations, "limit": plan.memory_limit_bytes},
        "bytes_by_axis": plan.bytes_by_axis(),
        "gap": plan.gap,
        "memory_price_ms_per_gib": {"least": 1e3 * 2**30 * least, "most": 1e3 * 2**30 * most},
        "attention": [asdict(site) for site in plan.attention],
        "context": [dict(zip(("axis", "where", "does"), row, strict=True)) for row in plan.context],
        "planning_s": plan.planning_s,
        "passes": [asdict(each) for each in plan.times],
        "regions": [asdict(region) for region in plan.regions],
        "parameters": {p.name: format_tensor(p, plan.interface.axes) for p in plan.interface.parameters},
        "collectives": [asdict(row) for row in plan.collectives],
        "written": [str(path) for path in written],
    }


def _pipeline_data(plan: Plan) -> dict[str, Any] | None:
    summary = plan.pipeline
    if summary is None:
        return None
    timeline, schedule = summary.timeline, summary.schedule
    rows = [
        {**asdict(stage), "rank": schedule.rank_of[number], "in_flight": schedule.in_flight[number]}
        for number, stage in enumerate(summary.stages)
    ]
    return {
        "schedule": schedule.name,
        "ranks": schedule.num_ranks,
        "microbatches": plan.interface.microbatches,
        "bubble": timeline.bubble_share,
        "peak_bytes": list(timeline.peak_bytes),
        "stages": rows,
        "considered": [asdict(each) for each in summary.considered],
    }


def proof_data(proof: Proof, plan: Plan) -> dict[str, Any]:
    """A proof as `--json` prints it."""
    names = ("ok", "mesh", "scaled_down", "dtype", "dropout", "num_collectives", "rtol", "notes")
    return {
        **{name: getattr(proof, name) for name in names},
        "model": plan.title,
        "strategy": plan.strategy,
        "microbatches": plan.interface.microbatches,
        "together": plan.interface.together,
        "worst": asdict(proof.worst),
        "comparisons": [asdict(each) for each in proof.comparisons],
    }


def print_rows(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], as_json: bool) -> None:
    """A table; as JSON a list of objects."""
    if as_json:
        print(json.dumps([dict(zip(columns, row, strict=True)) for row in rows], indent=1))
        return
    table = new_table("", *columns)
    for row in rows:
        table.add_row(*row)
    stdout().print(table)


def stdout() -> Console:
    """Width 120 where there is no terminal, so that what is piped is not folded at 80."""
    return Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 120)


def print_search(
    found: SearchResult, model: str, batch: str | None, written: Sequence[Path], halves: bool | None = None
) -> None:
    """The tables of a search, and the command that plans the best. halves: as was asked."""
    print(str(found))
    for path in written:
        print(f"written: {path}")
    best = found.planned[0][0].point
    words = ",".join(f"{axis}={name}" for axis, name in best.strategy.items())
    size = f" --batch {batch}" if batch else ""
    together = "" if halves is None else f" --{'' if halves else 'no-'}halves"
    print(
        f"next: autopar plan {model} --mesh {best} --hardware {found.cluster.hardware.name}{size} "
        f"--strategy '{words}' --microbatches {best.microbatches}{together}"
    )


def write_generation_search(found: GenerationSearch, plot: Path | None, save: Path | None) -> list[Path]:
    """The files that were asked for: the picture, and of the plans that of most tokens a second."""
    written: list[Path] = []
    with writing():
        if plot is not None:
            written.append(found.plot(plot))
        if save is not None:
            if not found.planned:
                raise AutoparError("nothing was planned", where=str(save), remedy="use --top 1, or a larger limit")
            found.best.save(save)
            written.append(save)
    return written


def search_generation_command(found: GenerationSearch, model: str) -> str:
    """The command that plans what makes most tokens a second."""
    best, asked = found.frontier[-1], found.generation
    words = ",".join(f"{axis}={name}" for axis, name in best.point.strategy.items())
    return (
        f"autopar plan {model} --mesh {best.point} --hardware {found.cluster.hardware.name} "
        f"--strategy '{words}' --generate {best.batch}x{asked.prompt}x{asked.new_tokens}"
    )
