"""A profile from measurements: it loads, says what was measured, and names what was not."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.base.errors import AutoparError
from autopar.cli import hardware_output
from autopar.cost.calibration import Options, calibrate, run
from autopar.cost.calibration.cases import Case, all_cases
from autopar.cost.calibration.collectives import axes_of
from autopar.cost.calibration.profile_text import to_toml
from autopar.cost.calibration.timing import Timer
from autopar.cost.calibration.updates import optimizer_step
from autopar.machine import profiles
from autopar.machine.mesh import Mesh

VALUES = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.integers(-(10**12), 10**12),
    st.floats(1e-12, 1e15).map(lambda x: float(f"{x:.4g}")),
)
KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


@pytest.mark.moderate
@given(
    st.dictionaries(
        KEYS, VALUES | st.dictionaries(KEYS, VALUES | st.dictionaries(KEYS, VALUES, max_size=2), max_size=3)
    )
)
def test_toml_says_what_it_was_given(data: dict[str, object]) -> None:
    """Breaks if a key or value of a profile reads back as another one."""
    assert tomllib.loads(to_toml(data)) == data


def test_toml_of_points() -> None:
    """Breaks if points lose their order or digits, or what is no number is written."""
    assert tomllib.loads(to_toml({"a": {"points": [[1, 2.5e9], [2, 3.0]]}})) == {
        "a": {"points": [[1, 2.5e9], [2, 3.0]]}
    }
    with pytest.raises(TypeError):
        to_toml({"a": None})


def small(case: Case) -> bool:
    """Cases that take little time to build."""
    wanted = ("32 x 32 x 32", "64 x 64 x 64", "32³", "multiply 512 ", "multiply 65536 ", "64 tokens, head size 32")
    return (
        case.label.endswith(wanted[:3])
        or case.label.startswith(wanted[3:5])
        or wanted[5] in case.label
        or (case.kind == "operator" and case.label in ("gelu", "sum", "embedding"))
    )


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """No clock: every operator takes as long as its number in the order says."""
    count = iter(range(1, 1000))
    monkeypatch.setattr(Timer, "seconds", lambda self, function: (function(), 1e-4 * next(count))[1])
    monkeypatch.setattr(Timer, "launch_s", lambda self: 1e-6)
    monkeypatch.setattr(
        run, "all_cases", lambda dtype, device, quick: [case for case in all_cases(dtype, device, quick) if small(case)]
    )


@pytest.mark.moderate
@pytest.mark.usefixtures("quickly")
def test_a_calibration_is_a_profile(tmp_path: Path) -> None:
    """Breaks if what calibrate writes does not load, loses a measurement, or hides what it did not measure."""
    steps: list[str] = []
    totals: list[int] = []
    found = calibrate(Options(tmp_path / "mine.toml", dtypes=("fp32", "bf16")), totals.append, steps.append)
    assert found is not None and totals == [len(steps)]
    mine = profiles.load(tmp_path / "mine.toml")
    assert mine == found.hardware and mine.name == "mine" and mine.device == "cpu"
    assert set(mine.matmul) == {"fp32", "bf16"} and set(mine.attention) == {
        f"{key}.{phase}{variant}"
        for key in mine.matmul
        for phase in ("forward", "backward")
        for variant in ("", "_softcap", "_dropout", "_bias")
    }
    assert mine.memory_points and mine.optimizer_s_per_byte and mine.optimizer_s_per_tensor and mine.view_s
    assert all(source for source in mine.sources.values())
    assert "measured by autopar calibrate" in mine.sources["matmul"] and torch.__version__ in mine.sources["matmul"]
    assert "not measured, from the shipped profile cpu" in mine.sources["node"]
    assert found.notes and "collectives" in found.notes[0]
    assert {r.name for r in found.residuals} == {"matmul", "memory", "attention", "operator"}
    assert all("median error" in str(r) for r in found.residuals)
    json.dumps(found.to_dict())
    printed = hardware_output.calibration_text(found)
    assert "matmul: median error" in printed and "not measured: collectives" in printed
    assert {"memory", "optimizer", "node"} <= {row[0] for row in hardware_output.details(mine)}
    Mesh({"dp": 2}, hardware=mine)


def test_what_cannot_be_calibrated_is_refused(tmp_path: Path) -> None:
    """Breaks if minutes are spent before the file, the dtype or the mesh is found not to serve."""
    with pytest.raises(AutoparError, match="cannot write .*name a file in a folder that exists"):
        calibrate(Options(tmp_path / "none" / "mine.toml"))
    with pytest.raises(AutoparError, match="is a TOML file, not 'mine.json'.*mine.toml"):
        calibrate(Options(tmp_path / "mine.json"))
    with pytest.raises(AutoparError, match="unknown dtype 'fp7'"):
        calibrate(Options(tmp_path / "mine.toml", dtypes=("fp7",)))
    with pytest.raises(AutoparError, match="unknown device 'tpu'"):
        calibrate(Options(tmp_path / "mine.toml", device="tpu"))
    with pytest.raises(AutoparError, match="this is one process.*torchrun"):
        calibrate(Options(tmp_path / "mine.toml", axes="dp=2"))
    assert not list(tmp_path.iterdir())


def test_axes_measure_the_link_that_they_use() -> None:
    """Breaks if a group inside a machine is taken for the network, or one that uses both links is fitted to either."""
    found = {axis.name: axis for axis in axes_of(8, 4)}
    assert found["ranks of a node"].groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert found["nodes"].groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert [axis.section for axis in found.values()] == ["node", "network"]
    mesh = Mesh({"dp": 2, "cp": 2, "tp": 2}, hardware="cpu")
    named = [(name, mesh.groups(name)) for name in mesh.axis_names]
    assert [axis.section for axis in axes_of(8, 4, named)] == ["network", "node", "node"]
    assert [axis.section for axis in axes_of(8, 4, [("dp", [list(range(8))])])] == [None]
    assert [axis.section for axis in axes_of(4, 4)] == ["node"] and not axes_of(1, 1)


def test_an_optimizer_step_updates_all_bytes() -> None:
    """Breaks if the bytes that AdamW is timed for are not those of its parameters."""
    step, num_bytes = optimizer_step(torch.float32, torch.device("cpu"))
    step()
    assert num_bytes == 8 * 2**19 * 4
