"""The commands `autopar checkpoint …`, which need neither devices nor the model.

Nothing here imports torch before a command needs it: see `cli.py`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.input import errors
from autopar.cli.options import AsJson

Folder = Annotated[Path, typer.Argument(help="What compiled.save has written: the folder of a run, or of one step.")]
Step = Annotated[int | None, typer.Option("--step", min=0, help="Which step. Default: the newest.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(no_args_is_help=True, help="Look at checkpoints of compiled models, check and convert them.")
    for command in (inspect, verify, convert, prune):
        group.command()(command)
    app.add_typer(group, name="checkpoint")


def inspect(
    folder: Folder,
    step: Step = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List all tensors.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what is in a checkpoint."""
    with errors(1):
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
    folder: Folder,
    out: Annotated[Path, typer.Argument(help="The folder to be made.")],
    step: Step = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of floating-point weights: bfloat16. Default: as they are.")
    ] = None,
) -> None:
    """Write the weights as HuggingFace's safetensors: whole, under the model's names."""
    with errors(1):
        from autopar.runtime.checkpoint import offline
        from autopar.runtime.checkpoint.folders import step_at

        for path in offline.convert(step_at(folder, step), out, dtype):
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
