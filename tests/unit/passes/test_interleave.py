"""Exchanges of experts beside what does not depend on them: the same numbers, in an order that is predicted faster."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

import autopar
from autopar.api.plan import Plan
from autopar.base.errors import AutoparError
from autopar.cost.call_times import calls_of
from autopar.cost.collectives import phase_collectives
from autopar.cost.exchanges import Ways
from autopar.cost.memory.regions import Storages
from autopar.cost.memory.step import step_peak_bytes
from autopar.cost.operator_time import region_seconds, ways_of
from autopar.cost.under_way import hidden_beside, moving
from autopar.ir.program import Program
from autopar.ir.rings import SEND, TAKE, is_beside, is_exchange
from autopar.passes import interleave as module
from autopar.passes.interleave import interleave
from autopar.runtime.checker.program import check_types

pytestmark = pytest.mark.unit
BESIDE = ("comm.send_tokens(", "comm.take_tokens(")


def take_apart(patch: pytest.MonkeyPatch) -> None:
    """Whatever can run beside an exchange does, both ways: of small models all is latency."""
    patch.setattr(module, "WORTH", -1.0)
    patch.setattr(module, "LEAST", 0.0)
    patch.setattr(module, "ways_of", lambda *_: Ways(0.0, 4e-6, 4e-6))


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    take_apart(monkeypatch)


class Deep(nn.Module):
    """Layers whose shared expert comes behind the others, one after the other or side by side."""

    def __init__(self, layers: int = 1, hidden: int = 16, inner: int = 12, side_by_side: bool = False) -> None:
        super().__init__()
        config = transformers.DeepseekV3Config(
            hidden_size=hidden, moe_intermediate_size=inner, n_routed_experts=8, num_experts_per_tok=2, n_group=1,
            topk_group=1, n_shared_experts=1,
        )  # fmt: skip
        config._experts_implementation = "eager"
        self.first, self.last = nn.Linear(hidden, hidden), nn.Linear(hidden, 3)
        self.one = DeepseekV3MoE(config)
        self.other = DeepseekV3MoE(config) if layers > 1 else None
        self.side_by_side = side_by_side
        for each in self.parameters():
            nn.init.normal_(each, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = x + self.one(x)
        if self.other is not None:
            y = y + self.other(x if self.side_by_side else y)
        return self.last(y).square().mean()


class Qwen(nn.Module):
    """A layer whose shared expert comes before the others."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.Qwen2MoeConfig(
            hidden_size=16, moe_intermediate_size=12, shared_expert_intermediate_size=20, num_experts=8,
            num_experts_per_tok=2,
        )  # fmt: skip
        config._experts_implementation = "eager"
        self.layer, self.last = Qwen2MoeSparseMoeBlock(config), nn.Linear(16, 3)
        for each in self.parameters():
            nn.init.normal_(each, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.layer(x)
        return self.last(x + (mixed[0] if isinstance(mixed, tuple) else mixed)).square().mean()


class Alone(nn.Module):
    """A layer beside which there is nothing."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.MixtralConfig(hidden_size=16, intermediate_size=12, num_local_experts=4)
        config._experts_implementation = "eager"
        self.layer = transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock(config)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.layer(x)
        return (mixed[0] if isinstance(mixed, tuple) else mixed).square().mean()


def planned(model: nn.Module, strategy: Any = "expert", mesh: str = "dp=2", **options: Any) -> Plan:
    torch.manual_seed(0)
    return autopar.plan(
        model, autopar.Mesh.parse(mesh, hardware="cpu"), strategy=strategy, example_inputs={"x": torch.randn(4, 5, 16)},
        **options,
    )  # fmt: skip


MODELS = {
    "deep": Deep,
    "in a row": partial(Deep, 2),
    "side by side": partial(Deep, 2, side_by_side=True),
    "qwen": Qwen,
}


@pytest.mark.sampled(4)
@pytest.mark.moderate
@pytest.mark.parametrize("strategy", ["expert", "zero3+expert"])
@pytest.mark.parametrize("name", MODELS)
def test_numbers_are_the_same(name: str, strategy: str, always: None) -> None:
    """Breaks if a statement moves before what it reads, or behind what reads it; if a result is another exchange's."""
    torch.manual_seed(0)
    plan = planned(MODELS[name](), strategy)
    assert plan.source is not None and all(word in plan.source for word in BESIDE)
    assert plan.verify(rtol=1e-9).ok


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("strategy", "mesh"),
    [({"dp": "expert", "tp": "tensor"}, "dp=2,tp=2"), ({"dp": "zero2", "ep": "expert"}, "dp=2,ep=2")],
)
def test_beside_other_axes(strategy: Any, mesh: str, always: None) -> None:
    """Breaks if collectives of what is moved come in another order on some rank, or terms are not summed."""
    torch.manual_seed(0)
    plan = planned(Deep(2), strategy, mesh)
    assert plan.source is not None and "comm.take_tokens(" in plan.source
    assert plan.verify(rtol=1e-9).ok


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_halves_of_a_backward(schedule: str, always: None) -> None:
    """Breaks if a half of a backward, or a stage, waits for what another has sent."""
    from tests.unit.test_mixtures import model_of
    from tests.unit.test_mixtures import planned as of_model

    options = {"num_hidden_layers": 4} if schedule == "zbv" else {}
    strategy = {"pp": f"pipeline({schedule})", "dp": "expert"}
    plan = of_model(model_of("deepseek", **options), strategy, "pp=2,dp=2", rows=8)
    assert plan.source is not None and "comm.take_tokens(" in plan.source
    assert plan.verify(rtol=1e-9).ok


@pytest.mark.moderate
def test_recomputed_exchanges(always: None) -> None:
    """Breaks if what the backward computes again of an exchange, and its gradient, get each other's tokens."""
    torch.manual_seed(0)
    plan = planned(Deep(2), rematerialize="full")
    assert plan.source is not None and "comm.take_tokens(" in plan.source
    assert plan.verify(rtol=1e-9).ok


@pytest.mark.moderate
def test_how_it_reads(always: None) -> None:
    """Breaks if statements that belong together are torn apart, or variables do not say what they hold."""
    torch.manual_seed(0)
    source = planned(Qwen(), "expert").source
    assert source is not None
    body = source[source.index("_forward(comm") :]
    lines = [line.partition("  #")[0].strip() for line in body[: body.index("return")].splitlines()]
    at = {word: next(i for i, line in enumerate(lines) if word in line) for word in (*BESIDE, "comm.exchange_experts(")}
    assert lines[at["comm.send_tokens("]].startswith("sent = comm.send_tokens(")
    assert lines[at["comm.exchange_experts("]] == "experts = comm.exchange_experts("
    assert "sent=sent, later=True," in lines[at["comm.exchange_experts("] + 2]
    assert lines[at["comm.take_tokens("]] == "experts = comm.take_tokens(experts)"
    between = lines[at["comm.send_tokens("] + 1 : at["comm.take_tokens("]]
    assert sum("ops.linear(" in line and "shared_expert" in line for line in between) >= 2
    assert all("p[" not in line or "expert" in line for line in between)


@pytest.mark.moderate
def test_where_nothing_is_independent() -> None:
    """Breaks if an exchange is taken apart for nothing."""
    program = planned(Alone()).program
    assert program is not None and interleave(program) is program
    assert not any(is_beside(each) for region in program.regions for each in region.lowered.values())


# ------------------------------------------------------------------------------------------------- what it saves


@lru_cache(maxsize=2)
def large(beside: bool) -> Plan:
    """A layer whose shared expert takes about as long as its exchanges. No compute is slower beside what travels."""
    with torch.device("meta"):
        model, x = Deep(hidden=2048, inner=2048).bfloat16(), torch.empty(8, 2048, 2048, dtype=torch.bfloat16)
    hardware = replace(autopar.Mesh.parse("dp=8").hardware, overlap_slowdown=0.0, collective_busy=0.0)
    mesh = autopar.Mesh({"dp": 8}, hardware=hardware)
    patch = pytest.MonkeyPatch()
    if not beside:
        patch.setattr(module, "WORTH", float("inf"))
    try:
        return autopar.plan(model, mesh, strategy="expert", example_inputs={"x": x})
    finally:
        patch.undo()


def program_of(plan: Plan) -> Program:
    assert plan.program is not None
    return plan.program


@pytest.mark.moderate
def test_seconds_that_are_hidden() -> None:
    """Breaks if the plan's time knows nothing of what runs beside an exchange, or more is hidden than computes there,
    or than travels.
    """
    program = program_of(large(True))
    saved = 0.0
    for region in program.regions:
        seconds = region_seconds(region, program.on_mesh)
        for phase, lowered in region.phases.items():
            wanted, parts = 0.0, [0.0, 0.0]
            where = None
            ways = Ways(0.0, 0.0, 0.0)
            for node in lowered.graph.nodes:
                if node.target == SEND:
                    where, parts = 0, [0.0, 0.0]
                elif is_exchange(node):
                    name = node.meta["operator"]
                    where, ways = 1, ways_of(*region.ops[name], region.strategies[name], program.on_mesh)
                elif node.target == TAKE:
                    wanted += min(parts[0], ways.there_s) + min(parts[1], ways.back_s)
                    where = None
                elif where is not None and node.op == "call_function":
                    parts[where] += seconds.get(node.name, 0.0)
            assert hidden_beside(program, region, phase, seconds) == pytest.approx(wanted, abs=1e-12)
            saved += wanted
    assert saved > 2e-4
    plain, beside = large(False).cost, large(True).cost
    assert beside.compute_s == plain.compute_s and beside.communication_s == plain.communication_s
    assert beside.step_time_s < plain.step_time_s - 1e-4
    calls = [sum(c.forward_s + c.backward_s for c in calls_of(program_of(large(each)))) for each in (True, False)]
    assert calls[1] - calls[0] == pytest.approx(saved)


@pytest.mark.moderate
def test_what_travels_is_all_there() -> None:
    """Breaks if a way of an exchange is missing in the trace, or more is sent than the plan's tables say."""
    program = program_of(large(True))
    for region in program.regions:
        seconds = region_seconds(region, program.on_mesh)
        for phase in region.phases:
            rows = list(phase_collectives(program, region, phase, 1))
            found = moving(program, region, phase, seconds)
            assert sum(each.row.bytes_sent for each in found) == pytest.approx(sum(row.bytes_sent for row in rows))
            assert sum(each.end_s - each.start_s for each in found) == pytest.approx(sum(row.seconds for row in rows))


@pytest.mark.moderate
def test_memory_that_does_not_fit(always: None) -> None:
    """Breaks if what is on its way is left out of a step's peak, or a plan that fits without it is refused; if a saved
    plan is another one.
    """
    torch.manual_seed(0)
    model = Deep(inner=64).requires_grad_(False).eval()
    beside = planned(model)
    peak = step_peak_bytes(program_of(beside))
    limited = planned(model, memory_limit=peak - 1)
    assert beside.source is not None and "comm.take_tokens(" in beside.source
    assert limited.source is not None and "comm.take_tokens(" not in limited.source
    for plan in (beside, limited):
        loaded = Plan.from_json(plan.to_json())
        assert loaded.decisions.overlap is not None
        assert loaded.decisions.overlap.exchanges == (plan is beside)


@pytest.mark.moderate
def test_what_is_on_its_way_takes_memory(always: None) -> None:
    """Breaks if rows that travel while something else is computed are not in a phase's peak."""
    torch.manual_seed(0)
    program = program_of(planned(Deep(inner=64)))
    (region,) = program.regions
    mesh, lowered = program.on_mesh, region.lowered["forward"]
    for node in lowered.graph.nodes:  # what statements hold for themselves is apart
        node.meta.pop("buffers", None)
    held = [node.meta.pop("holds")(mesh.sizes) for node in lowered.graph.nodes if "holds" in node.meta]
    without = Storages(lowered, mesh).peak()
    (exchange,) = (node for node in lowered.graph.nodes if is_exchange(node))
    exchange.meta["holds"] = lambda _: 10_000
    assert len(held) == 2 and min(held) > 0
    assert 5_000 < Storages(lowered, mesh).peak() - without <= 10_000


# ------------------------------------------------------------------------------------------------- what is refused


@lru_cache(maxsize=1)
def two() -> Plan:
    patch = pytest.MonkeyPatch()
    take_apart(patch)
    torch.manual_seed(0)
    try:
        return planned(Deep(2))
    finally:
        patch.undo()


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (r"sent=(\w+), later", r"later", None),
        (r"(sent_\d) = comm\.send_tokens\((.*)\)", r"\1 = comm.send_tokens(\2); sent = \1", None),
        (r"sent=sent_\d", "sent=sent", "sent for another exchange"),
        (
            r'comm\.send_tokens\("dp", (\w+), (\w+), (\w+),',
            r'comm.send_tokens("dp", \1, \1, \2, \3,',
            "another exchange",
        ),
        (
            r'comm\.send_tokens\("dp", (\w+), (\w+), (\w+), (\w+), exp',
            r'comm.send_tokens("dp", \2, \1, \3, \4, exp',
            "another exchange",
        ),
        (r"(?s)(    experts = comm\.exchange_experts\(.*?\n    \)[^\n]*\n)", r"\1\1", "another exchange"),
        (r"experts=4\)", "experts=2)", "sent to 2 experts a rank, of which there are 4"),
        (r"later=True,", "", "no exchange with later=True"),
        (r"= comm\.take_tokens\((\w+)\)", r"= \1", "TypedComing"),
        (r"= comm\.take_tokens\((\w+)\)", r"= comm.take_tokens(\1); comm.take_tokens(\1)", "waits for is"),
        (r"sent = comm\.send", 'sent = comm.index("dp") == 0 and comm.send', "the number of its rank"),
    ],
)
def test_wrong_edits(old: str, new: str, says: str | None) -> None:
    """Breaks if a program passes whose exchange waits for another one's tokens, or whose ranks send in other orders, or
    that reads what is on its way; or if one that only waits at another place is refused.
    """
    source = two().source
    assert source is not None and re.search(old, source)
    text = re.sub(old, new, source, count=1)
    if says is None:
        check_types(text, two().interface)
        return
    with pytest.raises(AutoparError, match=says):
        check_types(text, two().interface)
