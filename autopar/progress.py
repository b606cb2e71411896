"""What a long command is at, on stderr."""

from __future__ import annotations

import threading
import time

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Steps:
    """Shows on stderr what a command is at, once it takes over a second: a spinner on a terminal, else a line a slow
    step.
    """

    def __init__(self) -> None:
        console = Console(stderr=True)
        self.is_terminal = console.is_terminal
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self.progress = Progress(*columns, console=console, transient=True)
        self.task = self.progress.add_task("loading torch")
        self.name, self.begun = "", time.perf_counter()
        self.timer = threading.Timer(1.0, self.progress.start)
        self.timer.daemon = True

    def begin(self, name: str) -> None:
        """The next step; the one before is done."""
        now = time.perf_counter()
        if not self.is_terminal and self.name and now - self.begun > 1:
            typer.echo(f"{self.name}: {now - self.begun:.1f} s", err=True)
        self.name, self.begun = name, now
        self.progress.reset(self.task, description=name)

    def __enter__(self) -> Steps:
        if self.is_terminal:
            self.timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_terminal:
            self.timer.cancel()
            self.timer.join()
            self.progress.stop()
        self.begin("")
