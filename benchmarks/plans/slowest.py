r"""What planning of tiny models of every architecture costs, and where it goes: CPU seconds by stage, from samples.

    nice python benchmarks/plans/slowest.py [--only '*rwkv*;*slanet*'] [--slowest 10] [--cells auto,ddp] \
        [--rows FILE] [--before FILE] [--stacks FOLDER]

The models are those of `benchmarks/coverage`, and so are the cells (mesh and strategy). `--slowest N` takes the cells
that took longest when they were planned and proven last (benchmarks/results/architectures.json). A cell is planned
alone, in a fork of a process that has loaded everything: CPU seconds of `autopar.plan` and the processes that it
starts; neither the model's construction nor the proof. `--rows` keeps one JSON line a cell; `--before` compares with
such a file of another version: seconds, predicted step times and programs. `--stacks` writes each cell's samples as
folded stacks (`a;b;c 12`), which speedscope and flamegraph.pl read. Exits with 1 where a step is predicted slower.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from types import FrameType

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import pages
from benchmarks.coverage import discovery, eager
from benchmarks.coverage.cells import COLUMNS
from benchmarks.coverage.discovery import Pair
from benchmarks.coverage.kept import load
from benchmarks.proofs.matrix import matches

EVERY_S = 0.01
"""Of CPU, between two samples."""
TOLERANCE = 1e-3
"""What a predicted step may be slower by: proven gaps of plans are about as large."""
STAGES: Mapping[str, tuple[str, ...]] = {
    "capture": ("passes/capture.py",),
    "outline": ("passes/fuse_attention.py", "passes/outline.py", "passes/separate.py", "passes/pad.py"),
    "differentiate": ("passes/differentiate.py", "passes/fuse_elementwise.py"),
    "names": ("passes/name_values.py", "passes/rematerialize.py", "passes/spread_heads.py"),
    "annotate": ("passes/annotate.py",),
    "place": ("passes/place.py",),
    "lower": ("passes/insert_collectives.py", "passes/split_stages.py"),
    "overlap": ("passes/overlap.py",),
    "price": ("planner/assembly.py", "planner/bounds.py"),
    "emit": ("passes/emit.py",),
    "check": ("runtime/checker/program.py",),
    "views": ("views/graphs.py", "views/step_memory.py", "ir/meaning.py"),
}
"""The files in which a stage begins: of a sample's frames the outermost that lies in one of them decides."""
INSIDE: Mapping[str, tuple[str, ...]] = {"solve": ("autopar/solver/",), "verify IR": ("ir/verify.py",)}
"""Stages that begin inside others."""
NAMES = (*STAGES, *INSIDE, "children", "rest")


@dataclass
class Row:
    """A cell that was planned.

    cpu_s: with children. stages: CPU seconds by stage. hot: functions and the seconds with them on the stack. step_s:
    predicted. digest: of the program's text. error: why there is no plan.
    """

    key: str
    column: str
    cpu_s: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    hot: list[tuple[str, float]] = field(default_factory=list)
    step_s: float = 0.0
    digest: str = ""
    error: str = ""


class Samples:
    """Stacks of the main thread, outermost frame first, and how often each was seen."""

    def __init__(self) -> None:
        self.stacks: Counter[tuple[tuple[str, str], ...]] = Counter()

    @contextmanager
    def taken(self) -> Iterator[None]:
        before = signal.signal(signal.SIGPROF, self._take)
        signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)

    def _take(self, number: int, frame: FrameType | None) -> None:
        stack = []
        while frame is not None:
            stack.append((frame.f_code.co_filename, frame.f_code.co_name))
            frame = frame.f_back
        self.stacks[tuple(reversed(stack))] += 1

    def seconds(self, total_s: float) -> tuple[dict[str, float], list[tuple[str, float]]]:
        """By stage, and of the functions of autopar that are on the stack most often."""
        stages, functions = Counter[str](), Counter[str]()
        for stack, times in self.stacks.items():
            stages[stage_of(stack)] += times
            for name in {f"{_short(file)}:{name}" for file, name in stack if "/autopar/" in file}:
                functions[name] += times
        each = total_s / max(1, sum(self.stacks.values()))
        return {n: round(stages[n] * each, 2) for n in stages}, [
            (n, round(t * each, 2)) for n, t in functions.most_common(60)
        ]

    def folded(self) -> str:
        """A line a stack."""
        return "".join(
            f"{';'.join(f'{_short(file)}:{name}' for file, name in stack)} {times}\n"
            for stack, times in self.stacks.items()
        )


def stage_of(stack: Sequence[tuple[str, str]]) -> str:
    """The stage that a sample belongs to, by its frames' files, outermost first."""
    files = [file for file, _ in stack]
    for name, begins in INSIDE.items():
        if any(part in file for file in files for part in begins):
            return name
    for file in files:
        for name, begins in STAGES.items():
            if file.endswith(begins):
                return name
    return "rest"


def _short(file: str) -> str:
    for root in ("/autopar/", "/site-packages/", "/lib/"):
        if root in file:
            return file.rpartition(root)[2]
    return file


def planned(key: str, column: str, stacks: Path | None) -> Row:
    """Plan a cell in this process."""
    import autopar

    sys.setrecursionlimit(10_000)
    row = Row(key, column)
    try:
        subject = eager.subject(Pair.of(key))
    except eager.NotEager as error:
        row.error = f"not eager: {error}"
        return row
    mesh, strategy = COLUMNS[column]
    samples = Samples()
    before, children = time.process_time(), _children_s()
    try:
        with samples.taken():
            plan = autopar.plan(
                subject.model, autopar.Mesh.parse(mesh, hardware="cpu"), example_inputs=subject.batch, strategy=strategy
            )
    except Exception as error:
        row.error = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    else:
        row.step_s, row.digest = plan.cost.step_time_s, sha256(plan.source.encode()).hexdigest()[:12]
    own_s, children_s = time.process_time() - before, _children_s() - children
    row.cpu_s = round(own_s + children_s, 2)
    row.stages, row.hot = samples.seconds(own_s)
    row.stages["children"] = round(children_s, 2)
    if stacks is not None:
        (stacks / f"{key.split(' | ')[1]}-{column}.folded").write_text(samples.folded())
    return row


def _children_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


def forked(key: str, column: str, stacks: Path | None) -> Row:
    """Plan a cell in a process of its own."""
    context = get_context("fork")
    reading, writing = context.Pipe(duplex=False)

    def work() -> None:
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        writing.send(planned(key, column, stacks))

    process = context.Process(target=work)
    process.start()
    writing.close()
    try:
        row: Row = reading.recv()
    except EOFError:
        row = Row(key, column, error="the process ended")
    process.join()
    return row


def report(rows: Sequence[Row], before: Mapping[tuple[str, str], Row]) -> str:
    """The page: seconds by stage, slowest first; beside another version's."""
    ordered = sorted(rows, key=lambda row: -row.cpu_s)
    stages = [name for name in NAMES if any(row.stages.get(name, 0.0) >= 0.05 for row in rows)]
    head = ("model", "cell", "CPU s", *(("before", "step", "program") if before else ()), *stages)
    lines = []
    for row in ordered:
        old = before.get((row.key, row.column))
        compared: tuple[str, ...] = ()
        if before:
            compared = (
                "" if old is None else f"{old.cpu_s:.1f}",
                "" if old is None or not old.step_s or not row.step_s else f"{row.step_s / old.step_s - 1:+.2%}",
                "" if old is None or not row.digest else "same" if row.digest == old.digest else "other",
            )
        name = row.key.rpartition(" | ")[2] + (f" ({row.error[:60]})" if row.error else "")
        lines.append(
            (name, row.column, f"{row.cpu_s:.1f}", *compared, *(f"{row.stages.get(s, 0.0):.1f}" for s in stages))
        )
    return pages.table(head, lines)


def chosen(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Cells, slowest first by what they took before."""
    columns, there, kept = options.cells.split(","), {pair.key for pair in discovery.pairs()}, load()
    known = [
        (row.cells.get(column, ["", 0.0])[1], key, column)
        for key, row in kept.items()
        if key in there and row.eager == "ok" and matches(key, options.only)
        for column in columns
        if row.admits(column)
    ]
    known.sort(key=lambda each: (-each[0], each[1:]))
    return [(key, column) for _, key, column in known][: options.slowest or None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="patterns of `task | model type | class`, separated by semicolons")
    parser.add_argument("--slowest", type=int, default=0, help="how many cells; 0: all that match")
    parser.add_argument("--cells", default="auto", help="columns, separated by commas")
    parser.add_argument("--rows", type=Path, help="a JSON line a cell, kept; what is there is not planned again")
    parser.add_argument("--before", type=Path, help="rows of another version")
    parser.add_argument("--stacks", type=Path, help="a folder for folded stacks")
    parser.add_argument("--functions", type=int, default=0, help="how many functions to print of each cell")
    options = parser.parse_args()
    _prepare()
    rows = {(row["key"], row["column"]): Row(**row) for row in pages.kept(options.rows)}
    before = {(row["key"], row["column"]): Row(**row) for row in pages.kept(options.before)}
    wanted = chosen(options)
    for key, column in wanted:
        if (key, column) in rows:
            continue
        row = rows[key, column] = forked(key, column, options.stacks)
        pages.keep(options.rows, row)
        print(f"{key} {column}: {row.cpu_s} CPU s {row.error}", file=sys.stderr, flush=True)
        for name, seconds in row.hot[: options.functions]:
            print(f"    {seconds:7.2f}  {name}", file=sys.stderr, flush=True)
    asked = [rows[each] for each in wanted]
    print(report(asked, before))
    slower = [
        row for row in asked
        if (old := before.get((row.key, row.column))) and old.step_s and row.step_s > old.step_s * (1 + TOLERANCE)
    ]  # fmt: skip
    print(*(f"{row.key} {row.column}: a slower step" for row in slower), sep="\n", end="")
    return bool(slower)


def _prepare() -> None:
    """Load all that a cell needs, so that forks begin at once: much of it is imported, and loops of the solver are read
    from numba's cache or compiled, when something is planned first.
    """
    import torch
    import transformers

    import autopar

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    layers = [torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)]
    autopar.plan(
        torch.nn.Sequential(*layers), autopar.Mesh.parse("dp=2,tp=2", hardware="cpu"),
        example_inputs=(torch.randn(4, 8),),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
