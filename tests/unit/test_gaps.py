"""benchmarks/plans/gaps.py: every shipped model is asked for, limits bind, and the report counts right."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cli.models import catalogue
from autopar.machine.mesh import Mesh
from benchmarks.plans import gaps
from benchmarks.plans.gaps import MESHES, Case, Placed, cases, measure, report

pytestmark = pytest.mark.unit
ROW = Placed("a", "dp=8", "free", "none", 75, 269, 0.0, 0.0, 1.25)


def test_every_shipped_model_on_one_to_four_axes() -> None:
    """Breaks if a model is left out or counted by two names, or a number of axes is."""
    found = list(cases())
    assert len(found) == len(set(found)) == len(MESHES) * (len(catalogue.names()) - len(catalogue.ALIASES))
    data = Path(catalogue.__file__).parents[1] / "data" / "models"
    assert {path.stem for path in data.glob("*.json")} <= {case.model for case in found}
    assert {len(Mesh.parse(mesh, hardware="h100").sizes) for mesh in MESHES} == {1, 2, 3, 4}


@pytest.mark.moderate
def test_a_model_is_placed_with_memory_to_spare_and_without() -> None:
    """Breaks if the limit does not bind where the row says so, or a row does not survive its own process."""
    free, binds = measure(Case("mlp", "dp=4,tp=2"))
    assert (free.memory, free.price_ms_per_gib, free.recompute) == ("free", 0.0, "none")
    assert binds.memory.endswith("%") and binds.price_ms_per_gib > 0
    assert all(row.nodes and row.choices > row.nodes and 0 <= row.gap < 1 for row in (free, binds))


@pytest.mark.moderate
def test_what_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if one case that fails ends the run, or leaves no trace."""
    (row,) = gaps.run_case(Case("no-such-model", "dp=8"))
    assert row.memory == "free" and "no-such-model" in row.error
    monkeypatch.setattr(gaps, "SECONDS", 0)
    (late,) = gaps.run_case(Case("mlp", "dp=8"))
    assert late.error == "not done within 0 s"


def test_what_is_above_a_gap_is_named() -> None:
    """Breaks if a gap is held against the wrong number, or rows of other meshes or memory are counted together."""
    rows = [
        ROW, replace(ROW, model="b", gap=0.004), replace(ROW, model="b", memory="80%", gap=0.02, price_ms_per_gib=1.5),
        replace(ROW, model="c", mesh="dp=4,tp=2", error="too slow"),
    ]  # fmt: skip
    text = report(rows)
    assert "3 placements of 2 models." in text
    assert "Above 1.0%: 1 (b on dp=8, memory 80%: 2.00%)." in text
    assert "Above 0.1%: 2 (b on dp=8, memory 80%: 2.00%; b on dp=8, memory free: 0.40%)." in text
    assert "Without a placement: c on dp=4,tp=2, memory free: too slow." in text
    assert "| dp=8 | free | 2 | 0.200% | 0.400% | 1.2 |" in text and "| dp=8 | binds | 1 | 2.000% |" in text
    assert "| b | dp=8 | 80% | none | 75 | 269 | 2.000% | 1.5 | 1.2 |" in text


def test_rows_that_are_done_are_not_placed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Breaks if a run that was stopped begins again, or its rows are read back as others."""
    done: list[Case] = []

    def run(case: Case) -> list[Placed]:
        done.append(case)
        return [replace(ROW, model=case.model, mesh=case.mesh)]

    monkeypatch.setattr(gaps, "run_case", run)
    path = tmp_path / "rows.jsonl"
    monkeypatch.setattr("sys.argv", ["gaps.py", "--only", "mlp dp=8; cnn dp=8", "--rows", str(path)])
    gaps.main()
    first = capsys.readouterr().out
    assert len(done) == len(path.read_text().splitlines()) == 4
    assert all(json.loads(line)["rows"] for line in path.read_text().splitlines())
    gaps.main()
    assert len(done) == 4 and capsys.readouterr().out == first
