"""benchmarks/training/accuracy.py: errors have the right sign, rows are found, a page says what missed its target."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.training import accuracy
from benchmarks.training.accuracy import MODELS, TOGETHER, Row, cases_of, cells, median_error, summary, verdict

pytestmark = pytest.mark.unit
PARTS = {"compute": 0.8, "communication": 0.0, "optimizer": 0.1}
ROW = Row("llama", 1, "ddp", 0.9, 1.0, 0.95, 0.9, 1.1, 99 * 2.0**20, 100 * 2.0**20, PARTS)


def test_errors() -> None:
    """Breaks if a prediction that is too low is not negative, or a median forgets the sign of what it is of."""
    assert ROW.time_error == pytest.approx(-0.1) and ROW.memory_error == pytest.approx(-0.01)
    assert ROW.cpu_error == pytest.approx(0.9 / 0.95 - 1) and replace(ROW, cpu_s=None).cpu_error is None
    assert median_error([-0.3, 0.1, 0.2]) == pytest.approx(0.2)


def test_rows_by_name() -> None:
    """Breaks if a row has no model, is run twice, or cannot be asked for."""
    rows = cases_of("cpu")
    assert len(set(rows)) == len(rows) == len(MODELS) + sum(map(len, TOGETHER.values()))
    assert set(TOGETHER) <= set(MODELS)
    assert {case.ranks for case in cases_of("cpu", ["llama"])} == {1, 2}
    assert [case.strategy for case in cases_of("cpu", ["gpt2:tensor"])] == ["tensor"]
    assert {case.ranks for case in cases_of("cpu", ["2"])} == {2}
    assert {case.axis for case in cases_of("cpu")} == {"dp", "tp", "pp"}
    assert {case.ranks for case in cases_of("cuda")} == {1}


def test_what_a_page_says() -> None:
    """Breaks if a table's cells and head differ, or the worst under-prediction of memory is not the one named."""
    other = replace(ROW, model="gpt2", predicted_bytes=97 * 2.0**20)
    assert len(cells(ROW, 1.0)) == len(accuracy.HEADER)
    time, memory = verdict([replace(ROW, measured_s=1.2), other], "cpu")
    assert "median error 20.0% (target 10%)" in time and "a factor of 1.333; without it 10.0%" in time
    assert "of CPU time 5.3%" in time and "calibrates" in cells(ROW, 1.3) and "**+17.0%**" in cells(other, 1.3)
    assert "least: -3.0% (gpt2 ddp; target: not under -2%)" in memory
    assert "900 ms (compute 800, optimizer 100), measured 1000, -10.0%" in summary(ROW)
