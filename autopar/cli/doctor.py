"""The command `autopar doctor`, for one machine or, under torchrun, for all ranks.

Nothing here imports torch before it is needed: see `cli/__init__.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from autopar.base import environment
from autopar.cli.input import errors, parse_bytes
from autopar.cli.options import AsJson


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(doctor)


def doctor(
    folder: Annotated[
        Path | None, typer.Option(help="Where checkpoints are to go: is it shared, are renames seen, is there room.")
    ] = None,
    needs: Annotated[str, typer.Option(help="What has to be free there: 200GiB.")] = "1GiB",
    hardware: Annotated[
        str | None,
        typer.Option(help="A profile (autopar hardware, or a .toml file) to hold links against. Default: the GPU's."),
    ] = None,
    share: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Of the profile's speed: below it a link is off.")
    ] = 0.5,
    skew: Annotated[float, typer.Option(min=0.0, help="Seconds by which clocks may differ.")] = 1.0,
    within: Annotated[
        float, typer.Option(min=0.1, help="Seconds in which ranks have to see what others wrote.")
    ] = 30.0,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds for which a rank is waited for.")] = 120.0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda where there is one.")] = None,
    as_json: AsJson = False,
) -> None:
    """Look at this machine before a run: versions, devices, limits, clock, room; exit code 1 where something is off.

    For all ranks, with links and a shared folder: torchrun ... --no-python autopar doctor --folder /shared/run
    """
    rank = environment.launched().rank
    with errors(2):
        needed_bytes = int(parse_bytes(needs))
    with errors(1):
        from autopar.api.doctor import Options
        from autopar.api.doctor import doctor as look

        options = Options(folder, needed_bytes, hardware, share, skew, within, timeout, device)
        report = look(options)
    if rank == 0:
        if as_json:
            print(json.dumps(report.to_dict(), indent=1))
        else:
            for finding in report.findings:
                state = "OFF" if finding.state == "off" else finding.state
                print(f"{state:5}{finding.name:10}{finding.said}")
                if finding.remedy:
                    print(f"{'':15}-> {finding.remedy}")
            num = sum(finding.state == "off" for finding in report.findings)
            print(f"{num} {'thing is' if num == 1 else 'things are'} off" if num else "nothing is off")
    raise typer.Exit(0 if report.is_well or rank != 0 else 1)
