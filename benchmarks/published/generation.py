"""Predicted against published: tokens of generate() (benchmarks/published/generation.toml).

    python benchmarks/published/generation.py [--only PATTERN,…] [--list] [--layers N] [--json FILE] [--write]

Both phases of every row are placed on meta, tensor-parallel, and priced on the row's machine as serving engines run
programs (`Hardware.as_engine`); no GPU is used, nothing is fitted. A batch is static: its prompts go through the model
together, then each token of all; where requests come and go, prompts of new ones go with tokens of others through one
call (`_together`). A token is priced with the cache at its mean length, as engines read no more of it than is
written.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from autopar.cost.operator_time import region_seconds
from autopar.ir.op_call import OpCall
from autopar.ir.program import Program
from autopar.ir.rule import Rule
from autopar.machine.curves import FEW_ROWS
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
TRACED_ROWS = 8192
"""Of prompts that go with tokens: more are priced as so many more times these."""


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
    """One measured batch. model: class and configuration of transformers'. tp, ep: ranks. prompt, new: tokens of each
    of `batch` sequences. All else as the file's head says.
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
    ep: int = 1
    peers: bool = True
    graphs: bool = True
    grouped_heads: bool = True
    attention_rows: float = FEW_ROWS
    whole_head: bool = False
    together: bool = False
    engine: Engine | None = None
    weights: str | None = None
    leave: tuple[str, ...] = ()
    cache: str | None = None
    later: bool = False
    counts: bool = True

    @property
    def metric(self) -> str:
        (name,) = self.published
        return name

    @property
    def gpus(self) -> int:
        return self.tp * self.ep

    @property
    def words(self) -> str:
        """What ran, for a table."""
        ranks = f"tp={self.tp}" if self.ep == 1 else f"ep={self.ep}"
        return f"{self.batch} x ({self.prompt} + {self.new}), {ranks}, {self.machine.description}"


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
            "tokens_per_s": tokens / total_s, "tokens_per_s_per_gpu": tokens / total_s / row.gpus, "latency_s": total_s,
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
            fields["leave"] = tuple(fields.get("leave", ()))
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
    machine = machine_of(row.machine)
    found = replace(machine.as_engine(), head_by_head=not row.grouped_heads, attention_rows=row.attention_rows)
    if not row.graphs:
        found = replace(found, launch_overhead_s=machine.launch_overhead_s)
    if row.engine is not None:
        each_s = row.engine.row_s + row.tp * row.engine.row_rank_s
        found = replace(found, engine_step_s=row.engine.step_s, engine_row_s=each_s)
    return found if row.peers else replace(found, node=replace(found.node, by_peers=False))


def predict(row: Row, layers: int | None = None) -> Prediction:
    """The prediction for a row. Raises AutoparError where autopar cannot express it."""
    model = _model(row, layers)
    mean = autopar.Generation(row.batch, row.prompt, max(2, row.new // 2), cache=row.cache)  # its mean length
    programs = programs_of(row, model, phase_inputs(model, mean), row.batch)
    between_s = hardware_of(row).between_s(row.batch)
    if row.together:
        return _together(row, model, programs, between_s)
    first, then = (Phase.of(programs[name]).cost for name in ("prefill", "decode"))
    head_s = _rest_of_head_s(row, model, programs["decode"]) if row.whole_head else 0.0
    first_s, token_s = first.step_time_s + head_s, then.step_time_s + head_s
    return Prediction(row.id, first_s, token_s, then.communication_s, between_s)


def programs_of(row: Row, model: Any, inputs: Mapping[str, Any], rows: int) -> dict[str, Program]:
    """Phases of so many sequences. Raises AutoparError where they cannot be placed so."""
    families = TokenFamilies(model, Cluster(hardware_of(row), 1, row.gpus), rows, inputs)
    programs = families.on({"dp": 1, "ep": row.ep, "tp": row.tp})
    if programs is None:
        raise AutoparError("a published row cannot be placed", where=row.id)
    return programs


def _together(row: Row, model: Any, programs: Mapping[str, Program], between_s: float) -> Prediction:
    """Of requests that come and go. On the average `batch / new` prompts end in a token each step; they come whole, so
    that a part of the steps has some, and the others none. A step with some is a token's with as many rows more, but
    for its attention, which is a token's and a prompt's, and for the head, of which a prompt needs one row. Where ranks
    have sequences of their own, one has the whole prompt, and the others wait for it where tokens go to experts; these
    have the rows of all.
    """
    mean = row.batch / row.new
    prompts = max(1, round(mean))
    most = math.ceil(prompts / row.ep)
    prompt, token = programs["prefill"], programs["decode"]
    traced = min(1.0, TRACED_ROWS / (row.ep * most * row.prompt))
    busiest = _joined(row, model, row.batch + row.ep * math.ceil(most * row.prompt * traced))
    alone = Phase.of(token).cost
    head = functools.partial(_is_head, model.config.vocab_size)
    more_s = Phase.of(busiest).cost.step_time_s - alone.step_time_s
    more_s += sum(_seconds(token, each) - _seconds(busiest, each) for each in (_is_attention, head))
    if row.ep > 1:
        shared = _joined(row, model, row.batch + row.ep * math.ceil(prompts * row.prompt * traced / row.ep))
        more_s += _experts_s(shared) - _experts_s(busiest)
    more_s = more_s / traced + _seconds(prompt, _is_attention) * most * row.ep / row.batch
    step_s = alone.step_time_s + mean / prompts * more_s
    return Prediction(row.id, step_s, step_s, alone.communication_s, between_s)


def _joined(row: Row, model: Any, rows: int) -> Program:
    """A token of so many sequences, with next to nothing in their caches."""
    inputs = phase_inputs(model, autopar.Generation(rows, 2, 2, cache=row.cache))
    return programs_of(row, model, {"decode": inputs["decode"]}, rows)["decode"]


def _experts_s(program: Program) -> float:
    """What all ranks do together: experts, and what is sent."""
    return _seconds(program, lambda call, _: "experts" in call.name) + Phase.of(program).cost.communication_s


def _rest_of_head_s(row: Row, model: Any, token: Program) -> float:
    """What each rank of a run that has a whole head multiplies beside its part of it."""
    launch_s = token.on_mesh.hardware.launch_overhead_s
    return (row.tp - 1) * (_seconds(token, functools.partial(_is_head, model.config.vocab_size)) - launch_s)


def _seconds(program: Program, wanted: Callable[[OpCall, Rule], bool]) -> float:
    """Of some operators, in all calls."""
    return sum(
        seconds * program.num_calls(region.name)
        for region in program.regions
        for name, seconds in region_seconds(region, program.on_mesh).items()
        if wanted(*region.ops[name])
    )


def _is_attention(call: OpCall, rule: Rule) -> bool:
    return rule.op_class == "attention"


def _is_head(vocabulary: int, call: OpCall, rule: Rule) -> bool:
    return rule.op_class == "matmul" and any(each is not None and each.shape[-1] == vocabulary for each in call.results)


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
    return model if row.weights is None else autopar.store_weights(model, row.weights, leave=row.leave)


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
        "that, nor of what a run's kernels read for each query head, of tiles of XQA, of prompts that go with tokens: "
        "these terms came from sources after rows had shown that something is missing, and no number of them from a "
        "row. + is too fast.",
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
