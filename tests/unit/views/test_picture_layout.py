"""Where pictures put things: nothing on words, the forward on the left, what an edge says, what the legend explains."""

from __future__ import annotations

import re
import shutil
import struct
from collections import defaultdict
from functools import cache
from typing import Any
from xml.etree import ElementTree

import pytest

import autopar
from autopar.api.plan import Plan
from autopar.base.text import format_bytes, format_time
from autopar.cli.models import catalogue
from autopar.views import render
from autopar.views.dot import END, LABEL, TITLE
from autopar.views.picture import box_members, dot_source
from tests.unit.views.conftest import make_plan
from tests.unit.views.picture_clashes import SVG, clashes_of

NODE = re.compile(r'^\s+"([^"]+)" \[id="[^"]+" label="([^"]*)"', re.MULTILINE)
DRAWN = [
    ("llama", "dp=2,tp=2", {"dp": "zero3", "tp": "tensor+sequence"}, 2),
    ("gpt2", "dp=2,cp=2", {"dp": "zero3", "cp": "ring"}, 1),
    ("llama", "pp=2,dp=2", {"pp": "pipeline(1f1b)", "dp": "zero2"}, 4),
    pytest.param("t5", "dp=2,tp=2", {"dp": "zero3", "tp": "tensor"}, 1, marks=pytest.mark.slow),
    pytest.param("clip", "pp=2,dp=2", {"pp": "pipeline(1f1b)", "dp": "zero2"}, 1, marks=pytest.mark.slow),
]
RENDERERS = [
    "wasm", pytest.param("dot", marks=pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not here"))
]  # fmt: skip


def svg_of(monkeypatch: pytest.MonkeyPatch, source: str, renderer: str) -> str:
    """The svg of one of the two builds of Graphviz."""
    if renderer == "wasm":
        monkeypatch.setattr(render.shutil, "which", lambda _: None)
    return (render.render(source, "svg") or b"").decode()


@pytest.mark.sampled(3)
@pytest.mark.moderate
@pytest.mark.parametrize("renderer", RENDERERS)
@pytest.mark.parametrize(("name", "mesh", "strategy", "microbatches"), DRAWN)
def test_nothing_lies_on_words(
    monkeypatch: pytest.MonkeyPatch, name: str, mesh: str, strategy: dict[str, str], microbatches: int, renderer: str
) -> None:
    """Breaks if words lie on words, boxes or borders, an edge runs through words, a backward is left of its forward."""
    plan = _planned(name, mesh, tuple(strategy.items()), microbatches)
    for detail, phase in (("overview", "both"), ("overview", "backward"), ("region", "both"), ("operator", "both")):
        svg = svg_of(monkeypatch, dot_source(plan, detail=detail, phase=phase), renderer)
        found = clashes_of(svg)
        if renderer == "dot":  # one of many versions, which may lead an edge elsewhere
            found = [each for each in found if not each[0].startswith("edge")]
        assert not found, (detail, phase)


@cache
def _planned(name: str, mesh: str, strategy: tuple[tuple[str, str], ...], microbatches: int) -> Plan:
    return make_plan(name, mesh, strategy=dict(strategy), microbatches=microbatches)


def test_clashes_are_found() -> None:
    """Breaks if the test above passes because it sees nothing."""

    def group(kind: str, id: str, content: str) -> str:
        return f'<g id="{id}" class="{kind}"><title>{id}</title>{content}</g>'

    def text(x: float, y: float, words: str = "words of a box") -> str:
        return f'<text text-anchor="middle" x="{x}" y="{y}" font-size="10">{words}</text>'

    frame = '<polygon points="{0},0 {1},0 {1},90 {0},90"/>'
    box = group("node", "box", '<polygon points="0,200 100,200 100,240 0,240"/>' + text(50, 220))
    clashes = {
        "words on words": group("edge", "a", text(50, 220)) + group("edge", "e", text(60, 225)),
        "words on box": box + group("edge", "e", text(10, 235)),
        "words out of box": group("node", "n", '<polygon points="0,0 30,0 30,20 0,20"/>' + text(15, 12)),
        "words over border": group("cluster", "c", frame.format(0, 50)) + group("edge", "e", text(50, 50)),
        "edge through words": group("edge", "a", text(50, 50))
        + group("edge", "e", '<path d="M50,0C50,30 50,60 50,90"/>'),
        "edge through box": box + group("edge", "e", '<path d="M20,100C20,150 20,250 20,300"/>'),
        "back left": group("cluster", "region:x", frame.format(100, 200))
        + group("cluster", "backward:x", frame.format(0, 90)),
    }  # fmt: skip
    for kind, content in clashes.items():
        svg = f'<svg xmlns="http://www.w3.org/2000/svg">{content}</svg>'
        assert {each[0] for each in clashes_of(svg)} == {kind}
    assert not clashes_of(f'<svg xmlns="http://www.w3.org/2000/svg">{box}</svg>')


@pytest.mark.slow
@pytest.mark.parametrize("renderer", RENDERERS)
@pytest.mark.parametrize("stages_per_rank", [2, 3])
def test_stages_stand_in_the_ranks_order(monkeypatch: pytest.MonkeyPatch, stages_per_rank: int, renderer: str) -> None:
    """Breaks if what the last rank sends back to the first puts a row of stages out of order."""
    loaded = catalogue.load("gpt2", tiny=True, batch=(8, 16), overrides={"num_hidden_layers": 12})
    plan = autopar.plan(
        loaded.model, autopar.Mesh.parse("pp=4,dp=1", hardware="h100"), example_inputs=loaded.batch, microbatches=4,
        strategy={"pp": autopar.strategies.pipeline("interleaved", stages_per_rank=stages_per_rank), "dp": "ddp"},
    )  # fmt: skip
    svg = svg_of(monkeypatch, dot_source(plan), renderer)
    places = re.findall(r'id="stage:(\d+)" class="node">.*?<text[^>]* x="([-\d.]+)" y="([-\d.]+)"', svg, re.S)
    at = {int(stage): (float(x), float(y)) for stage, x, y in places}
    assert len(at) == 4 * stages_per_rank
    for row in range(stages_per_rank):
        xs = [at[row * 4 + rank][0] for rank in range(4)]
        assert xs == sorted(xs)
        assert all(row == 0 or at[row * 4 + rank][1] > at[row * 4 + rank - 4][1] for rank in range(4))


@pytest.mark.parametrize("renderer", RENDERERS)
def test_an_edge_is_one_group_with_its_text(monkeypatch: pytest.MonkeyPatch, llama: Plan, renderer: str) -> None:
    """Breaks if a report's click on a collective's text, or on its line, finds something else than the collective."""
    for detail in ("overview", "region", "operator"):
        root = ElementTree.fromstring(svg_of(monkeypatch, dot_source(llama, detail=detail), renderer))
        groups = {group.get("id", ""): group for group in root.iter(f"{SVG}g") if group.get("class")}
        assert not [id for id in groups if id.startswith((LABEL, END, TITLE))]
        moving = [id for id in groups if id.startswith("move:")]
        assert moving or detail == "operator"
        for id in moving:
            texts = [each.text or "" for each in groups[id].iter(f"{SVG}text")]
            assert len(list(groups[id].iter(f"{SVG}path"))) == 2 and re.match(r"(\d+ × )?\w+ [dt]p$", texts[0])
            assert LABEL not in (groups[id].findtext(f"{SVG}title") or "")
        if detail == "overview":
            assert any("layer × 2" in (each.text or "") for each in groups["region:layer"].iter(f"{SVG}text"))


def test_edges_say_the_sums_of_the_plan(llama: Plan) -> None:
    """Breaks if an edge that stands for several collectives says other bytes or seconds than theirs, or the edges of a
    picture are, over all calls of a step, other than the plan's collectives.
    """
    rows: dict[str, tuple[Any, Any]] = {
        f"op:{region.name}.{op.name}": (op, region) for region in llama.views.regions for op in region.ops
    }
    for region in llama.views.regions:
        count: dict[str, int] = defaultdict(int)
        for move in region.moves:
            rows[f"move:{region.name}.{move.which}.{count[move.which]}"] = (move, region)
            count[move.which] += 1
    said = dict(NODE.findall(dot_source(llama)))
    drawn: dict[str, float] = defaultdict(float)
    for id, members in box_members(llama).items():
        if f"{LABEL}{id}" not in said:
            continue
        each = [rows[member] for member in members]
        sent, seconds = (sum(getattr(row, name) for row, _ in each) for name in ("bytes_sent", "seconds"))
        kind = getattr(each[0][0], "op", "") or getattr(each[0][0], "kind", "")
        times = f"{len(each)} × " * (len(each) > 1)
        start = f"{times}{kind} {each[0][0].axis}\\n{format_bytes(sent)} · {format_time(seconds)}"
        assert said[f"{LABEL}{id}"].startswith(start)
        for row, region in each:
            uses = region.calls * (1 if getattr(row, "once", False) else llama.interface.microbatches)
            drawn[f"{kind} {row.axis} bytes"] += row.bytes_sent * uses
            drawn[f"{kind} {row.axis} seconds"] += row.seconds * uses
    planned: dict[str, float] = defaultdict(float)
    for each in llama.collectives:
        planned[f"{each.kind} {each.axis} bytes"] += each.bytes_sent
        planned[f"{each.kind} {each.axis} seconds"] += each.seconds
    assert len(planned) >= 6 and dict(drawn) == pytest.approx(dict(planned))


@pytest.mark.moderate
def test_the_legend_explains_what_is_shown_and_nothing_else(mlp: Plan, llama: Plan) -> None:
    """Breaks if the legend lacks a sign of the picture, or explains one that it has not."""

    def legend(plan: Plan, **options: str) -> str:
        return "\n".join(text for id, text in NODE.findall(dot_source(plan, **options)) if id.startswith("legend:"))

    pipeline = make_plan("mlp", "pp=2,dp=2", strategy={"pp": "pipeline(1f1b)", "dp": "zero2"}, microbatches=4)
    for sign, has in (("dashed edge", pipeline), ("once a step", pipeline), ("stages", pipeline)):
        for plan in (mlp, llama, pipeline):
            assert (sign in legend(plan)) is (plan is has), sign
    assert "solid box" in legend(mlp, detail="operator") and "solid box" not in legend(mlp)
    for sign in ("max:tp", "+tp"):
        assert sign in legend(mlp, detail="operator") and sign not in legend(pipeline, detail="operator")
    assert "× 2   drawn once, called 2 times" in legend(llama, detail="region", region="layer")
    assert "drawn once" not in legend(llama, detail="region", region="epilogue")
    assert (
        "dp: 2 ranks" in legend(llama) and "tp: 2 ranks" in legend(llama) and "pp: 2 ranks, stages" in legend(pipeline)
    )


def test_a_png_has_a_largest_size(mlp: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a png of a large picture takes a minute, or gigabytes, for its pixels."""
    pytest.importorskip("typst")
    monkeypatch.setattr(render, "MAX_PIXELS", 300)
    drawn = render.render(dot_source(mlp), "png") or b""
    assert 290 <= max(struct.unpack(">II", drawn[16:24])) <= 301
