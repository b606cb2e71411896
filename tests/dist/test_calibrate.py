"""`autopar calibrate` on several processes: every collective, medians over ranks, one file, ranks that differ."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from autopar.base.errors import AutoparError
from autopar.cost.calibration import Options, calibrate, collectives, run
from autopar.cost.calibration.cases import all_cases
from autopar.cost.roofline import COLLECTIVE_KINDS
from autopar.machine import profiles
from tests.dist.launch import launch


def calibrated(path: str, axes: str | None, dtype: str) -> list[str] | str | None:
    """A calibration of a few small cases: residuals on rank 0, None on the others, or the error."""
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size())
    few = ("linear 32 x", "multiply 512 ", "multiply 262144 ", "gelu", "sum")

    def cases(dtype: torch.dtype, device: str, quick: bool) -> list[object]:
        every = all_cases(dtype, device, quick)
        attention = [case for case in every if case.kind == "attention"][:2]
        return attention + [case for case in every if case.label.startswith(few)]

    run.all_cases = cases  # type: ignore[assignment]
    collectives.sizes_for = lambda device, quick: [2**12, 2**16]
    try:
        found = calibrate(Options(Path(path), quick=True, axes=axes, dtypes=(dtype,)))
    except AutoparError as error:
        return f"error: {error}"
    finally:
        del os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"]
    return None if found is None else [str(each) for each in found.residuals]


def differently(path: str) -> list[str] | str | None:
    return calibrated(path, None, "fp32" if dist.get_rank() == 0 else "fp64")


@pytest.mark.parametrize("axes", [None, "dp=2,tp=1"])
def test_every_collective_is_measured(tmp_path: Path, axes: str | None) -> None:
    """Breaks if a collective hangs, is left out of the profile, or another rank than the first writes."""
    path = tmp_path / "two.toml"
    first, second = launch(calibrated, 2, str(path), axes, "fp32")
    assert second is None and isinstance(first, list)
    assert {f"node {kind}" for kind in COLLECTIVE_KINDS} <= {line.split(":")[0] for line in first}
    mine = profiles.load(path)
    assert {each.kind for each in mine.node.measured} == set(COLLECTIVE_KINDS)
    assert "2 processes" in mine.sources["node"] and "not measured" in mine.sources["network"]


def test_ranks_that_differ_are_named(tmp_path: Path) -> None:
    """Breaks if ranks with other options make one profile, or wait for each other."""
    errors = launch(differently, 2, str(tmp_path / "two.toml"))
    assert all("rank 1 is not like rank 0" in str(error) and "float64" in str(error) for error in errors)
    errors = launch(calibrated, 2, str(tmp_path / "two.toml"), "dp=4", "fp32")
    assert all("has 4 ranks, and torchrun started 2" in str(error) for error in errors)
    assert not list(tmp_path.iterdir())
