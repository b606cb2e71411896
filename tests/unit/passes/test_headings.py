"""headings: which module and lines the comments of a generated function name, and where they stand."""

from __future__ import annotations

from collections.abc import Container

import pytest
from torch import fx

from autopar.passes.emission.headings import headings


def headed(*origins: str, leaves: Container[str] = ()) -> list[tuple[str, int]]:
    """The headings of statements that come from here, and how many stand under each."""
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{number}") for number in range(len(origins))]
    for node, origin in zip(nodes, origins, strict=True):
        node.meta["origin"] = origin
    found = list(headings(nodes, leaves))
    assert [node for _, inside in found for node in inside] == nodes
    return [(heading, len(inside)) for heading, inside in found]


@pytest.mark.parametrize(
    ("origins", "wanted"),
    [
        (["mlp (m.py:3)", "mlp (m.py:7)", "mlp (m.py:5)"], [("mlp (m.py:3-7)", 3)]),
        (["mlp (m.py:3)", "mlp (m.py:3)"], [("mlp (m.py:3)", 2)]),
        (["mlp (m.py:3)", "mlp (act.py:9)"], [("mlp (m.py:3, act.py:9)", 2)]),
        (["mlp (m.py:3)", "attn (m.py:5)"], [("mlp (m.py:3)", 1), ("attn (m.py:5)", 1)]),
        (["mlp (m.py:3)", "mlp"], [("mlp (m.py:3)", 2)]),
        (["(m.py:3)"], [("(m.py:3)", 1)]),
        (["mlp"], [("mlp", 1)]),
        ([], []),
    ],
)
def test_runs_of_statements(origins: list[str], wanted: list[tuple[str, int]]) -> None:
    """Breaks if a heading loses a line or a file, or two modules stand under one."""
    assert headed(*origins) == wanted


def test_statements_from_nowhere_stay_with_those_before() -> None:
    """Breaks if a statement that no line of the model is known of gets a heading, or takes one from those behind it."""
    assert headed("", "mlp (m.py:3)", "", "mlp (m.py:4)") == [("", 1), ("mlp (m.py:3-4)", 3)]


def test_leaves_stand_under_their_caller() -> None:
    """Breaks if torch's own modules are named, whose lines are those of the module that calls them."""
    assert headed("mlp.act.up (m.py:3)", leaves={"mlp.act.up", "mlp.act"}) == [("mlp (m.py:3)", 1)]
    assert headed("mlp.up (m.py:3)", "mlp (m.py:4)", leaves={"mlp.up"}) == [("mlp (m.py:3-4)", 2)]


@pytest.mark.parametrize(
    ("inner", "count", "wanted"),
    [
        ("mlp.act", 3, [("mlp (m.py:3-5, a.py:1)", 5)]),
        ("mlp.act", 4, [("mlp (m.py:3)", 1), ("mlp.act (a.py:1)", 4), ("mlp (m.py:5)", 1)]),
        ("mlp_2", 1, [("mlp (m.py:3)", 1), ("mlp_2 (a.py:1)", 1), ("mlp (m.py:5)", 1)]),
    ],
)
def test_a_few_statements_of_an_inner_module(inner: str, count: int, wanted: list[tuple[str, int]]) -> None:
    """Breaks if an inner module's few statements interrupt those around them, or many of them go unnamed."""
    assert headed("mlp (m.py:3)", *[f"{inner} (a.py:1)"] * count, "mlp (m.py:5)") == wanted
