"""Search, grouping, comparing, phones and keys in a browser. Every test also fails on an error in the console, and on
any request but for the file itself (the fixture `open_report`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autopar.views.page import page
from tests.browser import sample
from tests.browser.conftest import Tab

UP_PROJ = "model.layers.*.mlp.up_proj.weight"
PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
Open = Callable[..., Tab]


@pytest.mark.parametrize(
    ("typed", "first", "expected"),
    [
        ("rank 13", "rank 13", "#sharding/rank=13"),
        ("stage 2", "stage 2", "#graph/stage:2"),
        ("all_gather", "all_gather over", "#collectives/by=kind/all_gather over "),
        ("timeline", "Timeline", "#timeline"),
    ],
)
def test_search_finds_more_than_names(open_report: Open, typed: str, first: str, expected: str) -> None:
    """Breaks when a rank, a stage, a kind of collective or a tab is not the first thing found, or leads elsewhere."""
    content = sample.content()
    for number in (2, 12):
        content["items"][f"stage:{number}"] = {
            **content["items"]["op:layer.linear_3"], "kind": "stage", "name": str(number), "title": f"stage {number}",
        }  # fmt: skip
    tab = open_report(page(content))
    tab.page.keyboard.press("/")
    tab.page.keyboard.type(typed)
    assert first in tab.page.locator("[role=option]").first.inner_text()
    tab.page.keyboard.press("Enter")
    tab.settle()
    assert tab.page.evaluate("decodeURIComponent(location.hash)").startswith(expected)
    if typed == "rank 13":
        assert "Rank 13 stores" in tab.page.inner_text(".panel-sharding .total")
    if typed == "stage 2":
        assert "stage 2" in tab.page.inner_text("#ui-inspector")


def test_ranks_that_are_none_are_not_found(open_report: Open) -> None:
    """Breaks when a rank beyond the mesh is found."""
    tab = open_report()
    tab.page.keyboard.press("/")
    tab.page.keyboard.type("rank 1024")
    assert tab.page.locator("[role=option]").count() == 0


def test_experts_of_mixtures_alone(open_report: Open) -> None:
    """Breaks when a mixture's layers have no tab, or a model without experts has one."""
    assert open_report().page.get_by_role("tab", name="Experts").count() == 0
    row = {
        "op": "experts", "split": "tokens and experts over dp", "axis": "dp", "ranks": 8, "experts": 256, "chosen": 8,
        "here": 32, "tokens": 1024, "expert_rows": 256, "rows": 8192, "busiest_rows": 10240, "round_rows": 10918,
        "forward_bytes": 2**25, "forward_s": 2e-4, "forward_compute_s": 1e-3, "backward_bytes": 2**26,
        "backward_s": 3e-4, "backward_compute_s": 2e-3, "module": "model.layers.*.mlp.experts", "item": "none",
        "calls": 20, "times": 80, "forward_hidden_s": 1e-4, "backward_hidden_s": 0.0,
    }  # fmt: skip
    tab = open_report(page({**sample.content(), "experts": [row]}), hash_="#experts")
    cells = tab.page.locator(".panel-experts tbody td").all_inner_texts()
    assert cells[0].split("\n") == ["model.layers.*.mlp.experts", "tokens and experts over dp"]
    assert cells[1] == "80" and "32 a rank" in cells[2] and cells[4] == "256"
    assert "10,240 the busiest" in cells[5] and cells[7] == "10,918"
    assert cells[8].split("\n") == ["200 µs, 32.0 MiB", "300 µs, 64.0 MiB"]
    assert cells[9].split("\n") == ["50%", "0%"]
    assert "1.25 times the mean" in tab.page.inner_text(".panel-experts")
    assert "a step take 40.0 ms, on all stages, 8.00 ms of it while something" in tab.page.inner_text(".panel-experts")


def test_loads_of_experts_have_a_column_where_they_were_measured(open_report: Open) -> None:
    """Breaks when what placing experts would gain is not shown, or a column stands empty without loads."""
    row = {
        "op": "experts", "split": "tokens and experts over dp", "axis": "dp", "ranks": 4, "experts": 8, "chosen": 2,
        "here": 2, "tokens": 32, "expert_rows": 32, "rows": 64, "busiest_rows": 80, "round_rows": 96,
        "forward_bytes": 2**10, "forward_s": 2e-4, "forward_compute_s": 1e-3, "backward_bytes": 2**11,
        "backward_s": 3e-4, "backward_compute_s": 2e-3, "module": "model.layers.*.mlp.experts", "item": "none",
        "calls": 2, "times": 2, "forward_hidden_s": 0.0, "backward_hidden_s": 0.0,
    }  # fmt: skip
    loads = {"measured": 2.909, "placed": 1.818, "visited": 1.0606}
    for shown in ({**row, **loads}, row):
        tab = open_report(page({**sample.content(), "experts": [shown]}), hash_="#experts")
        text = tab.page.inner_text(".panel-experts")
        words = ("2.91 ×", "1.82 × placed", "1.06 × with guests", "Measured")
        assert [each in text for each in words] == ["measured" in shown] * 4


def test_collectives_in_groups(open_report: Open) -> None:
    """Breaks when a group's sums are not those of its rows, or a click on it does not show these alone."""
    tab = open_report(hash_="#collectives")
    rows = sample.content()["collectives"]
    tab.page.get_by_role("button", name="By kind and axis").click()
    tab.settle()
    shown = tab.page.locator(".panel-collectives tbody tr")
    assert shown.count() == len({(row["kind"], row["axis"]) for row in rows})
    own = [row for row in rows if (row["kind"], row["axis"]) == ("all_gather", "dp")]
    cells = shown.filter(has_text="all_gather over dp").locator("td").all_inner_texts()
    seconds = sum(row["seconds"] for row in own)
    assert cells[2] == str(len(own)) and cells[3] == f"{384 * len(own):,}"
    assert cells[5] == f"{seconds * 1e3:.0f} ms" and cells[6] == f"{seconds / 7.52:.1%}" and cells[7] == "75%"
    assert shown.filter(has_text="send over pp").locator("td").last.inner_text() == "–"
    shown.filter(has_text="all_gather over dp").locator("a").click()
    tab.settle()
    assert shown.count() == len(own) and f"{len(own)} rows" in tab.page.inner_text(".panel-collectives .toolbar")
    tab.page.get_by_role("link", name="All groups").click()
    tab.page.get_by_role("button", name="By module").click()
    tab.settle()
    assert shown.count() == len({row["module"] for row in rows})
    tab.page.get_by_role("button", name="Each", exact=True).click()
    tab.settle()
    assert shown.count() == len(rows)


def test_what_is_hidden_adds_up(open_report: Open) -> None:
    """Breaks when the sum of what runs beside the computation is not that of the rows that say it."""
    content = sample.content()
    content["headline"]["bubble"] = None
    for row in content["collectives"]:
        row["hidden"] = row["hidden"] or 0.0
    tab = open_report(page(content), hash_="#collectives")
    text = tab.page.inner_text(".collective-note")
    beside = sum(row["seconds"] * row["hidden"] for row in content["collectives"])
    assert f"{beside * 1e3:.0f} ms run beside" in text and "gets 1.69 s shorter" in text
    for row in content["collectives"]:
        row["hidden"] = None
    assert "not known" in open_report(page(content), hash_="#collectives").page.inner_text(".collective-note")


def test_otherwise_axis_by_axis(open_report: Open) -> None:
    """Breaks when the sentences of an explanation are lost, or what recomputes otherwise is not marked as a change."""
    content = sample.content()
    explanation = content["explanations"][UP_PROJ]
    explanation["alternatives"][0].update(rematerialize="full", note="against zero3 on dp; recomputes full")
    tab = open_report(page(content), hash_=f"#sharding/{UP_PROJ}")
    answer = tab.page.locator(".axis-answer", has_text="tp").last.inner_text()
    assert "cuts dim 0 in 8" in answer and "Over dp instead of tp (dim 0): a step would take 7.85 s" in answer
    cell = tab.page.locator(".alternatives tbody td").first.inner_text()
    assert "against zero3 on dp" in cell and "and recomputes full" in cell and "; recomputes" not in cell


def test_inspector_says_all_and_nothing_twice(open_report: Open) -> None:
    """Breaks when a fact stands twice, or what is inside a box is less than is said and cannot be had."""
    content = sample.content()
    keys = [key for key in content["items"] if key.startswith("op:layer.")][:64]
    content["items"]["region:layer"] = {
        **content["items"][keys[0]], "kind": "region", "name": "layer", "module": "model.layers.*", "members": keys,
        "facts": [["Module", "model.layers.*"], ["Calls", "8"]],
    }  # fmt: skip
    tab = open_report(page(content), hash_="#graph/region:layer")
    text = tab.page.inner_text("#ui-inspector")
    assert text.count("Module") == 1 and "Inside: 64" in text and "The first 20 of 64" in text
    assert tab.page.locator("#ui-inspector .names li").count() == 20
    tab.page.get_by_role("button", name="Show all 64").press("Enter")
    assert tab.page.locator("#ui-inspector .names li").count() == 64
    assert tab.page.evaluate("document.activeElement.closest('.names li:nth-child(21)') !== null")


def test_equal_colours_are_equal_pieces(open_report: Open) -> None:
    """Breaks when two pieces of different ranks of the axis have one colour, or the axis cannot be chosen."""
    tab = open_report(hash_=f"#sharding/{UP_PROJ}")

    def colours(name: str) -> list[str]:
        fills = "lanes => lanes.filter(lane => lane.style.fill).map(lane => [lane.textContent, lane.style.fill])"
        found = tab.page.eval_on_selector_all("#ui-boxes .lane", fills)
        assert [text for text, _ in found] == [f"{name} {number}" for number in range(8)]
        return [fill for _, fill in found]

    first = colours("dp")
    assert len(set(first)) == 8
    tab.page.locator("#ui-boxes").get_by_role("button", name="tp").click()
    assert colours("tp") == first
    assert "Equal colour: the same piece along" in tab.page.inner_text("#ui-boxes")


def test_compare_with_another_report(open_report: Open, tmp_path: Path) -> None:
    """Breaks when another report's numbers, settings or shardings are not the ones compared, or what is no report is
    taken for one.
    """
    other = json.loads(json.dumps(sample.content()))
    other["headline"]["step_s"] = 9.4
    other["strategy"] = "dp=zero3, tp=tensor"
    other["parameters"][5]["stored"] = "f32[all]"
    other["collectives"] = other["collectives"][1:]
    file = tmp_path / "slower.html"
    file.write_text(page(other), encoding="utf-8")
    tab = open_report(hash_="#compare")
    tab.page.set_input_files("input[type=file]", file)
    tab.arrive("#compare/2")
    text = tab.page.inner_text("#ui-panel-compare")
    assert "slower against this report: predicted 25.0% slower, 9.40 s a step instead of 7.52 s" in text
    assert "1 kind of parameters lies differently" in text and "f32[all]" in text and "dp=zero3, tp=tensor" in text
    step = tab.page.locator(".panel-compare tbody tr").first
    assert "+1.88 s" in step.inner_text() and step.locator(".is-worse").count() == 1
    assert "training" not in text  # a setting that is the same
    plan = tmp_path / "plan.json"
    plan.write_text('{"format": 3, "sha256": "x", "plan": {}}')
    for wrong, said in ((plan, "is a saved plan"), (Path(__file__), "is not a report")):
        tab.page.set_input_files("input[type=file]", wrong)
        tab.page.locator("[role=status]", has_text=said).wait_for()
    assert tab.hash == "#compare/2"


def test_a_report_against_itself_differs_in_nothing(open_report: Open, tmp_path: Path) -> None:
    """Breaks when equal reports are said to differ."""
    file = tmp_path / "same.html"
    file.write_text(page(sample.content()), encoding="utf-8")
    tab = open_report(page({**sample.content(), "comparisons": []}), hash_="#compare")
    assert "autopar diff plan.json other.json --report plan.html" in tab.page.inner_text("#ui-panel-compare")
    tab.page.set_input_files("input[type=file]", file)
    tab.page.wait_for_selector(".panel-compare tbody tr")
    text = tab.page.inner_text("#ui-panel-compare")
    assert "predicted as fast" in text and "The settings are the same." in text
    assert "All parameters lie the same." in text and tab.page.locator(".panel-compare .delta[class*=is-]").count() == 2


def test_phone_tables_are_cards(open_report: Open) -> None:
    """Breaks when a table is wider than a phone, or a collective's bytes and seconds are off its screen."""
    tab = open_report(**PHONE)
    for target in ("overview", "sharding", "sharding/rank", "collectives", "collectives/by=kind", "compare"):
        tab.go(f"#{target}")
        wide = "boxes => boxes.filter(box => box.scrollWidth > box.clientWidth + 1).length"
        assert tab.page.eval_on_selector_all(".panel:not([hidden]) .scroll", wide) == 0, target
    tab.go("#collectives")
    for title in ("Bytes", "Time"):
        box = tab.page.locator(f".panel-collectives td[data-title='{title}']").first.bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 390
    heads = tab.page.locator(".panel-collectives th button:visible")
    heads.filter(has_text="Bytes").click()
    assert tab.page.locator(".panel-collectives th[aria-sort]").inner_text().startswith("Bytes")


def test_pictures_open_with_their_top(open_report: Open) -> None:
    """Breaks when a picture does not open with its whole width and its top on a phone, or the legend is not at hand."""
    phone = open_report(hash_="#graph/picture=layer", **PHONE)
    frame = phone.page.locator(".frame").bounding_box()
    drawn = phone.page.locator(".frame > svg g.graph").bounding_box()
    assert frame["x"] <= drawn["x"] and drawn["x"] + drawn["width"] <= frame["x"] + frame["width"]
    assert frame["y"] - 1 <= drawn["y"] <= frame["y"] + 40
    legend = phone.page.locator(".picture-legend")
    assert legend.get_attribute("open") is None
    legend.locator("summary").click()
    for tab in (phone, open_report(hash_="#graph")):
        box = tab.page.locator(".picture-legend ul").bounding_box()
        size = tab.page.viewport_size
        assert (
            box is not None
            and box["y"] + box["height"] <= size["height"]
            and "dp splits this dim" in (tab.page.inner_text(".picture-legend"))
        )


@pytest.mark.parametrize("options", [PHONE, {}], ids=["phone", "desk"])
def test_timeline_names_its_tracks(open_report: Open, options: dict[str, Any]) -> None:
    """Breaks when the ranks or their tracks have no name beside the timeline."""
    tab = open_report(hash_="#timeline", **options)
    tab.page.evaluate(
        """() => {
            window.painted = [];
            const paint = CanvasRenderingContext2D.prototype.fillText;
            CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
                window.painted.push(text);
                return paint.call(this, text, ...rest);
            };
            document.dispatchEvent(new Event("theme"));
        }"""
    )
    tab.settle()
    painted = tab.page.evaluate("window.painted")
    assert {"stage 0", "stage 1", "parameters", "network"} <= set(painted)


def test_every_control_shows_its_focus(open_report: Open) -> None:
    """Breaks when a control cannot be reached with Tab, or does not show that it has the focus."""
    tab = open_report()
    visible = """() => {
        const at = document.activeElement;
        const style = getComputedStyle(at);
        const name = `${at.tagName} ${at.id} ${at.className.baseVal ?? at.className} ${at.textContent.slice(0, 20)}`;
        const marked = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
        const shape = at.closest("svg g") && at.querySelector("polygon, path, ellipse");
        return [name, marked || Boolean(shape && parseFloat(getComputedStyle(shape).strokeWidth) >= 3)];
    }"""
    wanted = {
        "graph": "select, .picture-legend summary, .zoom button", "sharding": ".segmented button, .filter, th button",
        "memory": "select, .toggles button, canvas", "timeline": "input[type=checkbox], button, canvas[tabindex]",
        "collectives": ".tile, .segmented button, .filter, th button", "program": ".code", "compare": ".toolbar button",
    }  # fmt: skip
    for name, controls in wanted.items():
        tab.go(f"#{name}")
        panel = f"#ui-panel-{name} "
        listed = tab.page.locator(", ".join(panel + one for one in controls.split(", ")))
        count = listed.locator("visible=true").count()
        assert count >= 1, name
        tab.page.focus(f"#ui-tab-{name}")
        reached = 0
        for _ in range(150):
            tab.page.keyboard.press("Tab")
            inside = tab.page.evaluate(
                """([panel, wanted]) => {
                    const at = document.activeElement;
                    return at.closest(panel) ? at.matches(wanted) : null;
                }""",
                [panel, controls],
            )
            if inside is None or reached == count:
                break
            what, is_marked = tab.page.evaluate(visible)
            assert is_marked, (name, what)
            reached += inside
        assert reached == count, name


def test_escape_closes_what_is_open(open_report: Open) -> None:
    """Breaks when Escape leaves the search's list, the inspector or the help open, or closes two at once."""
    tab = open_report(hash_="#graph/op:layer.linear_3")
    tab.page.keyboard.press("/")
    tab.page.keyboard.type("linear")
    tab.page.wait_for_selector("[role=option]")
    tab.page.keyboard.press("Escape")
    assert tab.page.locator("#ui-results").is_hidden() and tab.page.is_visible("#ui-inspector")
    tab.page.click("#ui-help")
    tab.page.keyboard.press("Escape")
    assert not tab.page.is_visible("#ui-dialog") and tab.page.is_visible("#ui-inspector")
    tab.page.keyboard.press("Escape")
    tab.settle()
    assert not tab.page.is_visible("#ui-inspector")
