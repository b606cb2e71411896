"""The plan's tables: what they say, that they are the same each time, and the units."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

import autopar
from autopar.api.again import replan
from autopar.api.plan import Plan
from autopar.base.text import WIDTH, format_bytes, format_count, format_time
from autopar.cli.models import catalogue
from autopar.cli.output import plan_data
from autopar.ir.names import starred
from autopar.ir.sharding import Shard
from autopar.views.text import collective_groups, memory_price_text, one_line, parameter_groups, plan_text


@pytest.fixture(scope="module")
def plan() -> Plan:
    loaded = catalogue.load("mlp", tiny=True, batch=(8, 1))
    mesh = autopar.Mesh.parse("dp=2,tp=2", hardware="h100")
    return autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, strategy={"dp": "zero3", "tp": "tensor"})


def test_units() -> None:
    """Breaks if a number of the tables loses its unit, its three digits, or rounds up to 1000."""
    assert [format_bytes(n) for n in (0, 999, 1000, 1536, 999.9 * 1024, 80 * 2**30)] == [
        "0 B", "999 B", "0.977 KiB", "1.50 KiB", "1000 KiB", "80.0 GiB",
    ]  # fmt: skip
    assert [format_time(t) for t in (0, 2.5e-9, 1.23e-5, 0.0012, 2.5, 123.4)] == [
        "0 s", "2.50 ns", "12.3 µs", "1.20 ms", "2.50 s", "123 s",
    ]  # fmt: skip
    assert [format_count(n) for n in (950, 8.03e9, 4.05e11)] == ["950", "8.03 billion", "405 billion"]
    assert format_time(math.inf) == "inf s"


@pytest.mark.moderate
def test_every_part_is_there(plan: Plan) -> None:
    """Breaks if print(plan) leaves out the mesh, a region, a parameter, a collective, the memory or the solver."""
    text = str(plan)
    assert text == plan_text(plan)
    for part in ("MLP", "dp=2 × tp=2", "dp=zero3, tp=tensor", "h100", "layers.*", "predicted ="):
        assert part in text
    for title in ("Regions", "Parameters", "Collectives", "Memory of one rank", "Solver:"):
        assert title in text
    assert "layers.*.up.weight" in text and "f32[64/tp, 32/dp]" in text and "f32[64/tp, 32]" in text
    assert "gather parameter" in text and "reduce_scatter" in text


@pytest.mark.moderate
def test_text_is_plain_narrow_and_repeatable(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if the terminal, its width or its colours get into the text, or a line is wider than 120."""
    text = str(plan)
    for name, value in (("FORCE_COLOR", "1"), ("COLUMNS", "40"), ("TERM", "xterm-256color")):
        monkeypatch.setenv(name, value)
    assert str(plan) == text
    assert "\x1b" not in text and max(map(len, text.splitlines())) <= WIDTH
    assert all(line == line.rstrip() for line in text.splitlines())


@pytest.mark.moderate
def test_a_loaded_plan_prints_the_same(plan: Plan) -> None:
    """Breaks if a table needs more than what is saved."""
    assert str(Plan.from_json(plan.to_json())) == str(plan)


def test_blocks_are_folded(plan: Plan) -> None:
    """Breaks if a deep model prints a row a layer, or rows of different layouts become one."""
    groups = dict(parameter_groups(plan))
    assert len(groups["layers.*.up.weight"]) == 2 and len(groups["classifier.weight"]) == 1
    assert sum(map(len, groups.values())) == len(plan.interface.parameters)


def test_only_the_number_of_a_block_becomes_a_star() -> None:
    """Breaks if a digit outside a repeated block is starred, or the path of another list is."""
    modules = ["model.layers.*", "encoder.block.*"]
    assert starred("model.layers.11.mlp.experts.3.weight", modules) == "model.layers.*.mlp.experts.3.weight"
    assert starred("head.0.weight", modules) == "head.0.weight"
    assert starred("model.layers_extra.1.weight", modules) == "model.layers_extra.1.weight"


def test_collectives_add_up(plan: Plan) -> None:
    """Breaks if aggregation loses or doubles bytes, seconds or calls."""
    groups = list(collective_groups(plan.collectives))
    assert sum(group[1] for group in groups) == sum(row.times for row in plan.collectives)
    assert math.isclose(sum(group[2] for group in groups), sum(row.bytes_sent for row in plan.collectives))
    assert math.isclose(sum(group[3] for group in groups), plan.cost.communication_s)
    assert [group[3] for group in groups] == sorted((group[3] for group in groups), reverse=True)


def test_the_last_line_says_it_all(plan: Plan) -> None:
    """Breaks if the line that ends a command lacks the model, the mesh, the time or the memory."""
    line = one_line(plan)
    assert "\n" not in line
    assert line.startswith("MLP on dp=2 × tp=2 (h100), dp=zero3, tp=tensor: ")
    assert "a step predicted" in line and "a rank" in line and "gap" in line


@pytest.mark.moderate
def test_what_is_gathered_once_and_overlaps_is_said() -> None:
    """Breaks if kept parameters look like ZeRO-3's, or microbatches and overlap are left out of the table."""
    loaded = catalogue.load("mlp", tiny=True, batch=(8, 1))
    mesh = autopar.Mesh.parse("dp=2", hardware="h100")
    plan = autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, strategy="zero1", microbatches=2)
    text = str(plan)
    assert "f32[64, 32], gathered once" in text and "f32[4/dp, 32]" in text
    assert "in each of 2 microbatches a step" in text
    assert "gradients are reduced after the backward" in text and "are gathered while one computes" in text
    assert f"(up to {format_bytes(plan.decisions.overlap.extra_bytes)} in flight)" in " ".join(text.split())
    assert any(row.tensor.startswith("layers.0.") and row.tensor.endswith(" more") for row in plan.collectives)
    assert str(Plan.from_json(plan.to_json())) == text


@pytest.mark.moderate
def test_what_does_not_fit_beside_the_compute_is_said() -> None:
    """Breaks if a step that has no memory for what is in flight holds it, or a saved plan starts it early again."""
    loaded = catalogue.load("mlp", tiny=True, batch=(8, 1))
    mesh = autopar.Mesh.parse("dp=2", hardware="h100")

    def planned(limit: float | None) -> Plan:
        return autopar.plan(
            loaded.model, mesh, example_inputs=loaded.batch, strategy="zero3", microbatches=2, memory_limit=limit
        )

    plan = planned(None)
    peak = plan.cost.peak_memory_bytes
    assert planned(peak).source == plan.source
    tight = planned(peak - 1)
    assert tight.cost.peak_memory_bytes < peak
    assert "overlap    none: what is in flight would not fit the memory limit" in str(tight)
    assert "note: nothing overlaps: " in str(tight)
    again = replan(Plan.from_json(tight.to_json()), loaded.model, loaded.batch, mesh)
    assert again.source == tight.source and again.source != plan.source


@pytest.mark.moderate
def test_parameters_in_place_are_not_gathered() -> None:
    """Breaks if a plan that gathers and reduces nothing talks of overlap, or DDP of gathers."""
    loaded = catalogue.load("mlp", tiny=True, batch=(8, 1))
    one, two = (autopar.Mesh.parse(text, hardware="h100") for text in ("dp=1", "dp=2"))
    plans = [autopar.plan(loaded.model, m, example_inputs=loaded.batch, strategy="ddp") for m in (one, two)]
    assert "overlap" not in str(plans[0])
    assert "overlap    gradients are reduced beside the backward" in str(plans[1])


@pytest.mark.moderate
def test_a_vocabulary_that_its_axis_does_not_divide_is_printed() -> None:
    """Breaks if bytes a rank are of even pieces only: the first rank's piece is the larger one."""
    loaded = catalogue.load("gpt2", tiny=True, batch=(8, 16), overrides={"vocab_size": 257})
    mesh = autopar.Mesh.parse("dp=2,tp=2", hardware="h100")
    plan = autopar.plan(
        loaded.model, mesh, example_inputs=loaded.batch, strategy={"dp": "zero3", "tp": "tensor"},
        constraints=[autopar.pin("transformer.wte.weight", tp=Shard(0))],
    )  # fmt: skip
    line = next(line for line in plan_text(plan).splitlines() if line.startswith("transformer.wte.weight"))
    width = loaded.model.config.n_embd
    assert f"f32[257/tp, {width}/dp]" in line and line.endswith(format_bytes(129 * width // 2 * 4))


def _priced(plan: Plan, limit_bytes: float, price_s_per_gib: float, overlap_price: float = 1.0) -> Plan:
    solved = replace(plan.solved, memory_price_s_per_byte=price_s_per_gib / 2**30, overlap_price=overlap_price)
    return replace(plan, memory_limit_bytes=limit_bytes, solved=solved)


def test_where_memory_binds_its_price_is_said(plan: Plan) -> None:
    """Breaks if the price of memory loses its unit, or is said of more than a small part of the limit."""
    said = "one more GiB a rank would save about 1.30 ms a step, to first order"
    binds = _priced(plan, 8 * 2**30, 1.3e-3)
    assert memory_price_text(binds) == said and f"\nMemory binds: {said}\n" in str(binds)
    assert memory_price_text(_priced(plan, 7.9 * 2**30, 1.3e-3)).startswith(
        "one more MiB a rank would save about 1.27 µs"
    )
    assert memory_price_text(_priced(plan, 1000.0, 2**20)).startswith("one more KiB a rank would save about 1.00 s")
    assert plan_data(binds, [])["memory_price_ms_per_gib"] == pytest.approx({"least": 1.3, "most": 1.3})


def test_gathers_that_are_waited_for_save_more(plan: Plan) -> None:
    """Breaks if seconds that the objective counts at a twentieth are taken for a step's, or hidden ones for more."""
    beside = _priced(plan, 2**40, 1.3e-3, overlap_price=0.05)
    said = "one more GiB a rank would save 1.30 ms to 26.0 ms a step, to first order: most where gathers are waited for"
    assert memory_price_text(beside) == said
    assert plan_data(beside, [])["memory_price_ms_per_gib"] == pytest.approx({"least": 1.3, "most": 26.0})
    hidden = replace(beside, cost=replace(plan.cost, hidden_s=plan.cost.communication_s))
    assert "would save about 1.30 ms a step" in memory_price_text(hidden)


def test_where_memory_is_slack_it_has_no_price(plan: Plan) -> None:
    """Breaks if a plan that has memory to spare says that it binds."""
    assert plan.memory_limit_bytes and memory_price_text(plan) == "" and "Memory binds" not in str(plan)
    assert plan_data(plan, [])["memory_price_ms_per_gib"] == {"least": 0.0, "most": 0.0}


@pytest.mark.moderate
def test_a_pipelines_price_is_of_one_rank() -> None:
    """Breaks if the seconds of all ranks of a pipeline together, which its objective adds up, are said of a step."""
    loaded = catalogue.load("mlp", tiny=True, batch=(8, 1))
    mesh = autopar.Mesh.parse("pp=2,dp=2", hardware="h100")
    plan = autopar.plan(
        loaded.model, mesh, example_inputs=loaded.batch, strategy={"pp": "gpipe", "dp": "zero2"}, microbatches=2
    )
    said = "one more GiB a rank would save about 650 µs of each pipeline rank's work a step, to first order"
    assert memory_price_text(_priced(plan, 8 * 2**30, 1.3e-3)) == said


@pytest.mark.moderate
def test_memory_that_binds_is_priced_by_the_solver() -> None:
    """Breaks if the price of a placement within too little memory does not get from the solver into the plan's file."""
    loaded = catalogue.load("mlp", tiny=True, batch=(64, 1))
    mesh = autopar.Mesh.parse("dp=4", hardware="h100")
    free = autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, rematerialize="none", memory_limit=1e12)
    limit = 0.9 * free.cost.peak_memory_bytes
    tight = autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, rematerialize="none", memory_limit=limit)
    assert "Memory binds: one more KiB a rank would save " in str(tight) and "Memory binds" not in str(free)
    assert str(Plan.from_json(tight.to_json())) == str(tight)
