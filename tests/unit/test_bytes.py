"""What a plan says it sends is what the program sends, and what the literature says the strategy sends."""

from __future__ import annotations

from collections import Counter

import pytest

from autopar.cost.collectives import Collective, collectives
from autopar.cost.step_time import Event
from tests.unit.tiers import mostly_slow
from tests.unit.traced import MODELS, Lowered, lower

CASES = [
    (name, mesh, strategy)
    for name in MODELS
    for mesh, strategy in [
        ("dp=2", "ddp"),
        ("dp=4", "zero3"),
        ("tp=4", "tensor"),
        ("dp=2,tp=2", "product"),
        ("dp=4", "auto"),
    ]
]


def planned(lowered: Lowered) -> list[Collective]:
    return list(collectives(lowered.program))


def num_bytes(lowered: Lowered) -> int:
    """Bytes of all parameters, tied ones once."""
    return sum(v.type.num_bytes for v in lowered.program.variables if v.is_parameter)


@pytest.mark.moderate
@pytest.mark.parametrize(("name", "mesh", "strategy"), mostly_slow(CASES, *CASES[:5]))
def test_the_plan_says_what_every_rank_sends(name: str, mesh: str, strategy: str) -> None:
    """Breaks if a collective runs that the plan does not list, or the other way round, or its bytes are off."""
    lowered = lower(name, mesh, strategy)
    said: Counter[tuple[str, str]] = Counter()
    times: Counter[tuple[str, str]] = Counter()
    for row in planned(lowered):
        said[row.kind, row.axis] += row.bytes_sent  # type: ignore[assignment]
        times[row.kind, row.axis] += row.times
    for events in lowered.run().events:
        sent: Counter[tuple[str, str]] = Counter()
        for event in events:
            sent[event.kind, event.axis] += event.bytes_sent  # type: ignore[assignment]
        assert sent == said
        assert Counter((event.kind, event.axis) for event in events) == times


@pytest.mark.moderate
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num", [2, 4])
def test_ddp_moves_twice_the_parameters(name: str, num: int) -> None:
    """Breaks if a gradient is reduced twice (a tied one), not at all, or before it is complete: 2Ψ(n−1)/n."""
    rows = [row for row in planned(lower(name, f"dp={num}", "ddp")) if row.why == "reduce gradient"]
    assert {row.kind for row in rows} == {"all_reduce"}
    assert sum(row.bytes_sent for row in rows) == 2 * num_bytes(lower(name, f"dp={num}", "ddp")) * (num - 1) / num


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num", [2, 4])
def test_zero3_moves_three_times_the_parameters(name: str, num: int) -> None:
    """Breaks if a parameter is gathered more or less than twice, or its gradient not scattered: 3Ψ(n−1)/n."""
    lowered = lower(name, f"dp={num}", "zero3")
    whole = {n for n, layout in lowered.program.placement.parameters.items() if layout.stored == layout.compute}
    variables = {v.name: v.type.num_bytes for v in lowered.program.variables}
    pieces = num_bytes(lowered) - sum(
        variables[n] for n in whole if n in variables and lowered.program.variable(n).is_parameter
    )
    rows = [row for row in planned(lowered) if row.why in ("gather parameter", "reduce gradient")]
    cut = [row for row in rows if row.kind != "all_reduce"]
    assert sum(row.bytes_sent for row in cut) == 3 * pieces * (num - 1) / num
    odd = {n for n in whole if any(size % num == 0 for size in lowered.program.variable(n).type.shape)}
    assert not {n for n in odd if lowered.program.variable(n).is_parameter}, "every parameter that can be cut is"


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("name", MODELS)
def test_data_parallel_sends_nothing_else_but_scalars(name: str, strategy: str) -> None:
    """Breaks if data parallelism moves activations: only the loss and its count may be summed, in one message."""
    lowered = lower(name, "dp=4", strategy)
    others = [row for row in planned(lowered) if row.why not in ("gather parameter", "reduce gradient")]
    assert [(row.kind, row.bytes_sent, row.times) for row in others] == [("all_reduce", 2 * 2 * 8 * 3 / 4, 1)], others


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("num", [2, 4])
def test_tensor_sums_the_hidden_state_twice_a_layer_each_way(name: str, num: int) -> None:
    """Breaks if a projection is split the wrong way (GPT-2's fused qkv), or a sum is taken where none is due."""
    lowered = lower(name, f"tp={num}", "tensor")
    hidden = 8 * 16 * 64
    block = next(region for region in lowered.program.regions if region.module)
    for phase in ("forward", "backward"):
        rows = [row for row in planned(lowered) if row.where.startswith(f"{block.name} {phase}")]
        whole = [row for row in rows if row.bytes_sent == 2 * 2 * hidden * 8 * (num - 1) / num]
        assert [(row.kind, row.times) for row in whole] == [("all_reduce", 2)] * 2
        # Llama's norms sum their weight's gradient [D] from the terms, beside the one of the hidden state.
        assert all(
            8 * 16 * row.bytes_sent == whole[0].bytes_sent and name == "llama" for row in rows if row not in whole
        )
    gathers = [row for row in planned(lowered) if row.why in ("gather parameter", "reduce gradient")]
    assert not [row for row in gathers if "weight" in row.tensor and row.where.startswith(block.name)], gathers


def test_tied_parameters_are_moved_once() -> None:
    """Breaks if GPT-2's embedding is reduced, or gathered in one phase, once for each of its two uses."""
    table = "transformer.wte.weight"
    reduced = [row for row in planned(lower("gpt2", "dp=4", "ddp")) if row.tensor == table]
    assert [(row.kind, row.times) for row in reduced] == [("all_reduce", 1)]
    lowered = lower("gpt2", "dp=4", "zero3")
    rows = Counter((row.kind, row.phase) for row in planned(lowered) if row.tensor == table)
    assert rows == {("all_gather", "forward"): 1, ("all_gather", "backward"): 1, ("reduce_scatter", "backward"): 1}
    shared = [row for row in planned(lowered) if row.where.startswith("several calls")]
    assert {row.tensor for row in shared} == {table}
    moved = lowered.program.variable(table).type.num_bytes * 3 / 4
    events: list[Event] = list(lowered.run().events[0])
    assert Counter(event.kind for event in events if event.bytes_sent == moved) == {
        "all_gather": 2,
        "reduce_scatter": 1,
    }
