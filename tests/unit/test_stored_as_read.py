"""Parameters of a forward, or of prompt and token together, are stored in the fewest bytes that their readers take."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import autopar
from autopar.api.generation import _least_among, phase_inputs
from autopar.ir.sharding import REPLICATE, Shard, Sharding
from autopar.passes.placement import storage
from autopar.passes.placement.storage import ways_to_store
from autopar.planner import stored
from autopar.planner.decide import decide
from autopar.planner.plan.record import PlanRecord
from autopar.planner.stored import in_fewest_bytes, read_apart, stored_bytes

EXPERTS = "model.layers.0.mlp.experts.down_proj"
WANTED = autopar.Generation(batch=2, prompt=8, new_tokens=4)


def _mesh(**axes: int) -> autopar.Mesh:
    """Of devices that take long to read their memory, so that matrices of any size are cut."""
    hardware = autopar.Mesh(axes, hardware="h100").hardware
    return autopar.Mesh(axes, hardware=replace(hardware, memory_bandwidth_bytes_per_s=3e7))


def _mixtral() -> Any:
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(config).eval()


@lru_cache
def _prompt(strategy: str) -> PlanRecord:
    """Of the prompt, as it was placed: every parameter whole."""
    inputs = phase_inputs(_mixtral(), WANTED)["prefill"]
    return decide(_mixtral(), _mesh(x=2), example_inputs=inputs, inference=True, strategy=strategy)


def _stored(plan: PlanRecord) -> dict[str, Sharding]:
    return {name: each.stored for name, each in plan.decisions.placement.parameters.items()}


@pytest.mark.moderate
def test_what_is_read_in_slices_is_stored_in_slices() -> None:
    """Breaks if a parameter that operators read in slices stays whole, if one is cut that a reader wants whole, or if
    anything else of the plan changes for it.
    """
    before = _prompt("auto")
    assert set(_stored(before).values()) == {(REPLICATE,)}
    (after,) = in_fewest_bytes([before], ())
    assert _stored(after)[EXPERTS] == (Shard(0),) and _stored(after)["model.norm.weight"] == (REPLICATE,)
    assert after.decisions.operators == before.decisions.operators
    assert after.collectives == before.collectives and after.cost.step_time_s == before.cost.step_time_s
    saved = stored_bytes(before) - stored_bytes(after)
    assert 0 < saved == before.cost.peak_memory_bytes - after.cost.peak_memory_bytes
    assert after.interface.parameters != before.interface.parameters


def test_what_another_program_reads_or_the_user_asks_for_stays() -> None:
    """Breaks if the second program has to gather what the first one alone reads in slices, or a pin is passed over."""
    rows = _prompt("ddp")
    assert _stored(in_fewest_bytes([rows], ())[0]) == _stored(rows)
    assert all(_stored(each)[EXPERTS] == (REPLICATE,) for each in in_fewest_bytes([_prompt("auto"), rows], ()))
    pinned = in_fewest_bytes([_prompt("auto")], (autopar.pin("*.down_proj", x=REPLICATE),))[0]
    assert _stored(pinned)[EXPERTS] == (REPLICATE,) != _stored(pinned)[EXPERTS.replace("down", "gate_up")]


@pytest.mark.moderate
def test_prompt_and_token_store_what_both_read_in_slices() -> None:
    """Breaks if the phases store a parameter otherwise, or if their programs are not the model's any more."""
    plan = autopar.plan_generation(_mixtral(), _mesh(x=2), WANTED)
    prefill, decode = (_stored(each) for each in plan)
    assert prefill == decode and prefill[EXPERTS] == (Shard(0),)
    for each in plan:
        assert all(pin.placements[0][1] == prefill[pin.pattern][0] for pin in each.pins if pin.pattern in prefill)
    plan.verify().raise_on_failure()


def test_of_plans_as_fast_the_one_of_least_memory_is_taken() -> None:
    """Breaks if memory is bought with time, or what takes less and is as fast is passed over."""

    def made(first_s: float, token_s: float, size: int) -> Any:
        return SimpleNamespace(time_to_first_token_s=first_s, time_per_token_s=token_s, peak_memory_bytes=size)

    best = made(1.0, 1.0, 1000)
    slow, slow_token, as_fast = made(1.01, 1.0, 10), made(1.0, 1.01, 10), made(1.0005, 0.9, 900)
    assert _least_among([best, slow, slow_token, as_fast], best) is as_fast
    assert _least_among([best, slow, made(1.0005, 1.0, 1000)], best) is best


def test_what_both_read_in_other_slices_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if no plan is tried in which one program reads what the other one does, or one for what they share."""
    plan, shared = _prompt("auto"), dict[str, Sharding]()
    found = iter([{EXPERTS: (Shard(0),)}, {EXPERTS: (Shard(1),)}, shared, {EXPERTS: (Shard(0),)}, {}, shared])
    monkeypatch.setattr(stored, "_least", lambda plans, pins: next(found))
    assert read_apart(plan, plan, ()) == {EXPERTS: (Shard(0),)}
    assert read_apart(plan, plan, ()) == {}, "the other one reads all of it"


def test_what_one_of_several_readers_wants_whole_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a parameter is cut as one of its readers takes it, so that another one has to gather it."""
    plan, whole = _prompt("auto"), (REPLICATE,)
    assert plan.program is not None
    monkeypatch.setattr(storage, "_reads", lambda region, slot, stored: [(Shard(0),), whole])
    assert set(ways_to_store(plan.program, plan.strategies, ()).values()) == {frozenset({whole})}
