"""Predicted against published: tokens/s/GPU of training runs that others measured (benchmarks/published/*.toml).

    python benchmarks/published/backtest.py [--rows SOURCE,…] [--only PATTERN,…] [--list] [--layers N] [--resume FILE]
                                            [--write]

Plans every row on meta, each in a process of its own unless `--together`, and prints prediction, error and whether the
order of the configurations is kept. Nothing is fitted to the rows that count: those that calibrate say so
(`calibrates = true`), and stand apart. Rows in formats that autopar has not (fp8) are listed with the reason. What a
prediction is made of is in published_runs.py.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from autopar.base.errors import AutoparError
from autopar.machine import profiles
from benchmarks import pages
from benchmarks.published import rows as published_rows
from benchmarks.published.rows import Row
from benchmarks.published.runs import Prediction, axes_of, predict

PRECISIONS = ("bf16", "fp16")
NOISE = 0.01
"""Published speeds that are closer than this are no order."""
FAR = 0.15
"""A row that is further off is named, with what is known of it."""
METHOD = (
    "Every row is planned on meta by its own named strategies; no GPU was used. The machines are those of the sources, "
    "as hardware profiles (a100-80, h100-sxm) with the numbers that the source states in place of the profile's."
)


PARTS = {
    "test": "rows that count",
    "incomplete": "rows whose source says no microbatch or nothing of recomputation: assumed, so they count apart",
    "calibrates": "rows that calibrate",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row's comparison. published, predicted: tokens/s/GPU. *_gib: peak memory.

    group: rows whose order is compared. part: of `PARTS`. reason: why there is no prediction. why: what is known of a
    prediction that is far off. seconds: of the step by kind (`published_runs.Prediction`).
    """

    id: str
    source: str
    group: str
    configuration: str
    published: float
    predicted: float | None = None
    published_gib: float | None = None
    predicted_gib: float | None = None
    part: str = "test"
    assumptions: tuple[str, ...] = ()
    reason: str | None = None
    why: str = ""
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def error(self) -> float | None:
        """predicted/published − 1."""
        return None if self.predicted is None else self.predicted / self.published - 1


# -- all rows


def describe(row: Row) -> str:
    """`8b, dp=8, fsdp, 16 × 8192, microbatch 2, selective`"""
    mesh = ",".join(f"{axis}={size}" for axis, size in axes_of(row).items())
    stages = f"({row.stages_per_rank})" if (row.stages_per_rank or 1) > 1 else ""
    parts = [row.name, mesh, row.data_parallel] + [f"{row.schedule or '1f1b'}{stages}"] * (row.sizes["pp"] > 1)
    parts += [f"{row.global_batch} × {row.sequence}", f"microbatch {row.microbatch or '?'}", row.recompute or "?"]
    parts += ["async TP"] * row.async_tp + ["compiled"] * bool(row.compiled) + [row.precision]
    return ", ".join(parts)


def untried(row: Row) -> Outcome:
    """The row without a prediction."""
    peak = profiles.load(row.machine.profile).peak_flops["bf16"]
    gib = row.published.get("memory_gib")
    if gib is None and "memory_gb" in row.published:
        gib = row.published["memory_gb"] * 1e9 / 2**30
    return Outcome(
        row.id,
        row.source,
        f"{row.name} on {row.machine.description}, {row.precision}, {row.sequence} tokens",
        describe(row),
        published_rows.tokens_per_s(row, peak),
        published_gib=gib,
        part="calibrates" if row.calibrates else "test" if row.is_whole else "incomplete",
        assumptions=row.assumptions,
        why=row.why,
        reason=None if row.precision in PRECISIONS else f"autopar has no {row.precision}",
    )


def compare(row: Row, layers: int | None, timeout_s: float) -> Outcome:
    """Plan the row in a process of its own, and set the prediction beside what was published."""
    outcome = untried(row)
    if outcome.reason is not None:
        return outcome
    command = [sys.executable, __file__, "--one", row.id] + (["--layers", str(layers)] if layers else [])
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return replace(outcome, reason=f"not planned within {timeout_s:.0f} s")
    if done.returncode:
        return replace(outcome, reason=(done.stderr.strip().splitlines() or ["no message"])[-1][:300])
    return predicted(outcome, Prediction(**json.loads(done.stdout.splitlines()[-1])))


def compare_here(row: Row, layers: int | None) -> Outcome:
    """The same in this process, without a limit of time."""
    outcome = untried(row)
    if outcome.reason is not None:
        return outcome
    try:
        return predicted(outcome, predict(row, layers))
    except AutoparError as error:
        return replace(outcome, reason=" ".join(str(error).split())[:300])


def predicted(outcome: Outcome, found: Prediction) -> Outcome:
    """The comparison with its prediction."""
    seconds = {name: value for name, value in asdict(found).items() if name.endswith("_s") and "token" not in name}
    return replace(outcome, predicted=found.tokens_per_s, predicted_gib=found.gib, seconds=seconds)


@dataclass(frozen=True, slots=True)
class Order:
    """pairs: of configurations of one model whose published speeds differ. swapped: those predicted the other way (the
    first of each was measured faster). tied: how many are predicted alike, as autopar has one plan for both.
    """

    pairs: int
    swapped: tuple[tuple[str, str], ...]
    tied: int

    @property
    def tau(self) -> float | None:
        """Kendall's: (kept − swapped) / pairs; None without pairs."""
        return None if not self.pairs else (self.pairs - self.tied - 2 * len(self.swapped)) / self.pairs


def order_of(outcomes: Iterable[Outcome]) -> Order:
    """Compare every two rows of one group."""
    pairs, tied, swapped = 0, 0, []
    for one, other in combinations([each for each in outcomes if each.predicted is not None], 2):
        fast, slow = (one, other) if one.published > other.published else (other, one)
        if one.group != other.group or fast.published / slow.published < 1 + NOISE:
            continue
        assert fast.predicted is not None and slow.predicted is not None
        pairs += 1
        if math.isclose(fast.predicted, slow.predicted):
            tied += 1
        elif fast.predicted < slow.predicted:
            swapped.append((fast.id, slow.id))
    return Order(pairs, tuple(swapped), tied)


def of_part(outcomes: Iterable[Outcome], part: str) -> list[Outcome]:
    """The rows of one of `PARTS` that have a prediction."""
    return [each for each in outcomes if each.predicted is not None and each.part == part]


# -- what is printed


def table(outcomes: Sequence[Outcome]) -> str:
    lines = []
    for each in outcomes:
        error = each.error
        last = (f"{each.predicted:.1f}", f"{error:+.1%}") if error is not None else (each.reason or "not planned", "")
        memory = [f"{gib:.1f}" if gib is not None else "" for gib in (each.published_gib, each.predicted_gib)]
        name = each.id + ("" if each.part == "test" else f" ({each.part})")
        lines.append((name, each.configuration, f"{each.published:.1f}", *last, *memory))
    header = ("row", "configuration", "published tokens/s/GPU", "predicted", "error", "published GiB", "predicted GiB")
    return pages.table(header, lines)


def summary(outcomes: Sequence[Outcome]) -> str:
    """One table for each of `PARTS`, and the pairs that are predicted the other way round."""
    lines = []
    for part, meaning in PARTS.items():
        own = of_part(outcomes, part)
        if own:
            lines += [f"{meaning[0].upper()}{meaning[1:]}:", "", *_errors(own), ""]
    swapped = order_of([each for part in ("test", "incomplete") for each in of_part(outcomes, part)]).swapped
    if swapped:
        lines += ["Predicted the other way round (the first was measured faster):", ""]
        lines += [f"- {fast}, {slow}" for fast, slow in swapped]
    return "\n".join(lines).strip()


def _errors(outcomes: Sequence[Outcome]) -> list[str]:
    lines = [
        "| source | rows | mean absolute error | median | mean error | pairs | swapped | tied | Kendall tau |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in [*dict.fromkeys(each.source for each in outcomes), "all"]:
        own = [each for each in outcomes if name in (each.source, "all")]
        errors = [each.error for each in own if each.error is not None]
        order = order_of(own)
        tau = "" if order.tau is None else f"{order.tau:.2f}"
        sizes = list(map(abs, errors))
        lines.append(
            f"| {name} | {len(own)} | {statistics.mean(sizes):.1%} | {statistics.median(sizes):.1%} | "
            f"{statistics.mean(errors):+.1%} | {order.pairs} | {len(order.swapped)} | {order.tied} | {tau} |"
        )
    return lines


def far_off(outcomes: Sequence[Outcome]) -> str:
    """The rows that are more than `FAR` off, each reason once."""
    found: dict[str, list[str]] = {}
    for each in outcomes:
        if each.error is not None and abs(each.error) > FAR:
            found.setdefault(each.why or "not explained", []).append(f"{each.id} {each.error:+.0%}")
    return "\n".join(f"- {', '.join(rows)}: {why}" for why, rows in found.items())


def assumptions(outcomes: Sequence[Outcome]) -> str:
    """Every assumption once, with the number of rows that rest on it."""
    found: dict[str, list[str]] = {}
    for each in outcomes:
        for text in each.assumptions:
            found.setdefault(text, []).append(each.id)
    lines = []
    for text, ids in found.items():
        shown = ", ".join(ids[:4]) + (f" and {len(ids) - 4} more" if len(ids) > 4 else "")
        lines.append(f"- {text} ({shown})")
    return "\n".join(lines)


def report(outcomes: Sequence[Outcome], layers: int | None) -> str:
    calibrating = [each.id for each in outcomes if each.part == "calibrates"]
    parts = []
    if layers is None:
        parts.append(summary(outcomes))
        if text := far_off(outcomes):
            parts.append(f"More than {FAR:.0%} off:\n\n{text}")
    else:
        parts.append(f"Planned with {layers} blocks: the predictions say whether a row can be planned, nothing else.")
    parts += [
        "Pairs: two rows of one model, machine, precision and sequence length whose published speeds differ by more "
        f"than {NOISE:.0%}; tied: those that autopar plans alike.",
        f"Rows that calibrate the cost model: {', '.join(calibrating) or 'none'}.",
        table(outcomes),
    ]
    if text := assumptions(outcomes):
        parts.append(f"Assumed:\n\n{text}")
    return "\n\n".join(part for part in parts if part)


def chosen(options: argparse.Namespace) -> list[Row]:
    """The rows asked for. Raises AutoparError where there are none."""
    rows = published_rows.load(options.rows.split(",") if options.rows else ())
    patterns = options.only.split(",") if options.only else ["*"]
    found = [row for row in rows if any(fnmatch.fnmatch(row.id, pattern) for pattern in patterns)]
    if not found:
        raise AutoparError("no row has such a name", values=f"--only {options.only}", remedy="see --list")
    return found


def compare_all(rows: Sequence[Row], options: argparse.Namespace) -> list[Outcome]:
    """Compare rows one after the other; those that the file to resume from has are taken from there."""
    kept = Path(options.resume) if options.resume else None
    found = json.loads(kept.read_text(encoding="utf-8")) if kept is not None and kept.exists() else {}
    outcomes = []
    for number, row in enumerate(rows, 1):
        if row.id in found:
            known = {name: found[row.id][name] for name in ("predicted", "predicted_gib", "reason", "seconds")}
            outcomes.append(replace(untried(row), **known))
            continue
        here = options.together
        outcomes.append(compare_here(row, options.layers) if here else compare(row, options.layers, options.timeout))
        last = outcomes[-1]
        said = f"{last.error:+.0%}" if last.error is not None else last.reason
        print(f"{number}/{len(rows)} {row.id}: {said}", file=sys.stderr, flush=True)
        if kept is not None:
            found[row.id] = asdict(last)
            kept.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return outcomes


def run(options: argparse.Namespace) -> None:
    rows = chosen(options)
    outcomes = [untried(row) for row in rows] if options.list else compare_all(rows, options)
    text = report(outcomes, options.layers)
    print(text)
    if options.write:
        sources = "\n".join(f"- {row.source}: {row.citation}" for row in {row.source: row for row in rows}.values())
        title = (
            f"# Back-tests, {date.today()}\n\n"
            "Predicted against published tokens/s/GPU, by `benchmarks/published/backtest.py`. "
            f"{METHOD}\n\n{sources}"
        )
        pages.write("backtest", f"{title}\n\n{text}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", help="sources: names of files in benchmarks/published, without .toml")
    parser.add_argument("--only", help="patterns of row names, such as 'mpt/h100-7b-*'")
    parser.add_argument("--list", action="store_true", help="show the rows and plan nothing")
    parser.add_argument("--layers", type=int, help="plan with so many blocks, to see what can be expressed")
    parser.add_argument("--together", action="store_true", help="plan all rows in one process, which is faster")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one row")
    parser.add_argument("--resume", metavar="FILE", help="keep predictions in this file, and plan none of them again")
    parser.add_argument("--write", action="store_true", help="a dated file under benchmarks/results")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        if options.one:
            row = next(row for row in published_rows.load() if row.id == options.one)
            print(json.dumps(asdict(predict(row, options.layers))))
            return
        run(options)
    except AutoparError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
