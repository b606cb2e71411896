"""Bytes that context strategies send in a layer, to the byte, against what their papers count."""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache

import pytest

from autopar.cost.collectives import Collective, collectives
from autopar.ir.program import Program
from benchmarks.proofs.contexts import ROWS, TOKENS, lowered
from tests.unit.tiers import mostly_slow

BYTES = 8
"""Of an element: the models are in float64."""
WIDTHS = {"bert": (64, 64), "gpt2": (64, 64), "llama": (64, 32)}
"""Elements of a token's queries, and of its keys; heads of eight."""
STEPS = 2
"""Layers, each once a step."""


@lru_cache(maxsize=16)
def made(model: str, mesh: str, strategy: str) -> tuple[Program, str]:
    return lowered(model, mesh, strategy)[1:]


def program(model: str, mesh: str, strategy: str) -> Program:
    return made(model, mesh, strategy)[0]


def source(model: str, mesh: str, strategy: str) -> str:
    return made(model, mesh, strategy)[1]


def inside(model: str, mesh: str, strategy: str, phase: str) -> list[Collective]:
    """What the blocks send of activations and their gradients, in one phase."""
    found = program(model, mesh, strategy)
    blocks = tuple(f"{region.name} {phase}" for region in found.regions if region.module)
    rows = [row for row in collectives(found) if row.where.startswith(blocks)]
    assert all(row.times == STEPS for row in rows)
    return rows


def a_layer(rows: list[Collective]) -> Counter[tuple[str, float]]:
    """(kind, bytes that a rank sends in one layer) -> how often."""
    return Counter((row.kind, row.bytes_sent / STEPS) for row in rows)


def hidden(width: int) -> int:
    """Bytes of all tokens' queries, or keys, of one layer."""
    return ROWS * TOKENS * width * BYTES


@pytest.mark.moderate
@pytest.mark.parametrize("num", mostly_slow([2, 4], 4))
@pytest.mark.parametrize("model", WIDTHS)
def test_ulysses_turns_four_hidden_states(model: str, num: int) -> None:
    """Breaks if a layer moves anything but q, k, v and the result, or one of them twice: each B·S·D/n·(n−1)/n
    (Jacobs et al., 2309.14509, section 3.2), as many again backward.
    """
    queries, keys = (hidden(width) / num * (num - 1) / num for width in WIDTHS[model])
    wanted = Counter({("all_to_all", queries): 2})
    wanted.update({("all_to_all", keys): 2})
    for phase in ("forward", "backward"):
        assert a_layer(inside(model, f"cp={num}", "ulysses", phase)) == wanted


@pytest.mark.moderate
def test_ulysses_sends_the_key_heads_that_a_rank_reads() -> None:
    """Breaks if each of 8 ranks is sent all 4 key heads, of which it reads one: lcm(4, 8) = 8 heads, one for each."""
    queries = hidden(64) / 8 * 7 / 8
    for phase in ("forward", "backward"):
        rows = inside("llama", "cp=8", "ulysses", phase)
        assert a_layer(rows) == {("all_to_all", queries): 4}


@pytest.mark.moderate
@pytest.mark.parametrize("num", mostly_slow([2, 4], 4))
@pytest.mark.parametrize("model", WIDTHS)
def test_allgather_kv_gathers_keys_and_values(model: str, num: int) -> None:
    """Breaks if the hidden state is gathered, or queries, or keys twice: K and V (n−1)/n of their bytes forward, their
    gradients as many backward (The Llama 3 Herd of Models, section 3.3.2).
    """
    keys = hidden(WIDTHS[model][1]) * (num - 1) / num
    assert a_layer(inside(model, f"cp={num}", "allgather_kv", "forward")) == {("all_gather", keys): 2}
    assert a_layer(inside(model, f"cp={num}", "allgather_kv", "backward")) == {("reduce_scatter", keys): 2}


@pytest.mark.moderate
@pytest.mark.parametrize("num", mostly_slow([2, 4], 4))
@pytest.mark.parametrize("model", WIDTHS)
def test_ring_sends_keys_and_values_round(model: str, num: int) -> None:
    """Breaks if a block goes all the way home, or its gradients do not: n−1 blocks of K and V forward (Liu et al.,
    2310.01889, section 3); backward as many, and n of their gradients.
    """
    block = 2 * hidden(WIDTHS[model][1]) / num
    assert a_layer(inside(model, f"cp={num}", "ring", "forward")) == {("ring", (num - 1) * block): 1}
    backward = (num - 1) * block + num * block
    assert a_layer(inside(model, f"cp={num}", "ring", "backward")) == {("ring", backward): 1}


@pytest.mark.moderate
def test_a_ring_stops_where_a_window_ends() -> None:
    """Breaks if blocks travel that no query sees: a window of 6 on pieces of 4 tokens reaches two blocks back."""
    block = 2 * hidden(32) / 4
    assert a_layer(inside("mistral", "cp=4", "ring", "forward")) == {("ring", 2 * block): 1}


@pytest.mark.moderate
def test_usp_is_both() -> None:
    """Breaks if the ring of USP carries heads of others, or all-to-alls cross it (Fang and Zhao, 2405.07719)."""
    queries, keys = (hidden(width) / 4 for width in WIDTHS["llama"])
    rows = inside("llama", "cp0=2,cp1=2", "cp0=ring,cp1=ulysses", "forward")
    wanted = {("ring", "cp0", keys * 2): 1, ("all_to_all", "cp1", queries / 2): 2, ("all_to_all", "cp1", keys / 2): 2}
    assert Counter((row.kind, row.axis, row.bytes_sent / STEPS) for row in rows) == wanted


@pytest.mark.parametrize("strategy", ["ulysses", "allgather_kv", "ring"])
def test_gradients_are_summed_as_under_ddp(strategy: str) -> None:
    """Breaks if more than 2Ψ(n−1)/n crosses the axis for parameters, however they lie."""
    num, found = 4, program("llama", "cp=4", strategy)
    parameters = sum(variable.type.num_bytes for variable in found.variables if variable.trainable)
    rows = [row for row in collectives(found) if row.why in ("gather parameter", "reduce gradient")]
    assert sum(row.bytes_sent for row in rows) == 2 * parameters * (num - 1) / num


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "strategy"), [
    ("dp=2,cp=2", "dp=zero3,cp=ulysses"), ("dp=2,cp=2", "allgather_kv"), ("dp=2,cp=2", "ring"),
    ("cp=2,tp=2", "tp=tensor,cp=ring"), ("tp=2,cp=2", "tp=tensor,cp=ulysses"), ("cp=2,tp=2", "tp=tensor,cp=ulysses"),
    ("cp=2,tp=2", "tp=tensor+sequence,cp=ulysses"),
])  # fmt: skip
def test_beside_other_axes_it_sends_what_they_leave(mesh: str, strategy: str) -> None:
    """Breaks if blocks talk over the data axis, or the sequence's sends what another axis has split already."""
    rows = [row for row in inside("llama", mesh, strategy, "forward") if row.axis == "cp"]
    queries, keys = (hidden(width) / 4 for width in WIDTHS["llama"])
    wanted = {
        "ulysses": 2 * (queries + keys) / 2,
        "allgather_kv": 2 * keys,
        "ring": 2 * keys,
    }  # fmt: skip
    name = strategy.split("cp=")[-1]
    assert math.isclose(sum(row.bytes_sent for row in rows) / STEPS, wanted[name])
    assert not [row for row in inside("llama", mesh, strategy, "forward") if row.axis == "dp"]
    epilogue = [row for row in collectives(program("llama", mesh, strategy)) if row.where.startswith("epilogue")]
    if "zigzag=True" not in source("llama", mesh, strategy):  # else the logits are turned once, to leave contiguously
        assert not [row for row in epilogue if row.axis == "cp" and row.kind == "all_to_all"]
