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
