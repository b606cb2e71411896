"""benchmarks/attention/speed.py, as far as it goes without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "attention" / "speed.py"


def run(*arguments: str, interpreted: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"CUDA_VISIBLE_DEVICES": ""} | ({"TRITON_INTERPRET": "1"} if interpreted else {})
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)


def test_contenders_are_right() -> None:
    """Breaks if the comparison with float64 cannot run, or a contender that runs here fails it."""
    done = run("--check", interpreted=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 contenders wrong" in done.stdout and done.stderr.count("autopar: out") == 4


def test_without_a_gpu() -> None:
    """Breaks if a run without a GPU looks like one that measured something."""
    done = run("--quick")
    assert done.returncode == 2 and "no CUDA device" in done.stderr and not done.stdout
    assert run("--lengths", "1000").returncode == 2
