"""What a user may ask of the pipeline axis, and what the other axes then are."""

from __future__ import annotations

import pytest

from autopar.base.errors import AutoparError
from autopar.machine.mesh import Mesh
from autopar.strategies.names import describe, parse, pipeline, pipeline_of, resolve
from autopar.strategies.pipelining.spec import PipelineSpec, parse_spec

MESH = Mesh({"pp": 2, "dp": 2, "tp": 4})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("pipeline", PipelineSpec()),
        ("pipeline(1f1b)", PipelineSpec("1f1b")),
        ("1f1b", PipelineSpec("1f1b")),
        ("pipeline(interleaved, 3)", PipelineSpec("interleaved", 3)),
        ("pipeline(interleaved:3)", PipelineSpec("interleaved", 3)),
        ("pipeline(my/own.csv)", PipelineSpec("my/own.csv")),
        ("zero3", None),
    ],
)
def test_a_schedule_by_name(text: str, found: PipelineSpec | None) -> None:
    assert parse_spec(text) == found
    if found is not None:
        assert parse_spec(str(found)) == found


@pytest.mark.parametrize(
    ("strategy", "names", "schedule"),
    [
        ("auto", ["auto", "auto"], "auto"),
        ("zero2", ["zero2", "zero2"], "auto"),
        ("tensor", ["ddp", "tensor"], "auto"),
        ("pipeline(zbv)", ["auto", "auto"], "zbv"),
        ({"pp": "pipeline(1f1b)", "dp": "zero2", "tp": "tensor+sequence"}, ["zero2", "tensor+sequence"], "1f1b"),
        ({"pp": pipeline("interleaved", 2), "dp": "zero3"}, ["zero3", "auto"], "interleaved"),
        ({"pp": "auto", "dp": "ddp", "tp": "tensor"}, ["ddp", "tensor"], "auto"),
    ],
)
def test_the_other_axes_keep_their_strategies(strategy: object, names: list[str], schedule: str) -> None:
    assert [each.name for each in resolve(strategy, MESH)] == names  # type: ignore[arg-type]
    found = pipeline_of(strategy, MESH)  # type: ignore[arg-type]
    assert found.schedule == schedule


def test_the_command_line_takes_a_comma_inside_brackets() -> None:
    text = "pp=pipeline(interleaved, 2),dp=zero2,tp=tensor"
    assert parse(text) == {"pp": "pipeline(interleaved, 2)", "dp": "zero2", "tp": "tensor"}
    inner = MESH.without("pp")
    assert describe(resolve(parse(text), MESH), inner, pipeline_of(parse(text), MESH)) == (
        "pp=pipeline(interleaved, 2), dp=zero2, tp=tensor"
    )


def test_no_pipeline_without_its_axis() -> None:
    assert pipeline_of("zero2", Mesh({"dp": 2})) is None


@pytest.mark.parametrize(
    ("strategy", "mesh", "message"),
    [
        ({"pp": "zero2"}, MESH, "is the pipeline's"),
        ({"dp": "pipeline(1f1b)"}, MESH, "runs over the mesh axis pp"),
        ("pipeline(1f1b)", Mesh({"dp": 2}), "needs a mesh axis pp"),
        ("pipeline(2f2b)", MESH, "unknown pipeline schedule"),
    ],
)
def test_what_cannot_be_asked(strategy: object, mesh: Mesh, message: str) -> None:
    with pytest.raises(AutoparError, match=message):
        resolve(strategy, mesh)  # type: ignore[arg-type]


def test_a_stage_has_the_links_of_the_whole_mesh() -> None:
    whole = Mesh({"pp": 4, "dp": 8, "tp": 8}, hardware="h100")
    inner = whole.without("pp")
    assert inner.axis_names == ("dp", "tp")
    assert inner.whole == whole
    assert [inner.link(axis) for axis in inner.axis_names] == [whole.link("dp"), whole.link("tp")]
    # Between the stage's own axes: tp, whose groups are neighbours, is inside a node, whatever stands before it.
    last = Mesh({"dp": 8, "tp": 8, "pp": 2}, hardware="h100")
    assert last.without("pp").link("tp") == last.link("tp") != whole.link("tp")


def test_a_pipeline_alone_has_one_rank_a_stage() -> None:
    assert Mesh({"pp": 4}).without("pp").axes == (("dp", 1),)
