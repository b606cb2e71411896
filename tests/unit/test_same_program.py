"""The same model gives the same program, in whichever process, and however busy its machine is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PLANS = """
import hashlib
import torch
from torch import nn
from torch.nn import functional as F
import autopar

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(16, 16) for name in ("query", "key", "value", "out")})
        self.up, self.down, self.norm = nn.Linear(16, 48), nn.Linear(48, 16), nn.LayerNorm(16)

    def forward(self, x):
        q, k, v = (self.parts[name](x).unflatten(-1, (2, 8)).transpose(1, 2) for name in ("query", "key", "value"))
        x = x + self.parts["out"](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm(x))))

class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x):
        return {"loss": self.head(F.relu(self.norm(self.stem(x))).mean((2, 3))).logsumexp(-1).mean()}

given = (nn.Sequential(Block(), Block()), torch.randn(4, 8, 16)), (Images(), torch.randn(8, 3, 8, 8))
found = []
for model, batch in given:
    plan = autopar.plan(model, "dp=2,tp=2", hardware="cpu", example_inputs=batch)
    digest = hashlib.sha256((plan.source + repr(plan.notes)).encode()).hexdigest()
    found.append(f"{digest} {plan.cost.step_time_s}")
"""
BUSY = """
import itertools, time
hours = itertools.count(step=600.0)
time.process_time = time.perf_counter = time.monotonic = lambda: next(hours)
"""


@pytest.mark.moderate
def test_the_same_model_gives_the_same_program() -> None:
    """Breaks if the order of a set, an address, what was planned before, or what clocks say decides what is planned;
    or if the first use of autopar draws of Python's generator (rich does, as it is imported), so that a script that was
    seeded before draws otherwise. The other process has another hash seed, and clocks that go on by ten minutes at
    every look.
    """
    here: dict[str, Any] = {}
    exec(PLANS, here)
    given = {**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    text = f"{BUSY}import random\ndrawn = random.getstate()\n{PLANS}\nassert random.getstate() == drawn"
    text += "\nprint('\\n'.join(found))"
    done = subprocess.run([sys.executable, "-c", text], env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(here["found"]) == 2
    assert done.stdout.splitlines() == here["found"]
