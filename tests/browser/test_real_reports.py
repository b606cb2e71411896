"""Reports of real plans in a browser: what a person would look for is there, and every link leads somewhere."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.api.plan import Plan
from autopar.cli.models import catalogue
from tests.browser.conftest import Tab

TABS = ("overview", "graph", "sharding", "memory", "timeline", "collectives", "program", "compare")
QKV = "transformer.h.*.attn.c_attn.weight"
Open = Callable[..., Tab]


def make_plan(name: str, mesh: str, strategy: Any, **options: Any) -> Plan:
    loaded = catalogue.load(name, tiny=True, **options.pop("loading", {}))
    parsed = autopar.Mesh.parse(mesh, hardware="h100")
    return autopar.plan(loaded.model, parsed, example_inputs=loaded.batch, strategy=strategy, **options)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan("gpt2", "dp=2,tp=2", {"dp": "zero3", "tp": "tensor"})


@pytest.fixture(scope="module")
def other() -> Plan:
    return make_plan("gpt2", "dp=2,tp=2", "auto")


@pytest.fixture(scope="module")
def text(plan: Plan, other: Plan, tmp_path_factory: pytest.TempPathFactory) -> str:
    return plan.report(tmp_path_factory.mktemp("report") / "plan.html", explain_s=6, against=[other]).read_text()


def content_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.S)
    return json.loads(found[1])


def test_every_tab_of_a_plan(open_report: Open, text: str) -> None:
    """Breaks if a tab fails on what the compiler really writes, or has nothing to show."""
    tab = open_report(text)
    for name in TABS:
        tab.page.click(f"#ui-tab-{name}")
        tab.settle()
        shown = tab.page.inner_text(f"#ui-panel-{name}")
        assert shown.strip() and "cannot be shown" not in shown
    assert tab.page.locator("#ui-panel-graph svg").count() >= 1


def test_a_parameter_is_found_and_explained(open_report: Open, text: str, plan: Plan) -> None:
    """Breaks if searching one layer's weight does not lead to its sharding, why it lies so, and the runners-up."""
    tab = open_report(text)
    tab.page.keyboard.press("/")
    tab.page.keyboard.type("transformer.h.1.attn.c_attn.weight")
    tab.settle()
    tab.page.keyboard.press("Enter")
    tab.settle()
    shown = tab.page.inner_text("#ui-inspector")
    row = next(each for each in content_of(text)["parameters"] if each["name"] == QKV)
    assert row["stored"] in shown and "Why it lies so" in shown and "Runners-up" in shown
    assert content_of(text)["explanations"][QKV]["why"][0] in shown


def test_collectives_sort_and_plans_compare(open_report: Open, text: str) -> None:
    """Breaks if the table of collectives does not sort, or the other plan's numbers are not the ones compared."""
    tab = open_report(text, "#collectives")
    header = tab.page.locator("#ui-panel-collectives th", has_text="Bytes")
    header.locator("button").click() if header.locator("button").count() else header.click()
    tab.settle()
    assert header.get_attribute("aria-sort") in ("ascending", "descending")
    tab.go("#compare/2")
    assert "auto" in tab.page.inner_text("#ui-panel-compare")


def test_a_report_from_disk_compares_like_a_plan(open_report: Open, text: str, other: Plan, tmp_path: Path) -> None:
    """Breaks if what the page makes of two reports is not what autopar makes of the two plans."""
    file = other.report(tmp_path / "other.html", explain_s=0.0, memory_factors=())
    number = len(content_of(text)["comparisons"])
    tab = open_report(text, f"#compare/{number - 1}")

    def rows(title: str) -> set[tuple[str, ...]]:
        found = tab.page.locator(f".panel-compare table[aria-label='{title}'] tbody tr").all()
        return {tuple(row.locator("td").all_inner_texts()) for row in found}

    own = {title: rows(title) for title in ("Numbers", "Parameters", "Collectives")}
    tab.page.set_input_files("input[type=file]", file)
    tab.arrive(f"#compare/{number}")
    read = {title: rows(title) for title in own}
    assert own["Parameters"] and {row[1:] for row in own["Parameters"]} == {row[1:] for row in read["Parameters"]}
    assert own["Collectives"] == read["Collectives"]
    same = {row[0] for row in own["Numbers"] & read["Numbers"]}
    assert {"step", "compute", "communication", "peak memory", "bytes a rank sends", "bytes over dp", "devices"} <= same


def test_every_link_of_the_content_leads_somewhere(text: str) -> None:
    """Breaks if an item or a picture that something points at is not there, or a node of a picture is no item."""
    content = content_of(text)
    items, pictures = content["items"], {picture["id"] for picture in content["pictures"]}
    names = {row["name"] for row in content["parameters"]}
    for key, item in items.items():
        assert item["picture"] is None or item["picture"] in pictures, key
        assert item["parameter"] is None or item["parameter"] in names, key
        assert all(member in items for member in item["members"]), key
    drawn = {item["picture"] for item in items.values()}
    assert pictures <= drawn, f"pictures without anything to click: {pictures - drawn}"
    for picture in content["pictures"]:
        keys = re.findall(r'<g id="((?:op|p|in|out|box|move):[^"]+)"', picture["svg"])
        unknown = {key for key in keys if key.replace("&gt;", ">").replace("&#45;", "-") not in items}
        assert not unknown, picture["id"]
    computing = [key for key, item in items.items() if item["kind"] in ("operator", "collective", "parameter")]
    assert all(items[key]["picture"] for key in computing)


@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [("pp=2,dp=2", {"pp": "pipeline(zero_bubble)", "dp": "zero2"}), ("dp=2,cp=2", {"dp": "zero3", "cp": "ring"})],
)
def test_pipelines_and_rings(open_report: Open, tmp_path: Path, mesh: str, strategy: dict[str, str]) -> None:
    """Breaks if stages, their timeline, or attention that goes round cannot be shown; also from a file alone."""
    model = "gpt2" if "pp" in strategy else "llama"
    plan = make_plan(model, mesh, strategy)
    loaded = Plan.from_json(plan.to_json())
    tab = open_report(loaded.report(tmp_path / "plan.html").read_text())
    for name in TABS:
        tab.go(f"#{name}")
        assert "cannot be shown" not in tab.page.inner_text(f"#ui-panel-{name}")
    tab.go("#sharding")
    tab.page.locator("#ui-panel-sharding tbody a").first.click()
    tab.settle()
    assert "autopar explain" in tab.page.inner_text("#ui-inspector")


def test_phases_of_generate(open_report: Open, tmp_path: Path) -> None:
    """Breaks if the page shows one phase alone, forgets the tab at the switch, or compares a phase with the other."""
    model = catalogue.load("llama", tiny=True).model
    wanted = autopar.Generation(batch=2, prompt=8, new_tokens=4)
    plan = autopar.plan_generation(model, autopar.Mesh.parse("tp=2", hardware="h100"), wanted, strategy="tensor")
    file = plan.report(tmp_path / "generate.html", explain_s=0.0)
    tab = open_report(file.read_text(), "#memory")
    tab.page.click("text=A token (decode)")
    tab.arrive("?phase=decode#memory")
    for name in TABS:
        tab.page.click(f"#ui-tab-{name}")
        tab.settle()
        assert "cannot be shown" not in tab.page.inner_text(f"#ui-panel-{name}")
    tab.go("#overview")
    shown = tab.page.inner_text("#ui-panel-overview")
    assert "2 sequences of 8 tokens, 4 new tokens each" in shown and "First token" in shown
    assert tab.page.get_attribute("#ui-phases a[aria-current]", "href") == "?phase=decode"
    tab.go("#compare")
    tab.page.set_input_files("input[type=file]", file)
    tab.arrive("#compare/0")
    assert "predicted as fast" in tab.page.inner_text("#ui-panel-compare")
