"""The report in a browser. Every test also fails on an error in the console, and on any request but for the file
itself (the fixture `open_report`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from autopar.views.page import page
from tests.browser import sample
from tests.browser.conftest import Tab

TABS = ("overview", "graph", "sharding", "memory", "timeline", "collectives", "program", "compare")
UP_PROJ = "model.layers.*.mlp.up_proj.weight"
Open = Callable[..., Tab]


def test_every_tab_shows_its_part(open_report: Open) -> None:
    """Breaks when a tab throws, asks the network for something, or stays empty."""
    tab = open_report()
    for name in TABS:
        tab.page.click(f"#ui-tab-{name}")
        tab.settle()
        panel = tab.page.locator(f"#ui-panel-{name}")
        assert panel.is_visible()
        assert tab.page.locator("[role=tabpanel]:visible").count() == 1
        assert "cannot be shown" not in panel.inner_text()
        assert panel.inner_text().strip()
        assert tab.page.locator(f"#ui-tab-{name}").get_attribute("aria-selected") == "true"


def test_overview_answers_on_one_screen(open_report: Open) -> None:
    """Breaks when a headline number is missing or wrongly formatted, or the answer needs scrolling at 1280 × 800."""
    tab = open_report()
    text = tab.page.inner_text("#ui-panel-overview")
    for expected in (
        "7.52 s",
        "41.2%",
        "557,728",
        "62.0 GiB",
        "86.1% of 72.0 GiB",
        "2.31 s",
        "11.8%",
        "Computation bounds the step",
        "−1.69 s",
    ):
        assert expected in text
    for title in ("A step", "The plan in words", "Memory at the peak", "The mesh", "Questions"):
        box = tab.page.locator("#ui-panel-overview h2", has_text=title).first.locator("..").bounding_box()
        assert box is not None and box["y"] + box["height"] <= 800, title


@pytest.mark.parametrize(
    "content",
    [
        {},
        dict.fromkeys(sample.content()),
        {key: type(value)() for key, value in sample.content().items() if value is not None},
    ],
    ids=["nothing", "nulls", "empty"],
)
def test_missing_parts_are_said(open_report: Open, content: dict[str, Any]) -> None:
    """Breaks when a part that is missing, null or empty throws instead of being left out or explained."""
    tab = open_report(page(content))
    for name in TABS:
        tab.go(f"#{name}")
        text = tab.page.inner_text(f"#ui-panel-{name}")
        assert text.strip() and "cannot be shown" not in text


def test_holes_in_rows(open_report: Open) -> None:
    """Breaks when a null that the format allows inside a row throws."""
    content = json.loads(json.dumps(sample.content()))
    for item in content["items"].values():
        item.update(parameter=None, explain=None, line=None, picture=None)
    for row in content["parameters"]:
        row.update(gradient=None, region=None, item=None, stages=None)
    for row in content["collectives"]:
        row.update(item=None)
    for rank in content["timeline"]["ranks"]:
        rank.update(bubble=None)
    content["headline"].update(mfu=None, tokens_per_s=None, limit_bytes=None, gap=None, bubble=None)
    tab = open_report(page(content))
    for target in (
        *(f"#{name}" for name in TABS),
        "#graph/op:layer.linear_30",
        "#graph/nothing",
        f"#sharding/{UP_PROJ}",
        "#sharding/rank=99999",
        "#program/999",
        "#compare/9",
        "#what",
    ):
        tab.go(target)
        assert "cannot be shown" not in tab.page.inner_text("#ui-body")


def test_search_a_parameter_and_read_why(open_report: Open) -> None:
    """Breaks when `/` does not reach the search, a parameter is not found, or its answer of `explain` is not shown."""
    tab = open_report()
    tab.page.keyboard.press("/")
    tab.page.keyboard.type("layers.7.mlp.up_proj")
    tab.page.wait_for_selector("[role=option]")
    tab.page.keyboard.press("Enter")
    tab.settle()
    assert tab.hash == "#graph/p:layer.mlp.up_proj.weight"
    text = tab.page.inner_text("#ui-inspector")
    for expected in (
        UP_PROJ,
        "zero3 stores parameters in pieces on dp",
        "Runners-up",
        "+32.8 ms",
        "−6.10 ms",
        "What cannot be had",
        "9.00 GiB over the limit",
        "Collectives due to it",
        "22.1% of a bucket",
    ):
        assert expected in text
    picked = tab.page.locator("g.is-selected")
    assert picked.get_attribute("data-key") == "p:layer.mlp.up_proj.weight"
    frame, node = tab.page.locator(".frame").bounding_box(), picked.bounding_box()
    assert (
        frame
        and node
        and frame["x"] < node["x"] < frame["x"] + frame["width"]
        and frame["y"] < node["y"] < frame["y"] + frame["height"]
    )


def test_click_in_the_graph_and_go_to_the_program(open_report: Open) -> None:
    """Breaks when a click in a picture does not open the inspector, its link to the program is off, the way back from a
    line is lost, or the back button does not undo a step.
    """
    tab = open_report(hash_="#graph/picture=layer")
    tab.page.locator("g[data-key='op:layer.linear_3']").click()
    tab.settle()
    assert tab.hash == "#graph/op:layer.linear_3"
    assert "autopar explain plan.json layer.linear_3" in tab.page.inner_text("#ui-inspector")
    tab.page.locator("#ui-inspector a", has_text="line ").click()
    tab.settle()
    line = tab.page.locator(".line.is-marked")
    assert "linear_3 = " in line.inner_text() and tab.hash == f"#program/{line.get_attribute('id')[1:]}"
    line.click()
    tab.settle()
    assert tab.hash == "#graph/op:layer.linear_3"
    tab.page.go_back()
    tab.page.go_back()
    tab.settle()
    assert tab.hash == "#graph/op:layer.linear_3" and tab.page.is_visible("#ui-inspector")
    tab.page.keyboard.press("Escape")
    tab.settle()
    assert tab.hash == "#graph" and not tab.page.is_visible("#ui-inspector")


def test_picture_zooms_and_pans(open_report: Open) -> None:
    """Breaks when wheel, keys, buttons or a drag do not move the picture, or a drag counts as a click."""
    tab = open_report(hash_="#graph/picture=layer")

    def view() -> list[float]:
        tab.settle()
        return [float(part) for part in tab.page.get_attribute(".frame > svg", "viewBox").split()]

    box = tab.page.locator(".frame").bounding_box()
    assert box is not None
    middle = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    start = view()
    tab.page.mouse.move(*middle)
    tab.page.mouse.wheel(0, -400)
    wheeled = view()
    assert wheeled[2] < start[2]
    tab.page.keyboard.press("-")
    assert view()[2] > wheeled[2]
    before = view()
    tab.page.mouse.down()
    tab.page.mouse.move(middle[0] + 80, middle[1] + 50, steps=4)
    tab.page.mouse.up()
    after = view()
    assert after[1] < before[1] and tab.hash == "#graph/picture=layer"
    tab.page.click("[aria-label='All of it (0)']")
    assert view()[3] > before[3]


def test_sort_and_filter_collectives(open_report: Open) -> None:
    """Breaks when a click on a head does not sort by number, a second one does not turn it round, or the filter's sums
    are not those of the rows it leaves.
    """
    tab = open_report(hash_="#collectives")
    rows = sample.content()["collectives"]

    def column(number: int) -> list[str]:
        return tab.page.locator(f".panel-collectives tbody td:nth-child({number})").all_inner_texts()

    by_time = sorted(rows, key=lambda row: -row["seconds"])
    assert column(8) == [row["tensor"] for row in by_time]
    head = tab.page.locator(".panel-collectives th", has_text="Bytes")
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    assert column(8) == [row["tensor"] for row in sorted(rows, key=lambda row: -row["bytes_sent"])]
    head.locator("button").click()
    assert column(8) == [row["tensor"] for row in sorted(rows, key=lambda row: row["bytes_sent"])]
    tab.page.fill(".panel-collectives .filter", "reduce gradient")
    kept = [row for row in rows if row["why"] == "reduce gradient"]
    assert len(column(1)) == len(kept)
    assert f"{len(kept)} rows" in tab.page.inner_text(".panel-collectives .toolbar")
    tab.page.locator(".panel-collectives tbody tr").first.click()
    tab.settle()
    assert tab.hash.startswith("#graph/op:")


def test_compare_two_plans(open_report: Open) -> None:
    """Breaks when a difference has the wrong sign, or better and worse are exchanged or told by colour alone."""
    tab = open_report(hash_="#compare")

    def row(text: str) -> Any:
        return tab.page.locator(".panel-compare tbody tr", has_text=text).first

    assert "−410 ms" in row("step time").inner_text() and row("step time").locator(".is-better").count() == 1
    assert "+2.4 points" in row("MFU").inner_text() and row("MFU").locator(".is-better").count() == 1
    assert "+14.0 GiB" in row("peak memory").inner_text() and row("peak memory").locator(".is-worse").count() == 1
    tab.page.get_by_role("button", name="without tensor parallelism").click()
    tab.settle()
    assert tab.hash == "#compare/1"
    assert "+2.28 s" in row("step time").inner_text() and row("step time").locator(".is-worse").count() == 1
    assert row("tokens a second").locator(".is-worse").count() == 1
    assert "f32[53248/dp/tp, 16384]" in row(UP_PROJ).inner_text()


def test_what_a_rank_holds(open_report: Open) -> None:
    """Breaks when the ranges that the page shows of a rank are not those of the placement."""
    tab = open_report(hash_=f"#sharding/{UP_PROJ}")
    tab.page.locator("#ui-boxes [aria-label=Rank]").fill("37")
    tab.page.locator("#ui-boxes [aria-label=Rank]").press("Enter")
    # Rank 37 = dp 4, tp 5: rows 5 × 53248 / 8 on, columns 4 × 16384 / 8 on.
    assert "[33280:39936, 8192:10240]" in tab.page.inner_text("#ui-boxes")
    assert "52.0 MiB" in tab.page.inner_text("#ui-boxes")
    assert (
        tab.page.locator("#ui-boxes .cell").count() == 64 and tab.page.locator("#ui-boxes .cell.is-ours").count() == 1
    )
    tab.page.get_by_role("button", name="What one rank holds").click()
    tab.settle()
    assert "[33280:39936, 8192:10240]" in tab.page.locator("tr", has_text=UP_PROJ).last.inner_text()
    assert tab.page.locator("tr:visible", has_text="lm_head.weight").count() == 0  # of the last stage


def test_tabs_by_keyboard(open_report: Open) -> None:
    """Breaks when the row of tabs is not one stop of the Tab key with arrows inside, or loses its focus."""
    tab = open_report()
    tab.page.focus("#ui-tab-overview")
    for expected in ("graph", "sharding"):
        tab.page.keyboard.press("ArrowRight")
        tab.settle()
        assert tab.hash == f"#{expected}"
        assert tab.page.evaluate("document.activeElement.id") == f"ui-tab-{expected}"
    tab.page.keyboard.press("End")
    tab.settle()
    assert tab.hash == "#compare"
    tab.page.keyboard.press("ArrowRight")
    tab.settle()
    assert tab.hash == "#overview"
    assert tab.page.locator("[role=tab][tabindex='0']").count() == 1
    tab.page.keyboard.press("?")
    assert tab.page.is_visible("#ui-dialog")
    tab.page.keyboard.press("Escape")
    assert not tab.page.is_visible("#ui-dialog")


def test_graph_by_keyboard(open_report: Open) -> None:
    """Breaks when a node cannot have the focus, or Enter on it opens nothing."""
    tab = open_report(hash_="#graph/picture=layer")
    tab.page.focus("g[data-key='op:layer.linear_5']")
    tab.page.keyboard.press("Enter")
    tab.settle()
    assert tab.hash == "#graph/op:layer.linear_5" and "layer.linear_5" in tab.page.inner_text("#ui-inspector h2")


def test_phone_has_no_horizontal_scroll(open_report: Open) -> None:
    """Breaks when a part is wider than a phone, or the inspector leaves no room for the picture."""
    tab = open_report(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    for target in (
        *(f"#{name}" for name in TABS),
        f"#sharding/{UP_PROJ}",
        "#sharding/rank",
        "#graph/op:layer.linear_30",
    ):
        tab.go(target)
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= 390, target
        assert (
            tab.page.eval_on_selector(".panel:not([hidden])", "panel => panel.scrollWidth - panel.clientWidth") <= 0
        ), target
    sheet, picture = tab.page.locator("#ui-inspector").bounding_box(), tab.page.locator(".frame").bounding_box()
    assert sheet and picture and picture["y"] + picture["height"] <= sheet["y"] + 1


def test_dark_mode(open_report: Open) -> None:
    """Breaks when the page does not follow the system, or its switch does not win over it."""

    def ground(tab: Tab) -> int:
        return sum(
            tab.page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)")
        )

    light, dark = open_report(color_scheme="light"), open_report(color_scheme="dark")
    assert ground(light) > 600 and ground(dark) < 150
    light.page.click("#ui-theme")
    assert ground(light) < 150 and light.page.get_attribute("#ui-theme", "aria-pressed") == "true"
    dark.page.click("#ui-theme")
    assert ground(dark) > 600
    for name in TABS:
        light.go(f"#{name}")


def test_memory_and_timeline_readouts(open_report: Open) -> None:
    """Breaks when the memory's readout is not the sum of its categories, or an event cannot be pointed at."""
    tab = open_report(hash_="#memory/3")
    curve = sample.content()["memory"][3]
    assert (
        tab.page.locator(".memory-table tfoot tr").first.inner_text().split("\t")[1].strip()
        == f"{curve['peak_bytes'] / 2**30:.1f} GiB"
    )
    tab.page.get_by_role("button", name="activations").click()
    assert "activations" not in tab.page.inner_text(".memory-table")
    tab.go("#timeline")
    box = tab.page.locator(".rows canvas").bounding_box()
    assert box is not None
    tab.page.mouse.move(box["x"] + 200, box["y"] + 14)
    assert "forward" in tab.page.inner_text("#ui-tip") and "stage 0" in tab.page.inner_text("#ui-tip")
    tab.page.mouse.click(box["x"] + 200, box["y"] + 14)
    tab.settle()
    assert tab.hash == "#graph/op:layer.linear_0"


def test_texts_are_not_markup(open_report: Open) -> None:
    """Breaks when a name of the model is taken for HTML, or ends the script that holds the content."""
    content = sample.content()
    bad = "</script><img src=x onerror=document.title='broken'>\"'&🦙 {{script}}"
    content["title"] = content["bound"] = content["words"][0] = bad
    content["parameters"][0]["name"] = bad
    content["collectives"][0]["why"] = bad
    content["items"]["op:layer.linear_3"]["name"] = content["items"]["op:layer.linear_3"]["title"] = bad
    tab = open_report(page(content))
    assert tab.page.title() == bad and tab.page.inner_text("h1") == bad
    for target in ("#sharding", "#collectives", "#graph/op:layer.linear_3"):
        tab.go(target)
    assert tab.page.locator("img").count() == 0
    assert bad in tab.page.inner_text("#ui-inspector")
