"""`place` goes the way of graphs of thousands of edges where the table of the solver says so, within its seconds."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from autopar.passes import place as placing
from autopar.passes.place import place
from autopar.solver import methods, phases
from autopar.solver.methods import Method, Size, Sought, method_for
from autopar.solver.problem import Solution
from autopar.solver.solve import solve
from autopar.strategies.names import resolve
from tests.unit.passes import small
from tests.unit.solver.instances import thresholds


@pytest.mark.moderate
@pytest.mark.parametrize("share", [None, 0.8])
def test_a_placement_reaches_what_serves_large_graphs(case: small.Case, share: float | None) -> None:
    """Breaks if only a benchmark reaches annealing and volume, or what they place is dearer, or does not fit."""
    strategies = resolve("auto", small.MESH)
    usual = place(case.programs["annotate"], strategies=strategies).result
    limit = None if share is None else share * usual.peak_bytes
    exact = place(case.programs["annotate"], strategies=strategies, memory_limit_bytes=limit).result
    methods_seen: list[Method] = []

    def seen(size: Size, sought: Sought, *, priced: bool, anytime: bool = False) -> Method:
        methods_seen.append(method_for(size, sought, priced=priced, anytime=anytime))
        return methods_seen[-1]

    with thresholds(large_edges=0, large_edges_in_brief=0, most_cells=0), patch.object(phases, "method_for", seen):
        large = place(case.programs["annotate"], strategies=strategies, memory_limit_bytes=limit).result
    assert Method.LARGE in methods_seen
    assert large.cost_s <= exact.cost_s * 1.01
    assert limit is None or large.peak_bytes <= limit * (1 + 1e-9)


def test_a_search_that_the_clock_ended_says_so(case: small.Case) -> None:
    """Breaks if nobody is told that another run may plan otherwise."""

    def ended(*given: Any, **named: Any) -> Solution:
        return replace(solve(*given, **named), is_ended_by_clock=True)

    strategies = resolve("ddp", small.MESH)
    assert placing.BY_CLOCK not in place(case.programs["annotate"], strategies=strategies).notes
    with patch.object(placing, "solve", ended):
        assert placing.BY_CLOCK in place(case.programs["annotate"], strategies=strategies).notes


@pytest.mark.parametrize(
    ("edges", "tables", "priced", "anytime", "method"),
    [
        (3_267, 3.2e9, False, False, Method.LOOPS),  # ResNet-101 on four times two: then tables, once
        (3_267, 1e6, False, False, Method.TABLES),
        (4_745, float("inf"), False, False, Method.LOOPS),  # convolutions with branches: annealing leaves 14%
        (4_745, float("inf"), False, True, Method.LARGE),
        (20_000, float("inf"), False, False, Method.LARGE),
        (3_267, float("inf"), True, False, Method.LOOPS),
        (3_267, float("inf"), True, True, Method.LARGE),
        (20_000, float("inf"), True, False, Method.LARGE),
        (100, float("inf"), True, False, Method.MESSAGES),
    ],
)
def test_rows_of_the_table(edges: int, tables: float, priced: bool, anytime: bool, method: Method) -> None:
    """Breaks if a row of `autopar.solver.methods` no longer is what its code does."""
    assert methods.method_for(Size(edges, 1000, 1000, tables), "cost", priced=priced, anytime=anytime) is method
    assert methods.method_for(Size(edges, 1000, 1000, tables), "part", priced=priced) is not Method.LARGE
