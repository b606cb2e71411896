"""The commands of `autopar` that show a saved plan: show, explain, holds, draw, report, trace, diff, export,
hand-over.

Nothing here imports torch before a command needs it: see `cli.py`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from autopar.base.errors import AutoparError
from autopar.base.progress import Steps
from autopar.cli import output as cli_output
from autopar.cli.input import as_planned, errors, model_of_plan, names_bundled_model, read_plan, read_plans
from autopar.cli.options import AsJson, Batch, Layers, OfModel, OfPhase, PlanFile, Tiny

MOST_RANKS = 64
"""Whose bytes are printed, one a line."""
_LOADS = "Write it by json.dump(compiled.expert_loads(), file): a list of tokens of each expert, by layer"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (show, explain, holds, draw, report, trace, diff, export, hand_over):
        app.command()(command)


def show(plan: PlanFile, of: OfPhase = None) -> None:
    """Print PLAN: parameters, regions, stages, collectives, memory."""
    with errors(2):
        from autopar.api.generation import GenerationPlan
        from autopar.views.generation import phases_tables, phases_text
        from autopar.views.text import plan_tables, plan_text

        found = read_plans(plan) if of is None else read_plan(plan, of)
    console = cli_output.stdout()
    if isinstance(found, GenerationPlan):
        if console.is_terminal:
            console.print(phases_tables(found.to_data(), found.phases))
        else:
            print(phases_text(found.to_data(), found.phases))
    elif console.is_terminal:
        console.print(plan_tables(found))
    else:
        print(plan_text(found), end="")


def explain(
    plan: PlanFile,
    name: Annotated[
        str,
        typer.Argument(
            help="A parameter, an input, an output, an operator's result (layer.linear_3), or a module that holds an "
            "attention; * for any part of a name. `cost`: what the predicted step is made of."
        ),
    ],
    model: OfModel = None,
    batch: Batch = None,
    layers: Layers = None,
    tiny: Tiny = False,
    alternatives: Annotated[int, typer.Option(min=1, help="How many other shardings to show, best first.")] = 8,
    time_limit: Annotated[float, typer.Option(min=0.0, help="Seconds after which no other one is begun.")] = 120.0,
    as_json: AsJson = False,
) -> None:
    """Say why NAME lies as it does in PLAN, what else there was, and what that would cost; or what the step costs."""
    with Steps() as steps:
        with errors(2):
            from autopar.api.generation import GenerationPlan

            found = read_plans(plan)
            if isinstance(found, GenerationPlan):
                raise AutoparError(
                    f"{plan} is a plan for generate(), which is explained where it was made",
                    remedy=f"in Python: autopar.plan_generation(model, mesh, …).decode.explain({name!r})",
                )
            loaded = model_of_plan(steps, plan, found, model, batch, tiny, layers)
        from autopar.views.explain import explain as explaining
        from autopar.views.explain.subjects import find

        with errors(1):
            steps.begin("tracing it again")
            found = explaining.with_program(found, loaded.model, loaded.batch)
        with errors(2):
            assert found.program is not None
            if not explaining.is_cost(found, name):
                find(found.program, name)
        with errors(1):
            answer = found.explain(name, max_alternatives=alternatives, time_limit_s=time_limit, progress=steps.part)
    console = cli_output.stdout()
    if as_json:
        print(json.dumps(answer.to_dict(), indent=1))
    elif console.is_terminal:
        console.print(answer.tables())
    else:
        print(answer, end="")


def holds(
    plan: PlanFile,
    name: Annotated[str | None, typer.Argument(help="A parameter, a buffer, an input, an output.")] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Everything that this rank holds.")] = None,
    of: OfPhase = None,
    as_json: AsJson = False,
) -> None:
    """Show which rank holds which part of NAME, or all that one rank holds."""
    with errors(2):
        if (name is None) == (rank is None):
            raise AutoparError("holds takes a name or a rank", remedy="autopar holds plan.json NAME, or --rank 0")
        found = read_plan(plan, of).holds(name, rank=rank)
    if as_json:
        print(json.dumps(found.to_dict(), indent=1))
    else:
        print(found, end="")


def draw(
    plan: PlanFile,
    path: Annotated[Path, typer.Argument(help="Where the picture goes (.svg, .png, .pdf, .gv).")] = Path("plan.svg"),
    detail: Annotated[
        Literal["overview", "region", "operator", "timeline", "memory"],
        typer.Option(help="How much to draw of the graph; or the predicted step over time, or what a rank holds."),
    ] = "overview",
    phase: Annotated[Literal["both", "forward", "backward"], typer.Option(help="Of the step.")] = "both",
    region: Annotated[str | None, typer.Option(help="Only this region (autopar show lists them).")] = None,
    of: OfPhase = None,
) -> None:
    """Draw PLAN."""
    with errors(2):
        written = read_plan(plan, of).visualize(path, detail=detail, phase=phase, region=region)
    print(f"wrote {written}")


def report(
    plan: PlanFile,
    path: Annotated[Path, typer.Argument(help="Where the page goes.")] = Path("plan.html"),
    against: Annotated[list[Path] | None, typer.Option(help="Another plan's file to compare with.")] = None,
    explain_seconds: Annotated[
        float, typer.Option(min=0.0, help="Seconds in which tensors are explained; 0: nothing is solved again.")
    ] = 60.0,
    model: OfModel = None,
    batch: Batch = None,
    layers: Layers = None,
    tiny: Tiny = False,
    expert_loads: Annotated[
        Path | None, typer.Option(help="JSON of what compiled.expert_loads() gave: what placing experts would gain.")
    ] = None,
    of: OfPhase = None,
) -> None:
    """Write everything about PLAN as one HTML file that needs no network."""
    with Steps() as steps:
        with errors(2):
            from autopar.api.generation import GenerationPlan
            from autopar.api.plan import Plan

            found: Plan
            whole = read_plans(plan) if of is None else read_plan(plan, of)
            if isinstance(whole, GenerationPlan):
                if against or expert_loads is not None or model is not None:
                    raise AutoparError(
                        f"{plan} is a plan for generate(): its page has both phases, and nothing else",
                        remedy="leave --against, --expert-loads and --model out, or add --of decode",
                    )
                print(f"wrote {whole.report(path, explain_s=0.0, progress=steps.part)}")
                return
            others = {each.stem: read_plan(each, of) for each in against or []}
            options: dict[str, Any] = {"against": others, "explain_s": explain_seconds}
            if expert_loads is not None:
                options["expert_loads"] = _read_loads(expert_loads)
            found = whole
            if explain_seconds and of is None and (model is not None or names_bundled_model(found)):
                loaded = model_of_plan(steps, plan, found, model, batch, tiny, layers)
                options |= {"model": loaded.model, "example_inputs": loaded.batch}
            else:
                options["memory_factors"] = ()
                if explain_seconds and of is None:
                    typer.echo("autopar: nothing is explained: that takes the plan's model, --model MODEL", err=True)
        with errors(1):
            written = found.report(path, **options, progress=steps.part)
    print(f"wrote {written}")


def _read_loads(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise AutoparError(f"{path} has no loads of experts", values=str(error)[:200], remedy=_LOADS) from error
    if not isinstance(found, dict) or not all(isinstance(each, list) for each in found.values()):
        raise AutoparError(f"{path} has no loads of experts", remedy=_LOADS)
    return found


def trace(
    plan: PlanFile,
    path: Annotated[Path, typer.Argument(help="Where the trace goes.")] = Path("plan.perfetto.json"),
    of: OfPhase = None,
) -> None:
    """Write the predicted step of PLAN as a trace for ui.perfetto.dev."""
    with errors(2):
        written = read_plan(plan, of).trace(path)
    print(f"wrote {written}")


def diff(
    left: Annotated[Path, typer.Argument(help="A plan's file.")],
    right: Annotated[Path, typer.Argument(help="Another.")],
    of: OfPhase = None,
    page: Annotated[Path | None, typer.Option("--report", help="Also write LEFT's report with the comparison.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what RIGHT decides differently from LEFT, and what that costs. Exits with 1 where they differ."""
    with errors(2):
        from autopar.views.compare import compare

        plans = read_plan(left, of), read_plan(right, of)
        names = (left.stem, right.stem) if left.stem != right.stem else (str(left), str(right))
        found = compare(*plans, names=names)
        if page is not None:
            plans[0].report(page, against={names[1]: plans[1]}, explain_s=0.0, memory_factors=())
    if as_json:
        print(json.dumps(found.to_dict(), indent=1))
    else:
        print(found, end="")
        if page is not None:
            print(f"wrote {page}")
    raise typer.Exit(0 if found.same else 1)


def hand_over(
    prefill: Annotated[Path, typer.Argument(help="A file of `autopar plan --generate … --save`: of the prompts.")],
    decode: Annotated[Path, typer.Argument(help="Another, of the tokens; its mesh and batch may differ.")],
    row: Annotated[int, typer.Option(help="Where the prompts' rows begin in the tokens' batch.")] = 0,
    bandwidth: Annotated[
        float | None, typer.Option(help="GB/s of a rank, one direction. [default: the slower network of both]")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write all messages as JSON.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what of the caches goes from the devices that read prompts (PREFILL) to those that make tokens (DECODE)."""
    with errors(2):
        from autopar.api.generation import GenerationPlan
        from autopar.api.hand_over import hand_over as plan_messages

        plans = [GenerationPlan.load(path) for path in (prefill, decode)]
        given = None if bandwidth is None else 1e9 * bandwidth
        found = plan_messages(*plans, row=row, bandwidth_bytes_per_s=given)
        if output is not None:
            found.save(output)
    print(json.dumps(found.to_data(), indent=1) if as_json else found)
    if output is not None and not as_json:
        print(f"wrote {output}")


def export(
    plan: PlanFile,
    to: Annotated[
        Literal["transformers-tp-plan", "vllm", "sglang", "tensorrt-llm", "autopar"],
        typer.Option(
            help="The arguments of transformers' DistributedConfig as JSON, a command, a YAML file; with --weights a "
            "folder that the engine loads. autopar: a file of weights for each rank, for compiled.load."
        ),
    ],
    name: Annotated[str, typer.Option(help="Of the weights to serve: a path or a hub's name.")] = "MODEL",
    weights: Annotated[
        Path | None,
        typer.Option(help="A checkpoint to export, too: a folder of safetensors, a saved step, torch's own kind."),
    ] = None,
    model: OfModel = None,
    batch: Batch = None,
    layers: Layers = None,
    tiny: Tiny = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A file instead of the terminal; with --weights a new folder.")
    ] = None,
) -> None:
    """Tell PLAN to another engine: how many devices do what, and, for transformers, how each weight is split. With
    --weights, write a folder of the weights that it loads, or for autopar a file for each rank.
    """
    with Steps() as steps, errors(2):
        from autopar.api.generation import GenerationPlan

        found = read_plans(plan)
        one = next(iter(found)) if isinstance(found, GenerationPlan) else found
        wanted = to == "transformers-tp-plan" or model is not None or (weights is not None and names_bundled_model(one))
        loaded = model_of_plan(steps, plan, one, model, batch, tiny, layers) if wanted else None
        given = None if loaded is None else as_planned(loaded.model, one, weights)
        if weights is not None:
            steps.begin("reading weights")
        folder = None if weights is None else output
        exported = found.export(to, model=given, name=name, weights=weights, folder=folder, progress=steps.part)
        if output is not None and weights is None:
            with cli_output.writing():
                output.write_text(exported.text, encoding="utf-8")
    if output is None or weights is not None:
        print(exported.text, end="")
    for rank, size in enumerate(exported.bytes_by_rank[:MOST_RANKS]):
        print(f"rank {rank}: {size:,} bytes")
    for note in exported.notes:
        print(f"note: {note}", file=sys.stderr)
