"""The command line. Exit codes: 0 well, 1 the answer is no, 2 bad usage.

Nothing here imports torch before a command needs it, so that `autopar --help` is instant.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from autopar import __version__, cli_output
from autopar.errors import AutoparError
from autopar.progress import Steps

if TYPE_CHECKING:
    from autopar.mesh import Mesh
    from autopar.models.catalogue import LoadedModel
    from autopar.plans import Plan
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
    times: Annotated[
        Path | None, typer.Option(help="Draw what each pass of planning took here (.svg, .png, .pdf).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Decide how MODEL runs on a mesh. Needs no GPU and no weights."""
    with Steps() as steps:
        with _errors(2):
            wanted = _read_mesh(mesh, hardware), _read_strategy(strategy, mesh, hardware)
            limit = parse_bytes(memory_limit) if memory_limit else None
            if precision is None:
                precision = "fp32" if wanted[0].hardware.device == "cpu" else "bf16"
            elif precision not in ("bf16", "fp16", "fp32", "fp64"):
                raise AutoparError(f"unknown precision {precision!r}", remedy="use bf16, fp16, fp32 or fp64")
            loaded = _load(steps, model, batch, tiny, layers, "meta")
        with _errors(1):
            options: dict[str, Any] = {"memory_limit": limit, "microbatches": microbatches}
            found = _plan(steps, loaded, *wanted, precision=precision, **options)
            found = _with_spec(found, model, batch, tiny, layers)
            written = cli_output.write(found, save, source, picture, trace)
            if times is not None:
                from autopar.plots import draw_times

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
        list[str] | None,
        typer.Option("--limit", help="The largest size of an axis: tp=8 (or pp, dp, cp)."),
    ] = None,
    layers: Layers = None,
    tiny: Tiny = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw time against memory of all that was compared here (.svg, .png, .pdf).")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write the best plan here (JSON).")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare meshes, strategies, schedules and microbatches for MODEL on a cluster. Needs no GPU and no weights."""
    with Steps() as steps:
        with _errors(2):
            from autopar.searching.cluster import Cluster

            wanted = Cluster.parse(cluster)
            limits = _read_limits(limit or [])
            most = parse_bytes(memory_limit) if memory_limit else None
            precision = precision or ("fp32" if wanted.hardware.device == "cpu" else "bf16")
            loaded = _load(steps, model, batch, tiny, layers, "meta")
        with _errors(1):
            from autopar.searching.run import search as run

            found = run(
                loaded.model, wanted, example_inputs=loaded.batch, precision=precision, memory_limit=most, top=top,
                limits=limits, progress=lambda what, number, count: steps.begin(f"{what} ({number + 1} of {count})"),
            )  # fmt: skip
            if plot is not None:
                found.plot(plot)
            if save is not None:
                _with_spec(found[0], model, batch, tiny, layers).save(save)
    if as_json:
        print(json.dumps(found.to_data(), indent=1))
    else:
        cli_output.print_search(found, model, batch, [path for path in (plot, save) if path is not None])


def _read_limits(texts: list[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for text in texts:
        match = re.fullmatch(r"(pp|dp|cp|tp)=(\d+)", text)
        if match is None or int(match[2]) < 1:
            raise AutoparError(f"{text!r} limits no axis", remedy="write tp=8, with pp, dp, cp or tp")
        found[match[1]] = int(match[2])
    return found


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
        print(json.dumps(cli_output.proof_data(proof, found), indent=1))
    else:
        cli_output.print_proof(proof, found, model)
    raise typer.Exit(0 if proof.ok else 1)


@app.command()
def explain(
    plan: Annotated[Path, typer.Argument(help="A plan's file (autopar plan MODEL --save plan.json).")],
    name: Annotated[
        str,
        typer.Argument(
            help="A parameter, an input, an output, an operator's result (layer.linear_3), or a module that holds an "
            "attention; * for any part of a name. `cost`: what the predicted step is made of."
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
    """Say why NAME lies as it does in PLAN, what else there was, and what that would cost; or what the step costs."""
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
            if not explaining.is_cost(found, name):
                find(found.program, name)
        with _errors(1):
            answer = found.explain(
                name,
                max_alternatives=alternatives,
                time_limit_s=time_limit,
                progress=lambda text, number, total: steps.begin(f"{text} ({number + 1} of {total})"),
            )
    console = cli_output.stdout()
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

    cli_output.print_rows(("name", "shards", "communicates", "source"), rows(), as_json)


@app.command()
def hardware(
    name: Annotated[
        str | None, typer.Argument(help="One profile: h100, h100:ethernet-25, a .toml file. Default: all of them.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Profiles of devices and their links, or one of them with its sources."""
    from autopar import hardware as profiles
    from autopar import hardware_output

    if name is None:
        rows = [hardware_output.row(profiles.load(each)) for each in profiles.names()]
        cli_output.print_rows(hardware_output.COLUMNS, rows, as_json)
        return
    with _errors(2):
        found = profiles.load(name)
    if as_json:
        print(json.dumps(hardware_output.to_dict(found), indent=1))
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
    import os

    from autopar import hardware_output
    from autopar.progress import Bar

    rank = int(os.environ.get("RANK", "0"))
    with Bar(hidden=rank != 0) as bar, _errors(2):
        from autopar.calibration import Options
        from autopar.calibration import calibrate as measure
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
    from autopar.models import catalogue

    rows = [(entry.name, entry.architecture, entry.summary) for entry in catalogue.entries()]
    cli_output.print_rows(("name", "architecture", "sizes"), rows, as_json)


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


@contextmanager
def _errors(code: int) -> Iterator[None]:
    """An AutoparError is one message on stderr and this exit code."""
    try:
        yield
    except AutoparError as error:
        typer.echo(f"autopar: {error}", err=True)
        raise typer.Exit(code) from None
