"""Cells of the sweep: a tiny model of an architecture under one strategy, planned and proven, in a process of its own.

A fork of a process that has loaded everything makes the model, runs it eagerly, and works through its cells; what came
of each it writes into a pipe. It is ended when a cell takes too much time or memory, and another goes on with the next.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import autopar
from autopar.api.reference import NotEager
from autopar.base.errors import AutoparError
from autopar.planner.microbatches import UNDIVIDED
from benchmarks.coverage import eager

Columns = Mapping[str, tuple[str, Any]]
"""Mesh and strategy of each, in the order in which they are asked."""
COLUMNS: Columns = {
    "ddp": ("dp=2,tp=2", "ddp"),
    "auto": ("dp=2,tp=2", "auto"),
    "zero3": ("dp=2,tp=2", "zero3"),
    "tensor": ("dp=2,tp=2", "tensor"),
    "pipeline": ("pp=2,dp=2", {"pp": "pipeline(1f1b)", "dp": "ddp"}),
    "ring": ("dp=2,cp=2", "ring"),
}
STATES = ("ok", "refused", "wrong", "crash", "timeout")
CPU_S, WALL_S = 120.0, 600.0
"""Of one cell, with the processes that it starts."""
MEMORY_BYTES = 6 << 30


@dataclass
class Row:
    """What is known of a model.

    eager: how it ran ("ok", or what stood in the way); the rest as in `eager.Subject`. cells: column -> state, seconds
    of CPU, and what was said. asked: the day on which a cell was asked last; "" before days were kept.
    """

    eager: str = ""
    parameters: int = 0
    loss: bool = False
    blocks: bool = False
    sequence: bool = False
    dropout: bool = False
    cells: dict[str, list[Any]] = field(default_factory=dict)
    asked: str = ""

    def admits(self, column: str) -> bool:
        """Whether a column is asked of it."""
        return (column != "pipeline" or self.blocks) and (column != "ring" or self.sequence)


def add_options(parser: argparse.ArgumentParser, kept: Path, page: str) -> None:
    """What every sweep is asked. kept: where its results are kept by default; page: what is made of them."""
    parser.add_argument("--states", help="only cells that are in one of these states, as in `wrong,crash`")
    parser.add_argument("--resume", action="store_true", help="keep the cells that are there")
    parser.add_argument("--json", type=Path, default=kept, help="where results are kept")
    parser.add_argument("--cpu", type=float, default=CPU_S, help="seconds of CPU that a cell may take")
    parser.add_argument("--page", action="store_true", help=f"write {page} from them, and run nothing")


def run(
    made: Callable[[], eager.Subject],
    columns: Sequence[str],
    row: Row,
    limit_s: float = CPU_S,
    known: Columns = COLUMNS,
) -> Row:
    """Fill in the cells of `columns`, in as many processes as it takes.

    made: the model and its batch, which have run eagerly; what it raises is what is said of the row then. known: what
    the columns are.
    """
    waiting = list(columns)
    while waiting or not row.eager:
        before = len(waiting)
        for event in _forked(made, waiting, row, limit_s, known):
            if "eager" in event:
                for name, value in event.items():
                    setattr(row, name, value)
                if row.eager != "ok":
                    return row
                waiting = [column for column in waiting if row.admits(column)]
            else:
                row.cells[event["column"]] = event["cell"]
                waiting.remove(event["column"])
        if len(waiting) == before and not row.eager:
            row.eager = "the process ended"
            return row
    return row


def _forked(
    made: Callable[[], eager.Subject], columns: Sequence[str], row: Row, limit_s: float, known: Columns
) -> list[dict[str, Any]]:
    """What a process says until it ends, or is ended."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        _in_child(made, columns, known, writing)
    os.close(writing)
    events: list[dict[str, Any]] = []
    began, cpu, spent = time.monotonic(), 0.0, 0.0
    text, why = b"", ""
    while True:
        ready, _, _ = select.select([reading], [], [], 0.5)
        if ready:
            chunk = os.read(reading, 1 << 16)
            if not chunk:
                break
            text += chunk
            *lines, text = text.split(b"\n")
            for line in lines:
                events.append(json.loads(line))
                began, cpu = time.monotonic(), _cpu_s(child)
        spent = _cpu_s(child) - cpu
        why = _too_much(child, time.monotonic() - began, spent, limit_s)
        if why:
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            break
    os.close(reading)
    _, code = os.waitpid(child, 0)
    if why or code:
        ran = any("eager" in event for event in events) or bool(row.eager)
        done = {event.get("column") for event in events}
        said = why or f"the process ended by signal {os.WTERMSIG(code)}" * os.WIFSIGNALED(code) or f"exit {code}"
        if not ran:
            events.append({"eager": said})
        else:
            state = "timeout" if why else "crash"
            admitted = [c for c in columns if c not in done and _admitted(row, events, c)]
            if admitted:
                events.append({"column": admitted[0], "cell": [state, round(max(spent, 0.0), 1), said]})
    return events


def _admitted(row: Row, events: Sequence[Mapping[str, Any]], column: str) -> bool:
    known = next((event for event in events if "eager" in event), None)
    probe = Row(blocks=row.blocks, sequence=row.sequence) if known is None else Row(**known)
    return probe.admits(column)


def _too_much(child: int, wall_s: float, cpu_s: float, limit_s: float) -> str:
    if cpu_s > limit_s or wall_s > WALL_S:
        return f"more than {limit_s:.0f} CPU-seconds" if cpu_s > limit_s else f"more than {WALL_S:.0f} seconds"
    with suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{child}/statm") as file:
            if int(file.read().split()[1]) * resource.getpagesize() > MEMORY_BYTES:
                return f"more than {MEMORY_BYTES >> 30} GiB"
    return ""


def _cpu_s(child: int) -> float:
    """Of a process and the children that it has waited for."""
    try:
        with open(f"/proc/{child}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


# ------------------------------------------------------------------------------------------------------- in the child


def _in_child(made: Callable[[], eager.Subject], columns: Sequence[str], known: Columns, pipe: int) -> None:
    """Never returns."""
    os.setsid()
    with open(os.devnull, "r+") as nothing:
        for number in (0, 1, 2):
            os.dup2(nothing.fileno(), number)
    sys.setrecursionlimit(10_000)
    warnings.simplefilter("ignore")
    code = 1
    try:
        with os.fdopen(pipe, "w", buffering=1) as out:
            for event in _events(made, columns, known):
                out.write(json.dumps(event) + "\n")
                out.flush()
        code = 0
    finally:
        os._exit(code)


def _events(made: Callable[[], eager.Subject], columns: Sequence[str], asked: Columns) -> Any:
    try:
        subject = made()
    except Exception as error:
        said = str(error) if isinstance(error, eager.NotEager) else _said(error)
        yield {"eager": said or type(error).__name__}
        return
    known = Row("ok", subject.parameters, subject.loss, subject.blocks, subject.sequence, subject.dropout)
    yield {name: value for name, value in vars(known).items() if name not in ("cells", "asked")}
    for column in columns:
        if known.admits(column):
            yield {"column": column, "cell": proven(subject, column, asked)}


def proven(subject: eager.Subject, column: str, known: Columns = COLUMNS) -> list[Any]:
    """A cell: state, seconds of CPU, what was said."""
    mesh, strategy = known[column]
    began = _own_cpu_s()
    state, said = "ok", ""
    try:
        plan = autopar.plan(
            subject.model, autopar.Mesh.parse(mesh, hardware="cpu"), example_inputs=subject.batch, strategy=strategy
        )
        try:
            proof = _proof(plan)
            said = UNDIVIDED * any(note.startswith(UNDIVIDED) for note in plan.notes)
            if not proof.ok:
                state, said = "wrong", f"{proof.worst.name} differs by {proof.worst.error:.1e}"
        except Exception as error:
            state, said = "crash", f"verify: {_said(error)}"
    except AutoparError as error:
        state, said = "refused", "\n".join(str(error).splitlines()[:4])[:600]
    except Exception as error:
        state, said = "crash", f"plan: {_said(error)}"
    return [state, round(_own_cpu_s() - began, 1), said]


def _proof(plan: Any) -> Any:
    """In float64, or in float32 where the model has an operator that knows no other."""
    try:
        return plan.verify()
    except NotEager:
        return plan.verify(dtype=torch.float32)


def _own_cpu_s() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def _said(error: BaseException) -> str:
    """The error's first line, and where it was raised."""
    lines = str(error).strip().splitlines()
    frames = traceback.extract_tb(error.__traceback__)
    where = next((f for f in reversed(frames) if "/autopar/" in f.filename), frames[-1] if frames else None)
    place = f" [{where.filename.rpartition('/autopar/')[2]}:{where.lineno}]" if where else ""
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}{place}"
