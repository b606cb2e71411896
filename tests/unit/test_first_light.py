"""benchmarks/first_light, as far as it goes without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.first_light.run import SECTIONS, rows_of, summary

ROOT = Path(__file__).parents[2]


def test_what_is_wrong_is_told(tmp_path: Path) -> None:
    """Breaks if a row that is wrong, a section without rows, or a line that was being written looks well."""
    path = tmp_path / "kernels.jsonl"
    rows = [{"case": "a", "ok": True}, {"case": "b", "ok": False}, {"case": "c", "ok": None}]
    path.write_text("\n".join(map(json.dumps, rows)) + '\n{"case": "d", "o')
    found = rows_of(path)
    assert found == rows
    line = summary("kernels", found, 3.0, "")
    assert line["wrong"] == [rows[1]] and line["ended"] == "" and "well" in line["text"]
    assert summary("kernels", [], 3.0, "")["ended"] == "found nothing"


def test_every_section_is_in_the_runbook() -> None:
    """Breaks if a section is added, and nobody is told what it shows."""
    text = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in text for name in SECTIONS)


@pytest.mark.slow
def test_sections_run_without_a_gpu(tmp_path: Path) -> None:
    """Breaks if the first minutes on a GPU would go into errors that show here too."""
    command = [sys.executable, str(ROOT / "benchmarks" / "first_light" / "run.py"), "env", "attention", "step1b"]
    options = ["--device", "cpu", "--quick", "--budget", "240", "--out", str(tmp_path)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=260)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" well") >= 3
    rows = rows_of(tmp_path / "step1b.jsonl")
    losses = [row["losses"] for row in rows if "losses" in row]
    assert len(losses) == 3 and all(abs(a - losses[0][-1]) < 1e-4 for *_, a in losses)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("section", ["decode", "experts"])
def test_the_section_of_some_kernels_runs_without_a_gpu(section: str, tmp_path: Path) -> None:
    """Breaks if the check of a token's kernels, or of experts', would end in an error on a GPU that shows here too."""
    command = [sys.executable, str(ROOT / "benchmarks" / "first_light" / "run.py"), section, "--device", "cpu"]
    options = ["--quick", "--budget", "240", "--out", str(tmp_path)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=260)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {row["ok"] for row in rows_of(tmp_path / f"{section}.jsonl")} == {True}
