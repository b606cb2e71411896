"""The command line. Exit codes: 0 well, 1 the answer is no, 2 bad usage.

Nothing here imports torch before a command needs it, so that `autopar --help` is instant.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from autopar import __version__
from autopar.errors import AutoparError
from autopar.progress import Steps

if TYPE_CHECKING:
    from autopar.mesh import Mesh
    from autopar.models.catalogue import LoadedModel
    from autopar.plans import Plan
    from autopar.proof import Proof
    from autopar.strategies import Strategy

app = typer.Typer(
    name="autopar",
    help="Shard a PyTorch model onto many devices: plan it, prove it, run it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[
    str, typer.Argument(help="A shipped name (autopar models), a config.json or its folder, or module:callable.")
]
MeshText = Annotated[str, typer.Option("--mesh", help="Axes, slowest link first: dp=4,tp=2.")]
StrategyText = Annotated[
    str,
    typer.Option(
        "--strategy",
        help="auto, a name (autopar strategies: ddp, zero1, zero2, zero3, hsdp, tensor, tensor+sequence, tensor2d, …), "
        "or one for each axis: dp=zero2,tp=tensor+sequence; node=hsdp,dp=hsdp; tp0=tensor2d,tp1=tensor2d; "
        "pp=pipeline(1f1b) (gpipe, 1f1b, interleaved, zero_bubble, zbv, dualpipev, or a CSV of actions).",
    ),
]
Batch = Annotated[str | None, typer.Option("--batch", help="The global batch, sequences x tokens: 8x2048.")]
HardwareName = Annotated[str, typer.Option("--hardware", help="A profile (autopar hardware) or a .toml file.")]
Tiny = Annotated[bool, typer.Option("--tiny", help="The same architecture with small sizes.")]
Microbatches = Annotated[
    int | None,
    typer.Option(
        "--microbatches",
        min=1,
        help="Parts of the batch that a step runs one after the other. Default: 1; with a pipeline the best number.",
    ),
]
Layers = Annotated[int | None, typer.Option("--layers", min=1, help="Another number of layers.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print data for machines.")]


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
    from autopar import demo as demonstration

    with _errors(1):
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
    layers: Layers = None,
    tiny: Tiny = False,
    save: Annotated[Path | None, typer.Option(help="Write the plan here (JSON).")] = None,
    source: Annotated[Path | None, typer.Option(help="Write the generated program here (.py).")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the plan here (.svg).")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the simulated step of a pipeline here, for ui.perfetto.dev (.json).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Decide how MODEL runs on a mesh. Needs no GPU and no weights."""
    with Steps() as steps:
        with _errors(2):
            wanted = _read_mesh(mesh, hardware), _read_strategy(strategy, mesh, hardware)
            limit = parse_bytes(memory_limit) if memory_limit else None
            if precision is None:
                precision = "fp32" if wanted[0].hardware.name == "cpu" else "bf16"
            elif precision not in ("bf16", "fp16", "fp32", "fp64"):
                raise AutoparError(f"unknown precision {precision!r}", remedy="use bf16, fp16, fp32 or fp64")
            loaded = _load(steps, model, batch, tiny, layers, "meta")
        with _errors(1):
            options: dict[str, Any] = {"memory_limit": limit, "microbatches": microbatches}
            found = _plan(steps, loaded, *wanted, precision=precision, **options)
            found = _with_spec(found, model, batch, tiny, layers)
            written = _write(found, save, source, picture, trace)
    if as_json:
        print(json.dumps(_plan_data(found, written), indent=1))
    else:
        _print_plan(found, written, _next_command(model, found, strategy))


@app.command()
def verify(
    model: Model,
    mesh: MeshText,
    strategy: StrategyText = "auto",
    batch: Batch = None,
    dtype: Annotated[Literal["float64", "float32"], typer.Option(help="What both sides compute in.")] = "float64",
    dropout: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Every dropout probability.")] = None,
    microbatches: Microbatches = None,
    hardware: HardwareName = "h100",
    layers: Layers = None,
    tiny: Tiny = False,
    as_json: AsJson = False,
) -> None:
    """Prove the generated program equal to the model: all ranks in one process, loss, outputs and every gradient."""
    with Steps() as steps:
        with _errors(2):
            wanted = _read_mesh(mesh, hardware), _read_strategy(strategy, mesh, hardware)
            loaded = _load(steps, model, batch, tiny, layers, "cpu", dropout)
        import torch

        with _errors(1):
            found = _plan(steps, loaded, *wanted, microbatches=microbatches)
            steps.begin("proving it")
            proof = found.verify(dtype=getattr(torch, dtype))
    if as_json:
        print(json.dumps(_proof_data(proof, found), indent=1))
    else:
        _print_proof(proof, found, model)
    raise typer.Exit(0 if proof.ok else 1)


@app.command()
def explain(
    plan: Annotated[Path, typer.Argument(help="A plan's file (autopar plan MODEL --save plan.json).")],
    name: Annotated[
        str,
        typer.Argument(
            help="A parameter, an input, an output, an operator's result (layer.linear_3), or a module that holds an "
            "attention; * for any part of a name."
        ),
    ],
    model: Annotated[
        str | None, typer.Option("--model", help="The model, where the plan's file does not say how it was built.")
    ] = None,
    batch: Batch = None,
    layers: Layers = None,
    tiny: Tiny = False,
    alternatives: Annotated[int, typer.Option(min=1, help="How many other shardings to show, best first.")] = 8,
    time_limit: Annotated[float, typer.Option(min=0.0, help="Seconds after which no other one is begun.")] = 120.0,
    as_json: AsJson = False,
) -> None:
    """Say why NAME lies as it does in PLAN, what else there was, and what that would cost."""
    with Steps() as steps:
        with _errors(2):
            found, loaded = _load_plan(steps, plan, model, batch, tiny, layers)
        from autopar import explain as explaining
        from autopar.subjects import find

        with _errors(1):
            steps.begin("tracing it again")
            found = explaining.with_program(found, loaded.model, loaded.batch)
        with _errors(2):
            assert found.program is not None
            find(found.program, name)
        with _errors(1):
            answer = found.explain(
                name,
                max_alternatives=alternatives,
                time_limit_s=time_limit,
                progress=lambda text, number, total: steps.begin(f"{text} ({number + 1} of {total})"),
            )
    console = _stdout()
    if as_json:
        print(json.dumps(answer.to_dict(), indent=1))
    elif console.is_terminal:
        console.print(answer.tables())
    else:
        print(answer, end="")


@app.command()
def strategies(as_json: AsJson = False) -> None:
    """What one axis of the mesh may do."""
    from autopar.strategies import rows

    _print_rows(("name", "shards", "communicates", "source"), rows(), as_json)


@app.command()
def hardware(as_json: AsJson = False) -> None:
    """Profiles of devices and their links."""
    from autopar import hardware as profiles

    rows = []
    for name in profiles.names():
        each = profiles.load(name)
        peak = ", ".join(f"{key} {value / 1e12:.4g}" for key, value in each.peak_flops.items())
        memory = f"{each.memory_bytes / 2**30:.3g} GiB at {each.memory_bandwidth_bytes_per_s / 1e9:.4g} GB/s"
        node = f"{each.devices_per_node} a node, {each.node.bandwidth_bytes_per_s / 1e9:.3g} GB/s"
        rows.append((name, peak, memory, node, f"{each.network.bandwidth_bytes_per_s / 1e9:.3g} GB/s"))
    _print_rows(("name", "peak TFLOP/s", "memory", "node links reached", "network reached"), rows, as_json)


@app.command()
def models(as_json: AsJson = False) -> None:
    """The models shipped with autopar, by the names that `plan` and `verify` take."""
    from autopar.models import catalogue

    rows = [(entry.name, entry.architecture, entry.summary) for entry in catalogue.entries()]
    _print_rows(("name", "architecture", "sizes"), rows, as_json)


# -- reading arguments
# -------------------------------------------------------------------------------------------------------


def parse_batch(text: str) -> tuple[int, int]:
    """`8x2048`, or `8` for models without tokens."""
    match = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", text.strip())
    if match is None:
        raise AutoparError(f"{text!r} is not a batch", remedy="write SEQUENCESxTOKENS, as in 8x2048")
    return int(match[1]), int(match[2] or 1)


def parse_bytes(text: str) -> float:
    """`60GiB`, `80GB`, `123456`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?", text.strip(), re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise AutoparError(f"{text!r} is not a number of bytes", remedy="write a number and a unit, as in 60GiB")
    if not match[2]:
        return float(match[1])
    return float(match[1]) * (1024 if match[3] else 1000) ** ("KMGT".index(match[2].upper()) + 1)


def _read_mesh(text: str, hardware: str) -> Mesh:
    from autopar.mesh import Mesh

    return Mesh.parse(text, hardware=hardware)


def _read_strategy(text: str, mesh: str, hardware: str) -> Strategy:
    """The strategy, known to exist and to fit the mesh's axes."""
    from autopar.strategies import parse, resolve

    found = parse(text)
    resolve(found, _read_mesh(mesh, hardware))
    return found


def _load(
    steps: Steps,
    model: str,
    batch: str | None,
    tiny: bool,
    layers: int | None,
    device: Any,
    dropout: float | None = None,
) -> LoadedModel:
    from autopar.models import catalogue

    sizes = parse_batch(batch) if batch else None
    overrides = {}
    if layers is not None:
        overrides = {"num_layers" if model in catalogue.PLAIN else "num_hidden_layers": layers}
    steps.begin(f"building {model}")
    return catalogue.load(model, tiny=tiny, batch=sizes, device=device, dropout=dropout, overrides=overrides)


def _with_spec(plan: Plan, model: str, batch: str | None, tiny: bool, layers: int | None) -> Plan:
    """The plan, with how its model was built, so that `autopar explain` can build it again."""
    from dataclasses import replace

    from autopar.plans import ModelSpec

    return replace(plan, model_spec=ModelSpec(model, tiny, parse_batch(batch) if batch else None, layers))


def _load_plan(
    steps: Steps, path: Path, model: str | None, batch: str | None, tiny: bool, layers: int | None
) -> tuple[Plan, LoadedModel]:
    """A plan's file, and the model it was made for: as the options say, else as the file does."""
    from autopar.plans import Plan

    plan, spec = Plan.load(path), None
    if model is None:
        if batch is not None or tiny or layers is not None:
            raise AutoparError("--batch, --tiny and --layers say how --model is built", remedy="add --model MODEL")
        spec = plan.model_spec
        if spec is None:
            raise AutoparError(
                f"{path} does not say how its model is built",
                remedy="add --model MODEL, with --tiny, --batch, --layers",
            )
        model, tiny, layers = spec.spec, spec.tiny, spec.layers
        batch = "x".join(map(str, spec.batch)) if spec.batch else None
    return plan, _load(steps, model, batch, tiny, layers, "meta")


def _plan(steps: Steps, loaded: LoadedModel, mesh: Mesh, strategy: Strategy, **options: Any) -> Plan:
    import autopar

    def progress(name: str, number: int, total: int) -> None:
        steps.begin(name)

    return autopar.plan(
        loaded.model, mesh, example_inputs=loaded.batch, strategy=strategy, progress=progress, **options
    )


# -- output
# ------------------------------------------------------------------------------------------------------------------


def _write(plan: Plan, save: Path | None, source: Path | None, picture: Path | None, trace: Path | None) -> list[Path]:
    written: list[Path] = []
    try:
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
    except OSError as error:
        raise AutoparError(f"cannot write: {error}", remedy="name a file in a folder that exists") from error
    return written


def _next_command(model: str, plan: Plan, strategy: str) -> str:
    """Prove the same strategy, small: every axis and the microbatches shrunk to what a tiny batch can be split over.

    A pipeline keeps a block for each stage, and where its schedule is a file its ranks and microbatches.
    """
    sizes = {name: min(size, 2) for name, size in plan.mesh.axes}
    tiny = "" if ":" in model else " --tiny"
    named = "" if strategy == "auto" else f" --strategy {shlex.quote(strategy)}"
    parts = " --microbatches 2" if plan.interface.microbatches > 1 else ""
    if plan.pipeline is not None and plan.asked is not None:
        schedule = plan.pipeline.schedule
        per_rank = schedule.num_stages // schedule.num_ranks
        parts = " --microbatches 4" if schedule.num_microbatches > 1 else ""
        if plan.asked.is_file:
            rows = schedule.num_microbatches * math.prod(sizes.values())
            sizes["pp"], parts = schedule.num_ranks, f" --batch {rows}x16"
        if ":" not in model and sizes["pp"] * per_rank > 2:
            parts += f" --layers {sizes['pp'] * per_rank}"
    small = ",".join(f"{name}={size}" for name, size in sizes.items())
    return f"autopar verify {model}{tiny} --mesh {small}{named}{parts}"


def _print_plan(plan: Plan, written: list[Path], following: str) -> None:
    from autopar.report import one_line, plan_tables, plan_text

    console = _stdout()
    # What is piped is the same text on every machine; a terminal gets its own width and bold titles.
    if console.is_terminal:
        console.print(plan_tables(plan))
    else:
        print(plan_text(plan))
    for path in written:
        console.print(f"wrote {path}", soft_wrap=True)
    console.print(one_line(plan), style="bold", soft_wrap=True)
    console.print(f"Next: {following}", soft_wrap=True)


def _print_proof(proof: Proof, plan: Plan, model: str) -> None:
    console = _stdout()
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
    mesh = ",".join(f"{name}={size}" for name, size in plan.mesh.axes)
    console.print(f"Next: autopar plan {model} --mesh {mesh} --source program.py, and read the program", soft_wrap=True)


def _plan_data(plan: Plan, written: list[Path]) -> dict[str, Any]:
    from dataclasses import asdict

    from autopar.report import format_tensor

    memory = plan.cost.memory
    return {
        "model": plan.title,
        "mesh": dict(plan.mesh.axes),
        "hardware": plan.mesh.hardware.name,
        "strategy": plan.strategy,
        "microbatches": plan.interface.microbatches,
        "step_time_s": plan.cost.step_time_s,
        "compute_s": plan.cost.compute_s,
        "communication_s": plan.cost.communication_s,
        "waiting_s": plan.cost.waiting_s,
        "pipeline": _pipeline_data(plan),
        "memory_bytes": {**asdict(memory), "activations": memory.activations, "limit": plan.memory_limit_bytes},
        "bytes_by_axis": plan.bytes_by_axis(),
        "gap": plan.gap,
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
    from dataclasses import asdict

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
        "microbatches": schedule.num_microbatches,
        "bubble": timeline.bubble_share,
        "peak_bytes": list(timeline.peak_bytes),
        "stages": rows,
        "considered": [asdict(each) for each in summary.considered],
    }


def _proof_data(proof: Proof, plan: Plan) -> dict[str, Any]:
    from dataclasses import asdict

    names = ("ok", "mesh", "scaled_down", "dtype", "dropout", "num_collectives", "rtol")
    return {
        **{name: getattr(proof, name) for name in names},
        "model": plan.title,
        "strategy": plan.strategy,
        "microbatches": plan.interface.microbatches,
        "worst": asdict(proof.worst),
        "comparisons": [asdict(each) for each in proof.comparisons],
    }


def _print_rows(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], as_json: bool) -> None:
    if as_json:
        print(json.dumps([dict(zip(columns, row, strict=True)) for row in rows], indent=1))
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    _stdout().print(table)


def _stdout() -> Console:
    """Width 120 where there is no terminal, so that what is piped is not folded at 80."""
    return Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 120)


@contextmanager
def _errors(code: int) -> Iterator[None]:
    """An AutoparError is one message on stderr and this exit code."""
    try:
        yield
    except AutoparError as error:
        typer.echo(f"autopar: {error}", err=True)
        raise typer.Exit(code) from None
