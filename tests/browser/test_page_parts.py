"""The parts of the report in a browser: what one clicks, and what is then shown. Every test also fails on an error in
the console, and on any request but for the file itself (the fixture `open_report`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar.views.page import page
from tests.browser import sample
from tests.browser.conftest import Tab

UP_PROJ = "model.layers.*.mlp.up_proj.weight"
Open = Callable[..., Tab]


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
    assert tab.page.evaluate("document.activeElement.innerText") == UP_PROJ
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

    def tensors() -> list[str]:
        return [text.rpartition("moves ")[2] for text in column(10)]

    by_time = sorted(rows, key=lambda row: -row["seconds"])
    assert tensors() == [row["tensor"] for row in by_time]
    head = tab.page.locator(".panel-collectives th", has_text="Bytes")
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    assert tensors() == [row["tensor"] for row in sorted(rows, key=lambda row: -row["bytes_sent"])]
    head.locator("button").click()
    assert tensors() == [row["tensor"] for row in sorted(rows, key=lambda row: row["bytes_sent"])]
    tab.page.fill(".panel-collectives .filter", "reduce gradient")
    kept = [row for row in rows if row["why"] == "reduce gradient"]
    assert len(column(1)) == len(kept)
    assert f"{len(kept)} rows" in tab.page.inner_text(".panel-collectives .toolbar")
    tab.page.locator(".totals .tile", has_text="tp").click()
    assert len(column(1)) == sum(row["axis"] == "tp" for row in rows)
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
    assert tab.page.locator("#ui-boxes .lane").count() == 16 and tab.page.locator("#ui-boxes .ours rect").count() == 1
    box = tab.page.locator("#ui-boxes .cover").bounding_box()
    tab.page.mouse.click(box["x"] + box["width"] * 4.5 / 8, box["y"] + box["height"] * 6.5 / 8)
    assert tab.page.input_value("#ui-boxes [aria-label=Rank]") == "38"  # dp 4, tp 6
    tab.page.mouse.click(box["x"] + box["width"] * 4.5 / 8, box["y"] + box["height"] * 5.5 / 8)
    tab.page.get_by_role("button", name="What one rank holds").click()
    tab.settle()
    assert "[33280:39936, 8192:10240]" in tab.page.locator("tr", has_text=UP_PROJ).last.inner_text()
    assert tab.page.locator("tr:visible", has_text="lm_head.weight").count() == 0  # of the last stage


def test_boxes_of_a_big_mesh(open_report: Open) -> None:
    """Breaks when a mesh of 131,072 ranks draws a box for each, or stripes are not drawn where they lie."""
    content = sample.content()
    sizes = (("dp", 512), ("cp", 4), ("tp", 64))
    content["mesh"]["axes"] = [{**content["mesh"]["axes"][0], "name": name, "size": size} for name, size in sizes]
    for row, dims, outer in zip(content["parameters"], ((0, 0, 0), (None, 1, 0)), (1, 2), strict=False):
        cuts = [
            {"name": name, "size": size, "dim": dim, "outer": outer if name == "cp" else 1, "zigzag": outer > 1}
            for (name, size), dim in zip(sizes, dims, strict=True)
        ]
        row.update(shape=[131072, 8192], placement={"shape": [131072, 8192], "axes": cuts}, stages=None)
    tab = open_report(page(content), hash_=f"#sharding/{content['parameters'][0]['name']}")
    assert "2,048 pieces" in tab.page.inner_text("#ui-boxes")
    assert "[0:1, 0:8192]" in tab.page.inner_text("#ui-boxes")
    tab.go(f"#sharding/{content['parameters'][1]['name']}")
    assert "[0:2048, 0:1024 + 7168:8192]" in tab.page.inner_text("#ui-boxes")
    assert tab.page.locator("#ui-boxes .ours rect").count() == 2


def test_timeline_moves(open_report: Open) -> None:
    """Breaks when wheel or keys do not zoom the timeline, or its tracks cannot be hidden."""
    tab = open_report(hash_="#timeline")
    canvas = tab.page.locator(".rows canvas")

    def picture() -> bytes:
        tab.settle()
        return canvas.screenshot()

    whole = picture()
    canvas.hover()
    tab.page.mouse.wheel(0, -300)
    zoomed = picture()
    tab.page.mouse.move(0, 0)
    canvas.focus()
    tab.page.keyboard.press("ArrowRight")
    moved = picture()
    tab.page.get_by_label("network").uncheck()
    fewer = picture()
    assert len({whole, zoomed, moved, fewer}) == 4
    tab.page.get_by_text("Numbers by rank").click()
    assert tab.page.locator(".numbers tbody tr").count() == 16
    assert "20.4%" in tab.page.locator(".numbers tbody tr").first.inner_text()


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
    tab.page.mouse.move(box["x"] + 200, box["y"] + 14)
    assert "forward" in tab.page.inner_text("#ui-tip") and "stage 0" in tab.page.inner_text("#ui-tip")
    tab.page.mouse.click(box["x"] + 200, box["y"] + 14)
    tab.settle()
    assert tab.hash == "#graph/op:layer.linear_0"
