"""What do files that are damaged, or made to do harm, do to those who read them? Plans, profiles, schedules, indices of
checkpoints, configurations: valid ones with parts dropped, replaced, retyped, nested, cut short, and arbitrary ones.

    python benchmarks/fuzz/readers.py [--only plans,profiles] [--count 10000] [--seed 0] [--write]

Each input is either taken (a plan is then also printed, drawn, traced, written as a page) or refused with an
AutoparError. Everything else is counted, and its inputs are kept in the folder of `--keep`: other exceptions, inputs
that take longer than they may or more memory than 4 GiB beyond what the process had, and whatever the process did that
data cannot ask for: modules imported, files written, processes started, sockets opened. Exits with 1 where there is
any. `--replay FILE --only TARGET` does one again. --write adds a dated file under benchmarks/results/.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.fuzz.targets import TARGETS, Target, outcome_of
from benchmarks.fuzz.watch import Hang, Watch, installed, limit_memory

MEMORY_BYTES = 4 << 30
FIRST = 20
"""Inputs that only load what readers load late, before anything is watched."""


@dataclass
class Counts:
    """What became of a target's inputs. failures: by what went wrong, and where, the first input."""

    name: str
    taken: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def row(self) -> str:
        wrong = self.failures.total()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
        total = self.taken + self.refused + wrong
        return (
            f"| {self.name} | {total} | {self.taken} | {self.refused} | {wrong} | {self.slowest_s:.1f} | {peak:.2f} |"
        )


def run(name: str, numbers: Sequence[int], keep: Path | None = None, replay: Path | None = None) -> Counts:
    """Inputs of a target, each made of its number alone."""
    target, counts = TARGETS[name], Counts(name)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        _warm_up(target, folder)
        watch = installed()
        watch.folder, watch.imports = folder, target.imports
        for number in numbers:
            draw = random.Random(f"{name} {number}")
            content = replay.read_bytes() if replay is not None else target.make(draw)
            start = time.process_time()
            wrong = _one(target, folder, content, draw, watch, counts)
            counts.slowest_s = max(counts.slowest_s, time.process_time() - start)
            if wrong:
                counts.failures[wrong] += 1
                if counts.failures[wrong] == 1:
                    print(f"{name} {number}: {wrong}", file=sys.stderr, flush=True)
                    if keep is not None:
                        keep.mkdir(parents=True, exist_ok=True)
                        (keep / f"{name}-{number}").write_bytes(content)
    return counts


def _warm_up(target: Target, folder: Path) -> None:
    if target.first is not None:
        target.first(folder)
    for number in range(FIRST):
        draw = random.Random(f"first {number}")
        with contextlib.suppress(Exception):
            (folder / target.file).write_bytes(target.make(draw))
            outcome_of(target, folder / target.file, draw)


def _one(target: Target, folder: Path, content: bytes, draw: random.Random, watch: Watch, counts: Counts) -> str:
    """What went wrong; "" where nothing did."""
    path = folder / target.file
    path.write_bytes(content)
    try:
        with watch.watching(target.seconds), warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            outcome = outcome_of(target, path, draw)
    except Hang as error:
        return f"takes too long, in {_place(error)}"
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:80]!r}, in {_place(error)}"
    if watch.seen:
        return f"does what it may not: {watch.seen[0]}"
    counts.taken += outcome == "taken"
    counts.refused += outcome == "refused"
    return ""


def _place(error: BaseException) -> str:
    """The innermost line of ours."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if "/autopar/" in each.filename and "site-packages" not in each.filename]
    frame = (own or frames)[-1]
    return f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(TARGETS), help="targets, split by commas")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="another one: other inputs")
    parser.add_argument("--keep", type=Path, help="a folder for the inputs that went wrong")
    parser.add_argument("--replay", type=Path, help="one input that was kept")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one or options.replay:
        limit_memory(MEMORY_BYTES)
        first = options.seed * options.count
        numbers = range(first, first + (1 if options.replay else options.count))
        counts = run(options.only, numbers, options.keep, options.replay)
        print(counts.row)
        return int(bool(counts.failures))
    rows, failed = [], False
    for name in options.only.split(","):
        # A process each, so that what one imports is news to another, and its memory is its own.
        given = ["--only", name, "--count", str(options.count), "--seed", str(options.seed), "--one"]
        given += ["--keep", str(options.keep)] if options.keep else []
        done = subprocess.run([sys.executable, __file__, *given], stdout=subprocess.PIPE, text=True)
        rows += [line for line in done.stdout.splitlines() if line.startswith("|")]
        failed |= done.returncode != 0
        print(rows[-1] if rows else f"{name}: {done.returncode}", flush=True)
    table = "\n".join([
        "| files | inputs | taken | refused | anything else | slowest, CPU s | peak, GiB |",
        "|---|--:|--:|--:|--:|--:|--:|", *rows,
    ])  # fmt: skip
    print(table)
    if options.write:
        import torch

        path = Path(__file__).parents[1] / "results" / f"fuzz-{date.today()}.md"
        machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
        path.write_text(
            f"# Damaged and hostile files, {date.today()}\n\n{machine}, torch {torch.__version__}, seed "
            f"{options.seed}. "
            "Refused: an AutoparError. Anything else: other exceptions, inputs without end, code that ran, files "
            f"written. Peak: of the process.\n\n{table}\n\nWritten by `benchmarks/fuzz/readers.py`.\n"
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
