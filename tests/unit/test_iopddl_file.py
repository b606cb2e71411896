"""benchmarks/solver/iopddl_file.py: files are read as they are meant, damaged ones refused, answers added up."""

from __future__ import annotations

import copy
import gzip
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.base.errors import AutoparError
from autopar.solver import solve
from benchmarks.solver import iopddl_file
from benchmarks.solver.iopddl_file import (
    Contest,
    Document,
    contest_results,
    evaluate,
    load,
    problem_of,
    read,
)

BIG = 10**18
TINY: dict[str, Any] = {
    "problem": {
        "name": "tiny",
        "nodes": {
            "costs": [[1, 2], [10, BIG, 30], [5]],
            "usages": [[7, 3], [1, 2, 4], [9]],
            "intervals": [[0, 4], [2, 5], [0, 0]],
        },
        "edges": {
            "nodes": [[0, 1], [1, 0], [0, 1], [0, 0], [1], [2, 0]],
            "costs": [
                [0, 1, 2, 3, 4, BIG],
                [0, 1, 2, 3, 4, BIG],
                [0, 1, 2, 3, 4, BIG],
                [100, 1, 1, 200],
                [7, 8, 9],
                [6, 4],
            ],
        },
        "usage_limit": 8,
    }
}
"""Parallel edges in both directions, edges of one node, written once and twice, one strategy, an interval of none."""


def written(folder: Path, data: object = TINY, name: str = "tiny.json") -> Path:
    path = folder / name
    text = json.dumps(data).encode()
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return path


@pytest.mark.parametrize("name", ["tiny.json", "tiny.json.gz"])
def test_everything_of_a_file_is_read(tmp_path: Path, name: str) -> None:
    """Breaks if a matrix is transposed, an interval shifted, a forbidden cost finite, or gzip not seen."""
    problem = read(written(tmp_path, name=name))
    assert [node.costs.tolist() for node in problem.nodes] == [[1, 2], [10, math.inf, 30], [5]]
    usages = [[(u.start, u.end, u.bytes.tolist()) for u in node.usages] for node in problem.nodes]
    assert usages == [[(0, 4, [7, 3])], [(2, 5, [1, 2, 4])], []]
    assert problem.usage_limit == 8
    edges = [(e.u, e.v, e.costs[np.ix_(e.u_class, e.v_class)].tolist()) for e in problem.edges]
    wide = [[0, 1, 2], [3, 4, math.inf]]
    tall = [[0, 1], [2, 3], [4, math.inf]]
    alone = [[7, 7, 7], [8, 8, 8], [9, 9, 9]]
    assert edges == [
        (0, 1, wide),
        (1, 0, tall),
        (0, 1, wide),
        (0, 0, [[100, 1], [1, 200]]),
        (1, 1, alone),
        (2, 0, [[6, 4]]),
    ]


def test_equal_edges_share_one_array(tmp_path: Path) -> None:
    """Breaks if the largest files take as much memory as all of their matrices."""
    first, turned, again, *_ = read(written(tmp_path)).edges
    assert first.costs is again.costs and first.costs is not turned.costs
    assert first.costs.base is None and first.v_class is again.v_class


def test_no_limit_and_no_nodes(tmp_path: Path) -> None:
    """Breaks if a file without usage_limit is an error, or limited; or one without nodes."""
    data = copy.deepcopy(TINY)
    del data["problem"]["usage_limit"]
    assert read(written(tmp_path, data)).usage_limit is None
    data["problem"]["usage_limit"] = None
    assert read(written(tmp_path, data)).usage_limit is None
    nothing: Any = {"nodes": {"costs": [], "usages": [], "intervals": []}, "edges": {"nodes": [], "costs": []}}
    path = written(tmp_path, {"problem": nothing})
    assert (read(path).nodes, read(path).edges) == ((), ())
    assert evaluate(load(path), []) == iopddl_file.Evaluation(0, 0, None, 0)


def test_answers_are_added_up(tmp_path: Path) -> None:
    """Breaks if the evaluation leaves out an edge, takes a closed interval, or a forbidden pair for a cost."""
    document = load(written(tmp_path))
    good = evaluate(document, [1, 0, 0])
    # nodes 2 + 10 + 5; edges 3, 1, 3 between 0 and 1, 200 and 7 of one node, 4
    assert (good.cost, good.peak, good.limit, good.forbidden, good.feasible) == (235, 4, 8, 0, True)
    assert not evaluate(document, [0, 2, 0]).feasible  # 7 + 4 bytes at times 2 and 3
    forbidden = evaluate(document, [1, 2, 0])
    assert (forbidden.cost, forbidden.forbidden, forbidden.feasible) == (math.inf, 3, False)
    assert evaluate(document, [0, 1, 0]).forbidden == 1


def test_a_byte_above_the_limit_does_not_fit(tmp_path: Path) -> None:
    """Breaks if what the solver allows as rounding becomes bytes: 179 of them in the largest file."""
    limit = 179_269_173_248
    data: Any = {
        "problem": {
            "nodes": {"costs": [[2, 1]], "usages": [[limit, limit + 1]], "intervals": [[3, 9]]},
            "edges": {"nodes": [], "costs": []},
            "usage_limit": limit,
        }
    }
    path = written(tmp_path, data)
    problem = read(path)
    assert [problem.fits([i]) for i in (0, 1)] == [evaluate(load(path), [i]).feasible for i in (0, 1)] == [True, False]
    assert solve(problem).choice == (0,)


def change(*keys: Any) -> Callable[[Any], Any]:
    """A change of the tiny file: the last of `keys` is put where the others lead; without it, what lies there goes."""

    def apply(data: Any) -> Any:
        *way, last, value = keys
        for key in way:
            data = data[key]
        if value is None:
            del data[last]
        else:
            data[last] = value

    return apply


NODES, EDGES = ("problem", "nodes"), ("problem", "edges")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change("problem", None), "there is no 'problem'"),
        (change("problem", 3), "'problem' is of type int, not dict"),
        (change(*NODES, None), "there is no 'nodes'"),
        (change(*NODES, "usages", None), "there is no 'usages'"),
        (change(*EDGES, "costs", None), "there is no 'costs'"),
        (change(*EDGES, "nodes", {}), "'nodes' is of type dict, not list"),
        (change(*NODES, "costs", 1, 5), "node 1: costs are of type int, not list"),
        (change(*NODES, "costs", 1, 0, "10"), "node 1: '10' in its costs"),
        (change(*NODES, "costs", 1, 0, True), "node 1: True in its costs"),
        (change(*NODES, "intervals", 1, 0, 0.5), "node 1: 0.5 in its intervals"),
        (change(*NODES, "intervals", 1, [1, 2, 3]), r"node 1: \[1, 2, 3\] is no interval"),
        (change(*NODES, "intervals", 1, [0, 2**70]), "is no interval"),
        (change(*NODES, "intervals", 2, None), "costs of 3 nodes, but intervals of 2"),
        (change(*NODES, "usages", 2, None), "costs of 3 nodes, but usages of 2"),
        (change(*NODES, "usages", 1, 2, None), "node 1 has 3 costs, but 2 usages"),
        (change(*NODES, "usages", 1, 2, -4), "node 1 uses -4 bytes"),
        (change(*NODES, "usages", 1, 2, math.nan), "node 1 uses nan bytes"),
        (change(*NODES, "usages", 1, 2, math.inf), "node 1 uses inf bytes"),
        (change(*NODES, "costs", 1, 2, math.nan), "node 1 has a cost of nan"),
        (change(*NODES, "costs", 1, 2, 10**400), "node 1 has a number that no float64"),
        (change(*NODES, "costs", 2, []), "node 2 has no strategies"),
        (change(*EDGES, "costs", 3, None), "6 edges, but costs of 5"),
        (change(*EDGES, "costs", 3, 1, None), r"edge 3 of nodes \[0, 0\] has 3 costs, not 2 × 2"),
        (change(*EDGES, "costs", 4, [1]), r"edge 4 of nodes \[1\] has 1 costs, not 3"),
        (change(*EDGES, "costs", 2, 1, -math.inf), "edge 2 has a cost of -inf"),
        (change(*EDGES, "nodes", 0, [0, 3]), r"edge 0 joins nodes \[0, 3\].*there are 3"),
        (change(*EDGES, "nodes", 0, [-1, 1]), r"edge 0 joins nodes \[-1, 1\]"),
        (change(*EDGES, "nodes", 0, [0, 1, 2]), "edge 0 joins 3 nodes"),
        (change(*EDGES, "nodes", 0, []), "edge 0 joins 0 nodes"),
        (change("problem", "usage_limit", -1), "usage_limit is -1"),
        (change("problem", "usage_limit", math.nan), "usage_limit is nan"),
        (change("problem", "usage_limit", "8"), "usage_limit is '8'"),
        (change("problem", "usage_limit", 10**400), "usage_limit is a number that no float64"),
    ],
)
def test_what_no_problem_can_say_is_refused(tmp_path: Path, damage: Callable[[Any], Any], message: str) -> None:
    """Breaks if a damaged file becomes an index error, or a problem of another shape."""
    data = copy.deepcopy(TINY)
    damage(data)
    path = written(tmp_path, data)
    with pytest.raises(AutoparError, match=message) as refused:
        read(path)
    assert refused.value.where == str(path) and refused.value.remedy


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", None, "there is no such file"),
        ("a.json", b'{"problem": {', "no whole JSON.*line 1"),
        ("a.json", b"\xff\xfe\xff", "no whole JSON"),
        ("a.json", b"[" * 200_000, "no whole JSON"),
        ("a.json", b"", "no whole JSON"),
        ("a.json", b"[1]", "there is no 'problem'"),
        ("a.json.gz", b'{"problem": 1}', "no whole gzip"),
        ("a.json.gz", gzip.compress(b"{}" * 999, mtime=0)[:-9], "no whole gzip"),
        ("a.json", gzip.compress(b"{}" * 999, mtime=0)[:20], "no whole gzip"),
        ("a.json.gz", gzip.compress(b"{}", mtime=0)[:-5] + b"12345", "no whole gzip"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    """Breaks if a download that was cut off is a traceback."""
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(AutoparError, match=message):
        load(path)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    """Breaks if a folder's name is a traceback."""
    with pytest.raises(AutoparError, match="the file cannot be read"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("strategies", "message"),
    [
        ([0, 0], "2 strategies for 3 nodes"),
        ([0, 3, 0], "node 1 has no strategy 3.*0 to 2"),
        ([0, -1, 0], "node 1 has no strategy -1"),
        ([0, 1.0, 0], "node 1 has no strategy 1.0"),
        ([True, 0, 0], "node 0 has no strategy True"),
    ],
)
def test_strategies_that_are_none_are_refused(tmp_path: Path, strategies: list[Any], message: str) -> None:
    """Breaks if an index from the end, or of another node, is evaluated."""
    with pytest.raises(AutoparError, match=message):
        evaluate(load(written(tmp_path)), strategies)


def test_results_of_the_contest(tmp_path: Path) -> None:
    """Breaks if what is not known is 0, or a table of something else is taken for results."""
    assert contest_results(tmp_path) == {}
    path = tmp_path / "best.csv"
    path.write_text("instance,nodes,time_limit_s,best_contest_cost\nA,3,60,123\nB,3,,\n")
    assert contest_results(tmp_path) == {"A": Contest(123.0, 60.0), "B": Contest(None, None)}
    for text, message in (
        ("instance,cost\nA,3\n", "no column time_limit_s"),
        ("instance,time_limit_s,best_contest_cost\nA,soon,3\n", "instance A: could not convert"),
        ("instance,time_limit_s,best_contest_cost\nA,-1,3\n", "instance A: no such limit"),
        ("instance,time_limit_s,best_contest_cost\nA,9,nan\n", "instance A: no such limit or cost"),
    ):
        path.write_text(text)
        with pytest.raises(AutoparError, match=message):
            contest_results(tmp_path)


@st.composite
def documents(draw: st.DrawFn) -> Document:
    """Files of up to four nodes, with all that a file may have."""
    sizes = draw(st.lists(st.integers(1, 3), max_size=4))
    cost = st.one_of(st.integers(-5, 9), st.just(BIG), st.sampled_from([0.5, 2.25]))
    bytes_ = st.one_of(st.integers(0, 9), st.just(0.5))

    def lists(number: Any, counts: list[int]) -> list[Any]:
        return [draw(st.lists(number, min_size=count, max_size=count)) for count in counts]

    nodes = st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=2)
    edges = draw(st.lists(nodes, max_size=5)) if sizes else []
    return Document(
        Path("drawn.json"),
        lists(cost, sizes),
        lists(bytes_, sizes),
        lists(st.integers(-1, 4), [2] * len(sizes)),
        edges,
        lists(cost, [math.prod(sizes[v] for v in ends) for ends in edges]),
        draw(st.one_of(st.none(), st.integers(0, 20), st.just(7.5))),
    )


@pytest.mark.moderate
@settings(max_examples=60, derandomize=True)
@given(documents())
def test_the_solver_s_problem_says_what_the_file_says(document: Document) -> None:
    """Breaks if reading changes a cost, a peak or what fits, or the solver's answer is not the file's best."""
    problem = problem_of(document)
    best = math.inf
    for choice in itertools.product(*(range(len(costs)) for costs in document.costs)):
        exact = evaluate(document, choice)
        assert problem.evaluate(choice) == exact.cost
        assert problem.peak(choice)[1] == exact.peak
        assert (problem.fits(choice) and exact.cost < math.inf) == exact.feasible
        best = min(best, exact.cost if exact.feasible else math.inf)
    found = solve(problem, gap=0.0, explain=False)
    assert found.status == ("optimal" if best < math.inf else "infeasible")
    assert not found.choice or evaluate(document, found.choice).cost == pytest.approx(best)
