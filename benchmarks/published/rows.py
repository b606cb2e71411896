"""Published measurements of training runs: the rows of benchmarks/published/*.toml, and their units.

A file is one source: `[source]` (who measured, where it stands, at which commit), `[hardware]` (its machines, as
stated), `[defaults]` (fields of every row that does not say otherwise), `[models]` (shapes), `[[rows]]`. What a source
does not state is left out of its rows; what is assumed in its place is named by `Row.assumptions`.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.base.errors import AutoparError
from autopar.machine.hardware import FUSED_KERNELS

FOLDER = Path(__file__).parent
CHOICES = "choices"
"""The file of configurations that experts chose; it has no measurements."""
GENERATION = "generation"
"""The file of tokens of generate(), whose rows have other words (`generation.py`)."""
MIXTURES = "mixtures"
"""The file of mixtures of experts, whose rows have other words (`mixtures.py`)."""
OTHERS = (CHOICES, GENERATION, MIXTURES)
METRICS = ("tokens_per_s_per_gpu", "step_s", "tflops_per_s_per_gpu", "mfu")
"""What a row may publish, the most direct first."""
RECOMPUTE = ("none", "selective", "full", "products", "blocks", "attention", "whole")
"""What is computed again. `products`: all but attention and every other product of a block (torchtitan's selective
op); `blocks`: every second block; `attention`: attention alone (Megatron-LM's selective); `whole`: blocks with their
last product too, which no gradient needs (reentrant checkpointing); `full`: blocks without it.
"""
ATTENTION = ("flash2", "flash1", "unfused")
"""Kernels: FlashAttention-2; the first one, in Triton; products, masks and softmax by themselves."""
OPTIMIZERS = ("foreach", "fused")
ACCUMULATIONS = ("separate", "fused", "reduced")
"""How gradients of microbatches are added up: by operators of their own, by the products that make them, or once they
are reduced, in pieces.
"""
DATA_PARALLEL = ("ddp", "zero1", "zero2", "fsdp")
PRICED = {
    "products": "every second product is computed again: planned as selective, those products priced beside the plan",
    "blocks": "every second block is computed again: the mean of two plans, none and full",
    "whole": "the last product of a block is computed again: planned as full, that product priced beside the plan",
    "attention": "attention is computed again: planned as none, attention's backward priced with its forward",
    "unfused": "attention of separate kernels: planned as fused, priced as two products and passes over the scores",
    "fused": "gradients are added up by the products that make them: adding is not priced",
    "reduced": "gradients are reduced in every microbatch, and then added up: adding is priced of the pieces",
    "flash1": "the first FlashAttention, in Triton: priced as 1.8 times slower than FlashAttention-2",
}
"""What is no plan of autopar's, and is priced all the same."""
FP32_REDUCTIONS = ("torchtitan", "torchtitan_a100", "mpt")
AXES = ("pp", "dp", "cp", "tp")
"""Slowest link first: the order of the mesh."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A dense decoder. architecture: `llama` (RMSNorm, rotary, gated MLP), `gpt` (LayerNorm, learned positions, GELU).

    hidden, ffn: features; vocabulary: rows of the embedding; tied: whether the head is the embedding.
    """

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    tied: bool = False

    @property
    def gated(self) -> bool:
        """Whether the MLP has three matrices."""
        return self.architecture == "llama"

    def parameters(self, positions: int = 0) -> int:
        """The number of weights in matrices, norms and embeddings, `positions` learned ones too; no biases."""
        attention = 2 * self.hidden**2 * (1 + self.kv_heads / self.heads)
        mlp = (3 if self.gated else 2) * self.hidden * self.ffn
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2) + positions * self.hidden
        return round(self.layers * (attention + mlp + 2 * self.hidden) + self.hidden + embeddings)


@dataclass(frozen=True, slots=True)
class Machine:
    """What a source says of its machine. profile: autopar's nearest; None: as in the profile (an assumption).

    network_gbit_per_s: of one GPU, one direction. power_limit_w: that the GPU was held to, watts; None: its own.
    memory_reached_bytes_per_s: the most that its memory gives, as the source has it, in the place of the data sheet's
    bandwidth times the profile's efficiency.
    """

    profile: str
    description: str
    gpus_per_node: int = 8
    network_gbit_per_s: float | None = None
    memory_bytes: float | None = None
    memory_bandwidth_bytes_per_s: float | None = None
    memory_reached_bytes_per_s: float | None = None
    power_limit_w: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One measured configuration.

    sizes: ranks of each of `AXES`. published: numbers by metric, in the source's own units, and `memory_gib`.
    formula: how the source counts FLOPs, where it publishes no tokens and no seconds. calibrates: it served to fit the
    cost model, so it is no test. assumed: where autopar's nearest configuration is another one. why: what is known of a
    prediction that is far off.

    How it ran: recompute, attention, optimizer, accumulation: of the words above. kernels: of
    `hardware.FUSED_KERNELS`, those that were fused by hand. compiled: elementwise operators that follow one another
    were one kernel, by torch.compile or by hand.
    """

    id: str
    source: str
    citation: str
    where: str
    name: str
    shape: Shape
    machine: Machine
    precision: str
    sizes: Mapping[str, int] = field(hash=False)
    data_parallel: str
    global_batch: int
    sequence: int
    published: Mapping[str, float] = field(hash=False)
    microbatch: int | None = None
    recompute: str | None = None
    sequence_parallel: bool = False
    async_tp: bool = False
    context: str | None = None
    schedule: str | None = None
    stages_per_rank: int | None = None
    compiled: bool | None = None
    attention: str = "flash2"
    kernels: tuple[str, ...] = FUSED_KERNELS
    optimizer: str = "foreach"
    accumulation: str = "separate"
    formula: str | None = None
    techniques: str = ""
    calibrates: bool = False
    assumed: tuple[str, ...] = ()
    why: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether the source says all that a step's time depends on most: the microbatch, and what is recomputed."""
        return self.microbatch is not None and self.recompute is not None

    @property
    def gpus(self) -> int:
        """All ranks."""
        return math.prod(self.sizes.values())

    @property
    def microbatches(self) -> int:
        """How many a rank of data parallelism runs in a step.

        Raises AutoparError where the batch does not divide.
        """
        rows, rest = divmod(self.global_batch, self.sizes["dp"] * (self.microbatch or 1))
        if rest or rows < 1:
            raise AutoparError(
                "the global batch is no whole number of microbatches on every rank",
                where=self.id,
                values=f"{self.global_batch} sequences, dp={self.sizes['dp']}, microbatch {self.microbatch or 1}",
                remedy="check the row",
            )
        return rows

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the back-test assumes where the source is silent, or where autopar has only something like it."""
        found = list(self.assumed)
        if self.microbatch is None:
            found.append("microbatch not published: 1")
        if self.recompute is None:
            found.append("recomputation not published: none")
        if self.data_parallel in ("zero2", "fsdp") and self.sizes["pp"] == 1 and self.microbatches > 1:
            found.append("gradient accumulation: planned with gradients reduced once a step")
        if self.sizes["pp"] > 1 and self.schedule is None:
            found.append("schedule not published: 1f1b")
        if self.sizes["cp"] > 1 and self.context is None:
            found.append("form of context parallelism not published: ring")
        if self.async_tp:
            found.append("async TP: planned as tensor+sequence")
        if self.data_parallel in ("zero2", "fsdp") and self.source in FP32_REDUCTIONS:
            found.append("gradients are reduced in fp32: planned in bf16")
        found += [
            text for field, text in PRICED.items() if field in (self.recompute, self.attention, self.accumulation)
        ]
        if self.gpus > self.machine.gpus_per_node and self.machine.network_gbit_per_s is None:
            found.append(f"network not stated: that of the profile {self.machine.profile}")
        return tuple(found)


def flops_per_token(formula: str, shape: Shape, sequence: int) -> float:
    """FLOPs that a source counts for one token of a training step.

    narayanan: 2104.04473, equation 3: with the forward of full recomputation, 96 B s l h² (1 + s/6h + V/16lh).
    korthikanti: 2205.05198, appendix A, model FLOPs: 72 B s l h² (1 + s/6h + V/12lh).
    megatron_core: `num_floating_point_operations` of Megatron-LM at f2e5db402c.
    palm: 2204.02311, appendix B: 6N + 12·L·H·Q·T.

    Raises AutoparError for another name.
    """
    layers, hidden, vocabulary = shape.layers, shape.hidden, shape.vocabulary
    if formula == "narayanan":
        return 96 * layers * hidden**2 * (1 + sequence / (6 * hidden) + vocabulary / (16 * layers * hidden))
    if formula == "korthikanti":
        return 72 * layers * hidden**2 * (1 + sequence / (6 * hidden) + vocabulary / (12 * layers * hidden))
    if formula == "megatron_core":
        attention = 1 + shape.kv_heads / shape.heads + sequence / hidden
        mlp = shape.ffn / hidden * (1.5 if shape.gated else 1)
        return 12 * layers * hidden**2 * (attention + mlp + vocabulary / (2 * layers * hidden))
    if formula == "palm":
        return 6 * shape.parameters() + 12 * layers * hidden * sequence
    raise AutoparError(
        f"there is no FLOP formula {formula!r}", remedy="use narayanan, korthikanti, megatron_core or palm"
    )


def tokens_per_s(row: Row, peak_flops: float) -> float:
    """The published speed in tokens/s/GPU. peak_flops: of one GPU, FLOP/s, for rows that publish MFU only.

    Raises AutoparError where the row has none of `METRICS`, or FLOPs without a formula.
    """
    metric = next((name for name in METRICS if name in row.published), None)
    if metric is None:
        raise AutoparError("the row publishes no speed", where=row.id, remedy=f"give one of {', '.join(METRICS)}")
    value = row.published[metric]
    if metric == "tokens_per_s_per_gpu":
        return value
    if metric == "step_s":
        return tokens_of_step(row) / value / row.gpus
    if row.formula is None:
        raise AutoparError(f"{metric} needs a formula to become tokens", where=row.id, remedy="name one: formula = …")
    flops = value * 1e12 if metric == "tflops_per_s_per_gpu" else value * peak_flops
    return flops / flops_per_token(row.formula, row.shape, row.sequence)


def tokens_of_step(row: Row) -> int:
    """Tokens of one optimizer step, on all GPUs."""
    return row.global_batch * row.sequence


def load(names: Sequence[str] = ()) -> list[Row]:
    """The rows of the named sources, or of all.

    Raises AutoparError for an unknown source, and for a row that is damaged.
    """
    files = {path.stem: path for path in sorted(FOLDER.glob("*.toml")) if path.stem not in OTHERS}
    for name in names:
        if name not in files:
            raise AutoparError(f"there is no source {name!r}", remedy=f"use {', '.join(files)}")
    return [row for name in names or files for row in parse(files[name].read_text(encoding="utf-8"), name)]


def parse(text: str, source: str) -> list[Row]:
    """The rows of one file. Raises AutoparError that names the row and the field."""
    data = tomllib.loads(text)
    shapes = {name: Shape(**fields) for name, fields in data["models"].items()}
    machines = {name: Machine(**fields) for name, fields in data["hardware"].items()}
    rows = [_row(data, {**data.get("defaults", {}), **fields}, source, shapes, machines) for fields in data["rows"]]
    double = {row.id for row in rows if sum(row.id == other.id for other in rows) > 1}
    if double:
        raise AutoparError("rows share a name", where=source, values=", ".join(sorted(double)))
    return rows


def _row(
    data: Mapping[str, Any],
    given: dict[str, Any],
    source: str,
    shapes: Mapping[str, Shape],
    machines: Mapping[str, Machine],
) -> Row:
    where = f"{source}: {given.get('id', 'a row without id')}"
    fields = {key: value for key, value in given.items() if key not in (*AXES, "model", "hardware", "note")}
    try:
        fields |= {
            "id": f"{source}/{given['id']}",
            "name": given["model"],
            "shape": shapes[given["model"]],
            "machine": machines[given["hardware"]],
            "sizes": {axis: int(given.get(axis, 1)) for axis in AXES},
            "assumed": tuple(given.get("assumed", ())),
            "kernels": tuple(given.get("kernels", FUSED_KERNELS)),
        }
        row = Row(source=source, citation=data["source"]["url"], **fields)
    except (KeyError, TypeError) as error:
        raise AutoparError("a published row is damaged", where=where, values=str(error)) from error
    words: dict[str, tuple[str | None, ...]] = {
        "recompute": (None, *RECOMPUTE), "data_parallel": DATA_PARALLEL, "attention": ATTENTION,
        "optimizer": OPTIMIZERS, "accumulation": ACCUMULATIONS,
    }  # fmt: skip
    for field_, known in words.items():
        if getattr(row, field_) not in known:
            raise AutoparError(
                "a published row has an unknown word",
                where=where,
                values=f"{field_} {getattr(row, field_)!r}",
                remedy=f"use {', '.join(str(word) for word in known if word is not None)}",
            )
    return row
