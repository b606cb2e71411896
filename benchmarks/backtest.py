"""Predicted against published: tokens/s/GPU of training runs that others measured (benchmarks/published/*.toml).

    python benchmarks/backtest.py [--rows SOURCE,…] [--only PATTERN,…] [--list] [--layers N] [--write] [--json]
                                  [--plot FILE]

Plans every row on meta, each in a process of its own, and prints prediction, error and whether the order of the
configurations is kept. Nothing is fitted to these rows: those that calibrate say so (`calibrates = true`), and are left
out of all averages. Rows in formats that autopar has not (fp8) are listed with the reason.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import math
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib import resources
from itertools import combinations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from autopar import hardware
from autopar.errors import AutoparError
from autopar.hardware import Hardware
from benchmarks import published_rows
from benchmarks.published_rows import Machine, Row

PRECISIONS = ("bf16", "fp16")
STRATEGIES = {"ddp": "ddp", "zero1": "zero1", "zero2": "zero2", "fsdp": "zero3"}
NOISE = 0.01
"""Published speeds that are closer than this are no order."""
NO_LIMIT = 1e15
"""Bytes: memory is predicted, and bends nothing. What was measured did fit."""
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row's comparison. published, predicted: tokens/s/GPU. *_gib: peak memory.

    group: rows whose order is compared. reason: why there is no prediction.
    """

    id: str
    source: str
    group: str
    configuration: str
    published: float
    predicted: float | None = None
    published_gib: float | None = None
    predicted_gib: float | None = None
    calibrates: bool = False
    assumptions: tuple[str, ...] = ()
    reason: str | None = None

    @property
    def error(self) -> float | None:
        """predicted/published − 1."""
        return None if self.predicted is None else self.predicted / self.published - 1


# -- a row as a plan


def machine_of(stated: Machine) -> Hardware:
    """The profile with the numbers that the source states in place of its own; efficiencies stay the profile's."""
    profile = hardware.load(stated.profile)
    network = profile.network
    if stated.network_gbit_per_s is not None:
        shipped = hardware.ALIASES.get(stated.profile, stated.profile)
        text = resources.files("autopar").joinpath("data", "hardware", f"{shipped}.toml").read_text("utf-8")
        wire = tomllib.loads(text)["network"]["bandwidth_bytes_per_s"]
        ratio = stated.network_gbit_per_s * 1e9 / 8 / wire
        network = replace(network, bandwidth_bytes_per_s=network.bandwidth_bytes_per_s * ratio)
    return replace(
        profile,
        devices_per_node=stated.gpus_per_node,
        network=network,
        memory_bytes=int(stated.memory_bytes or profile.memory_bytes),
        memory_bandwidth_bytes_per_s=stated.memory_bandwidth_bytes_per_s or profile.memory_bandwidth_bytes_per_s,
    )


def strategy_of(row: Row) -> dict[str, Any]:
    """autopar's names for what the source did, for each axis that has more than one rank."""
    from autopar.strategies import pipeline

    schedule = row.schedule or "1f1b"
    names: dict[str, Any] = {
        "pp": pipeline(schedule, None if schedule in ("1f1b", "gpipe") else row.stages_per_rank),
        "dp": STRATEGIES[row.data_parallel],
        "cp": row.context or "ring",
        "tp": "tensor+sequence" if row.sequence_parallel else "tensor",
    }
    return {axis: names[axis] for axis in axes_of(row)}


def axes_of(row: Row) -> dict[str, int]:
    """The mesh: axes with more than one rank, slowest link first."""
    return {axis: size for axis, size in row.sizes.items() if size > 1} or {"dp": 1}


def overrides_of(row: Row, layers: int | None) -> tuple[str, dict[str, object]]:
    """The bundled configuration to begin with, and the fields that make it the row's model."""
    shape = row.shape
    if layers is not None:
        layers = max(layers, row.sizes["pp"] * (row.stages_per_rank or 1))
    blocks = layers or shape.layers
    if shape.architecture == "llama":
        fields: dict[str, object] = {
            "num_hidden_layers": blocks, "hidden_size": shape.hidden, "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads, "head_dim": shape.hidden // shape.heads,
            "intermediate_size": shape.ffn, "vocab_size": shape.vocabulary,
            "max_position_embeddings": max(row.sequence, 131072),
        }  # fmt: skip
        return "llama-3.1-8b", fields
    fields = {
        "n_layer": blocks, "n_embd": shape.hidden, "n_head": shape.heads, "n_inner": shape.ffn,
        "vocab_size": shape.vocabulary, "n_positions": row.sequence, "tie_word_embeddings": shape.tied,
        "activation_function": "gelu",  # one operator, as in the sources; GPT-2's own is made of eight
    }  # fmt: skip
    return "gpt2", fields


def predict(row: Row, layers: int | None = None) -> dict[str, float]:
    """Plan the row on meta: tokens/s/GPU and GiB. layers: plan with so many blocks instead.

    Raises AutoparError where autopar cannot express the configuration.
    """
    import autopar
    from autopar.models import catalogue

    name, overrides = overrides_of(row, layers)
    batch = (row.global_batch, row.sequence)
    loaded = catalogue.load(name, batch=batch, overrides=overrides, dropout=0.0)
    plan = autopar.plan(
        loaded.model,
        autopar.Mesh(axes_of(row), hardware=machine_of(row.machine)),
        example_inputs=loaded.batch,
        strategy=strategy_of(row),
        precision=row.precision,
        memory_limit=NO_LIMIT,
        rematerialize=row.recompute or "none",
        microbatches=row.microbatches,
    )
    speed = published_rows.tokens_of_step(row) / plan.cost.step_time_s / row.gpus
    return {"tokens_per_s": speed, "gib": plan.cost.peak_memory_bytes / 2**30}


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
    peak = hardware.load(row.machine.profile).peak_flops["bf16"]
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
        calibrates=row.calibrates,
        assumptions=row.assumptions,
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
    found = json.loads(done.stdout.splitlines()[-1])
    return replace(outcome, predicted=found["tokens_per_s"], predicted_gib=found["gib"])


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


def tests_of(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """What counts: rows with a prediction that calibrate nothing."""
    return [each for each in outcomes if each.predicted is not None and not each.calibrates]


# -- what is printed


def table(outcomes: Sequence[Outcome]) -> str:
    lines = [
        "| row | configuration | published tokens/s/GPU | predicted | error | published GiB | predicted GiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in outcomes:
        error = each.error
        last = f"{each.predicted:.1f} | {error:+.0%}" if error is not None else f"{each.reason or 'not planned'} |"
        memory = [f"{gib:.1f}" if gib is not None else "" for gib in (each.published_gib, each.predicted_gib)]
        name = each.id + (" (calibrates)" if each.calibrates else "")
        lines.append(f"| {name} | {each.configuration} | {each.published:.1f} | {last} | {' | '.join(memory)} |")
    return "\n".join(lines)


def summary(outcomes: Sequence[Outcome]) -> str:
    lines = ["| source | rows | mean absolute error | mean error | pairs | swapped | tied | Kendall tau |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    tested = tests_of(outcomes)
    sources = list(dict.fromkeys(each.source for each in tested))
    for name in [*sources, "all"]:
        own = [each for each in tested if name in (each.source, "all")]
        errors = [each.error for each in own if each.error is not None]
        if not errors:
            continue
        order = order_of(own)
        tau = "" if order.tau is None else f"{order.tau:.2f}"
        lines.append(
            f"| {name} | {len(own)} | {statistics.mean(map(abs, errors)):.1%} | {statistics.mean(errors):+.1%} | "
            f"{order.pairs} | {len(order.swapped)} | {order.tied} | {tau} |"
        )
    swapped = order_of(tested).swapped
    if swapped:
        lines += ["", "Predicted the other way round (the first was measured faster):", ""]
        lines += [f"- {fast}, {slow}" for fast, slow in swapped]
    return "\n".join(lines)


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
    calibrating = [each.id for each in outcomes if each.calibrates]
    parts = [
        table(outcomes),
        "Pairs: two rows of one model, machine, precision and sequence length whose published speeds differ by more "
        f"than {NOISE:.0%}; tied: those that autopar plans alike.",
        f"Rows that calibrate the cost model, left out of every average: {', '.join(calibrating) or 'none'}.",
    ]
    if layers is None:
        parts.append(summary(outcomes))
    else:
        parts.append(f"Planned with {layers} blocks: the predictions say whether a row can be planned, nothing else.")
    if text := assumptions(outcomes):
        parts.append(f"Assumed:\n\n{text}")
    return "\n\n".join(parts)


def plot(outcomes: Sequence[Outcome], path: str) -> None:
    """Scatter of predicted over published, log axes, one colour a source. Raises AutoparError without matplotlib."""
    try:
        importlib.import_module("matplotlib").use("Agg")
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise AutoparError(
            "--plot needs matplotlib, which autopar does not depend on",
            remedy="pip install matplotlib, or take the numbers from --json",
        ) from error
    figure, axes = pyplot.subplots(figsize=(7, 7))
    shown = [each for each in outcomes if each.predicted is not None]
    for source in dict.fromkeys(each.source for each in shown):
        own = [each for each in shown if each.source == source]
        axes.scatter([each.published for each in own], [each.predicted for each in own], label=source, s=18)
    if shown:
        ends = [min(each.published for each in shown), max(each.published for each in shown)]
        axes.plot(ends, ends, color="grey", linewidth=1)
        axes.legend()
    axes.set(xscale="log", yscale="log", xlabel="published tokens/s/GPU", ylabel="predicted tokens/s/GPU")
    figure.savefig(path, dpi=150, bbox_inches="tight")


def chosen(options: argparse.Namespace) -> list[Row]:
    """The rows asked for. Raises AutoparError where there are none."""
    rows = published_rows.load(options.rows.split(",") if options.rows else ())
    patterns = options.only.split(",") if options.only else ["*"]
    found = [row for row in rows if any(fnmatch.fnmatch(row.id, pattern) for pattern in patterns)]
    if not found:
        raise AutoparError("no row has such a name", values=f"--only {options.only}", remedy="see --list")
    return found


def run(options: argparse.Namespace) -> None:
    rows = chosen(options)
    if options.list:
        outcomes = [untried(row) for row in rows]
    else:
        outcomes = []
        for number, row in enumerate(rows, 1):
            outcomes.append(compare(row, options.layers, options.timeout))
            last = outcomes[-1]
            said = f"{last.error:+.0%}" if last.error is not None else last.reason
            print(f"{number}/{len(rows)} {row.id}: {said}", file=sys.stderr, flush=True)
    text = report(outcomes, options.layers)
    if options.json:
        print(json.dumps([asdict(each) | {"error": each.error} for each in outcomes], indent=1, ensure_ascii=False))
    else:
        print(text)
    if options.plot:
        plot(outcomes, options.plot)
    if options.write:
        sources = "\n".join(f"- {row.source}: {row.citation}" for row in {row.source: row for row in rows}.values())
        title = (
            f"# Back-tests, {date.today()}\n\nPredicted against published, by `benchmarks/backtest.py`.\n\n{sources}"
        )
        (RESULTS / f"backtest-{date.today()}.md").write_text(f"{title}\n\n{text}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", help="sources: names of files in benchmarks/published, without .toml")
    parser.add_argument("--only", help="patterns of row names, such as 'mpt/h100-7b-*'")
    parser.add_argument("--list", action="store_true", help="show the rows and plan nothing")
    parser.add_argument("--layers", type=int, help="plan with so many blocks, to see what can be expressed")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one row")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", metavar="FILE", help="a scatter plot; needs matplotlib")
    parser.add_argument("--write", action="store_true", help="a dated file under benchmarks/results")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        if options.one:
            row = next(row for row in published_rows.load() if row.id == options.one)
            print(json.dumps(predict(row, options.layers)))
            return
        run(options)
    except AutoparError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
