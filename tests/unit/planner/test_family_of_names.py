"""A placement that was lowered with all the memory there is, within a limit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar import pipeline
from autopar.machine.mesh import Mesh
from autopar.planner.programs import Programs
from autopar.strategies.names import resolve
from autopar.strategies.request import Attempt

MESH = Mesh({"dp": 2}, hardware="cpu")


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()).square().mean()


@pytest.fixture(scope="module")
def programs() -> Programs:
    asked = Attempt(Small(), {"x": torch.randn(8, 16)}, MESH, resolve("auto", MESH), memory_limit_bytes=1e9)
    return Programs.of(asked, pipeline.DEFAULT)


@pytest.mark.parametrize("share", [1.0, 0.999])
def test_what_keeps_to_a_limit_is_not_lowered_again(
    share: float, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks if the same program is lowered once more, if it does not say its limit, or if one that does not fit passes
    for one that does.
    """
    named = replace(programs.asked, placed_by=resolve("zero3", MESH), memory_limit_bytes=None, explain=False)
    free = programs.plan(named)
    limit = share * free.cost.peak_memory_bytes
    lowered: list[Any] = []
    real = Programs._run
    monkeypatch.setattr(Programs, "_run", lambda self, *given: lowered.append(given) or real(self, *given))
    within = programs.plan(replace(named, memory_limit_bytes=limit, checks_limit=True))
    assert bool(lowered) == (share < 1)
    assert within.memory_limit_bytes == limit
    assert within.decisions == free.decisions or share < 1
