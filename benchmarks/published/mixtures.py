"""Predicted against published: runs of mixtures of experts (benchmarks/published/mixtures.toml), time and memory.

    python benchmarks/published/mixtures.py [--only PATTERN,…] [--list] [--layers N] [--json FILE] [--write]

Every row is planned on meta by the strategy of autopar's that does the same; no GPU is used. Where sources compare
configurations, ratios of speeds and the order are told, where they say speeds, these. What no plan of autopar's says
(`Row.copies`, `rows`, `shares`, `reduced`, `waited`) is priced beside it, by the same cost model, and what a run keeps
otherwise (`Row.keeps`) counted by the same walk of a step (held.py); nothing is fitted.
"""

from __future__ import annotations

import math
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from autopar.base.errors import AutoparError
from autopar.cost.call_times import calls_of
from autopar.cost.collectives import collectives
from autopar.cost.estimate import Cost
from autopar.cost.roofline import collective_time_s
from autopar.cost.step_time import CallTime, Chain, Lane, step_walk
from autopar.ir.program import Program
from autopar.machine.hardware import FUSED_KERNELS, Hardware
from autopar.operators.rules.exchange_cost import ranks_of_token
from autopar.passes import interleave
from benchmarks import pages
from benchmarks.published import runs
from benchmarks.published.by_row import Backtest
from benchmarks.published.held import Keeps, Sizes, run_peak_bytes
from benchmarks.published.rows import FOLDER, MIXTURES, Machine
from benchmarks.published.runs import FUSED_ADAM_PASSES, NO_LIMIT, machine_of

COPIES = ("ranks", "experts", "consecutive")
PLANNED_ROWS = 5
"""Rows of a token or its gradient that an exchange of autopar's moves in a step, for each rank with its experts."""
ADDED_BYTES = 10
"""To add an element up in fp32: the sum is read and written, the gradient read in bf16."""
NEAR = 0.20
"""What is further off is named, with what is known of it."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measured configuration, or one that was only said to be slower than another (`slower_than`).

    model: class and configuration of transformers'. mesh: axes, slowest link first. strategy: a name for each.
    published: `tokens_per_s` of all GPUs or `tokens_per_s_per_gpu`, and `memory_gib`. recompute: of `rematerialize`.
    copies, rows, shares, reduced, waited: as the file's head says. imbalance: of experts; None: the profile's.
    unchecked: autopar's checker refuses the program (the file says why), which is priced all the same. keeps: what
    the run keeps in memory where autopar's program keeps something else.
    """

    id: str
    source: str
    compares: str
    configuration: str
    model: Mapping[str, Any] = field(hash=False)
    machine: Machine
    mesh: Mapping[str, int] = field(hash=False)
    strategy: Mapping[str, str] = field(hash=False)
    global_batch: int
    sequence: int
    microbatches: int
    recompute: str
    published: Mapping[str, float] = field(default_factory=dict, hash=False)
    slower_than: str = ""
    copies: str = "ranks"
    rows: int = PLANNED_ROWS
    shares: str = ""
    reduced: bool = False
    waited: bool = False
    unchecked: bool = False
    keeps: Keeps | None = None
    imbalance: float | None = None
    kernels: tuple[str, ...] = FUSED_KERNELS
    optimizer: str = "foreach"
    why: str = ""

    @property
    def gpus(self) -> int:
        """All ranks."""
        return math.prod(self.mesh.values())

    @property
    def speed(self) -> float | None:
        """Published tokens/s/GPU; None where only an order was."""
        if "tokens_per_s" in self.published:
            return self.published["tokens_per_s"] / self.gpus
        return self.published.get("tokens_per_s_per_gpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction(runs.Prediction):
    """Of one row. run_gib: of the plan with what the run keeps (`Row.keeps`) in place of what its program does."""

    id: str
    run_gib: float | None = None


# -- the file


def load() -> tuple[list[Row], dict[str, Any]]:
    """All rows, and the file as it lies. Raises AutoparError for a row that is damaged."""
    data = tomllib.loads((FOLDER / f"{MIXTURES}.toml").read_text(encoding="utf-8"))
    sources = {each["id"]: each for each in data["sources"]}
    rows = []
    for given in data["rows"]:
        try:
            source = sources[given["id"].split("/")[0]]
            fields = {**source["defaults"], **given}
            if "keeps" in fields:
                fields["keeps"] = Keeps(**data["keeps"][fields["keeps"]])
            fields |= {"model": data["models"][fields["model"]], "kernels": tuple(fields.get("kernels", FUSED_KERNELS))}
            rows.append(
                Row(source=source["id"], compares=source["compares"], machine=Machine(**source["hardware"]), **fields)
            )
        except (KeyError, TypeError) as error:
            raise AutoparError("a published row is damaged", where=str(given.get("id")), values=str(error)) from error
        if rows[-1].copies not in COPIES:
            raise AutoparError("no such copies", where=rows[-1].id, remedy=f"use {', '.join(COPIES)}")
    return rows, data


# -- a prediction


def predict(row: Row, layers: int | None = None) -> Prediction:
    """Plan the row on meta. layers: so many blocks instead. Raises AutoparError where autopar cannot express it."""
    import autopar

    model, config = _model(row, layers)
    times = row.microbatches if row.reduced else 1
    ids = torch.zeros((row.global_batch // times, row.sequence), dtype=torch.int64, device="meta")
    environ = patch.dict(os.environ, {"AUTOPAR_CHECK": "0"} if row.unchecked else {})
    # What a run's exchanges take longer, or less long, is priced for such that run beside nothing.
    with environ, patch.object(interleave, "WORTH", math.inf):
        made = autopar.plan(
            model,
            autopar.Mesh(row.mesh, hardware=_hardware(row)),
            example_inputs={"input_ids": ids, "labels": ids},
            strategy=_strategy(row),
            precision="bf16",
            memory_limit=NO_LIMIT,
            rematerialize=row.recompute,
            microbatches=row.microbatches // times,
            halves=False,  # as none of these runs does
        )
    assert made.program is not None
    cost = made.cost
    beside_s = exchange_seconds(row, made.program, cost, config) + restoring_seconds(row, made.program, config)
    if row.waited:
        beside_s += waited_seconds(made.program) - (cost.step_time_s - cost.optimizer_s)
    step_s = times * (cost.step_time_s - cost.optimizer_s + beside_s) + cost.optimizer_s
    if row.reduced:
        elements = sum(each.numel() for each in model.parameters()) / row.gpus
        added = ADDED_BYTES * elements
        step_s += times * added / made.program.on_mesh.hardware.memory_bytes_per_s(added)
    return Prediction(
        id=row.id,
        tokens_per_s=row.global_batch * row.sequence / step_s / row.gpus,
        gib=cost.peak_memory_bytes / 2**30,
        compute_s=times * cost.compute_s,
        communication_s=times * cost.communication_s,
        hidden_s=times * cost.hidden_s,
        waiting_s=times * cost.waiting_s,
        optimizer_s=cost.optimizer_s,
        beside_s=step_s - times * (cost.step_time_s - cost.optimizer_s) - cost.optimizer_s,
        run_gib=None if row.keeps is None else held_bytes(row, made.program, config) / 2**30,
    )


def held_bytes(row: Row, program: Program, config: Any) -> float:
    """Bytes of the run's fullest rank: as planned, but for what the run keeps otherwise (`Row.keeps`)."""
    assert row.keeps is not None
    sharing = row.mesh.get(row.shares, 1)
    sizes = Sizes(
        tokens=row.global_batch * row.sequence / row.microbatches / (row.gpus / sharing),
        sharing=sharing,
        chosen=config.num_experts_per_tok,
        model=config.hidden_size,
        expert=getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
    )
    return run_peak_bytes(program, row.keeps, sizes, reduced=row.reduced, waited=row.waited)


def _model(row: Row, layers: int | None) -> tuple[torch.nn.Module, Any]:
    import transformers

    name = row.model["class"]
    maker = getattr(transformers, f"{name}{'Text' if row.model.get('text') else ''}Config")
    fields = {**row.model["config"], "use_cache": False}
    if layers is not None:
        fields["num_hidden_layers"] = layers
    config = maker(**fields)
    with torch.device("meta"):
        return getattr(transformers, f"{name}ForCausalLM")(config), config


def _hardware(row: Row) -> Hardware:
    """The row's machine with the kernels, optimizer and balance of the run."""
    machine = machine_of(row.machine)
    return replace(
        machine,
        fused_kernels=row.kernels,
        optimizer_passes=FUSED_ADAM_PASSES if row.optimizer == "fused" else machine.optimizer_passes,
        expert_imbalance=machine.expert_imbalance if row.imbalance is None else row.imbalance,
    )


def _strategy(row: Row) -> dict[str, Any]:
    """`interleaved(8)` is a pipeline with so many stages a rank."""
    from autopar.strategies.names import pipeline

    found: dict[str, Any] = dict(row.strategy)
    if "pp" in found:
        name, _, stages = found["pp"].rstrip(")").partition("(")
        found["pp"] = pipeline(name, int(stages) if stages else None)
    return found


def exchange_seconds(row: Row, program: Program, cost: Cost, config: Any) -> float:
    """What the exchanges of a step take longer in the run than planned; a pipeline's ranks wait as much longer."""
    exchanges = [each for each in _busiest(program) if each.kind == "exchange"]
    if not exchanges:
        return 0.0
    ranks, experts = program.on_mesh.size(exchanges[0].axis), _num_experts(config)
    planned = PLANNED_ROWS * ranks_of_token(experts, config.num_experts_per_tok, ranks)
    sent = row.rows * copies_of_token(row.copies, experts, config.num_experts_per_tok, ranks)
    share = sent / row.mesh.get(row.shares, 1) / planned
    busy = cost.compute_s + cost.communication_s - cost.hidden_s
    return (share - 1.0) * sum(each.seconds for each in exchanges) * (busy + cost.waiting_s) / busy


def restoring_seconds(row: Row, program: Program, config: Any) -> float:
    """Of a step in which the ranks of an axis (`Row.shares`) share the choices of their tokens: R rows, one for each
    choice, are gathered and their gradients summed over the axis, in every layer.

    Then each choice's rows are weighted and added to its tokens by themselves: forward 7 times the bytes of R rows
    (weights 2, rows that are picked 2, added 3), backward 7 + 4 K (added 2, weights 6, picked 2 + K and 3 (K - 1) for
    the sum of as many gradients), all read and written once.
    """
    if not row.shares:
        return 0.0
    forwards = sum(each.times for each in _busiest(program) if each.kind == "exchange" and each.phase == "forward")
    chosen, mesh = config.num_experts_per_tok, program.on_mesh
    size, link, launch_s = row.mesh[row.shares], mesh.link(row.shares), mesh.hardware.collective_launch_s
    tokens = row.global_batch * row.sequence / row.microbatches / (row.gpus / size)
    rows_bytes = tokens * chosen * config.hidden_size * torch.bfloat16.itemsize
    moved = (14 + 4 * chosen) * rows_bytes
    each_s = moved / mesh.hardware.memory_bytes_per_s(moved)
    each_s += collective_time_s("all_gather", rows_bytes, size, link, launch_s)
    each_s += collective_time_s("all_reduce", rows_bytes, size, link, launch_s)
    return forwards * each_s


def _num_experts(config: Any) -> int:
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    return next(int(getattr(config, name)) for name in names if hasattr(config, name))


def copies_of_token(copies: str, experts: int, chosen: int, ranks: int) -> float:
    """To how many places a token of `chosen` experts goes, itself among them."""
    if copies == "experts":
        return float(chosen)
    if copies == "consecutive":  # the blocks of experts that are chosen begin where those of ranks do, or divide them
        return max(1.0, chosen * ranks / experts)
    return ranks_of_token(experts, chosen, ranks)


def _busiest(program: Program) -> list[Any]:
    """The collectives of the rank of the pipeline that exchanges longest, or of any where there is no pipeline."""
    ranks: Sequence[int | None] = [None]
    if program.pipeline is not None:
        ranks = range(program.pipeline.schedule.num_ranks)
    return max(
        (list(collectives(program, rank)) for rank in ranks),
        key=lambda rows: sum(each.seconds for each in rows if each.kind == "exchange"),
    )


def waited_seconds(program: Program) -> float:
    """Of a step whose gathers run beside nothing, and whose reductions beside the calls that follow."""

    def waiting(call: CallTime) -> CallTime:
        forward, backward = (*call.once, *call.gather), call.again
        return replace(
            call,
            forward_s=call.forward_s + sum(_by_lane(forward).values()),
            backward_s=call.backward_s + sum(_by_lane(backward).values()),
            forward_inside=_sum(call.forward_inside, _by_lane(forward)),
            backward_inside=_sum(call.backward_inside, _by_lane(backward)),
            once=(),
            gather=(),
            again=(),
        )

    assert program.microbatches == 1
    calls = [waiting(call) for call in calls_of(program)]
    slowdown = program.on_mesh.hardware.overlap_slowdown
    return step_walk(
        calls, microbatches=1, prefetch=True, at_end=False, training=True, slowdown=slowdown, events=False
    ).seconds


def _by_lane(chains: Sequence[Chain]) -> dict[Lane, float]:
    found: dict[Lane, float] = {}
    for chain in chains:
        for message in chain:
            found[message.lane] = found.get(message.lane, 0.0) + message.seconds
    return found


def _sum(one: Mapping[Lane, float], other: Mapping[Lane, float]) -> dict[Lane, float]:
    return {lane: one.get(lane, 0.0) + other.get(lane, 0.0) for lane in {*one, *other}}


# -- what is compared


@dataclass(frozen=True, slots=True)
class Ratio:
    """How much faster one configuration is than another: as published (None: only that it is), and as predicted."""

    fast: str
    slow: str
    published: float | None
    predicted: float

    @property
    def off(self) -> float | None:
        """predicted / published − 1."""
        return None if self.published is None else self.predicted / self.published - 1

    @property
    def is_kept(self) -> bool:
        """Whether the order is."""
        return self.predicted > 1.0


def ratios(rows: Sequence[Row], found: Mapping[str, float]) -> list[Ratio]:
    """Of every two rows of a source that compares configurations, and of those that were said to be slower.

    found: predicted tokens/s/GPU by row.
    """
    pairs = []
    for one, other in combinations([row for row in rows if row.compares == "ratios" and row.id in found], 2):
        if one.source != other.source or one.model != other.model:
            continue
        if one.speed is not None and other.speed is not None:
            fast, slow = (one, other) if one.speed > other.speed else (other, one)
            assert fast.speed is not None and slow.speed is not None
            pairs.append(Ratio(fast.id, slow.id, fast.speed / slow.speed, found[fast.id] / found[slow.id]))
    said = [row for row in rows if row.slower_than in found and row.id in found]
    return pairs + [Ratio(row.slower_than, row.id, None, found[row.slower_than] / found[row.id]) for row in said]


def peaks(rows: Sequence[Row], found: Mapping[str, float]) -> list[Ratio]:
    """How much more one configuration holds than another, of every two of a source whose peaks are published.

    found: predicted GiB by row.
    """
    held = [row for row in rows if row.compares == "ratios" and row.id in found and "memory_gib" in row.published]
    pairs = []
    for one, other in combinations(held, 2):
        if one.source == other.source and one.model == other.model:
            more, less = sorted((one, other), key=lambda row: -row.published["memory_gib"])
            published = more.published["memory_gib"] / less.published["memory_gib"]
            pairs.append(Ratio(more.id, less.id, published, found[more.id] / found[less.id]))
    return pairs


# -- the page


def page(rows: Sequence[Row], data: Mapping[str, Any], found: Mapping[str, Prediction]) -> str:
    """All tables, with sources and what is assumed."""
    speeds = {name: each.tokens_per_s for name, each in found.items()}
    held = {name: each.run_gib for name, each in found.items() if each.run_gib is not None}
    parts = [
        "# Back-tests of mixtures of experts",
        f"Predicted against published, by `benchmarks/published/mixtures.py`, {pages.machine()}. {_METHOD}",
        "\n".join(f"- {each['id']}: {each['name']}, {each['url']}" for each in data["sources"]),
        "Ratios of speeds, where a source compares configurations of one model, or says no more than which is faster:",
        pages.table(("the faster", "the slower", *_RATIO), _ratio_lines(ratios(rows, speeds), "faster")),
        "Ratios of peaks of memory, with what the run keeps:",
        pages.table(("the fuller", "the other", *_RATIO), _ratio_lines(peaks(rows, held), "fuller")),
        "Tokens/s/GPU and GiB of the fullest rank: published, of the plan, and of the plan with what the run keeps:",
        pages.table(
            ("row", "configuration", "plan", "published", "predicted", "off", "GiB", "plan", "run", "off"),
            [_line(row, found[row.id]) for row in rows if row.id in found],
        ),
        "Seconds of a step, as predicted; beside the plan: what the run does otherwise (the file's head says what):",
        pages.table(
            ("row", "compute", "communication", "hidden", "waiting", "optimizer", "beside the plan"),
            [_seconds(found[row.id]) for row in rows if row.id in found],
        ),
        "Assumed:\n\n" + "\n".join(f"- {each['id']}: {text}" for each in data["sources"] for text in each["assumed"]),
        "What is off, and why:\n\n" + "\n".join(f"- {text}" for text in data.get("why", ())),
        "Not planned:\n\n"
        + "\n".join(f"- {each['what']} ({each['source']}): {each['reason']}" for each in data["untried"]),
    ]
    return "\n\n".join(parts) + "\n"


_METHOD = (
    "No GPU was used, nothing is fitted to these rows. The machine is the shipped profile of an H100 with the source's "
    "network."
)


_RATIO = ("published", "predicted", "off", "order")


def _ratio_lines(found: Sequence[Ratio], said: str) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    for each in found:
        published = said if each.published is None else f"{each.published:.3f}"
        off = "" if each.off is None else f"{each.off:+.1%}"
        lines.append(
            (each.fast, each.slow, published, f"{each.predicted:.3f}", off, "kept" if each.is_kept else "lost")
        )
    return lines


def _line(row: Row, found: Prediction) -> tuple[str, ...]:
    mesh = ",".join(f"{axis}={size} {row.strategy[axis]}" for axis, size in row.mesh.items())
    plan = f"{mesh}; {row.global_batch} × {row.sequence}, {row.microbatches} microbatches, recompute {row.recompute}"
    published, off = (
        ("", "") if row.speed is None else (f"{row.speed:.0f}", f"{found.tokens_per_s / row.speed - 1:+.1%}")
    )
    gib, run = row.published.get("memory_gib"), found.run_gib
    memory = ("" if gib is None else f"{gib:.1f}", f"{found.gib:.1f}", "" if run is None else f"{run:.1f}")
    far = "" if gib is None or run is None else f"{run / gib - 1:+.1%}"
    return (row.id, row.configuration, plan, published, f"{found.tokens_per_s:.0f}", off, *memory, far)


def _seconds(found: Prediction) -> tuple[str, ...]:
    kinds = ("compute", "communication", "hidden", "waiting", "optimizer", "beside")
    return (found.id, *(f"{getattr(found, f'{kind}_s'):.3f}" for kind in kinds))


if __name__ == "__main__":
    Backtest(
        "mixtures", load, predict, Prediction, lambda row: f"{row.configuration}, {row.speed or '?'} tokens/s/GPU", page
    ).main(__doc__)
