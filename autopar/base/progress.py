"""What a long command is at, on stderr."""

from __future__ import annotations

import threading
import time

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Steps:
    """Shows on stderr what a command is at, once it takes over a second: a spinner on a terminal, else a line a slow
    step.
    """

    def __init__(self) -> None:
        console = Console(stderr=True)
        self.is_terminal = console.is_terminal
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
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

    def part(self, what: str, number: int, count: int) -> None:
        """One of several: its number from 0, and how many there are."""
        self.begin(f"{what} ({number + 1} of {count})" if count > 1 else what)

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


class Bar:
    """Shows on stderr how many of a command's steps are done, and which one it is at: a bar on a terminal, else a line
    for each tenth. hidden: nothing, on all ranks but the first.
    """

    def __init__(self, *, hidden: bool = False) -> None:
        console = Console(stderr=True)
        self.is_terminal, self.hidden = console.is_terminal, hidden
        columns = (
            SpinnerColumn(),
            BarColumn(24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
        )
        self.progress = Progress(*columns, console=console, transient=True)
        self.task = self.progress.add_task("", total=None)
        self.done, self.total = -1, 1

    def begin(self, total: int) -> None:
        """So many steps there will be."""
        self.total = total
        self.progress.update(self.task, total=total)
        if self.is_terminal and not self.hidden:
            self.progress.start()

    def advance(self, name: str) -> None:
        """The next step; the one before is done."""
        self.done += 1
        self.progress.update(self.task, completed=self.done, description=name)
        tenths = self.done * 10 // self.total
        if not self.is_terminal and not self.hidden and tenths > (self.done - 1) * 10 // self.total and self.done:
            typer.echo(f"{tenths * 10}% of {self.total}: {name}", err=True)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_terminal and not self.hidden:
            self.progress.stop()
