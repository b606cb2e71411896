"""Plans on the disk: found again for the same request, and for no other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.api.plan import Plan
from autopar.machine.mesh import Mesh
from autopar.planner import plan_cache

BATCH = {"input": torch.ones(8, 16)}


def _plan(mesh: str, strategy: str) -> Plan:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    return autopar.plan(model, Mesh.parse(mesh, hardware="h100"), example_inputs=BATCH, strategy=strategy)


@pytest.mark.moderate
@pytest.mark.parametrize(("mesh", "strategy"), [("dp=2", "zero3"), ("tp=2", "tensor"), ("dp=2,tp=2", "auto")])
def test_a_plan_is_found_again(mesh: str, strategy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Breaks if what was decided is decided again, or another program comes of it."""
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    first, second = _plan(mesh, strategy), _plan(mesh, strategy)
    assert second.from_cache and not first.from_cache
    assert second.source == first.source


@pytest.mark.moderate
def test_entries_of_others_and_damaged_ones_are_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Breaks if a file under a request's name decides for it though it is a plan for another mesh or strategy, or if a
    damaged one ends the run.
    """
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    names = {}
    for mesh, strategy in (("dp=2", "zero3"), ("dp=4", "zero3"), ("dp=2", "ddp")):
        before = set(tmp_path.iterdir())
        _plan(mesh, strategy)
        (names[mesh, strategy],) = set(tmp_path.iterdir()) - before
    expected = _plan("dp=2", "zero3").source
    right = names["dp=2", "zero3"].read_text()
    for other, said in ((("dp=4", "zero3"), "is a plan for a mesh"), (("dp=2", "ddp"), "is a plan for other strateg")):
        names["dp=2", "zero3"].write_text(names[other].read_text())
        found = _plan("dp=2", "zero3")
        assert found.source == expected and not found.from_cache
        assert said in caplog.text
    names["dp=2", "zero3"].write_text(right.replace("zero3", "zero2", 1))
    found = _plan("dp=2", "zero3")
    assert found.source == expected and not found.from_cache
    assert "planning again" in caplog.text
    assert _plan("dp=2", "zero3").from_cache, "it is written anew"


@pytest.mark.moderate
def test_the_folder_keeps_the_last_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Breaks if the folder grows without end, or if files of others in it are removed."""
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    monkeypatch.setattr(plan_cache, "MOST_FILES", 1)
    (tmp_path / "notes.json").write_text("mine")
    _plan("dp=2", "zero3")
    _plan("dp=2", "ddp")
    assert len(list(tmp_path.iterdir())) == 2 and (tmp_path / "notes.json").exists()
