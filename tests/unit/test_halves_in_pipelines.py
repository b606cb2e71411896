"""Two microbatches at a time through the stages of a pipeline: the same numbers, and where it pays."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

import autopar
from autopar.api import interpret
from autopar.api.plan import Plan
from autopar.base.errors import AutoparError
from autopar.cli.output import next_command, plan_data
from autopar.cost.memory.calls import parameter_costs
from autopar.runtime.comm import RecordingComm
from autopar.runtime.dry_run import dry_events
from autopar.runtime.holders import held_by
from autopar.runtime.loader import load_program
from autopar.runtime.microbatches import make_batch
from autopar.runtime.pipeline import PipelineProgram, PipelineStep
from autopar.runtime.simulate import simulate
from autopar.runtime.simulated_comm import SimulatedMesh
from autopar.runtime.simulation import shard_state
from autopar.views.picture import dot_source
from autopar.views.words import in_words
from tests.unit.passes.test_interleave import program_of
from tests.unit.passes.test_pair_memory import as_processes_do
from tests.unit.passes.test_stage_costs import LiveBytes

pytestmark = pytest.mark.unit
HALVES: dict[str, Any] = {"microbatches": 4, "halves": True}


class Block(nn.Module):
    """A mixture beside a shared expert, and numbers drawn at random."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        config = transformers.Qwen2MoeConfig(
            hidden_size=16, moe_intermediate_size=12, shared_expert_intermediate_size=20, num_experts=4,
            num_experts_per_tok=2,
        )  # fmt: skip
        config._experts_implementation = "eager"
        self.mixture, self.dropout = Qwen2MoeSparseMoeBlock(config), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mixture(x)
        return x + self.dropout(mixed[0] if isinstance(mixed, tuple) else mixed)


class Model(nn.Module):
    """An average over the tokens that a mask leaves (of none of them it is 0 / 0), and what it is of."""

    def __init__(self, blocks: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        torch.manual_seed(0)
        for each in self.parameters():
            nn.init.normal_(each, std=0.3)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        y = self.last(x)
        return (y.square().mean(-1) * mask).sum() / mask.sum(), y


def batch_of(rows: int = 8) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(rows, 5, 16), "mask": torch.ones(rows, 5)}


def planned(schedule: str = "1f1b", model: nn.Module | None = None, rows: int = 8, **options: Any) -> Plan:
    strategy = {"pp": f"pipeline({schedule})", "dp": options.pop("strategy", "expert")}
    mesh = autopar.Mesh.parse(options.pop("mesh", "pp=2,dp=2"), hardware=options.pop("hardware", "cpu"))
    model = Model() if model is None else model
    batch = options.pop("batch", None) or batch_of(rows)
    return autopar.plan(model, mesh, strategy=strategy, example_inputs=batch, **options)


@lru_cache(maxsize=1)
def drawn() -> Plan:
    return planned(model=Model(dropout=0.3), **HALVES)


@pytest.mark.moderate
def test_each_draws_what_it_would_alone() -> None:
    """Breaks if a stage computes one microbatch of two, hands one's values to the other, loses gradients of one, or has
    both draw the same numbers, or others than in turn.
    """
    plan = drawn()
    interface, pipeline = plan.interface, plan.interface.pipeline
    assert (interface.together, interface.microbatches) == (2, 4) and pipeline is not None
    assert [len(each) for each in (pipeline.stages[0].sends, pipeline.stages[1].receives)] == [2, 2]
    assert "0F1" in pipeline.order[0] and "0F2" not in pipeline.order[0]
    assert plan.source is not None and "seed[1]" in plan.source
    assert plan.verify(rtol=1e-9).ok


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "microbatches", "options"),
    [
        ("gpipe", 2, {"strategy": "zero3+expert"}), ("zero_bubble", 8, {"rows": 16}),
        ("interleaved,2", 4, {"rematerialize": "full"}), ("greedy", 6, {"rows": 12}),
    ],
)  # fmt: skip
def test_numbers_are_the_same(schedule: str, microbatches: int, options: dict[str, Any]) -> None:
    """Breaks if a schedule runs other microbatches than there are, or halves of a backward take the other's."""
    plan = planned(schedule, microbatches=microbatches, halves=True, **options)
    assert plan.interface.together == 2 and plan.pipeline is not None
    assert plan.pipeline.schedule.num_microbatches == microbatches // 2
    assert plan.verify(rtol=1e-9).ok


@pytest.mark.moderate
@pytest.mark.parametrize("rows", [[2, 3], [0, 1, 4, 5]])  # the second microbatch's, of one rank; the first two
def test_microbatches_without_weight(rows: list[int]) -> None:
    """Breaks if what a microbatch computes as 0 / 0 gets into the gradients by way of the other, if one that goes alone
    counts twice, gradients of those before are lost, or there are none to reduce.
    """
    model, batch = Model().double(), {name: x.double() for name, x in batch_of().items()}
    plan = of_doubles()
    batch["mask"][rows if len(rows) > 2 else [*rows, *(row + 4 for row in rows)]] = 0
    assert [each.combine for each in plan.interface.outputs] == ["weighted", "concat"] and plan.source is not None
    state = interpret.state_of(model, program_of(plan))
    loss, made = model(**batch)
    loss.backward()
    found = simulate(plan.interface, plan.source, state, batch)
    torch.testing.assert_close(found.outputs, (loss.detach(), made.detach()))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.gradients[name], parameter.grad)
    alone = simulate(plan.interface, plan.source, state, batch, backward=False)
    torch.testing.assert_close(alone.outputs, found.outputs)


@lru_cache(maxsize=1)
def of_doubles() -> Plan:
    batch = {name: x.double() for name, x in batch_of().items()}
    return planned(model=Model().double(), batch=batch, **HALVES)


@pytest.mark.moderate
def test_a_saved_plan() -> None:
    """Breaks if a plan forgets that microbatches go together, or what is written from it afresh is another program."""
    plan = of_doubles()
    loaded = Plan.from_json(plan.to_json())
    assert loaded.interface == plan.interface and loaded.decisions == plan.decisions
    from autopar.api.again import replan

    batch = {name: x.double() for name, x in batch_of().items()}
    assert replan(loaded, Model().double(), batch, plan.mesh).source == plan.source


@pytest.mark.moderate
def test_what_ranks_compare_before_a_step() -> None:
    """Breaks if the check before the first step looks at other messages than the step sends."""
    plan, batch = of_doubles(), {name: x.double() for name, x in batch_of().items()}
    assert plan.source is not None
    found = simulate(plan.interface, plan.source, interpret.state_of(Model().double(), program_of(plan)), batch)
    for rank, events in enumerate(found.events):
        comm = RecordingComm(("pp", "dp"), (2, 2), rank)
        dry = dry_events(comm, plan.interface, plan.source)
        assert dry is not None and len(dry) == len(events)
        assert [each.where for each in dry] == [each.where for each in events]


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"strategy": "zero2"}, "no tokens travel to experts"),
        ({"microbatches": 3, "rows": 12}, "cannot go through a pipeline two at a time"),
        ({"schedule": "dualpipev"}, "4 microbatches, two at a time, are 2 for a schedule"),
    ],
)
def test_refused(options: dict[str, Any], says: str) -> None:
    """Breaks if what was asked for is left out silently, or a schedule is taken for microbatches that it has not."""
    with pytest.raises(AutoparError, match=says):
        planned(**{**HALVES, **options})


@pytest.mark.moderate
def test_what_people_look_at(tmp_path: Path) -> None:
    """Breaks if a view takes a schedule's pairs for microbatches, or tells them as such."""
    plan = drawn()
    text = str(plan)
    assert "4 microbatches a step, two at a time" in text and "1f1b, 2 pairs of microbatches" in text
    assert "To the next stage, for each pair: " in text and "what is in flight, are of pairs" in text
    events = json.loads(plan.trace(tmp_path / "trace.json").read_text())
    events = events["traceEvents"] if isinstance(events, dict) else events
    numbers = {each["name"]: each["args"]["microbatch"] for each in events if "microbatch" in each.get("args", {})}
    assert (numbers["0F0"], numbers["1B1"]) == ("0, 1", "2, 3")
    assert plan_data(plan, [])["pipeline"]["microbatches"] == 4
    following = next_command("gpt2", plan, "pp=pipeline(1f1b),dp=expert")
    assert following.endswith("--batch 32x16 --microbatches 8 --halves")
    dot = dot_source(plan)
    assert "1f1b, 2 pairs of microbatches" in dot and "of one pair of microbatches" in dot
    assert "4 microbatches two at a time" in " ".join(in_words(plan))


def held(plan: Plan, model: nn.Module, batch: dict[str, Tensor]) -> list[float]:
    """What each rank of the pipeline holds at most in a step, to what its timeline says, parameters and optimizer
    states left out of both.
    """
    summary, program = plan.pipeline, program_of(plan)
    assert summary is not None and plan.source is not None
    state, costs = interpret.state_of(model, program), parameter_costs(program)
    pipelined = PipelineProgram(load_program(plan.source, "<held>"), plan.interface)

    def stored(rank: int) -> float:
        return sum(costs[name].static_bytes - costs[name].waiting_bytes for name in names_of(plan, rank))

    def run(comm: Any) -> tuple[int, int]:
        inner, place = comm.within(plan.interface.axes), comm.index("pp")
        with torch.no_grad():
            own = shard_state(inner, plan.interface, state, names_of(plan, place))
            step = PipelineStep(pipelined, make_batch(pipelined.program, plan.interface, inner, batch), comm, 0)
            with LiveBytes([*batch.values(), *own.values()]) as live:
                step.train(own, (torch.ones(()),))
        return place, live.peak

    most = SimulatedMesh(("pp", "dp"), (2, 2), 60.0).run(run)
    return [
        max(peak for place, peak in most if place == rank) / (summary.timeline.peak_bytes[rank] - stored(rank))
        for rank in (0, 1)
    ]


def names_of(plan: Plan, rank: int) -> list[str]:
    return [entry.name for entry in held_by(plan.interface, rank)]


@pytest.mark.moderate
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_no_more_is_held_than_planned(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if what both microbatches of a pair keep, or have on its way, is not in the peak of a pipeline's rank.
    Every token goes to experts of one rank, or where the router sends it.
    """
    as_processes_do(monkeypatch)
    torch.manual_seed(0)
    model, batch = Model(), {"x": torch.randn(8, 64, 16), "mask": torch.ones(8, 64)}
    plan = planned(schedule, model=model, batch=batch, **HALVES)
    shares = held(plan, model, batch)
    for block in model.blocks:
        assert isinstance(block, Block)
        nn.init.zeros_(block.mixture.gate.weight)
    hot = held(plan, model, batch)
    assert max(*shares, *hot) <= 1, (shares, hot)
    assert min(hot) > 0.6, hot


def layers(**options: Any) -> Plan:
    """Layers of the size of Qwen3-30B's in two stages, over the network between nodes; nothing has to fit."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=4096, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=2,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=64, num_experts_per_tok=8,
        use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config)
        ids = torch.zeros((512, 4096), dtype=torch.int64)
    return autopar.plan(
        model, autopar.Mesh({"pp": 2, "dp": 16}, hardware="h100"), precision="bf16", memory_limit=1e15,
        strategy={"pp": "pipeline(1f1b)", "dp": "zero2+expert"}, rematerialize="none",
        example_inputs={"input_ids": ids, "labels": ids}, **options,
    )  # fmt: skip


@pytest.mark.slow
def test_where_it_is_faster() -> None:
    """Breaks if what the other microbatch hides is not in the seconds of a stage, or pairs are not half as many,
    if as many are cut as for a schedule that runs them in turn, or pairs are predicted as one.
    """
    plan, in_turn = layers(microbatches=16), layers(microbatches=16, halves=False)
    assert (plan.interface.together, in_turn.interface.together) == (2, 1)
    assert plan.cost.step_time_s < 0.9 * in_turn.cost.step_time_s
    assert plan.pipeline is not None and in_turn.pipeline is not None
    assert plan.pipeline.timeline.bubble_share > in_turn.pipeline.timeline.bubble_share
    pair, single = plan.pipeline.stages[1].cost, in_turn.pipeline.stages[1].cost
    assert pair.forward_s < 1.9 * single.forward_s and pair.backward_bytes == 2 * single.backward_bytes
    assert pair.saved_bytes == 2 * single.saved_bytes
    free = layers()
    assert free.interface.together == 2 and free.pipeline is not None
    assert free.interface.microbatches == 2 * free.pipeline.schedule.num_microbatches > 16
    assert free.cost.step_time_s <= plan.cost.step_time_s
