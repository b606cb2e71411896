"""A published run as autopar sees it: its machine as a hardware profile, its configuration as a plan, and what of it no
plan of autopar's says, priced beside the plan.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from autopar.cost.accumulation import accumulation_seconds
from autopar.cost.collectives import num_calls
from autopar.cost.estimate import Cost
from autopar.cost.operator_time import region_seconds
from autopar.ir.program import Program
from autopar.machine import profiles
from autopar.machine.curves import AttentionCurve
from autopar.machine.hardware import Hardware
from benchmarks.published import rows as published_rows
from benchmarks.published.rows import Machine, Row

STRATEGIES = {"ddp": "ddp", "zero1": "zero1", "zero2": "zero2", "fsdp": "zero3"}
REMATERIALIZE = {
    "none": "none", "selective": "selective", "full": "full",
    "products": "selective", "blocks": "full", "attention": "none", "whole": "full",
}  # fmt: skip
"""autopar's nearest mode; what it lacks is priced by `repeated_seconds`, or by `attention_of`."""
NO_LIMIT = 1e15
"""Bytes: memory is predicted, and bends nothing. What was measured did fit."""
FLASH1_SLOWDOWN = 1.8
"""An estimate: FlashAttention-2 is said to be 1.3 to 2.5 times faster than the first one in Triton (2307.08691, section
4.1, not looked up again): the geometric mean.
"""
FUSED_ADAM_PASSES = 7
"""AdamW in one kernel: reads parameter, gradient, two states; writes parameter, two states."""


def machine_of(stated: Machine) -> Hardware:
    """The profile with the numbers that the source states in place of its own; efficiencies stay the profile's."""
    profile = profiles.load(stated.profile)
    network = profile.network
    if stated.network_gbit_per_s is not None:
        shipped = profiles.ALIASES.get(stated.profile, stated.profile)
        text = resources.files("autopar.machine").joinpath("data", "hardware", f"{shipped}.toml").read_text("utf-8")
        wire = tomllib.loads(text)["network"]["bandwidth_bytes_per_s"]
        ratio = stated.network_gbit_per_s * 1e9 / 8 / wire
        network = replace(network, bandwidth_bytes_per_s=network.bandwidth_bytes_per_s * ratio)
    bandwidth = stated.memory_bandwidth_bytes_per_s or profile.memory_bandwidth_bytes_per_s
    if stated.memory_reached_bytes_per_s is not None:
        bandwidth = stated.memory_reached_bytes_per_s / profile.efficiency["memory"]
    return replace(
        profile,
        devices_per_node=stated.gpus_per_node,
        network=network,
        memory_bytes=int(stated.memory_bytes or profile.memory_bytes),
        memory_bandwidth_bytes_per_s=bandwidth,
        power_limit_w=stated.power_limit_w,
    )


def hardware_of(row: Row, sustained: float | None = None) -> Hardware:
    """The row's machine with the kernels that the run had: of attention, of the optimizer, fused ones.

    sustained: in place of the profile's (`Hardware.sustained`).
    """
    machine = machine_of(row.machine)
    if sustained is not None:
        machine = replace(machine, sustained=sustained)
    return replace(
        machine,
        fused_kernels=row.kernels,
        compiled=bool(row.compiled),
        optimizer_passes=FUSED_ADAM_PASSES if row.optimizer == "fused" else machine.optimizer_passes,
        attention=attention_of(row, machine),
        plain_attention_s={},
    )


def attention_of(row: Row, machine: Hardware) -> dict[str, AttentionCurve]:
    """The profile's curves of FlashAttention-2, or those divided by `FLASH1_SLOWDOWN`, or separate kernels'."""
    machine = replace(machine, attention={key: curve for key, curve in machine.attention.items() if "_" not in key})
    if row.attention == "unfused":
        return unfused_attention(row.shape.hidden // row.shape.heads, machine, row.precision, row.recompute)
    if row.attention == "flash2":
        return dict(machine.attention)

    def slower(tables: tuple[tuple[int, Any], ...]) -> tuple[tuple[int, Any], ...]:
        return tuple((size, tuple((x, y / FLASH1_SLOWDOWN) for x, y in points)) for size, points in tables)

    curves = machine.attention.items()
    return {key: replace(curve, causal=slower(curve.causal), full=slower(curve.full)) for key, curve in curves}


def unfused_attention(
    head_size: int, machine: Hardware, precision: str, recompute: str | None
) -> dict[str, AttentionCurve]:
    """Attention of separate kernels in a half type, as fractions of the peak that count the pairs a causal mask leaves.

    All pairs of a query and a key are computed. Bytes for each: forward 13 (the product writes 2; scale, mask and
    softmax, fused, read and write 4; dropout reads 2, writes 2 and a mask of 1; the second product reads 2), backward
    19 (scores' gradient written, dropout's 5, softmax's 6, three products read 2 each). Where attention is computed
    again for the backward, that holds the forward too.
    """
    peak = machine.peak_flops_per_s({"bf16": "bfloat16", "fp16": "float16"}[precision])
    product = peak * machine.matmul[precision].efficiency * machine.kept_speed("matmul")
    memory = machine.memory_bandwidth_bytes_per_s * machine.efficiency["memory"]
    forward_s = 4 * head_size / product + 13 / memory
    backward_s = 8 * head_size / product + 19 / memory + (forward_s if recompute == "attention" else 0.0)
    kept = machine.kept_speed("attention")

    def curve(flops: float, seconds: float) -> AttentionCurve:
        return AttentionCurve(((head_size, ((1.0, flops / (peak * seconds * kept)),)),))

    return {"forward": curve(2 * head_size, forward_s), "backward": curve(5 * head_size, backward_s)}


def strategy_of(row: Row) -> dict[str, Any]:
    """autopar's names for what the source did, for each axis that has more than one rank."""
    from autopar.strategies.names import pipeline

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


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one row. Seconds of a step by kind, as of `Cost`; beside_s: beside the plan, computed again, or less for
    adding gradients up.
    """

    tokens_per_s: float
    gib: float
    compute_s: float
    communication_s: float
    hidden_s: float
    waiting_s: float
    optimizer_s: float
    beside_s: float


def predict(row: Row, layers: int | None = None, sustained: float | None = None) -> Prediction:
    """Plan the row on meta: tokens/s/GPU and GiB. layers: plan with so many blocks instead. sustained: as of
    `hardware_of`.

    Raises AutoparError where autopar cannot express the configuration.
    """
    import autopar
    from autopar.cli.models import catalogue

    name, overrides = overrides_of(row, layers)
    loaded = catalogue.load(name, batch=(row.global_batch, row.sequence), overrides=overrides, dropout=0.0)

    def plan(mode: str) -> tuple[Cost, float]:
        made = autopar.plan(
            loaded.model,
            autopar.Mesh(axes_of(row), hardware=hardware_of(row, sustained)),
            example_inputs=loaded.batch,
            strategy=strategy_of(row),
            precision=row.precision,
            memory_limit=NO_LIMIT,
            rematerialize=mode,
            microbatches=row.microbatches,
        )
        assert made.program is not None
        repeated_s = repeated_seconds(made.program, made.cost, row.recompute)
        return made.cost, repeated_s - spared_seconds(made.program, made.cost, row)

    cost, beside_s = plan(REMATERIALIZE[row.recompute or "none"])
    if row.recompute == "blocks":
        less = plan("none")[0]
        beside_s += (less.step_time_s - cost.step_time_s) / 2
    return Prediction(
        tokens_per_s=published_rows.tokens_of_step(row) / (cost.step_time_s + beside_s) / row.gpus,
        gib=cost.peak_memory_bytes / 2**30,
        compute_s=cost.compute_s,
        communication_s=cost.communication_s,
        hidden_s=cost.hidden_s,
        waiting_s=cost.waiting_s,
        optimizer_s=cost.optimizer_s,
        beside_s=beside_s,
    )


def repeated_seconds(program: Program, cost: Cost, recompute: str | None) -> float:
    """Seconds that a step computes again beside its plan: of every block every second product (`products`), in the
    order of the forward, or the last one (`whole`).
    """
    taken = {"products": slice(1, None, 2), "whole": slice(-1, None)}.get(recompute or "")
    if taken is None:
        return 0.0
    assert program.mesh is not None
    each = {}
    for region in program.regions:
        if sum(call.region == region.name for call in program.calls) > 1:
            seconds = region_seconds(region, program.mesh)
            products = [
                node.name
                for node in region.graph.nodes
                if node.name in region.forward_nodes
                and node.name in seconds
                and region.ops[node.name][1].op_class == "matmul"
            ]
            each[region.name] = sum(seconds[name] for name in products[taken])
    return _of_step(program, cost, each)


def spared_seconds(program: Program, cost: Cost, row: Row) -> float:
    """Seconds of a step that the plan takes to add gradients up, and the run did not."""
    if row.accumulation == "separate":
        return 0.0
    all_s = _of_step(program, cost, {region.name: accumulation_seconds(program, region) for region in program.regions})
    return all_s if row.accumulation == "fused" else all_s * (1.0 - 1.0 / row.sizes["dp"])


def _of_step(program: Program, cost: Cost, each: Mapping[str, float]) -> float:
    """Of the busiest rank, all microbatches; a pipeline's ranks wait as much longer as they compute longer."""
    ranks = range(program.pipeline.schedule.num_ranks) if program.pipeline is not None else (None,)
    more = max(sum(s * num_calls(program, name, rank) for name, s in each.items()) for rank in ranks)
    more *= program.microbatches
    busy = cost.compute_s + cost.communication_s - cost.hidden_s
    return more * (busy + cost.waiting_s) / busy
