"""How good are answers, how soon? The solver on the problems of the ASPLOS / EuroSys 2025 contest: shardings from XLA.

    python benchmarks/solver/iopddl.py FILE [--time S]
    python benchmarks/solver/iopddl.py FOLDER [--only A,B] [--time S] [--repeat 3] [--write]

A FILE (.json or .json.gz) is solved with progress on stderr; the last line of stdout is the answer, a strategy for each
node: [0, 3, ...]. A FOLDER's files are solved one after another, each in a process of its own, and compared with the
lowest costs of the contest (best.csv in the folder). The clock starts once a file was read, as in the contest. Every
cost that is reported was added up from the file itself, in whole numbers (benchmarks/solver/iopddl_file.py).
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from autopar.base.errors import AutoparError
from autopar.solver import Solution, solve
from benchmarks import pages
from benchmarks.solver.iopddl_file import Contest, Evaluation, contest_results, evaluate, load, name_of, problem_of
from benchmarks.solver.iopddl_table import (
    ROUNDING,
    UNKNOWN,
    UNREADABLE,
    Row,
    gap_of,
    number,
    outcome,
    page,
    percent,
    ratio_of,
    table,
)

DEFAULT_SECONDS = 60.0
BETWEEN_LINES_S = 0.5
GRACE_S = 600.0
"""What a process may take beyond twice its limit, reading included, before it is stopped."""

CODES = "exit status: 0 every problem has an answer, 1 one has none, or a wrong one, 2 the input is wrong"


@dataclass(slots=True)
class Progress:
    """What the solver says while it runs: a line every half second."""

    say: Callable[[str], None]
    start: float = field(default_factory=lambda: time.perf_counter())
    said: float = -math.inf

    def __call__(self, phase: str, cost: float, bound: float) -> None:
        now = self.seconds
        if now - self.said >= BETWEEN_LINES_S:
            self.said = now
            words = f"cost {number(cost):>19}  bound {number(bound):>19}  gap {percent(gap_of(cost, bound)):>8}"
            self.say(f"{now:7.1f} s  {phase:14} {words}")

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start


SHARE_OF_TIME = 0.97
"""What the solver is given of the limit: a step that began in time may end a little late."""


def run(
    path: Path, time_limit_s: float, gap: float, contest: Contest
) -> tuple[Row, tuple[int, ...], Evaluation | None]:
    """Read, solve and check one file in this process, with progress on stderr."""
    start = time.perf_counter()
    document = load(path)
    problem = problem_of(document)
    read_s = time.perf_counter() - start
    del document  # it is larger than the problem; the answer is checked against what the file says then
    counts = {"nodes": len(problem.nodes), "edges": len(problem.edges)}
    _say(f"{name_of(path)}: {counts['nodes']:,} nodes, {counts['edges']:,} edges, read in {read_s:.1f} s")
    progress = Progress(_say)
    found = solve(
        problem,
        gap=gap,
        time_limit_s=SHARE_OF_TIME * time_limit_s,
        progress=progress,
        explain=False,
        anytime=True,
        wall_clock=True,
    )
    seconds, rss_gib = progress.seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    exact = evaluate(load(path), found.choice) if found.choice or not problem.nodes else None
    status = verdict(found, exact, contest)
    cost = exact.cost if exact is not None else math.inf
    row = Row(
        name_of(path), time_limit_s, status, cost=cost, bound=found.bound, gap=gap_of(cost, found.bound),
        seconds=seconds, rss_gib=rss_gib, **counts,
    )  # fmt: skip
    return row, found.choice, exact


def verdict(found: Solution, exact: Evaluation | None, contest: Contest) -> str:
    """The solver's status, if what it says can be true: "wrong: ..." otherwise."""
    known = math.inf if contest.cost is None else contest.cost
    if exact is not None:
        if exact.forbidden:
            return f"wrong: {exact.forbidden} forbidden choices"
        if not exact.feasible:
            return f"wrong: {number(exact.peak)} bytes"
        if abs(exact.cost - found.cost) > ROUNDING * max(1.0, abs(exact.cost)):
            return f"wrong: said to cost {number(found.cost)}"
        known = min(known, exact.cost)
    if found.status == "infeasible" and known < math.inf:
        return "wrong: not infeasible"
    if found.bound > known + ROUNDING * max(1.0, abs(known)):
        return f"wrong: {number(known)} is below the bound"
    return found.status


def run_apart(path: Path, time_limit_s: float, gap: float) -> Row:
    """The same in a process of its own. One that ends badly is a row that says so."""
    command = [sys.executable, __file__, str(path), "--time", str(time_limit_s), "--gap", str(gap), "--row"]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=2 * time_limit_s + GRACE_S)
    except subprocess.TimeoutExpired:
        return Row(name_of(path), time_limit_s, "stopped: it did not end")
    if done.returncode == 2:
        return Row(name_of(path), time_limit_s, UNREADABLE)
    lines = done.stdout.splitlines()
    if not lines:
        return Row(name_of(path), time_limit_s, f"ended with exit status {done.returncode}")
    return Row(**json.loads(lines[-1]))


def one(path: Path, options: argparse.Namespace) -> int:
    """Solve a file, print its answer."""
    contest = contest_results(path.parent).get(name_of(path), UNKNOWN)
    time_limit_s = options.time or contest.time_limit_s or DEFAULT_SECONDS
    row, choice, exact = run(path, time_limit_s, options.gap, contest)
    if options.row:
        print(json.dumps(asdict(row)))
        return 0 if row.answered else 1
    for line in _summary(row, exact, contest):
        _say(line)
    if exact is not None:
        print(json.dumps(choice), flush=True)
    return 0 if row.answered else 1


def folder(path: Path, options: argparse.Namespace) -> int:
    """Solve the files of a folder, print a table."""
    contest = contest_results(path)
    rows: list[Row] = []
    try:
        for file in _instances(path, options.only):
            known = contest.get(name_of(file), UNKNOWN)
            for _ in range(options.repeat):
                row = run_apart(file, options.time or known.time_limit_s or DEFAULT_SECONDS, options.gap)
                rows.append(row)
                _say(f"{row.instance}: {row.status}, cost {number(row.cost)}, {row.seconds:.1f} s")
                if row.status == UNREADABLE:
                    break
    finally:  # what was found before an interruption is worth seeing
        text = f"{table(rows, contest)}\n\n{outcome(rows, contest)}"
        print(text if rows else "", end="\n" if rows else "", flush=True)
    if options.write:
        pages.write("iopddl", page(text, options.repeat))
    return 0 if all(row.answered for row in rows) else 1


def _instances(path: Path, only: str) -> list[Path]:
    files = {name_of(file): file for ending in ("*.json", "*.json.gz") for file in sorted(path.glob(ending))}
    if not files:
        raise AutoparError("there are no problems here", where=str(path), remedy="files end in .json or .json.gz")
    wanted = only.split(",") if only else sorted(files)
    if unknown := [name for name in wanted if name not in files]:
        names = f"there are {', '.join(sorted(files))}"
        raise AutoparError(f"there is no problem {unknown[0]!r}", where=str(path), values=names, remedy="see --only")
    return [files[name] for name in wanted]


def _summary(row: Row, exact: Evaluation | None, contest: Contest) -> list[str]:
    used = f"{row.seconds:.1f} s of {row.time_limit_s:g} s, {row.rss_gib:.2f} GiB"
    if exact is None:
        reasons = {
            "infeasible": "proven infeasible: no strategies satisfy the limit and what is forbidden",
            "unknown": "none found, and not known whether there are any: give it more --time",
        }
        return [f"{row.instance}: {reasons.get(row.status, row.status)}", used]
    proof = f"{row.status}: no answer costs less than {number(row.bound)}, gap {percent(row.gap)}"
    return [*_evaluated(exact, contest), proof, used]


def _evaluated(exact: Evaluation, contest: Contest) -> list[str]:
    limit = "no limit" if exact.limit is None else f"limit {number(exact.limit)}"
    fits = "" if exact.limit is None else ": fits" if exact.peak <= exact.limit else ": DOES NOT FIT"
    lines = [f"peak {number(exact.peak)} bytes, {limit}{fits}"]
    if exact.forbidden:
        return [f"FORBIDDEN: {exact.forbidden} of its choices are not allowed", *lines]
    ratio = ratio_of(exact.cost, contest.cost)
    best = "" if contest.cost is None else f"; best of the contest {number(contest.cost)}{ratio and f', ratio {ratio}'}"
    return [f"cost {number(exact.cost)}{best}", *lines]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=CODES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, metavar="FILE|FOLDER", help="a problem, or a folder of them")
    parser.add_argument(
        "--time", type=float, metavar="S", help="seconds to search; else the contest's (best.csv beside it), or 60"
    )
    parser.add_argument("--gap", type=float, default=0.0, help="end at this proven share of the cost (default: 0)")
    parser.add_argument("--only", default="", metavar="A,B", help="FOLDER: these instances")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="FOLDER: runs of each instance")
    parser.add_argument("--write", action="store_true", help="FOLDER: write a dated page under benchmarks/results/")
    parser.add_argument("--row", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not options.path.is_dir() and (options.only or options.repeat > 1 or options.write):
        parser.error("--only, --repeat and --write go with a folder")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parsed(arguments)
    try:
        return folder(options.path, options) if options.path.is_dir() else one(options.path, options)
    except AutoparError as error:
        _say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        _say("interrupted")
        return 130


if __name__ == "__main__":
    sys.exit(main())
