"""The files for clusters: what they start is a run of several ranks, in the words of each scheduler."""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
SCONTROL = '#!/bin/sh\nif [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> "$ASKED"; fi\n'
SRUN = """#!/bin/sh
shift  # --kill-on-bad-exit
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" & SLURM_PROCID=0 SLURM_LOCALID=0 "$@"; code=$?; wait; exit $code
"""


def is_free(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) != 0


def test_the_slurm_script(tmp_path: Path) -> None:
    """Breaks if ranks do not find each other by what Slurm gives, or the job is not asked for again while steps are
    left. Slurm's two commands are stand-ins: scontrol names this machine, srun starts two tasks.
    """
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(stat.S_IRWXU)
    script = (ROOT / "examples/slurm/train.sbatch").read_text()
    script = script.replace("dp=4,tp=8 --steps 100000", "dp=2 --steps 6")
    (tmp_path / "job").write_text(script)
    job = next(number for number in range(os.getpid(), os.getpid() + 100) if is_free(20000 + number % 20000))
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {
        **os.environ, "PATH": path, "SLURM_JOB_NODELIST": "here", "OMP_NUM_THREADS": "1",
        "SLURM_NTASKS": "2", "SLURM_JOB_ID": str(job), "ASKED": str(tmp_path / "asked"), "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    command = ["bash", str(tmp_path / "job"), str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "step 6  loss" in done.stdout and (tmp_path / "run" / "step-000000006" / "manifest.json").exists()
    assert (tmp_path / "asked").read_text() == f"requeue {job}\n"


def test_the_directives() -> None:
    """Breaks if the job's numbers do not fit its mesh, or no signal leaves time for a save."""
    script = (ROOT / "examples/slurm/train.sbatch").read_text()
    nodes, tasks = (int(re.search(rf"--{name}=(\d+)", script)[1]) for name in ("nodes", "ntasks-per-node"))  # type: ignore[index]
    dp, tp = map(int, re.search(r"dp=(\d+),tp=(\d+)", script).groups())  # type: ignore[union-attr]
    assert nodes * tasks == dp * tp and "--signal=USR1@" in script and "--requeue" in script
    yaml = (ROOT / "examples/kubernetes/train.yaml").read_text()
    assert re.search(r"replicas: 4\b", yaml) and 'nprocPerNode: "8"' in yaml and '"dp=4,tp=8"' in yaml
