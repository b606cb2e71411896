"""Predicted against published: tokens of generate() (benchmarks/published/generation.toml).

    python benchmarks/published/generation.py [--only PATTERN,…] [--list] [--layers N] [--json FILE] [--write]

Both phases of every row are placed on meta, tensor-parallel, and priced on the row's machine as serving engines run
programs (`Hardware.as_engine`); no GPU is used, nothing is fitted. A batch is static: its prompts go through the model
together, then each token of all. A token is priced with the cache at its mean length, as engines read no more of it
than is written.
"""

from __future__ import annotations

import os
import statistics
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import autopar
from autopar.api.generation import phase_inputs
from autopar.base.errors import AutoparError
from autopar.machine.hardware import Hardware
from autopar.planner.search.cluster import Cluster
from autopar.planner.search.token_estimates import Phase
from autopar.planner.search.token_families import TokenFamilies
from benchmarks import pages
from benchmarks.published.by_row import Backtest
from benchmarks.published.rows import FOLDER, GENERATION, Machine
from benchmarks.published.runs import machine_of

METRICS = ("tokens_per_s", "tokens_per_s_per_gpu", "latency_s", "token_s", "first_token_s")
NEAR = 0.20
"""What is further off is told as such."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A serving engine whose host chooses between two tokens what runs next: seconds of that, of a step, of each
    sequence, and of each sequence on each rank.
    """

    id: str
    name: str
    step_s: float
    row_s: float
    row_rank_s: float
    source: str


@dataclass(frozen=True, slots=True)
class Row:
    """One measured batch. model: class and configuration of transformers'. tp: ranks. prompt, new: tokens of each of
    `batch` sequences. published, peers, engine, weights, cache, later, counts: as the file's head says.
    """

    id: str
    source: str
    model: Mapping[str, Any] = field(hash=False)
    machine: Machine
    tp: int
    batch: int
    prompt: int
    new: int
    published: Mapping[str, float] = field(hash=False)
    peers: bool = True
    engine: Engine | None = None
    weights: str | None = None
    cache: str | None = None
    later: bool = False
    counts: bool = True

    @property
    def metric(self) -> str:
        (name,) = self.published
        return name

    @property
    def words(self) -> str:
        """What ran, for a table."""
        return f"{self.batch} x ({self.prompt} + {self.new}), tp={self.tp}, {self.machine.description}"


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of the prompts, and of each token behind the first, both of the device; between_s: that it waits before
    each for the host.
    """

    id: str
    first_s: float
    token_s: float
    collectives_s: float
    between_s: float = 0.0

    def of(self, row: Row) -> float:
        """In the unit that the row publishes."""
        first_s, token_s = self.first_s + self.between_s, self.token_s + self.between_s
        total_s = first_s + (row.new - 1) * token_s
        tokens = row.batch * row.new
        return {
            "tokens_per_s": tokens / total_s, "tokens_per_s_per_gpu": tokens / total_s / row.tp, "latency_s": total_s,
            "token_s": token_s, "first_token_s": first_s,
        }[row.metric]  # fmt: skip

    def speed(self, row: Row) -> float:
        """Predicted speed over the published one: more than 1 is too fast."""
        found, said = self.of(row), row.published[row.metric]
        return said / found if row.metric.endswith("_s") and not row.metric.startswith("tokens") else found / said


# -- the file


def load() -> tuple[list[Row], dict[str, Any]]:
    """All rows, and the file as it lies. Raises AutoparError for a row that is damaged."""
    data = tomllib.loads((FOLDER / f"{GENERATION}.toml").read_text(encoding="utf-8"))
    sources = {each["id"]: each for each in data["sources"]}
    engines = {each["id"]: Engine(**each) for each in data["engines"]}
    rows = []
    for given in data["rows"]:
        try:
            source = sources[given["id"].split("/")[0]]
            fields = {**source["defaults"], **given}
            machine = Machine(**fields.pop("hardware", source["hardware"]))
            fields["model"] = data["models"][fields["model"]]
            if "engine" in fields:
                fields["engine"] = engines[fields["engine"]]
            rows.append(Row(source=source["id"], machine=machine, **fields))
        except (KeyError, TypeError) as error:
            raise AutoparError("a published row is damaged", where=str(given.get("id")), values=str(error)) from error
        if len(rows[-1].published) != 1 or rows[-1].metric not in METRICS:
            raise AutoparError("no such number", where=rows[-1].id, remedy=f"publish one of {', '.join(METRICS)}")
    return rows, data


# -- a prediction


def hardware_of(row: Row) -> Hardware:
    """The row's machine, as the row's engine runs programs."""
    found = machine_of(row.machine).as_engine()
    if row.engine is not None:
        each_s = row.engine.row_s + row.tp * row.engine.row_rank_s
        found = replace(found, engine_step_s=row.engine.step_s, engine_row_s=each_s)
    return found if row.peers else replace(found, node=replace(found.node, by_peers=False))


def predict(row: Row, layers: int | None = None) -> Prediction:
    """The prediction for a row. Raises AutoparError where autopar cannot express it."""
    model = _model(row, layers)
    hardware = hardware_of(row)
    cluster = Cluster(hardware, 1, row.tp)
    mean = autopar.Generation(row.batch, row.prompt, max(2, row.new // 2), cache=row.cache)  # its mean length
    families = TokenFamilies(model, cluster, row.batch, phase_inputs(model, mean))
    programs = families.on({"dp": 1, "ep": 1, "tp": row.tp})
    if programs is None:
        raise AutoparError("a published row cannot be placed", where=row.id)
    first, then = (Phase.of(programs[name]).cost for name in ("prefill", "decode"))
    between_s = hardware.between_s(row.batch)
    return Prediction(row.id, first.step_time_s, then.step_time_s, then.communication_s, between_s)


def _model(row: Row, layers: int | None) -> Any:
    import transformers

    given = dict(row.model["config"])
    if given.get("sliding_window") == 0:
        given["sliding_window"] = None
    made = getattr(transformers, row.model["class"])
    config = made.config_class(**given)
    if layers is not None:
        config.num_hidden_layers = layers
    with torch.device("meta"):
        model = made(config).eval().to(torch.bfloat16)
    return model if row.weights is None else autopar.store_weights(model, row.weights)


# -- the page

SUMMARY = ("rows", "number", "mean absolute error", "median", "mean", f"within {NEAR:.0%}")
COLUMNS = (
    "row", "what", "published", "predicted", "speed", "a token, ms", "of it collectives", "waited for the host, ms",
    "first token, ms",
)  # fmt: skip


def page(rows: Sequence[Row], data: Mapping[str, Any], found: Mapping[str, Prediction]) -> str:
    """What was predicted for all rows, in Markdown."""
    own = [row for row in rows if row.id in found]
    lines = [
        "# Tokens of generate(), predicted and published",
        "",
        f"{len(own)} rows of {len({row.source for row in own})} sources (`benchmarks/published/generation.toml`), "
        "predicted by `benchmarks/published/generation.py`. Nothing is fitted to a row. Rows called later were "
        "added when the terms were set: codes that are multiplied, hosts, what a machine's memory gives. Their mean "
        "error was 23.8% then. They showed that prompts of engines were priced with masks over whole caches, and the "
        "H200 without the attention that its cores have on an H100; with both mended they are no test any more of "
        "that. + is too fast.",
        "",
        pages.table(SUMMARY, _summary(own, data, found)),
    ]
    for source in data["sources"]:
        of_source = [row for row in own if row.source == source["id"]]
        if not of_source:
            continue
        lines += ["", f"## {source['name']}", f'{source["url"]}: "{source["quote"]}"', ""]
        lines += [f"- also {each}" for each in source.get("also", ())]
        lines += [f"- assumed: {each}" for each in source["assumed"]]
        lines += ["", pages.table(COLUMNS, [_line(row, found[row.id]) for row in of_source])]
    lines += ["", "## Hosts of engines"]
    lines += [
        f"- {each['name']}: {1e3 * each['step_s']:g} ms a step, {1e6 * each['row_s']:g} us a sequence, "
        f"{1e6 * each['row_rank_s']:g} us a sequence and rank. {each['source']}"
        for each in data["engines"]
    ]
    lines += ["", "## What does not agree, and what is known of it", *(f"- {each}" for each in data["why"]), ""]
    return "\n".join(lines)


def _summary(
    rows: Sequence[Row], data: Mapping[str, Any], found: Mapping[str, Prediction]
) -> Iterator[tuple[str, ...]]:
    counted = [row for row in rows if row.counts]
    groups = [(source["name"], [row for row in counted if row.source == source["id"]]) for source in data["sources"]]
    groups += [
        ("all that the terms were looked at with", [row for row in counted if not row.later]),
        ("of these: the device waits for no host", [row for row in counted if not row.later and row.engine is None]),
        ("of these: it waits for one", [row for row in counted if not row.later and row.engine is not None]),
        ("later rows", [row for row in counted if row.later]),
        ("all that count", counted),
    ]
    for name, own in groups:
        off = [found[row.id].speed(row) - 1 for row in own]
        if off:
            sizes = [abs(each) for each in off]
            yield (
                name, str(len(off)), f"{statistics.mean(sizes):.1%}", f"{statistics.median(sizes):.1%}",
                f"{statistics.mean(off):+.1%}", str(sum(each <= NEAR for each in sizes)),
            )  # fmt: skip


def _line(row: Row, found: Prediction) -> tuple[str, ...]:
    unit = {"tokens_per_s": " tokens/s", "tokens_per_s_per_gpu": " tokens/s/GPU"}.get(row.metric, " s")
    words = row.words + ("" if row.peers else ", NCCL") + ("" if row.counts else " (does not count)")
    return (
        row.id.split("/")[1], words, f"{row.published[row.metric]:.4g}{unit}", f"{found.of(row):.4g}{unit}",
        f"{found.speed(row) - 1:+.0%}", f"{1e3 * found.token_s:.2f}", f"{1e3 * found.collectives_s:.2f}",
        f"{1e3 * found.between_s:.2f}", f"{1e3 * found.first_s:.1f}",
    )  # fmt: skip


if __name__ == "__main__":
    Backtest("generation", load, predict, Prediction, lambda row: f"{row.words}, {dict(row.published)}", page).main(
        __doc__
    )
