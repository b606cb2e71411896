"""Plans with a pipeline, as users meet them: files, cache, dumps, explanations, reports, proofs, the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.api.again import replan
from autopar.api.plan import Plan
from autopar.api.proof import scaled_mesh
from autopar.cli.models import catalogue
from autopar.cli.models.catalogue import LoadedModel
from autopar.ir.sharding import Shard
from autopar.machine.mesh import Mesh
from autopar.strategies import names as strategies
from autopar.strategies.names import Strategy
from autopar.strategies.pipelining.spec import PipelineSpec
from autopar.views.text import one_line, plan_text
from tests.unit.commands import output

CSV = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@lru_cache(maxsize=8)
def load(model: str = "mlp", rows: int = 8, layers: int = 4) -> LoadedModel:
    overrides: Mapping[str, object] = {}
    if model in ("mlp", "llama"):
        overrides = {"num_layers" if model == "mlp" else "num_hidden_layers": layers}
    return catalogue.load(model, tiny=True, device="cpu", batch=(rows, 16), overrides=dict(overrides))


def plan_of(strategy: Strategy, mesh: str = "pp=2,dp=2", loaded: LoadedModel | None = None, **options: Any) -> Plan:
    loaded = loaded or load()
    parsed = Mesh.parse(mesh, hardware="h100")
    return autopar.plan(loaded.model, parsed, example_inputs=loaded.batch, strategy=strategy, **options)


@lru_cache(maxsize=1)
def chosen_for_llama() -> Plan:
    """A pipeline that `auto` chose."""
    return plan_of("pipeline", loaded=load("llama"), microbatches=4)


def data_of(plan: Plan) -> dict[str, Any]:
    """All that is saved but the times of planning."""
    return {name: value for name, value in json.loads(plan.to_json())["plan"].items() if name != "times"}


@pytest.mark.sampled(2)
@pytest.mark.moderate
@pytest.mark.parametrize(
    "strategy",
    [
        {"pp": "pipeline(1f1b)", "dp": "zero2"},
        {"pp": "pipeline(interleaved, 2)", "dp": "zero3"},
        {"pp": strategies.pipeline("greedy", cut=["layers.1"]), "dp": "ddp"},
        "pipeline",
    ],
    ids=["1f1b", "interleaved", "cut", "auto"],
)
def test_through_a_file_and_onto_the_model_again(strategy: Strategy, tmp_path: Path) -> None:
    """Breaks if a stage, the schedule or what was asked is lost in a file, or the program differs when it is written
    again from the decisions.
    """
    plan = plan_of(strategy, microbatches=4)
    path = tmp_path / "plan.json"
    plan.save(path)
    again = Plan.load(path)
    assert again.to_json() == plan.to_json() == path.read_text()
    assert again.pipeline == plan.pipeline and again.decisions == plan.decisions and again.asked == plan.asked
    assert again.strategy == plan.strategy and str(again) == str(plan) and again.stage_mesh == plan.stage_mesh
    loaded = load()
    redone = replan(again, loaded.model, loaded.batch, Mesh.parse("pp=2,dp=2", hardware="h100"))
    assert redone.source == plan.source and redone.interface == plan.interface
    assert data_of(redone) == data_of(plan)
    assert redone.verify().ok


@pytest.mark.moderate
def test_a_schedule_of_a_file_is_in_the_plan(tmp_path: Path) -> None:
    """Breaks if a saved plan needs the CSV that it was made with."""
    file = tmp_path / "own.csv"
    file.write_text(CSV)
    plan = plan_of({"pp": f"pipeline({file})", "dp": "zero2"})
    assert plan.asked == PipelineSpec(str(file), rows=CSV) and plan.interface.microbatches == 2
    file.unlink()
    loaded = load()
    again = Plan.from_json(plan.to_json())
    assert replan(again, loaded.model, loaded.batch, plan.mesh).source == plan.source
    assert plan.verify().ok
    name = "layers.*.up.weight"
    assert again.explain(name, model=loaded.model, example_inputs=loaded.batch).alternatives


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto", {"pp": "pipeline", "dp": "zero2"}])
def test_the_cache_of_plans(strategy: Strategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a plan with a pipeline is not found again, is found for another schedule, or is another one then."""
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    first, second = plan_of(strategy), plan_of(strategy)
    assert not first.from_cache and second.from_cache
    assert data_of(first) == data_of(second)
    assert not plan_of({"pp": "gpipe", "dp": "zero2"}).from_cache
    assert not plan_of({"pp": strategies.pipeline("gpipe", cut=["layers.1"]), "dp": "zero2"}).from_cache
    file = tmp_path / "own.csv"
    file.write_text(CSV)
    own = {"pp": f"pipeline({file})", "dp": "zero2"}
    assert not plan_of(own).from_cache and plan_of(own).from_cache
    file.write_text("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n")
    changed = plan_of(own)
    assert not changed.from_cache and changed.source != first.source


@pytest.mark.moderate
def test_dumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if the stages are not to be seen in the dumped program."""
    monkeypatch.setenv("AUTOPAR_DUMP", str(tmp_path))
    plan_of("pipeline(1f1b)", microbatches=2)
    (path,) = tmp_path.glob("*_split_stages.txt")
    head, first, second = path.read_text().splitlines()[-3:]
    assert head == "  pipeline 1f1b over pp=2"
    assert re.fullmatch(r"    stage 0 on 0: calls 0, 1.*; receives -; sends \d\.0", first)
    assert re.fullmatch(r"    stage 1 on 1: calls .*, 4; receives \d\.0; sends -", second)


@pytest.mark.slow
def test_explanations_leave_the_cut_alone() -> None:
    """Breaks if an alternative is priced on other stages, so that its numbers do not compare with the plan's."""
    plan = chosen_for_llama()
    found = plan.explain("model.layers.*.mlp.down_proj.weight", max_alternatives=3)
    assert found.chosen.step_time_s == plan.cost.step_time_s and found.alternatives
    for row in found.alternatives:
        assert row.peak_bytes > 0 and abs(row.relative) < 2
    assert "pp=2 × dp=2" in str(found)
    # Pinned as the plan has it and cut as the plan is, the cost is the plan's.
    assert plan.asked is not None and plan.pipeline is not None and plan.decisions.pipeline is not None
    stages = plan.decisions.pipeline.stages
    first = tuple(min(set(stage.calls) - set(stage.recomputed)) for stage in stages)[1:]
    schedule = plan.pipeline.schedule
    spec = PipelineSpec(schedule.name, len(stages) // 2, first, rank_of=schedule.rank_of)
    again = plan_of({"pp": spec}, loaded=load("llama"), microbatches=4)
    assert again.cost.step_time_s == pytest.approx(plan.cost.step_time_s, rel=1e-6)


@pytest.mark.moderate
def test_no_alternative_over_the_memory_limit() -> None:
    """Breaks if the fullest rank of an alternative's pipeline is not held against the limit."""
    strategy = {"pp": "1f1b", "dp": "auto"}
    free = plan_of(strategy, microbatches=4, rematerialize="none")
    limit = free.cost.peak_memory_bytes
    plan = plan_of(strategy, microbatches=4, memory_limit=limit, rematerialize="none")
    found = plan.explain("layers.*.up.weight")
    assert all(row.peak_bytes <= limit for row in found.alternatives)


@pytest.mark.parametrize(
    ("sizes", "least", "wanted"),
    [
        ({"pp": 4, "dp": 4, "tp": 4}, {"pp": 2}, {"pp": 2, "dp": 2, "tp": 4}),
        ({"pp": 16, "dp": 64, "tp": 8}, {"pp": 2}, {"pp": 2, "dp": 2, "tp": 4}),
        ({"pp": 3, "dp": 16}, {"pp": 2}, {"pp": 3, "dp": 4}),
        ({"pp": 17}, {"pp": 2}, {"pp": 2}),
        ({"pp": 32, "dp": 2}, {"pp": 32}, {"pp": 32, "dp": 1}),
        ({"pp": 2, "dp": 2}, {"pp": 2}, {"pp": 2, "dp": 2}),
        ({"dp": 64}, {}, {"dp": 16}),
    ],
)
def test_a_proof_scales_the_mesh_down(sizes: dict[str, int], least: dict[str, int], wanted: dict[str, int]) -> None:
    """Breaks if a pipeline of many ranks is proven without one."""
    mesh, scaled = scaled_mesh(Mesh(sizes, hardware="h100"), least)
    assert dict(mesh.axes) == wanted and scaled == (wanted != sizes)


@pytest.mark.slow
def test_proofs_on_more_ranks_than_there_are(tmp_path: Path) -> None:
    """Breaks if a large pipeline cannot be proven, or is proven with a schedule that its microbatches do not suit."""
    deep = load(rows=36, layers=34)
    proof = plan_of({"pp": "zero_bubble"}, "pp=32", deep, microbatches=36).verify()
    assert proof.ok and proof.scaled_down and proof.mesh == "pp=16"
    # 18 microbatches go over 9 rounds of 2 or 3 of 6 ranks, not over 4 rounds of 4.
    deep = load(rows=36, layers=12)
    proof = plan_of({"pp": "interleaved", "dp": "zero2"}, "pp=6,dp=6", deep, microbatches=6).verify()
    assert proof.ok and proof.scaled_down
    file = tmp_path / "own.csv"
    file.write_text(CSV)
    proof = plan_of({"pp": f"pipeline({file})", "dp": "zero2"}, "pp=2,dp=16", load(rows=64)).verify()
    assert proof.ok and proof.mesh == "pp=2 × dp=8"


@pytest.mark.moderate
def test_an_edited_program() -> None:
    """Breaks if an edit of a pipeline's program is passed over by the proof."""
    plan = plan_of({"pp": "1f1b", "dp": "zero2"}, microbatches=2)
    assert plan.with_source(plan.source + "\n# read\n").verify().ok
    edited = plan.source.replace("F.gelu(", "F.relu(")
    assert edited != plan.source
    proof = plan.with_source(edited).verify()
    assert not proof.ok and not proof.scaled_down


@pytest.mark.slow
def test_reduced_precision() -> None:
    """Breaks if a plan whose casts make it another program than the proof's cannot be proven."""
    plan = plan_of({"pp": "1f1b", "dp": "zero2"}, loaded=load("llama"), microbatches=4, precision="bf16")
    assert "bf16" in plan.source or "bfloat16" in plan.source
    assert Plan.from_json(plan.to_json()).source == plan.source
    assert plan.verify().ok


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "strategy", "stages", "layers"),
    [
        ("pp=1,dp=2", "pipeline", 1, 18),
        ("pp=4", "1f1b", 4, 18),
        ("pp=8", "pipeline(interleaved, 2)", 16, 18),
        ("pp=64", "1f1b", 64, 70),
    ],
)
def test_what_is_printed(mesh: str, strategy: str, stages: int, layers: int) -> None:
    """Breaks if a line is too wide, stages are missing, or a number is noise."""
    plan = plan_of(strategy, mesh, load(rows=64, layers=layers), microbatches=None if stages == 1 else 16)
    text = plan_text(plan)
    assert max(map(len, text.splitlines())) <= 120
    header = re.search(r"(?m)^pipeline   (\S+), \d+ microbatch(?:es)?, (\d+) stages?[,;]", text)
    assert header is not None and int(header[2]) == stages
    table = text[text.index("Stages\n") : text.index("Collectives")]
    ranks = plan.mesh.size("pp")
    assert len(re.findall(r"(?m)^\d+ ", table)) == min(ranks, 32) and ("\n…" in table) == (ranks > 32)
    assert "layers.0" in table and "epilogue" in table
    assert ("dp=auto" in text) == ("dp" in mesh)
    assert not re.search(r"0\.0000\d* ns", text)
    assert plan.pipeline is not None and plan.pipeline.schedule.name in one_line(plan)
    assert "1 microbatches" not in text + one_line(plan) and "1 stages" not in text


@pytest.mark.slow
def test_microbatches_by_themselves() -> None:
    """Breaks if the number chosen is none of those that the batch and the data-parallel ranks admit."""
    for strategy in ("pipeline(1f1b)", "pipeline(interleaved)", "pipeline(zbv)", "pipeline"):
        plan = plan_of({"pp": strategy, "dp": "zero2"}, "pp=2,dp=3", load(rows=18))
        assert 18 % plan.interface.microbatches == 0 and 18 // plan.interface.microbatches % 3 == 0


@pytest.mark.slow
def test_the_step_is_the_simulated_one() -> None:
    """Breaks if header, table and trace speak of different steps."""
    plan = chosen_for_llama()
    line = plan.pipeline.timeline
    assert plan.cost.step_time_s == pytest.approx(line.makespan_s + plan.cost.optimizer_s)
    assert plan.cost.peak_memory_bytes == pytest.approx(max(line.peak_bytes), abs=1)
    assert plan.cost.waiting_s >= 0 and plan.cost.communication_s >= 0
    rows = plan.bytes_by_axis()
    assert rows["pp"] > 0 and set(rows) == {"pp", "dp"}


@pytest.mark.moderate
def test_the_command_line(tmp_path: Path) -> None:
    """Breaks if a pipeline is missing in what machines read, or in the list of strategies."""
    rows = json.loads(output("strategies", "--json"))
    names = [row["name"] for row in rows]
    assert [name for name in names if name.startswith("pipeline")] == [
        "pipeline", *(f"pipeline({name})" for name in
        ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "greedy", "dualpipev")),
    ]  # fmt: skip
    assert max(map(len, output("strategies").splitlines())) <= 120
    words = ["plan", "mlp", "--tiny", "--layers", "4", "--mesh", "pp=2,dp=2", "--microbatches", "4"]
    words += ["--strategy", "pp=pipeline(interleaved, 2),dp=zero2", "--save", str(tmp_path / "plan.json")]
    text = output(*words, "--json")
    data = json.loads(text[text.index("{\n") :])
    assert data["pipeline"]["schedule"] == "interleaved" and len(data["pipeline"]["stages"]) == 4
    assert data["pipeline"]["ranks"] == 2 and data["waiting_s"] > 0 and data["microbatches"] == 4
    out = output(*words, "--trace", str(tmp_path / "trace.json"), "--source", str(tmp_path / "program.py"))
    assert (tmp_path / "trace.json").exists()
    following = re.search(r"(?m)^Next: autopar (verify .*)$", out)
    assert following is not None and "--layers 4" in following[1]
    assert "ok: " in output(*following[1].replace("'", "").replace("interleaved, 2", "interleaved:2").split())
    answer = output("explain", str(tmp_path / "plan.json"), "layers.0.up.weight")
    assert "pp=pipeline(interleaved, 2), dp=zero2" in answer


@pytest.mark.moderate
def test_the_next_command_of_a_file(tmp_path: Path) -> None:
    """Breaks if the command that the plan proposes does not run."""
    file = tmp_path / "own.csv"
    file.write_text(CSV)
    out = output("plan", "mlp", "--tiny", "--layers", "4", "--mesh", "pp=2,dp=4", "--strategy", f"pp=pipeline({file})")
    following = re.search(r"(?m)^Next: autopar (verify .*)$", out)
    assert "ok: " in output(*following[1].replace("'", "").split())


NAMED: list[tuple[str, str, Strategy]] = [
    ("llama", "pp=2,dp=2,tp=2", {"pp": "pipeline(1f1b)", "dp": "zero2", "tp": "tensor+sequence"}),
    ("llama", "pp=2,dp=2", {"pp": "1f1b", "dp": "zero1"}),
    ("llama", "pp=2,dp=2", {"pp": "zero_bubble", "dp": "zero3"}),
    ("llama", "pp=2,node=2,dp=2", "hsdp"),
    ("llama", "pp=2,node=2,dp=2", {"pp": "interleaved", "node": "hsdp", "dp": "hsdp"}),
    ("llama", "pp=2,tp0=2,tp1=2", {"pp": "zbv", "tp0": "tensor2d", "tp1": "tensor2d"}),
    ("gpt2", "pp=2,dp=2", {"pp": "greedy", "dp": "zero2"}),
    ("t5", "pp=2,tp=2", {"pp": "1f1b", "tp": "tensor"}),
    ("whisper", "pp=2,dp=2", {"pp": "1f1b", "dp": "zero3+keep"}),
    ("vit", "dp=2,pp=2", "zero2"),
    ("bert", "pp=2,dp=2", "auto"),
]


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh", "strategy"), NAMED)
def test_named_strategies_inside_a_pipeline(model: str, mesh: str, strategy: Strategy) -> None:
    """Breaks if a strategy of the stages' axes and the stages do not go together."""
    plan = plan_of(strategy, mesh, load(model, 16), microbatches=4)
    proof = plan.verify()
    assert proof.ok, proof.worst
    kinds = {row.kind for row in plan.collectives if row.why in ("gather parameter", "reduce gradient")}
    if strategy == {"pp": "1f1b", "dp": "zero1"}:
        assert kinds == {"all_gather", "reduce_scatter"}


@pytest.mark.moderate
@pytest.mark.parametrize("strategy", ["zero2", "zero3", "ddp"])
def test_modes_of_parameters_in_a_stage(strategy: str) -> None:
    """Breaks if what a stage holds for the step is held for each use, or the other way round."""
    plan = plan_of({"pp": "1f1b", "dp": strategy}, microbatches=4)
    held = [layout.held != layout.stored for layout in plan.decisions.placement.parameters.values()]
    assert any(held) == (strategy == "zero2")
    assert plan.verify().ok


@pytest.mark.moderate
def test_pins_of_parameters() -> None:
    """Breaks if a pin is not kept where there are stages."""
    plan = plan_of("pipeline(1f1b)", microbatches=2, constraints=[strategies.pin("layers.*.up.weight", dp=Shard(1))])
    shardings = {p.name: p.sharding for p in plan.interface.parameters}
    assert shardings["layers.3.up.weight"] == (Shard(1),)
    assert plan.verify().ok
