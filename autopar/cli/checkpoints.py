"""The commands `autopar checkpoint …`, which need neither devices nor the model.

Nothing here imports torch before a command needs it: see `cli.py`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from autopar.cli.input import errors
from autopar.cli.options import AsJson

Folder = Annotated[Path, typer.Argument(help="What compiled.save has written: the folder of a run, or of one step.")]
AnyFolder = Annotated[
    Path,
    typer.Argument(help="What compiled.save wrote, a HuggingFace folder, or one of torch.distributed.checkpoint."),
]
Step = Annotated[int | None, typer.Option("--step", min=0, help="Which step. Default: the newest.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(no_args_is_help=True, help="Look at checkpoints of compiled models, check and convert them.")
    for command in (inspect, verify, convert, prune):
        group.command()(command)
    app.add_typer(group, name="checkpoint")


def inspect(
    folder: AnyFolder,
    step: Step = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List all tensors.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what is in a checkpoint: of ours, of HuggingFace's safetensors, of torch.distributed.checkpoint."""
    with errors(1):
        from autopar.runtime.checkpoint import formats

        if formats.kind_of(folder) != "autopar":
            with formats.weights_of(folder) as found:
                if as_json:
                    print(formats.as_data(found))
                    return
                for name, said in formats.described(found):
                    print(f"{name:10} {said}")
                for name, weight in found.weights.items() if tensors else ():
                    print(f"{name}  {str(weight.dtype).removeprefix('torch.')} {weight.shape}")
            return
        from autopar.runtime.checkpoint import offline
        from autopar.runtime.checkpoint.folders import step_at

        at = step_at(folder, step)
        manifest = offline.read(at)
    if as_json:
        print(json.dumps(asdict(manifest)))
        return
    for name, said in offline.summary(at, manifest):
        print(f"{name:10} {said}")
    for name, tensor in manifest.tensors().items() if tensors else ():
        pieces = f"{len(tensor.pieces)} pieces" if len(tensor.pieces) != 1 else "1 piece"
        print(f"{name}  {tensor.dtype} {tuple(tensor.shape)}  {pieces}")


def verify(folder: Folder, step: Step = None) -> None:
    """Read all of a checkpoint, and name everything that is not as it was written; exit code 1 where something is."""
    with errors(1):
        from autopar.runtime.checkpoint import offline
        from autopar.runtime.checkpoint.folders import step_at

        at = step_at(folder, step)
        manifest = offline.read(at)
        problems = offline.check(at, manifest)
    for problem in problems:
        print(problem)
    print(f"{at}: {len(problems)} problems" if problems else f"{at}: all {len(manifest.tensors())} tensors are whole")
    raise typer.Exit(1 if problems else 0)


def convert(
    folder: AnyFolder,
    out: Annotated[Path, typer.Argument(help="The folder to be made.")],
    to: Annotated[
        str, typer.Option("--to", help="huggingface: safetensors; torch: for torch.distributed.checkpoint; autopar.")
    ] = "huggingface",
    step: Step = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of floating-point weights: bfloat16. Default: as they are.")
    ] = None,
    prefix: Annotated[
        str, typer.Option(help="Of weights' names in torch's folder, left out or, with --to torch, put there: model.")
    ] = "",
    experts: Annotated[
        str | None, typer.Option(help="single or stacked: how a mixture's experts are stored. Default: as they are.")
    ] = None,
    model_type: Annotated[
        str | None, typer.Option(help="transformers' word for the model, for --experts. Default: config.json's.")
    ] = None,
) -> None:
    """Write the weights of a checkpoint of any kind as another kind, part by part: they may be larger than memory."""
    with errors(1):
        from autopar.runtime.checkpoint.convert import convert as run

        options: dict[str, Any] = {"to": to, "step": step, "prefix": prefix}
        for path in run(folder, out, dtype, experts=experts, model_type=model_type, **options):
            print(path)


def prune(
    folder: Folder, keep: Annotated[int, typer.Option("--keep", min=1, help="How many of the newest steps.")] = 3
) -> None:
    """Remove older steps of a run that does not run."""
    with errors(1):
        from autopar.base.errors import AutoparError
        from autopar.runtime.checkpoint import folders

        try:
            if folders.steps_in(folder):
                folders.lock(folder)
            for path in folders.prune(folder, keep):
                print(f"removed {path}")
        except OSError as error:
            raise AutoparError(f"steps of {folder} cannot be removed", values=str(error)) from error
