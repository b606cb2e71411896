"""Reports, pictures and traces on the command line, from a saved plan alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import autopar
from autopar.api.plan import Plan
from autopar.base.errors import AutoparError
from autopar.cli.models import catalogue
from autopar.ir.sharding import Replicate, Shard
from autopar.planner.plan.record import ModelSpec
from autopar.strategies.names import Pin
from autopar.views.explain.exclusions import pin_texts
from tests.unit.commands import output

UP = "layers.*.up.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    loaded = catalogue.load("mlp", tiny=True)
    mesh = autopar.Mesh.parse("dp=2,tp=2", hardware="h100")
    plan = autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, strategy={"dp": "zero3", "tp": "tensor"})
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    replace(plan, model_spec=ModelSpec("mlp", tiny=True)).save(path)
    return path


@pytest.mark.moderate
def test_a_saved_plan_is_reported_with_explanations(saved: Path, tmp_path: Path) -> None:
    """Breaks if `autopar report` cannot build the model again, explains nothing, or asks for no other memory limit."""
    path = tmp_path / "plan.html"
    assert f"wrote {path}" in output("report", saved, path, "--explain-seconds", 5)
    text = path.read_text()
    assert "20% more memory" in text and f'"{UP}"' in text and '"alternatives"' in text
    assert "http://" not in text.replace("http://www.w3.org/", "") and "src=" not in text


@pytest.mark.moderate
def test_nothing_is_solved_where_nothing_is_asked(saved: Path, tmp_path: Path) -> None:
    """Breaks if a report without explanations still traces the model, or compares with the wrong plan."""
    plan = Plan.load(saved)
    plain = plan.report(tmp_path / "plain.html").read_text()
    assert '"explanations": {}' in plain or '"explanations":{}' in plain
    output("report", saved, tmp_path / "b.html", "--explain-seconds", 0, "--against", saved)
    assert "predicted as fast" in (tmp_path / "b.html").read_text()


@pytest.mark.moderate
def test_pictures_from_a_file(saved: Path, tmp_path: Path) -> None:
    """Breaks if a saved plan cannot be drawn at some detail, or in some format."""
    for detail in ("overview", "region", "operator", "timeline", "memory"):
        path = tmp_path / f"{detail}.svg"
        output("draw", saved, path, "--detail", detail)
        assert "<svg" in path.read_text()
    output("draw", saved, tmp_path / "plan.bmp", code=2)
    output("draw", saved, tmp_path / "x.svg", "--detail", "operator", "--region", "nope", code=2)
    pytest.importorskip("typst")
    output("draw", saved, tmp_path / "plan.png")
    output("draw", saved, tmp_path / "plan.pdf")
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "plan.pdf").read_bytes()[:4] == b"%PDF"


@pytest.mark.moderate
def test_text_trace_and_holdings_from_a_file(saved: Path, tmp_path: Path) -> None:
    """Breaks if a command on a saved plan prints or writes something else than the plan's methods give."""
    plan = Plan.load(saved)
    assert output("show", saved) == str(plan)
    assert output("holds", saved, UP) == str(plan.holds(UP))
    assert json.loads(output("holds", saved, "--rank", 3, "--json"))["rank"] == 3
    output("holds", saved, code=2)
    output("holds", saved, "nope", code=2)
    output("trace", saved, tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_a_plan_of_an_older_version(saved: Path, tmp_path: Path) -> None:
    """Breaks if a plan without views is drawn empty, or ends in anything but a remedy."""
    old = replace(Plan.load(saved), views=None)
    for act in (old.report, old.visualize, old.trace):
        with pytest.raises(AutoparError, match=r"older version|without what"):
            act(tmp_path / "x.svg")


@pytest.mark.moderate
def test_a_folder_that_is_not_there(saved: Path, tmp_path: Path) -> None:
    """Breaks if a path that cannot be written ends in a traceback."""
    assert "cannot write" in output("report", saved, tmp_path / "no" / "x.html", "--explain-seconds", 0, code=1)


@pytest.mark.moderate
def test_both_phases_of_generate_are_one_page(tmp_path: Path) -> None:
    """Breaks if `plan --generate --report` leaves a phase or its numbers out, counts gradients of what has none, or
    says what every layer's weight is bound to one by one.
    """
    path = tmp_path / "generate.html"
    said = output(
        "plan", "llama", "--tiny", "--mesh", "tp=2", "--strategy", "tensor", "--generate", "2x8x4", "--report", path,
        "--explain-seconds", 20,
    )  # fmt: skip
    assert f"wrote {path}" in said
    whole = json.loads(path.read_text().split('id="ui-content">')[1].split("</script>")[0])
    assert list(whole["phases"]) == ["prefill", "decode"]
    for name, content in whole["phases"].items():
        about = content["generation"]
        own = next(row for row in about["rows"] if row["phase"] == name)
        assert content["headline"]["step_s"] == own["seconds"] and about["time_per_token_s"] > 0
        assert about["cache_bytes"] == own["cache_bytes"] > 0 and own["tokens"] == {"prefill": 16, "decode": 2}[name]
        held, why = (each["answer"] for each in content["questions"][:2])
        assert "of caches at all times" in held and "gradients" not in held
        bound = "autopar.pin(" in why
        assert bound == (name == "decode") and why.count("autopar.pin(") == bound
        assert not bound or ", 2 of them" in why


def test_pins_of_equal_layers_are_one() -> None:
    """Breaks if pins that say the same of every layer stay apart, or others become one: of other placements, asked for
    by somebody, of names that differ in more than numbers, with patterns of the user's own.
    """
    split, whole = (("tp", Shard(0)),), (("tp", Replicate()),)
    pins = [
        *(Pin(f"layers.{number}.up.weight", split, taken=True) for number in range(12)),
        Pin("layers.12.up.weight", whole, taken=True), Pin("layers.13.up.weight", split),
        Pin("layers.0.up2.weight", split, taken=True), Pin("h.*.0.weight", split), Pin("h.*.1.weight", split),
    ]  # fmt: skip
    assert [text for _, text in pin_texts(pins)] == [
        'autopar.pin("layers.*.up.weight", tp=Shard(0)), 12 of them',
        'autopar.pin("layers.12.up.weight", tp=Replicate())',
        'autopar.pin("layers.13.up.weight", tp=Shard(0))',
        'autopar.pin("layers.0.up2.weight", tp=Shard(0))',
        'autopar.pin("h.*.0.weight", tp=Shard(0))',
        'autopar.pin("h.*.1.weight", tp=Shard(0))',
    ]
