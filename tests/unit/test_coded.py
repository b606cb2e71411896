"""Products of weights that are codes, as engines run them: by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cost.operator_time import operator_work, region_seconds
from autopar.cost.roofline import Work, compute_time_s
from autopar.ir.program import Program
from autopar.machine import hardware_data, profiles
from autopar.machine.hardware import Hardware
from autopar.machine.mesh import Mesh

pytestmark = pytest.mark.unit
ROWS, WIDE = 8, 256


class Layers(nn.Module):
    """Columns, then rows, of which ranks have halves; `twice` reads a weight beside its product."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDE, WIDE, bias=False) for _ in range(2)])
        self.twice = twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers: list[Any] = list(self.blocks)
        first, second = layers
        found = second(torch.relu(first(x)))
        return found + second.weight.sum(0) if self.twice else found


def planned(way: str, hardware: Hardware, twice: bool = False, strategy: str = "ddp", rows: int = ROWS) -> Program:
    model = autopar.store_weights(Layers(twice).to(torch.bfloat16), way, group=32)
    batch = {"x": torch.zeros(rows, WIDE, dtype=torch.bfloat16)}
    mesh = Mesh({"a": 2}, hardware=hardware)
    plan = autopar.plan(model, mesh, example_inputs=batch, strategy=strategy, inference=True)
    assert plan.program is not None
    return plan.program


def products(program: Program) -> dict[str, tuple[float, Work]]:
    """By name: seconds, and the work by itself."""
    mesh, found = program.on_mesh, {}
    for region in program.regions:
        seconds = region_seconds(region, mesh)
        for name, (call, rule) in region.ops.items():
            if name in seconds and rule.op_class == "matmul":
                found[name] = (seconds[name], operator_work(call, rule, region.strategies[name], mesh))
    return found


def engine() -> Hardware:
    return profiles.load("h100:engine")


BYTES = {
    "fp8": WIDE * WIDE + 2 * WIDE,
    "fp8-tensor": WIDE * WIDE + 2,
    "int8": WIDE * WIDE + 2 * WIDE,
    "int4": WIDE * WIDE // 2 + 2 * WIDE * WIDE // 32,
}


@pytest.mark.parametrize("way", BYTES)
def test_an_engine_reads_codes_and_scales_where_it_multiplies(way: str) -> None:
    """Breaks if the weight that is written out is read, codes or scales are counted otherwise than they are stored, or
    what makes the weight is a kernel of its own; floats of eight bits are multiplied as such, and all other codes are
    decoded, once for the one tile of rows.
    """
    program = planned(way, engine())
    around = 2 * (ROWS // 2) * WIDE * 2
    for seconds, alone in products(program).values():
        assert alone.moved_bytes == around + 2 * WIDE * WIDE
        dtype = torch.float8_e4m3fn if way.startswith("fp8") else alone.dtype
        decoded = 0.0 if way.startswith("fp8") else WIDE * WIDE
        read = replace(alone, dtype=dtype, moved_bytes=around + BYTES[way], decoded=decoded)
        assert seconds == pytest.approx(compute_time_s(read, engine(), in_step=True), rel=1e-12)
    kinds = {"matmul", "elementwise"}
    for region in program.regions:
        taken = region_seconds(region, program.on_mesh)
        others = [n for n, (call, rule) in region.ops.items() if rule.op_class not in kinds or "relu" not in call.name]
        assert sum(taken[n] for n in others if n in taken) == pytest.approx(
            sum(seconds for name, (seconds, _) in products(program).items() if name in taken)
        )


def test_only_an_engine_does() -> None:
    """Breaks if autopar's own programs, which write the weight out, are priced as an engine's."""
    plain = planned("fp8", engine())
    own = replace(engine(), engine=False)
    region = plain.regions[0]
    mesh = Mesh({"a": 2}, hardware=own)
    assert sum(region_seconds(region, mesh).values()) > 1.5 * sum(region_seconds(region, plain.on_mesh).values())


@pytest.mark.moderate
def test_a_weight_that_others_read_too_is_written_out() -> None:
    """Breaks if a weight that something beside its product reads is said to be there for nothing."""
    once, twice = (planned("int8", engine(), each) for each in (False, True))
    cast = [sum(s for r in p.regions for s in region_seconds(r, p.on_mesh).values()) for p in (once, twice)]
    assert cast[1] > cast[0] + 2 * WIDE * WIDE / 3.35e12
    alone = [seconds == compute_time_s(work, engine(), in_step=True) for seconds, work in products(twice).values()]
    assert sorted(alone) == [False, True]  # only the other's weight is a part of its product


@pytest.mark.moderate
def test_many_rows_are_multiplied_as_floats_of_eight_bits() -> None:
    """Breaks if an engine's products of floats of eight bits take what those of sixteen do, where these decide."""
    slow = replace(engine(), peak_flops={name: rate / 100 for name, rate in engine().peak_flops.items()})
    (narrow, alone), *_ = products(planned("fp8", slow, rows=1 << 14)).values()
    (wide, _), *_ = products(planned("int8", slow, rows=1 << 14)).values()
    assert narrow < 0.7 * wide
    assert wide == pytest.approx(compute_time_s(alone, slow, in_step=True), rel=0.01)


def test_codes_are_decoded_for_each_tile_of_rows() -> None:
    """Breaks if codes that are not multiplied are decoded for nothing, once for all rows, or as the products run; or
    where nobody knows how long that takes.
    """
    rows = 3 * 128 + 1
    ((seconds, alone), *_) = products(planned("int8", engine(), rows=2 * rows)).values()
    none = products(planned("int8", replace(engine(), decoded_per_s=None), rows=2 * rows))
    rate = engine().decoded_per_s
    assert rate is not None and rate == pytest.approx(132 * 64 * 1.83e9 * 8 / 13, rel=0.01)
    computed = replace(alone, moved_bytes=0.0)
    assert seconds == pytest.approx(compute_time_s(computed, engine(), in_step=True) + 4 * WIDE * WIDE / rate, rel=1e-6)
    assert next(iter(none.values()))[0] < seconds


def test_a_device_without_such_products_reads_codes_all_the_same() -> None:
    """Breaks if an A100, which multiplies no floats of eight bits, is said to, or has to read the weight for it."""
    a100 = profiles.load("a100:engine")
    for seconds, alone in products(planned("fp8", a100)).values():
        around = 2 * (ROWS // 2) * WIDE * 2
        read = replace(alone, moved_bytes=around + BYTES["fp8"], decoded=WIDE * WIDE)
        assert seconds == pytest.approx(compute_time_s(read, a100, in_step=True), rel=1e-12)


def test_a_host_between_two_forwards_is_an_engines() -> None:
    """Breaks if seconds of a host are lost on the way from a profile, in a plan's file, or are those of no engine."""
    text = profiles.resources.files("autopar.machine").joinpath("data", "hardware", "h100-sxm.toml").read_text("utf-8")
    text += '\n[engine]\nsource = "a test"\nstep_s = 2e-3\nrow_s = 5e-6\n'
    found = profiles.parse(text, name="own", where="a test")
    assert found.between_s(64) == 0.0
    as_engine = found.as_engine()
    assert as_engine.between_s(64) == pytest.approx(2e-3 + 64 * 5e-6)
    assert hardware_data.from_data(hardware_data.to_data(as_engine)) == as_engine
    assert engine().between_s(64) == 0.0


@pytest.mark.moderate
@pytest.mark.parametrize(("way", "per_expert"), [("int8", 2 * 64 + 64), ("fp8-tensor", 1 + 1)])
def test_an_engine_reads_codes_of_experts(way: str, per_expert: int) -> None:
    """Breaks if an engine is charged for numbers of experts that it does not write out, or others are not; floats of
    eight bits are multiplied as such, others decoded for each expert's one tile, which is computed whole.
    """
    import transformers

    config = transformers.MixtralConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, vocab_size=64, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    made: Any = transformers.MixtralForCausalLM(config)
    model = autopar.store_weights(made.to(torch.bfloat16).eval(), way)
    batch = {"input_ids": torch.zeros(4, 1, dtype=torch.long), "use_cache": False}
    mesh = Mesh({"a": 2}, hardware=engine())
    plan = autopar.plan(model, mesh, example_inputs=batch, strategy="ddp", inference=True)
    assert plan.program is not None
    slow = replace(engine(), peak_flops={name: rate / 1e6 for name, rate in engine().peak_flops.items()})
    for hardware in (engine(), slow):  # bytes decide, then products
        program = replace(plan.program, mesh=Mesh({"a": 2}, hardware=hardware))
        ((seconds, alone),) = (each for name, each in products(program).items() if name.startswith("experts"))
        share = 1 - (1 - 2 / 4) ** 2  # of two tokens a rank
        numbers = share * 4 * 3 * 64 * 64
        dtype = torch.float8_e4m3fn if way.startswith("fp8") else alone.dtype
        decoded = 0.0 if way.startswith("fp8") else numbers
        read = replace(alone, dtype=dtype, moved_bytes=alone.moved_bytes - 2 * 2 * numbers, decoded=decoded)
        between = 4 * 2 * (2 * 64 + 64)  # of a row: what is activated, written and read, and what comes of it
        scales, around = share * 4 * 2 * per_expert, 2 * (64 * 2 + 2 * 8 + 2 * 4 + 64 * 2)  # of a token: x, choices, y
        assert read.moved_bytes == pytest.approx(numbers + scales + around + between, rel=1e-12)
        assert alone.flops == pytest.approx(16 * 2 * numbers, rel=0.01)  # a tile of 16 rows, where 4 / 3 are
        assert seconds == pytest.approx(compute_time_s(read, hardware, in_step=True), rel=1e-12)
