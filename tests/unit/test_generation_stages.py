"""`generate()` over the stages of a pipeline: a prompt and a token on the same stages, each with its own caches."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.api.again import first_of_stages, same_stages
from autopar.api.generation import phase_inputs
from autopar.api.interpret import state_of
from autopar.api.small_model import small_model
from autopar.api.stored import states_of
from autopar.base.errors import AutoparError
from autopar.cost.estimate import state_bytes
from autopar.ir.schedule import Schedule
from autopar.ir.stages import Stage
from autopar.ir.values import ValueRef
from autopar.passes.repeatable import repeatable_calls
from autopar.passes.stages.states import check_states, parts_states, state_uses
from autopar.planner.family import Family
from autopar.runtime.checker.program import check_types
from autopar.runtime.holders import holders, keepers, own_inputs
from autopar.runtime.simulate import simulate
from autopar.strategies.pipelining import schedules
from autopar.strategies.pipelining.asked import forwards
from autopar.strategies.pipelining.check import check
from autopar.strategies.pipelining.spec import PipelineSpec, parse_spec
from tests.dist.generation import model_and_prompt

WANTED = autopar.Generation(batch=2, prompt=4, new_tokens=3)
MESHES: dict[str, tuple[dict[str, int], Any]] = {
    "pp": ({"pp": 2}, "auto"),
    "tp": ({"pp": 2, "tp": 2}, {"pp": "pipeline(1f1b)", "tp": "tensor"}),
    "zbv": ({"dp": 2, "pp": 2}, {"pp": "pipeline(zbv)", "dp": "ddp"}),
}


@lru_cache
def planned(name: str, mesh: str) -> autopar.GenerationPlan:
    """Of a small model in eval mode, float64."""
    model, _ = model_and_prompt(name)
    sizes, strategy = MESHES[mesh]
    return autopar.plan_generation(model.double(), autopar.Mesh(sizes), WANTED, strategy=strategy)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), [("gpt2", "pp"), ("gpt2", "tp"), ("qwen2", "zbv"), ("lfm2", "pp")])
def test_a_prompt_and_a_token_are_proven_on_the_same_stages(name: str, mesh: str) -> None:
    """Breaks if a token's stages are cut elsewhere than the prompt's, so that parameters or caches would have to move,
    if a stage reads what another one keeps, or if the programs give other logits than the model without a cache.
    """
    plan = planned(name, mesh)
    first, then = plan.prefill.interface, plan.decode.interface
    assert holders(first) == holders(then)
    assert states_of(first) == states_of(then)
    assert keepers(first) == keepers(then)
    assert [each.sharding for each in first.parameters] == [each.sharding for each in then.parameters]
    assert plan.verify().raise_on_failure().ok


@pytest.mark.slow
def test_each_rank_keeps_the_caches_of_its_stages() -> None:
    """Breaks if a rank takes the cache of a layer that is not its own, if no rank takes one, or if the bytes that are
    predicted are not those.
    """
    plan = planned("qwen2", "zbv")
    interface, program = plan.decode.interface, plan.decode.program
    assert program is not None
    caches = {each.name: each for each in interface.inputs if each.name.startswith("past_key_values")}
    kept = [sorted(name for name in own_inputs(interface, rank) if name in caches) for rank in (0, 1)]
    counts = {name for name, each in caches.items() if not each.shape}
    # Three layers in four stages, there and back: the first is on the first rank, the others on the last one.
    layers = [{f"past_key_values.{number}" for number in range(first, first + 2)} for first in (0, 3, 6)]
    assert kept == [sorted(own | counts) for own in _by_rank(interface, layers)]
    # Keys and values of one row of two: [1, heads 2, positions 6, 8] of eight bytes; a count of eight bytes.
    sizes = [sum(len(own) for own in layers if own <= set(each)) * 2 * 6 * 8 * 8 + 3 * 8 for each in kept]
    assert [sum(state_bytes(program, rank).values()) for rank in (0, 1)] == sizes
    assert plan.cache_bytes == max(sizes)
    assert plan.decode.pipeline is not None and interface.pipeline is not None
    static = [stage.cost.static_bytes for stage in plan.decode.pipeline.stages]
    assert static[1:] == [_bytes_of_stage(interface, stage, caches) for stage in interface.pipeline.stages[1:]]


def _by_rank(interface: Any, layers: list[set[str]]) -> list[set[str]]:
    found: list[set[str]] = [set(), set()]
    for layer in layers:
        (rank,) = {keepers(interface)[name] for name in layer}
        found[rank] |= layer
    return found


def _bytes_of_stage(interface: Any, stage: Any, caches: Collection[str]) -> int:
    """Of parameters, which lie whole, and of what it makes, of which each rank has half: of caches the old, too."""
    outputs = [interface.outputs[place] for place in stage.outputs]
    whole = [_bytes(interface.parameter(name)) for name in stage.parameters]
    pieces = [_bytes(each) // (2 if each.shape else 1) * (1 + (each.name in caches)) for each in outputs]
    return sum(whole) + sum(pieces)


def _bytes(entry: Any) -> int:
    return int(math.prod(entry.shape)) * 8


@pytest.mark.slow
def test_what_every_rank_is_told_is_counted() -> None:
    """Breaks if the bytes of logits and counts that a plan says all ranks get are not those that are sent, or if their
    time is left out.
    """
    plan = planned("gpt2", "tp").decode
    assert plan.model is not None and plan.pipeline is not None
    rows = [row for row in plan.collectives if row.where == "outputs"]
    interface = plan.interface
    batch = {each.name: torch.zeros(each.shape, dtype=getattr(torch, each.dtype)) for each in interface.inputs}
    program: Any = plan.program
    found = simulate(interface, plan.source, state_of(small(plan), program), batch, backward=False)
    for events in found.events:
        sent = [each.bytes_sent for each in events if each.kind == "all_reduce" and each.axis == "pp"]
        # Half of the vocabulary's 96 logits for two rows, and two counts, in eight bytes each: 2 (2 - 1) / 2 of them.
        assert sorted(sent) == sorted(row.bytes_sent for row in rows) == [2 * 8, 2 * 48 * 8]
    device_s = plan.pipeline.timeline.makespan_s + sum(row.seconds for row in rows)
    assert plan.cost.step_time_s == pytest.approx(device_s + plan.cost.host_s)


def small(plan: Any) -> nn.Module:
    """The plan's model with weights."""
    model, _ = small_model(plan.model, {}, torch.float64, 0)
    return model


@pytest.mark.slow
def test_a_saved_plan_is_the_same() -> None:
    """Breaks if a plan whose stages have no backward cannot be written and read again."""
    plan = planned("gpt2", "pp")
    again = autopar.GenerationPlan.from_json(plan.to_json())
    assert str(again) == str(plan)
    assert again.to_data() == plan.to_data()


@pytest.mark.slow
def test_an_edited_stage_that_reads_the_cache_of_another_is_refused() -> None:
    """Breaks if the checker gives every stage all caches, though at run time a rank has its own alone."""
    decode = planned("gpt2", "pp").decode
    check_types(decode.source, decode.interface)
    first, last = decode.source.split("def last_forward")
    assert 'inputs["past_key_values.3"]' in last
    edited = first + "def last_forward" + last.replace('inputs["past_key_values.3"]', 'inputs["past_key_values.0"]')
    with pytest.raises(AutoparError, match=r"past_key_values\.0"):
        check_types(edited, decode.interface)


@pytest.mark.slow
def test_training_afterwards_has_the_stages_of_the_prompt() -> None:
    """Breaks if what was planned for tokens binds training to a schedule without a backward, or to other stages."""
    plan = planned("gpt2", "pp")
    strategy = same_stages(plan.prefill, "auto")
    assert isinstance(strategy, dict)
    spec = strategy["pp"]
    assert spec == PipelineSpec("auto", 1, ("transformer.h.1",), rank_of=(0, 1))
    assert same_stages(plan.decode, "auto") == strategy


@pytest.mark.slow
def test_blocks_that_are_used_again_are_named_by_their_turn() -> None:
    """Breaks if a cut before a block's second use becomes one before its first."""
    plan = planned("gpt2", "pp").prefill
    program, pipeline = plan.program, plan.decisions.pipeline
    assert program is not None and pipeline is not None
    twice = tuple(replace(call, path="transformer.h.0") if call.path else call for call in program.calls)
    assert first_of_stages(replace(program, calls=twice), pipeline) == ("transformer.h.0#2",)


@pytest.mark.slow
def test_a_cut_is_named_by_what_has_parameters() -> None:
    """Breaks if a stage that begins with a mask, which other batches have no call for, is known by that call."""
    plan = planned("gpt2", "pp").decode
    program, pipeline = plan.program, plan.decisions.pipeline
    assert program is not None and pipeline is not None
    mask = replace(program.calls[0], arguments=())
    calls = (*program.calls[:3], mask, *program.calls[3:])
    stages = (pipeline.stages[0], Stage((3, 4, 5)))
    assert first_of_stages(replace(program, calls=calls), replace(pipeline, stages=stages)) == ("transformer.h.1",)


@pytest.mark.slow
def test_what_is_made_of_a_cache_is_made_where_it_is_kept() -> None:
    """Breaks if a stage may compute again for itself what is made of a cache that another one has."""
    program = planned("gpt2", "pp").decode.program
    assert program is not None
    assert 0 in repeatable_calls(program)
    reading = replace(program.calls[0], arguments=(ValueRef(name="past_key_values.0"),))
    assert 0 not in repeatable_calls(replace(program, calls=(reading, *program.calls[1:])))
    counting = replace(program.calls[0], arguments=(ValueRef(name="past_key_values.2"),))
    assert 0 in repeatable_calls(replace(program, calls=(counting, *program.calls[1:])))


@pytest.mark.slow
def test_a_token_is_not_placed_by_the_calls_of_the_prompt() -> None:
    """Breaks if decisions for the prompt's calls are read as if a token's program, which computes its mask by a call of
    its own, had the same ones: a KeyError, or layouts of other values.
    """
    prompt = planned("gpt2", "tp").prefill
    program = prompt.program
    assert program is not None and prompt.model is not None
    assert prompt.decisions.apply(program).phase == "placed"
    for calls in ((*program.calls, program.calls[-1]), program.calls[:-1]):
        with pytest.raises(AutoparError, match="made for another program"):
            prompt.decisions.apply(replace(program, calls=calls))
    token = phase_inputs(prompt.model, WANTED)["decode"]
    with pytest.raises(AutoparError, match="made for another program"):
        Family.of(prompt).plan(prompt.model, token)


@pytest.mark.slow
def test_cuts_part_no_state() -> None:
    """Breaks if a state that two calls touch does not hold them in one stage."""
    program = planned("gpt2", "pp").decode.program
    assert program is not None
    uses = state_uses(program)
    assert [each.name for each in uses] == [f"past_key_values.{number}" for number in (0, 1, 3, 4)]
    assert [each.span for each in uses] == [(each.maker, each.maker) for each in uses]
    maker = uses[0].maker
    wide = [replace(uses[0], readers=(maker, maker + 2))]
    assert [parts_states(wide, (0, cut)) for cut in range(maker, maker + 4)] == [False, True, True, False]


@pytest.mark.slow
def test_what_no_stage_can_keep_is_refused_by_operator() -> None:
    """Breaks if a cache that one stage reads and another one hands back is planned, so that the reader would have an
    old one; the error says which operator, and where.
    """
    plan = planned("gpt2", "pp").decode
    program, pipeline = plan.program, plan.decisions.pipeline
    assert program is not None and pipeline is not None
    check_states(program, pipeline.stages, (0, 1))
    last = program.calls[-1]
    region = program.region(last.region)
    asking = replace(last, arguments=(ValueRef(name="past_key_values.0"), *last.arguments[1:]))
    reading = replace(program, calls=(*program.calls[:-1], asking))
    with pytest.raises(AutoparError) as caught:
        check_states(reading, pipeline.stages, (0, 1))
    check_states(reading, pipeline.stages, (0, 0))  # both are on one rank
    assert "no stage of the pipeline can keep the state past_key_values.0" in str(caught.value)
    assert f"{region.name} by aten.native_layer_norm" in str(caught.value)
    assert "read in stage 1 by epilogue, made in stage 0 by transformer.h.0" in str(caught.value)
    assert "mesh without pp" in str(caught.value)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["pp", "tp"])
def test_what_an_encoder_gave_is_kept_where_it_is_read(mesh: str) -> None:
    """Breaks if keys that a decoder's block reads and nobody writes are handed back by another stage, so that they
    would have to travel, or if a rank lacks the encoder, which runs by itself on every one.
    """
    plan = planned("t5", mesh)
    for phase in plan:
        kept, program = keepers(phase.interface), phase.program
        assert program is not None
        assert [kept[f"past_key_values.{number}"] for number in (0, 1, 3, 4, 6, 7, 8, 9)] == [0, 0, 1, 1, 0, 0, 1, 1]
        assert not [use for use in state_uses(program) if set(use.readers) - {use.maker}]
        assert holders(phase.interface)["encoder.block.0.layer.0.SelfAttention.q.weight"] == (0, 1)
    assert holders(plan.prefill.interface) == holders(plan.decode.interface)
    # Half of the model on either stage, and the encoder on both.
    parameters = {each.name: _bytes(each) for each in plan.decode.interface.parameters}
    encoder = sum(size for name, size in parameters.items() if name.startswith("encoder."))
    split = MESHES[mesh][0].get("tp", 1)
    assert plan.decode.cost.memory.parameters > encoder / split + (sum(parameters.values()) - encoder) / 2 / split
    assert plan.decode.cost.memory.peak > plan.decode.cost.memory.parameters
    assert plan.verify().raise_on_failure().ok


@pytest.mark.parametrize(
    ("asked", "ranks"),
    [
        ("pipeline", (0, 1)),
        ("pipeline(1f1b)", (0, 1)),
        ("pipeline(interleaved)", (0, 1, 0, 1)),
        ("pipeline(zbv)", (0, 1, 1, 0)),
        ("pipeline(dualpipev)", (0, 1, 1, 0)),
        ("pipeline(greedy, 2)", (0, 1, 0, 1)),
    ],
)
def test_forwards_lie_on_the_ranks_of_training(asked: str, ranks: tuple[int, ...]) -> None:
    """Breaks if the stages of a token are on other ranks than those of a training step of the same wish."""
    spec = parse_spec(asked)
    assert spec is not None
    found = forwards(spec, 2)
    assert found.rank_of == ranks
    assert (found.num_microbatches, found.has_backward, found.name) == (1, False, schedules.FORWARDS)
    check(found, backward=False)


def test_forwards_of_a_cut_that_was_decided() -> None:
    """Breaks if the ranks that a first plan chose are chosen anew."""
    spec = replace(PipelineSpec("auto", 2, ("a", "b", "c")), rank_of=(0, 1, 1, 0))
    found: Schedule = forwards(spec, 2)
    assert found.rank_of == (0, 1, 1, 0)
