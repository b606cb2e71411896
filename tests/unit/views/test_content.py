"""What a report says: its words, items and rows are the plan's, and it can be made from a file alone."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

import autopar
from autopar.api.plan import Plan
from autopar.cli.models import catalogue
from autopar.ir.sharding import Replicate, Shard
from autopar.views.content import Findings, content_of
from autopar.views.text import plan_text
from autopar.views.words import axis_does, bound, in_words


def make_plan(name: str, mesh: str, strategy: Any, **options: Any) -> Plan:
    loaded = catalogue.load(name, tiny=True)
    parsed = autopar.Mesh.parse(mesh, hardware="h100")
    return autopar.plan(loaded.model, parsed, example_inputs=loaded.batch, strategy=strategy, **options)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan("gpt2", "dp=2,tp=2", {"dp": "zero3", "tp": "tensor+sequence"}, microbatches=2)


@pytest.fixture(scope="module")
def staged() -> Plan:
    return make_plan("gpt2", "pp=2,dp=2", {"pp": "pipeline(1f1b)", "dp": "zero2"}, microbatches=4)


@pytest.fixture(scope="module")
def content(plan: Plan) -> dict[str, Any]:
    return content_of(Plan.from_json(plan.to_json()), Findings(), [], {})


@pytest.mark.moderate
def test_a_loaded_plan_says_what_the_fresh_one_does(plan: Plan, content: dict[str, Any]) -> None:
    """Breaks if something that the report shows is not saved, or is no JSON."""
    fresh = json.dumps(content_of(plan, Findings(), [], {}), sort_keys=True)
    assert fresh == json.dumps(content, sort_keys=True)


@pytest.mark.moderate
def test_sums_are_the_plans(plan: Plan, content: dict[str, Any]) -> None:
    """Breaks if parts of the step or of the memory, or collectives, do not add up to what the plan says."""
    cost = plan.cost
    assert sum(part["seconds"] for part in content["step"]) == pytest.approx(cost.step_time_s, rel=1e-12)
    assert sum(row["bytes_sent"] for row in content["collectives"]) == sum(r.bytes_sent for r in plan.collectives)
    assert sum(axis["bytes"] for axis in content["mesh"]["axes"]) == sum(r.bytes_sent for r in plan.collectives)
    parts = plan.explain("cost")
    rows = {(row["op_class"], row["phase"]): row for row in content["operators"]}
    for row in parts.operators:
        own = rows[(row.op_class, row.phase)]
        assert own["seconds"] == pytest.approx(row.seconds), row
        assert own["flops"] == pytest.approx(row.flops) and len(rows) == len(parts.operators)
    assert sum(row["bytes_a_rank"] for row in content["parameters"]) == cost.memory.parameters
    assert content["headline"]["peak_bytes"] == cost.memory.peak


def test_members_of_classes_are_all_parameters(plan: Plan, content: dict[str, Any]) -> None:
    """Breaks if a parameter, or an alias of one, cannot be found in the report."""
    names = {name for row in content["parameters"] for name in row["members"]}
    assert names == {n for each in plan.interface.parameters for n in (each.name, *each.aliases)}
    assert "transformer.wte.weight" in names and "lm_head.weight" in names
    rows = {row["name"]: row for row in content["parameters"]}
    qkv = rows["transformer.h.*.attn.c_attn.weight"]
    split = next(axis for axis in qkv["placement"]["axes"] if axis["name"] == "tp")
    assert (split["dim"], split["outer"]) == (1, 3) and qkv["item"] in content["items"]


def test_items_lead_to_the_program(plan: Plan, content: dict[str, Any]) -> None:
    """Breaks if an operator's line is not where the program makes it, or one has none."""
    lines, anchors = plan.source.splitlines(), content["program"]["anchors"]
    seen = set()
    for region in plan.views.regions:
        for op in region.ops:
            line = lines[anchors[f"op:{region.name}.{op.name}"] - 1]
            function = next(each for each in reversed(lines[: lines.index(line)]) if each.startswith("def "))
            if lines.count(line) == 1:
                assert function.startswith(f"def {region.name}_{op.phase}("), (op, line)
            if (op.kind == "collective" and op.op != "reduce_scatter") or op.op in ("attention", "dropout"):
                assert f".{op.op}(" in line, (op, line)
                seen.add(op.op)
    assert {"all_gather", "all_reduce", "attention", "dropout"} <= seen


def test_items_say_what_they_are(content: dict[str, Any]) -> None:
    """Breaks if an operator has no sharding, source line, or cost; a member that is no item is a dead link."""
    items = content["items"]
    computed = [each for each in items.values() if each["kind"] == "operator"]
    products = [each for each in computed if each["title"].startswith(("linear", "addmm", "mm"))]
    assert products
    for each in products:
        facts = dict(each["facts"])
        assert re.match(r"(f32|bf16)\[", facts["Result"]) and "a call" in facts["Computes"]
    assert any(each["source"].startswith("modeling_gpt2.py:") for each in products)
    gathers = [each for each in items.values() if each["kind"] == "collective"]
    assert gathers and all("over " in dict(each["facts"])["Moves"] for each in gathers)
    assert all(member in items for each in items.values() for member in each["members"])


def test_every_collective_leads_somewhere(content: dict[str, Any]) -> None:
    """Breaks if a click on a collective leads nowhere."""
    lost = [row for row in content["collectives"] if row["item"] not in content["items"]]
    assert not lost


@pytest.mark.moderate
def test_a_pipeline_has_a_timeline_and_stages(staged: Plan) -> None:
    """Breaks if a rank, an action or a message is missing from the timeline, or the step has another length."""
    content = content_of(staged, Findings(), [], {})
    timeline = content["timeline"]
    assert [rank["name"] for rank in timeline["ranks"]] == ["pp rank 0", "pp rank 1"]
    assert timeline["step_s"] >= staged.cost.step_time_s - 1e-12
    compute = [e for rank in timeline["ranks"] for t in rank["tracks"] if t["name"] == "compute" for e in t["events"]]
    assert len(compute) == 2 * 2 * 4  # two stages, forward and backward, four microbatches
    assert len(timeline["arrows"]) == 2 * 4
    assert {"stage:0", "stage:1"} <= set(content["items"])
    head = next(row for row in content["parameters"] if "transformer.ln_f.weight" in row["members"])
    assert head["stages"] == [1] and content["headline"]["bubble"] > 0


def test_a_call_does_not_compute_while_it_waits(plan: Plan, content: dict[str, Any]) -> None:
    """Breaks if collectives inside a call are drawn as computing, or a click on one leads to another collective."""
    (rank,) = content["timeline"]["ranks"]
    tracks = {track["name"]: track["events"] for track in rank["tracks"]}
    inside = [event for name in ("node", "network") for event in tracks.get(name, ()) if event[3] == "collective"]
    assert inside and plan.views is not None
    for start, length, label, _, key in inside:
        assert key in content["items"] and dict(content["items"][key]["facts"])["Moves"].startswith(
            label.replace(" ", " over ", 1)
        )
        assert all(e[0] + e[1] <= start * (1 + 1e-9) or e[0] >= start + length * (1 - 1e-6) for e in tracks["compute"])
    spans = sum(span.end_s - span.start_s for span in plan.views.spans if span.track == "compute")
    assert sum(event[1] for event in tracks["compute"]) == pytest.approx(spans - sum(each[1] for each in inside))


def test_pins_of_another_program_were_not_asked_for(plan: Plan) -> None:
    """Breaks if where a token's weights lie, as the prompt's do, is told as what the user asked for, or a saved plan
    forgets whose pins they are.
    """
    own = autopar.pin("*.wte.weight", tp=Replicate())
    others = [replace(autopar.pin(f"h.{number}.ln_1.weight", dp=Shard(0)), taken=True) for number in range(2)]
    pinned = Plan.from_json(replace(plan, pins=(others[0], own, others[1])).to_json())
    assert [pin.taken for pin in pinned.pins] == [True, False, True]
    text = " ".join(in_words(pinned))
    assert "1 pin was asked for: *.wte.weight." in text
    assert "2 tensors lie as in another program of the model" in text
    assert ", 1 pin; 2 tensors as in another program of the model" in " ".join(plan_text(pinned).split())


@pytest.mark.moderate
def test_words(plan: Plan, staged: Plan) -> None:
    """Breaks if a sentence says of an axis what it does not do, or names the wrong thing as what bounds the step."""
    assert axis_does(plan, "dp").startswith("splits the batch; stores ")
    assert "the sequence" in axis_does(plan, "tp") and "computes with" in axis_does(plan, "tp")
    copies = make_plan("mlp", "dp=4", "ddp")
    assert axis_does(copies, "dp") == "splits the batch; holds all parameters, whose gradients it sums"
    text = " ".join(in_words(staged))
    assert "2 stages" in text and "schedule 1f1b" in text and "4 microbatches" in text
    assert re.match(r"(Compute|Communication|The pipeline|The optimizer)", bound(plan))


@pytest.mark.slow
def test_mfu_counts_the_models_own_operations() -> None:
    """Breaks if recomputation, copies of a computation, or microbatches change what counts as the model's work."""
    options: Any = {"strategy": "ddp", "microbatches": 2}
    plain = make_plan("mlp", "dp=2", **options)
    again = make_plan("mlp", "dp=2", **options, rematerialize="full")
    whole = make_plan("mlp", "dp=2", strategy="ddp")
    assert plain.views and again.views and whole.views
    assert plain.views.forward_flops == again.views.forward_flops == whole.views.forward_flops / 2 > 0
