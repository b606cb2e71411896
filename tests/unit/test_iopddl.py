"""benchmarks/solver/iopddl.py: an answer is the last line, is checked against the file, put into tables."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.base.errors import AutoparError
from autopar.solver import Solution
from benchmarks import pages
from benchmarks.solver import iopddl, iopddl_table
from benchmarks.solver.iopddl import Progress, main, run_apart, verdict
from benchmarks.solver.iopddl_file import Contest, Evaluation, evaluate, load
from benchmarks.solver.iopddl_table import UNKNOWN, Row, gap_of, outcome, page, table
from tests.unit.test_iopddl_file import TINY, written

FOUND = Solution((0,), 10.0, 9.0, 0.1, "feasible", 0.0, 5.0, 1.0)
EXACT = Evaluation(10, 5, 8, 0)
ROW = Row("A", 60.0, "feasible", 1200, 3400, 1100, 1000.0, 0.1, 59.5, 0.5)


def problem(costs: list[Any], usages: list[Any], limit: int | None, edges: dict[int, Any] | None = None) -> Any:
    """Nodes that are alive together; edges: between a node and the next."""
    nodes = {"costs": costs, "usages": usages, "intervals": [[0, 1]] * len(costs)}
    pairs = {"nodes": [[v, v + 1] for v in edges or {}], "costs": list((edges or {}).values())}
    return {"problem": {"nodes": nodes, "edges": pairs} | ({} if limit is None else {"usage_limit": limit})}


EMPTY = problem([], [], 5)
SINGLE = problem([[3, 1, 2]], [[0, 9, 4]], 5)
DECIDED = problem([[1], [2]], [[1], [1]], 5, {0: [4]})
TOO_SMALL = problem([[1, 2], [3, 4]], [[6, 5], [4, 3]], 7)
FORBIDDEN = problem([[1, 2], [3, 4]], [[1, 1], [1, 1]], None, {0: [10**18] * 4})


def answered(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, list[int], str]:
    """(exit status, the last line of stdout, stderr)."""
    status = main([str(path), "--time", "20", *options])
    out, err = capsys.readouterr()
    return status, json.loads(out.splitlines()[-1]), err


@pytest.mark.parametrize(
    ("data", "cost"), [(TINY, 129), (EMPTY, 0), (SINGLE, 2), (DECIDED, 7), (problem([[2, 1]], [[0, 0]], None), 1)]
)
def test_the_last_line_is_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str], data: Any, cost: int) -> None:
    """Breaks if output is no list of strategies, is not the best, or problems of few or no nodes, nodes of one
    strategy, parallel edges or edges of one node cannot be solved.
    """
    path = written(tmp_path, data)
    status, choice, err = answered(path, capsys)
    document = load(path)
    everything = [evaluate(document, each) for each in itertools.product(*(range(len(c)) for c in document.costs))]
    assert status == 0 and evaluate(document, choice).cost == min(e.cost for e in everything if e.feasible)
    assert evaluate(document, choice).cost == cost and f"cost {cost}\n" in err
    assert "fits" in err if data is TINY else "optimal" in err


@pytest.mark.parametrize("data", [TOO_SMALL, FORBIDDEN])
def test_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str], data: Any) -> None:
    """Breaks if a proof that there is no answer looks like an answer, or like a search that gave up."""
    assert main([str(written(tmp_path, data))]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "proven infeasible" in err


def test_nothing_found(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a search that gave up looks like a proof; or the contest's time is not the default, or --time is not
    taken instead.
    """
    asked: list[dict[str, Any]] = []

    def give_up(problem: object, **options: Any) -> Solution:
        asked.append(options)
        return Solution((), math.inf, 3.0, math.inf, "unknown", 0.0, 0.0, 0.0)

    monkeypatch.setattr(iopddl, "solve", give_up)
    path = written(tmp_path)
    assert main([str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "none found, and not known whether there are any" in err
    (tmp_path / "best.csv").write_text("instance,time_limit_s,best_contest_cost\ntiny,30,\n")
    main([str(path)])
    main([str(path), "--time", "0.5", "--gap", "0.1"])
    given = [iopddl.SHARE_OF_TIME * seconds for seconds in (60.0, 30.0, 0.5)]
    assert [each["time_limit_s"] for each in asked] == given
    assert [each["gap"] for each in asked] == [0.0, 0.0, 0.1] and asked[0]["wall_clock"] is True


@pytest.mark.parametrize(
    ("found", "exact", "best", "status"),
    [
        (FOUND, EXACT, None, "feasible"),
        (FOUND, EXACT, 10.0, "feasible"),
        (FOUND, EXACT, 8.5, "wrong: 8.5 is below the bound"),
        (replace(FOUND, bound=10.5), EXACT, None, "wrong: 10 is below the bound"),
        (replace(FOUND, cost=9.5), EXACT, None, "wrong: said to cost 9.5"),
        (FOUND, replace(EXACT, peak=9), None, "wrong: 9 bytes"),
        (FOUND, replace(EXACT, cost=math.inf, forbidden=2), None, "wrong: 2 forbidden choices"),
        (replace(FOUND, choice=(), status="infeasible", bound=math.inf), None, None, "infeasible"),
        (replace(FOUND, choice=(), status="infeasible", bound=math.inf), None, 12.0, "wrong: not infeasible"),
        (replace(FOUND, choice=(), status="unknown"), None, 12.0, "unknown"),
    ],
)
def test_what_cannot_be_true_is_wrong(
    found: Solution, exact: Evaluation | None, best: float | None, status: str
) -> None:
    """Breaks if a bug of the solver (a cost too low, bytes too many, a bound too high) flatters the table."""
    assert verdict(found, exact, Contest(best, None)) == status


def test_a_wrong_answer_is_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks if an answer that breaks the limit ends in exit status 0."""
    monkeypatch.setattr(iopddl, "solve", lambda problem, **_: replace(FOUND, choice=(0, 2, 0), cost=235.0))
    status, choice, err = answered(written(tmp_path), capsys)
    assert status == 1 and choice == [0, 2, 0] and "DOES NOT FIT" in err and "wrong: 11 bytes" in err


def test_progress_is_two_lines_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a terminal is flooded."""
    clock = [0.0]
    monkeypatch.setattr(iopddl.time, "perf_counter", lambda: clock[0])
    lines: list[str] = []
    progress = Progress(lines.append)
    for step in range(1000):
        clock[0] = step / 250
        progress("prices", math.inf if step < 100 else 1000.0 - step // 500, float(step // 2))
    assert len(lines) == 8 and lines[0].split() == ["0.0", "s", "prices", "cost", "–", "bound", "0", "gap", "–"]
    assert lines[-1].split()[-6:] == ["cost", "999", "bound", "437", "gap", "56.256%"]


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances of a folder are solved in this process, which is faster."""

    def run_here(path: Path, time_limit_s: float, gap: float) -> Row:
        try:
            return iopddl.run(path, time_limit_s, gap, UNKNOWN)[0]
        except AutoparError:
            return Row(path.stem, time_limit_s, iopddl_table.UNREADABLE)

    monkeypatch.setattr(iopddl, "run_apart", run_here)


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    written(tmp_path, TINY, "tiny.json.gz")
    written(tmp_path, SINGLE, "single.json")
    (tmp_path / "best.csv").write_text("instance,time_limit_s,best_contest_cost\nsingle,40,4\ntiny,,129\n")
    return tmp_path


def cells(out: str) -> dict[str, list[str]]:
    lines = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("|")]
    return {line[0]: line[1:] for line in lines[2:]}


@pytest.mark.usefixtures("in_process")
def test_a_folder_becomes_a_table_and_a_page(
    problems: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks if an instance is missing, compared with another's best, or given another's time."""
    monkeypatch.setattr(pages, "RESULTS", problems)
    assert main([str(problems), "--repeat", "2", "--write"]) == 0
    out = capsys.readouterr().out
    rows = cells(out)
    assert list(rows) == ["single", "tiny"]
    nodes, edges, cost, bound, gap, best, ratio, _, limit, _, status = rows["single"]
    assert (nodes, edges, cost, bound, gap) == ("1", "0", "2", "2", "0.000%")
    assert (best, ratio, limit, status) == ("4", "0.50000", "40", "optimal")
    assert rows["tiny"][5:7] == ["129", "1.00000"] and rows["tiny"][8] == "60"
    (written_page,) = problems.glob("iopddl-*.md")
    text = written_page.read_text()
    assert out.strip() in text and "2 runs each, medians (range)" in text and "cores" in text and "ortools" in text
    assert "2 of 2 instances answered" in out and "as low or lower on 2 of 2" in out


@pytest.mark.usefixtures("in_process")
def test_some_of_a_folder(problems: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Breaks if --only is not kept, a damaged file ends the whole run, or one without an answer is a success."""
    assert main([str(problems), "--only", "tiny", "--time", "7"]) == 0
    assert [row[8] for row in cells(capsys.readouterr().out).values()] == ["7"]
    assert main([str(problems), "--only", "tiny,nobody"]) == 2
    assert "no problem 'nobody'" in capsys.readouterr().err
    (problems / "broken.json").write_text("{")
    written(problems, TOO_SMALL, "small.json")
    assert main([str(problems), "--repeat", "2"]) == 1
    out = capsys.readouterr().out
    assert {name: row[-1] for name, row in cells(out).items()} == {
        "broken": "cannot be read", "single": "optimal", "small": "infeasible", "tiny": "optimal",
    }  # fmt: skip
    assert cells(out)["small"][2:7] == ["–", "–", "–", "", ""] and "2 of 4 instances answered" in out


@pytest.mark.moderate
def test_each_instance_has_a_process(problems: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if what a process found does not come back whole, or one that dies takes the others with it."""
    row = run_apart(problems / "single.json", 20.0, 0.0)
    assert (row.instance, row.status, row.cost, row.nodes) == ("single", "optimal", 2, 1)
    assert row.bound == pytest.approx(2) and row.rss_gib > 0 and row.time_limit_s == 20
    monkeypatch.setattr(sys, "executable", "false")
    assert run_apart(problems / "single.json", 20.0, 0.0).status == "ended with exit status 1"


def test_a_damaged_file_in_a_process_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Breaks if the reason is not to be seen."""
    (tmp_path / "broken.json").write_text("{")
    assert run_apart(tmp_path / "broken.json", 20.0, 0.0).status == "cannot be read"
    assert "no whole JSON" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["{folder}/nothing.json"], "there is no such file"), (["{folder}"], "there are no problems here")],
)
def test_wrong_input_is_said_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """Breaks if a wrong path is a traceback, or is found out after minutes of search."""
    assert main([each.format(folder=tmp_path) for each in arguments]) == 2
    err = capsys.readouterr().err
    assert message in err and err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["a.json", "--write"], ["a.json", "--repeat", "2"], ["a.json", "--only", "B"], [],
    ],
)  # fmt: skip
def test_options_that_mean_nothing_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Breaks if an option is silently left out of account."""
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2 and "error: " in capsys.readouterr().err


def test_medians_and_ranges() -> None:
    """Breaks if one of several runs stands for all."""
    rows = [replace(ROW, cost=cost, seconds=seconds) for cost, seconds in ((1100, 9.0), (1300, 8.0), (1200, 10.0))]
    line = cells(table(rows, {"A": Contest(1000.0, 60.0)}))["A"]
    assert line[:3] == ["1,200", "3,400", "1,200 (1,100–1,300)"] and line[6:8] == ["1.20000", "9.0 (8.0–10.0)"]
    assert "geometric mean 1.20000, at most 1.20000; as low or lower on 0 of 1" in outcome(
        rows, {"A": Contest(1000.0, 60.0)}
    )
    assert outcome(rows, {}) == "1 of 1 instances answered."
    assert "The latest came 2.5 s after its limit" in outcome([*rows, replace(ROW, seconds=62.5)], {})
    assert "1 run each." in page("", 1)


def test_gaps() -> None:
    """Breaks if a gap is negative, or divides by nothing."""
    assert gap_of(100.0, 99.0) == 0.01 and gap_of(-100.0, -101.0) == 0.01 and gap_of(5.0, 6.0) == 0.0
    assert gap_of(0.0, -1.0) == gap_of(math.inf, math.inf) == gap_of(3.0, -math.inf) == math.inf


def test_an_interruption_shows_what_was_found(
    problems: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks if half an hour of results is lost at a key."""
    replies: list[Callable[[], Row]] = [lambda: replace(ROW, instance="single"), lambda: _interrupt()]
    monkeypatch.setattr(iopddl, "run_apart", lambda *_: replies.pop(0)())
    assert main([str(problems)]) == 130
    assert list(cells(capsys.readouterr().out)) == ["single"]


def _interrupt() -> Row:
    raise KeyboardInterrupt
