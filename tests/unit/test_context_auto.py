"""`auto` splits sequences where that is fastest, and is never predicted slower than strategies that do so by name."""

from __future__ import annotations

import pytest

import autopar
from autopar.api.again import replan
from autopar.api.plan import Plan
from autopar.cli.models import catalogue
from autopar.machine.mesh import Mesh
from autopar.planner.candidates import context_candidates
from autopar.strategies.context import ALLGATHER_KV, RING, ULYSSES
from autopar.strategies.names import AUTO, DDP, TENSOR, ZERO3, resolve
from autopar.strategies.request import Request

pytestmark = pytest.mark.slow

NAMED = ("ulysses", "allgather_kv", "ring")


def planned(tokens: int, num: int, strategy: str, layers: int = 2) -> Plan:
    """Llama 3.1 8B, of some layers, on one node of H100s."""
    loaded = catalogue.load("llama-3.1-8b", batch=(1, tokens), overrides={"num_hidden_layers": layers})
    mesh = Mesh({"cp": num}, hardware="h100")
    return autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, strategy=strategy, precision="bf16")


def splits_sequence(plan: Plan) -> bool:
    """Whether all that flows between layers is in pieces of the sequence."""
    blocks = [i for i, call in enumerate(plan.program.calls) if plan.program.region(call.region).module]
    return all(getattr(plan.program.placement.values[i, 0][0], "dim", None) == 1 for i in blocks)


def test_long_sequences_are_split() -> None:
    """Breaks if 128k tokens of Llama 3.1 8B are anything but context parallel on 8 GPUs, or do not fit."""
    found = planned(131_072, 8, "auto", layers=32)
    assert splits_sequence(found) and "zigzag=True" in found.source
    assert found.cost.peak_memory_bytes < 80e9


def test_auto_is_never_predicted_slower() -> None:
    """Breaks if a strategy that a user could have named is faster."""
    found = planned(131_072, 8, "auto")
    assert splits_sequence(found)
    for strategy in NAMED:
        named = planned(131_072, 8, strategy)
        assert splits_sequence(named)
        assert found.cost.step_time_s <= named.cost.step_time_s * (1 + 1e-9), strategy


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", NAMED)
def test_memory_falls_with_ranks(strategy: str) -> None:
    """Breaks if more ranks hold as much of a long sequence as fewer do."""
    peaks = [planned(65_536, num, strategy).cost.memory.activations for num in (2, 4, 8)]
    assert peaks[1] < 0.7 * peaks[0] and peaks[2] < 0.7 * peaks[1]


def test_short_sequences_are_as_before() -> None:
    """Breaks if many short rows are split along their sequences, or prepared for it, where data parallelism does."""
    loaded = catalogue.load("llama-3.1-8b", batch=(64, 512), overrides={"num_hidden_layers": 4})
    mesh = Mesh({"dp": 8}, hardware="h100")
    plan = autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, precision="bf16")
    assert plan.spread is None and not splits_sequence(plan)


def test_plans_of_auto_say_what_they_were_prepared_for() -> None:
    """Breaks if a saved plan that took a context strategy's decisions is read back onto a program without them."""
    loaded = catalogue.load("llama", tiny=True, batch=(1, 1024), device="cpu")
    plan = autopar.plan(loaded.model, Mesh({"cp": 4}, hardware="cpu"), example_inputs=loaded.batch)
    assert plan.spread is not None and "zigzag=True" in plan.source
    text = plan.to_json()
    again = Plan.from_json(text)
    assert again.spread == plan.spread and again.to_json() == text
    assert replan(again, loaded.model, loaded.batch, plan.mesh).source == plan.source
    plan.verify().raise_on_failure()


def test_candidates_are_on_axes_for_sequences() -> None:
    """Breaks if a context strategy is tried on an axis that was asked to do something else, or on none."""
    loaded = catalogue.load("llama", tiny=True, device="cpu")

    def candidates(text: str, strategy: object = "auto") -> list[tuple[object, ...]]:
        mesh = Mesh.parse(text, hardware="cpu")
        return context_candidates(Request(loaded.model, loaded.batch, mesh, resolve(strategy, mesh)))  # type: ignore[arg-type, return-value]

    assert candidates("cp=8") == [(ULYSSES,), (ALLGATHER_KV,), (RING,)]
    assert (DDP, ULYSSES) in candidates("dp=2,cp=2") and (ZERO3, RING) in candidates("dp=2,cp=2")
    assert all(each[0] in (DDP, ZERO3) for each in candidates("dp=2,cp=2"))
    assert (RING, TENSOR) in candidates("cp=2,tp=2") and (ULYSSES, TENSOR) in candidates("cp=2,tp=2")
    assert (RING, ULYSSES) in candidates("cp0=2,cp1=2") and (RING, RING) not in candidates("cp0=2,cp1=2")
    assert candidates("dp=2,cp=2", {"cp": "ddp"}) == [(each, DDP) for each in (ULYSSES, ALLGATHER_KV, RING)]
    assert AUTO not in {each for row in candidates("a=2,b=2") for each in row}
