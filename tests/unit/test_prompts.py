"""Attention of a prompt to a cache, as engines have kernels for it: what it sees, by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

import autopar
from autopar.api.generation import phase_inputs
from autopar.cost.operator_time import operator_work, region_seconds
from autopar.cost.roofline import Work, compute_time_s
from autopar.ir.program import Program
from autopar.machine import profiles
from autopar.machine.hardware import Hardware
from autopar.machine.mesh import Mesh
from autopar.planner.search.cluster import Cluster
from autopar.planner.search.token_families import TokenFamilies

pytestmark = pytest.mark.unit
PROMPT, NEW = 96, 33
ENGINE = profiles.load("h200:engine")


@pytest.fixture(scope="module")
def programs() -> Mapping[str, Mapping[str, Program]]:
    """Both phases of a small Llama on two ranks, by what its cache holds; `masked`, with a mask over all of it."""
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=96,
    )  # fmt: skip
    with torch.device("meta"):
        made: Any = transformers.LlamaForCausalLM(config)
        model = made.eval().to(torch.bfloat16)
    found = {}
    for name, cache, chunk in (("numbers", None, None), ("int8", "int8", None), ("masked int8", "int8", PROMPT)):
        inputs = phase_inputs(model, autopar.Generation(2, PROMPT, NEW, cache=cache, chunk=chunk))
        families = TokenFamilies(model, Cluster(ENGINE, 1, 2), 2, inputs)
        placed = families.on({"dp": 1, "ep": 1, "tp": 2})
        assert placed is not None
        found[name] = placed
    return found


def attention(program: Program, hardware: Hardware) -> tuple[float, Work, float]:
    """Of a block: seconds of its attention, its work by itself, and seconds of all that makes numbers of codes."""
    mesh = Mesh(program.on_mesh.axes, hardware=hardware)
    for region in program.regions:
        seconds = region_seconds(region, mesh)
        for name, (call, rule) in region.ops.items():
            if name in seconds and call.name == "autopar.attention.default":
                work = operator_work(call, rule, region.strategies[name], mesh)
                shape = (2, 2, PROMPT + NEW - 1, 16)
                decoded = 0.0
                for other, (each, _) in region.ops.items():
                    first = each.results[0]
                    if first is not None and first.shape == shape and "index_copy" not in each.name:
                        decoded += seconds.get(other, 0.0)
                return seconds[name], work, decoded
    raise AssertionError("no attention")


@pytest.mark.parametrize("cache", ["numbers", "int8"])
def test_a_prompt_sees_itself(programs: Mapping[str, Mapping[str, Program]], cache: str) -> None:
    """Breaks if half of what a causal prompt computes is left out, or its cache is read back."""
    seconds, alone, decoded = attention(programs[cache]["prefill"], ENGINE)
    assert alone.dims == (2 * 2 * PROMPT, (PROMPT + 1) / 2, 16, 0.0)  # rows and heads of one of two ranks
    assert seconds == pytest.approx(compute_time_s(alone, ENGINE, in_step=True), rel=1e-12)
    assert decoded == 0.0


def test_a_masked_prompt_sees_what_is_before_it(programs: Mapping[str, Mapping[str, Program]]) -> None:
    """Breaks if an engine is said to multiply all of a cache for a prompt, or to read back what it just wrote."""
    seconds, alone, decoded = attention(programs["masked int8"]["prefill"], ENGINE)
    keys, seen = PROMPT + NEW - 1, (PROMPT + 1) / 2
    assert alone.dims == (2 * 2 * PROMPT, keys, 16, 1.0)  # rows and heads of one of two ranks
    assert alone.variant == "masked"
    flops = 4.0 * 2 * 2 * PROMPT * seen * 16
    read = replace(alone, flops=flops, dims=(2 * 2 * PROMPT, seen, 16, 0.0), variant="")
    assert seconds == pytest.approx(compute_time_s(read, ENGINE, in_step=True), rel=1e-12)
    assert decoded == 0.0


def test_pieces_of_a_prompt_and_tokens_see_the_cache(programs: Mapping[str, Mapping[str, Program]]) -> None:
    """Breaks if a piece of a prompt, or a token, is said to see only what came with it, or autopar's own programs,
    which have a mask, to skip what it hides.
    """
    masked, decode = programs["masked int8"]["prefill"], programs["numbers"]["decode"]
    for program, hardware in ((masked, ENGINE.in_chunks()), (masked, profiles.load("h200")), (decode, ENGINE)):
        seconds, alone, _ = attention(program, hardware)
        assert seconds == pytest.approx(compute_time_s(alone, hardware, in_step=True), rel=1e-12)
