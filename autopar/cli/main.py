"""The command line. Exit codes: 0 well, 1 the answer is no, 2 bad usage.

Nothing here imports torch before a command needs it, so that `autopar --help` is instant.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from autopar import __version__
from autopar.base import environment
from autopar.base.errors import AutoparError
from autopar.base.progress import Steps
from autopar.cli import checkpoints as cli_checkpoints
from autopar.cli import doctor as cli_doctor
from autopar.cli import output as cli_output
from autopar.cli import views as cli_views
from autopar.cli.input import (  # fmt: skip
    errors,
    load_model,
    make_generation_plan,
    make_plan,
    parse_bytes,
    parse_generate,
    phases_with_spec,
    read_generate,
    read_limits,
    read_mesh,
    read_plan,
    read_strategy,
    with_spec,
)
from autopar.cli.options import (  # fmt: skip
    AsJson,
    Batch,
    Cache,
    Generate,
    Halves,
    HardwareName,
    Imbalance,
    Layers,
    MeshText,
    Microbatches,
    Model,
    OfPhase,
    StrategyText,
    Tiny,
    Weights,
)
from autopar.machine import profiles

app = typer.Typer(
    name="autopar",
    help="Shard a PyTorch model onto many devices: plan it, prove it, run it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

cli_views.register(app)
cli_checkpoints.register(app)
cli_doctor.register(app)


def main() -> None:
    """The script `autopar`."""
    app(prog_name="autopar")


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"autopar {__version__}")
        raise typer.Exit


# -- commands
# ----------------------------------------------------------------------------------------------------------------


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Steps of AdamW.")] = 10,
    folder: Annotated[Path, typer.Option(help="Where the program, the plan and the picture go.")] = Path(
        "autopar_demo"
    ),
) -> None:
    """Train a small Llama on four local processes, beside one process, and prove the program."""
    from autopar.cli import demo as demonstration

    with errors(1):
        well = demonstration.run(folder, steps)
    raise typer.Exit(0 if well else 1)


@app.command()
def plan(
    model: Model,
    mesh: MeshText,
    hardware: HardwareName = "h100",
    batch: Batch = None,
    strategy: StrategyText = "auto",
    precision: Annotated[
        str | None, typer.Option(help="bf16, fp16, fp32 or fp64. Default: bf16 on a GPU, fp32 on a CPU.")
    ] = None,
    memory_limit: Annotated[str | None, typer.Option(help="Bytes of one rank: 60GiB. Default: the hardware's.")] = None,
    microbatches: Microbatches = None,
    halves: Halves = None,
    expert_imbalance: Imbalance = None,
    generate: Generate = None,
    cache: Cache = None,
    weights: Weights = None,
    layers: Layers = None,
    tiny: Tiny = False,
    save: Annotated[Path | None, typer.Option(help="Write the plan here (JSON).")] = None,
    source: Annotated[Path | None, typer.Option(help="Write the generated program here (.py).")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the plan here (.svg).")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write everything about the plan here, one offline page (.html).")
    ] = None,
    explain_seconds: Annotated[
        float, typer.Option(min=0.0, help="Seconds in which the report's tensors are explained.")
    ] = 60.0,
    trace: Annotated[
        Path | None, typer.Option(help="Write the predicted step here, for ui.perfetto.dev (.json).")
    ] = None,
    times: Annotated[
        Path | None, typer.Option(help="Draw what each pass of planning took here (.svg, .png, .pdf).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Decide how MODEL runs on a mesh. Needs no GPU and no weights."""
    with Steps() as steps:
        with errors(2):
            wanted = read_mesh(mesh, hardware), read_strategy(strategy, mesh, hardware)
            limit = parse_bytes(memory_limit) if memory_limit else None
            if precision is None:
                precision = "fp32" if wanted[0].hardware.device == "cpu" else "bf16"
            elif precision not in ("bf16", "fp16", "fp32", "fp64"):
                raise AutoparError(f"unknown precision {precision!r}", remedy="use bf16, fp16, fp32 or fp64")
            tokens = parse_generate(generate, cache, weights)
            others = (microbatches, halves, picture, trace, times)
            if tokens is not None and any(each is not None for each in others):
                raise AutoparError(
                    "--generate goes with --save, --source, --report and --json alone",
                    remedy="leave --microbatches, --halves, --picture, --trace and --times out",
                )
            loaded = load_model(steps, model, batch, tiny, layers, "meta")
        if tokens is not None:
            with errors(1):
                phases = make_generation_plan(steps, loaded, *wanted, tokens, precision, weights, memory_limit=limit)
                phases = phases_with_spec(phases, model, batch, tiny, layers)
                files = cli_output.write_generation(phases, save, source)
                if report is not None:
                    files.append(phases.report(report, explain_s=explain_seconds, progress=steps.part))
            if as_json:
                print(json.dumps(cli_output.generation_data(phases, files), indent=1))
            else:
                stored = "".join(f" --{a} {b}" for a, b in (("cache", cache), ("weights", weights)) if b)
                small = f"{cli_output.next_command(model, phases.decode, strategy)} --generate 2x8x4{stored}"
                cli_output.print_generation(phases, files, small)
            return
        with errors(1):
            options: dict[str, Any] = {"memory_limit": limit, "microbatches": microbatches, "halves": halves}
            options["expert_imbalance"] = expert_imbalance
            found = make_plan(steps, loaded, *wanted, precision=precision, **options)
            found = with_spec(found, model, batch, tiny, layers)
            written = cli_output.write(found, save, source, picture, trace)
            if report is not None:
                written.append(found.report(report, explain_s=explain_seconds, progress=steps.part))
            if times is not None:
                from autopar.views.plots import draw_times

                took: dict[str, float] = {}
                for each in found.times:
                    took[each.name] = took.get(each.name, 0.0) + each.cpu_s
                written.append(draw_times([(f"{model}, {mesh}", took)], times))
    if as_json:
        print(json.dumps(cli_output.plan_data(found, written), indent=1))
    else:
        cli_output.print_plan(found, written, cli_output.next_command(model, found, strategy))


@app.command()
def search(
    model: Model,
    cluster: Annotated[
        str, typer.Option("--cluster", help="Hardware x devices, h100x64, or x nodes x devices of a node, h100x8x8.")
    ],
    batch: Batch = None,
    precision: Annotated[
        str | None, typer.Option(help="bf16, fp16, fp32 or fp64. Default: bf16 on a GPU, fp32 on a CPU.")
    ] = None,
    memory_limit: Annotated[str | None, typer.Option(help="Bytes of one rank: 60GiB. Default: the hardware's.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many of the best are planned.")] = 3,
    limit: Annotated[
        list[str] | None, typer.Option("--limit", help="The largest size of an axis: tp=8 (or pp, dp, cp).")
    ] = None,
    halves: Halves = None,
    expert_imbalance: Imbalance = None,
    generate: Generate = None,
    batches: Annotated[
        str | None,
        typer.Option(help="With --generate: sequences at once, 1,8,64,256. Default: 1, 4, 16, … and --generate's."),
    ] = None,
    others: Annotated[
        bool,
        typer.Option("--others", help="With --generate: also zero3, split_kv, helix and auto on the meshes planned."),
    ] = False,
    layers: Layers = None,
    tiny: Tiny = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw time against memory of all that was compared here, with --generate time of a token against "
            "tokens a second (.svg, .png, .pdf)."
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(help="Write the best plan here (JSON); with --generate, of those planned that of most tokens/s."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare meshes, strategies, schedules and microbatches for MODEL on a cluster; with --generate, meshes and
    batches for generate(). Needs no GPU and no weights.
    """
    with Steps() as steps:
        with errors(2):
            from autopar.planner.search.cluster import Cluster

            wanted = Cluster.parse(cluster)
            limits = read_limits(limit or [])
            most = parse_bytes(memory_limit) if memory_limit else None
            precision = precision or ("fp32" if wanted.hardware.device == "cpu" else "bf16")
            tokens, sizes = read_generate(generate, batches, batch, halves)
            if others and tokens is None:
                raise AutoparError("--others goes with --generate", remedy="leave it out")
            loaded = load_model(steps, model, batch, tiny, layers, "meta")
        with errors(1):
            import autopar
            from autopar.planner.inputs import to_dtype

            options: dict[str, Any] = {
                "memory_limit": most, "top": top, "limits": limits, "expert_imbalance": expert_imbalance,
                "progress": steps.part,
            }  # fmt: skip
            if tokens is not None:
                loaded.model.eval().to(to_dtype(precision))
                options["others"] = others
                result = autopar.search(loaded.model, wanted, generate=tokens, batches=sizes, **options)
                written = cli_output.write_generation_search(result, plot, save)
                small = cli_output.search_generation_command(result, model)
                print(json.dumps(result.to_data(), indent=1) if as_json else f"{result}")
                for line in (*(f"written: {path}" for path in written), f"next: {small}") if not as_json else ():
                    print(line)
                return
            found = autopar.search(
                loaded.model, wanted, example_inputs=loaded.batch, precision=precision, halves=halves, **options
            )
            if plot is not None:
                found.plot(plot)
            if save is not None:
                with_spec(found[0], model, batch, tiny, layers).save(save)
    if as_json:
        print(json.dumps(found.to_data(), indent=1))
    else:
        cli_output.print_search(found, model, batch, [path for path in (plot, save) if path is not None], halves)


@app.command()
def check(
    program: Annotated[Path, typer.Argument(help="A generated program (.py), edited or not.")],
    plan: Annotated[Path, typer.Option("--plan", help="The plan (.json) that it was written from.")],
    of: OfPhase = None,
    types_only: Annotated[
        bool, typer.Option("--types-only", help="Do not ask whether its values are those that were planned.")
    ] = False,
) -> None:
    """Check a generated program before it runs: that every statement, on each rank's parts, does its part of one whole,
    and that outputs and gradients are those of the model.

    Its statements run on tensors without data, in this process: it is code, check only what you would launch.
    """
    with Steps() as steps, errors(1):
        steps.begin(f"reading {plan}")
        found = read_plan(plan, of)
        steps.begin(f"checking {program}")
        found.check(program, types_only=types_only)
    print(f"{program} is right: each of its statements does its part of what one device would compute.")
    if found.interface.meaning is not None and not types_only:
        print("Its outputs, buffers and gradients are those that were planned.")


@app.command()
def verify(
    model: Model,
    mesh: MeshText,
    strategy: StrategyText = "auto",
    batch: Batch = None,
    dtype: Annotated[Literal["float64", "float32"], typer.Option(help="What both sides compute in.")] = "float64",
    dropout: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Every dropout probability.")] = None,
    microbatches: Microbatches = None,
    halves: Halves = None,
    generate: Generate = None,
    cache: Cache = None,
    weights: Weights = None,
    hardware: HardwareName = "h100",
    layers: Layers = None,
    tiny: Tiny = False,
    as_json: AsJson = False,
) -> None:
    """Prove the generated program equal to the model: all ranks in one process, loss, outputs and every gradient."""
    with Steps() as steps:
        with errors(2):
            wanted = read_mesh(mesh, hardware), read_strategy(strategy, mesh, hardware)
            tokens = parse_generate(generate, cache, weights)
            loaded = load_model(steps, model, batch, tiny, layers, "cpu", dropout)
        import torch

        with errors(1):
            if tokens is not None:
                phases = make_generation_plan(steps, loaded, *wanted, tokens, weights=weights)
                steps.begin("proving it")
                proof, found = phases.verify(dtype=getattr(torch, dtype)), phases.decode
            else:
                found = make_plan(steps, loaded, *wanted, microbatches=microbatches, halves=halves)
                steps.begin("proving it")
                proof = found.verify(dtype=getattr(torch, dtype))
            likeness = None
            if tiny and tokens is None:
                from autopar.cli import twins

                large = load_model(steps, model, None, False, None, "meta", dropout)
                steps.begin("comparing with the model in its own size")
                likeness = twins.compared(large, loaded, found)
    if as_json:
        unlike = {} if likeness is None else {"regions": likeness.regions, "not_proven": list(likeness.missing)}
        print(json.dumps(cli_output.proof_data(proof, found) | unlike, indent=1))
    else:
        cli_output.print_proof(proof, found, model, "" if likeness is None else str(likeness))
    raise typer.Exit(0 if proof.ok else 1)


@app.command()
def strategies(as_json: AsJson = False) -> None:
    """What one axis of the mesh may do."""
    from autopar.strategies.names import rows

    cli_output.print_rows(("name", "shards", "communicates", "source"), rows(), as_json)


@app.command()
def hardware(
    name: Annotated[
        str | None, typer.Argument(help="One profile: h100, h100:ethernet-25, a .toml file. Default: all of them.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Profiles of devices and their links, or one of them with its sources."""
    from autopar.cli import hardware_output

    if name is None:
        rows = [hardware_output.row(profiles.load(each)) for each in profiles.names()]
        cli_output.print_rows(hardware_output.COLUMNS, rows, as_json)
        return
    with errors(2):
        found = profiles.load(name)
    if as_json:
        print(json.dumps(asdict(found), indent=1))
    else:
        cli_output.print_rows(("what", "value", "source"), hardware_output.details(found), False)


@app.command()
def calibrate(
    save: Annotated[Path, typer.Option(help="Write the profile here (.toml).")] = Path("profile.toml"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes, shorter: for a first look.")] = False,
    dtype: Annotated[
        str | None,
        typer.Option(help="fp32, bf16, fp16, fp64, or several: bf16,fp32. Default: bf16 on a GPU, else fp32."),
    ] = None,
    mesh: Annotated[
        str | None, typer.Option("--mesh", help="Under torchrun: time collectives over the axes of this mesh.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda where there is one.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure this machine and write a hardware profile of it. Under torchrun its links too."""
    from autopar.base.progress import Bar
    from autopar.cli import hardware_output

    rank = environment.launched().rank
    with Bar(hidden=rank != 0) as bar, errors(2):
        from autopar.cost.calibration import Options
        from autopar.cost.calibration import calibrate as measure
        from autopar.runtime import kernels

        kernels.register()
        dtypes = tuple(part.strip() for part in dtype.split(",")) if dtype else ()
        found = measure(Options(save, quick, dtypes, mesh, device), bar.begin, bar.advance)
    if found is None:
        return
    if as_json:
        print(json.dumps(found.to_dict(), indent=1))
    else:
        print(hardware_output.calibration_text(found), end="")


@app.command()
def models(as_json: AsJson = False) -> None:
    """The models shipped with autopar, by the names that `plan` and `verify` take."""
    from autopar.cli.models import catalogue

    rows = [(entry.name, entry.architecture, entry.summary) for entry in catalogue.entries()]
    cli_output.print_rows(("name", "architecture", "sizes"), rows, as_json)
