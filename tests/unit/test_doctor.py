"""`autopar doctor`: what of ranks' facts is off, and what of a folder, in one process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.api.doctor import Options, doctor, judging, links
from autopar.api.doctor.facts import UNLIMITED, Device, Facts
from autopar.api.doctor.findings import Finding
from autopar.cost.calibration.collectives import axes_of
from autopar.machine import profiles
from tests.unit.commands import run

GIB = 1 << 30
WELL = Facts(
    rank=0, host="a", local_ranks=2, python="3.12.1", autopar="0.1.0",
    packages={"torch": "2.13.0+cu130", "numpy": "2.3", "safetensors": "0.5", "xxhash": "3.5", "ortools": "9.12"},
    cuda="13.0", nccl="2.27.3", devices=2, device=Device("H100", 79 * GIB, 80 * GIB), threads=4, cores=64,
    shm_bytes=16 * GIB, memory_bytes=100 * GIB,
)  # fmt: skip


def ranks(**of_last: object) -> list[Facts]:
    """Four on two machines, all well but for the last."""
    found = [replace(WELL, rank=rank, host="ab"[rank // 2]) for rank in range(4)]
    return [*found[:3], replace(found[3], **of_last)]  # type: ignore[arg-type]


def off(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.state == "off"]


def test_ranks_that_are_well() -> None:
    """Breaks if a healthy job is told that something is off."""
    assert off(judging.judge(ranks())) == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"packages": {**WELL.packages, "torch": "2.12.0"}}, "torch is 2.13.0+cu130 on most ranks, rank 3 (b) has 2"),
        ({"python": "3.11.9"}, "Python is 3.12.1 on most ranks, rank 3 (b) has 3.11.9"),
        ({"nccl": ""}, "NCCL is 2.27.3 on most ranks, rank 3 (b) has none"),
        ({"packages": {**WELL.packages, "numpy": "1.26"}}, "numpy differs"),
        ({"packages": {k: v for k, v in WELL.packages.items() if k != "xxhash"}}, "has no xxhash"),
        ({"device": Device("A100", 79 * GIB, 80 * GIB)}, "A100: rank 3 (b)"),
        ({"device": Device("H100", 10 * GIB, 80 * GIB)}, "70 GiB of 80 GiB of the GPU of rank 3 (b) are taken"),
        ({"devices": 1}, "1 GPUs and 2 ranks"),
        ({"computes": False}, "rank 3 (b) is wrong about a product"),
        ({"threads": 64}, "threads of each: 64; cores: 64: rank 3 (b)"),
        ({"open_files": 256}, "rank 3 (b) may open 256 files, 528 may be needed"),
        ({"is_infiniband": True, "locked_bytes": 65536}, "may lock 64 KiB"),
        ({"shm_bytes": 64 << 20}, "64 MiB are free in /dev/shm for 2 ranks: rank 3 (b)"),
    ],
)  # fmt: skip
def test_what_is_off_on_one_rank(changed: dict[str, object], said: str) -> None:
    """Breaks if one rank of four with a fault passes, is not named, or nothing is said that helps."""
    (found,) = off(judging.judge(ranks(**changed)))
    assert said in found.said and found.remedy


def test_versions_that_are_too_old() -> None:
    """Breaks if all ranks alike may have a version that autopar does not run with."""
    old = [replace(WELL, packages={**WELL.packages, "torch": "2.9.1"}, python="3.10.0")]
    assert {finding.said for finding in off(judging.judge(old))} == {"Python is 3.10.0", "torch is 2.9.1"}
    assert off(judging.judge([replace(WELL, open_files=UNLIMITED)])) == []


def test_clocks() -> None:
    """Breaks if the rank with the wrong clock is not the one that is named, or what may be an error of measuring is."""
    hosts = ["a", "a", "b", "c"]
    (found,) = off(judging.clocks([(0.0, 0.0), (0.001, 0.01), (-12.0, 0.01), (0.002, 0.01)], hosts, 1.0))
    assert "the clock of rank 2 (b) is 12.0 s behind most" in found.said
    (found,) = off(judging.clocks([(0.0, 0.0), (60.0, 0.01), (60.0, 0.01), (60.0, 0.01)], hosts, 1.0))
    assert "the clock of rank 0 (a) is 60.0 s behind most" in found.said
    assert off(judging.clocks([(0.0, 0.0), (3.0, 2.5)], hosts[:2], 1.0)) == []


def test_links_against_a_profile_and_each_other() -> None:
    """Breaks if a link of half of its speed passes, or the group or pair that has it is not named."""
    hosts, hardware = ["a"] * 4 + ["b"] * 4, profiles.load("h100")
    inside, across = axes_of(8, 4)
    usual = [1.1e-3] * 8
    assert not off(links.judge_axis(inside, 1 << 28, usual, hardware, 0.5, hosts))
    (found,) = off(links.judge_axis(inside, 1 << 28, [*usual[:7], 9e-3], hardware, 0.5, hosts))
    assert found.said.startswith("ranks 4, 5, 6, 7 (b): 44.7 GB/s") and "by the profile h100" in found.said
    (found,) = off(links.judge_axis(across, 1 << 28, [1.0] * 8, hardware, 0.5, hosts))
    assert "NCCL_IB_HCA" in found.remedy
    (found,) = off(links.judge_axis(across, 1 << 28, [1.0, *usual[:3], 1.0, *usual[:3]], None, 0.5, hosts))
    assert found.said.startswith("ranks 0, 4 (a, b)")
    pairs = [1.0, 1.0, 1.0, float("inf"), 1.0, 4.0, 1.0, float("inf")]
    (found,) = off(links.judge_pairs(pairs, 4, 1 << 20, 0.5, hosts))
    assert found.said.startswith("ranks 5, 6 (b)")


def test_a_folder_of_one_process(tmp_path: Path) -> None:
    """Breaks if a plain local folder is found off, the trial leaves something, or a folder that is not there passes."""
    report = doctor(Options(tmp_path, needed_bytes=1))
    assert report.is_well and not list(tmp_path.iterdir())
    assert any(finding.name == "folder" and "renames" in finding.said for finding in report.findings)
    (found,) = off(list(doctor(Options(tmp_path / "none")).findings))
    assert "cannot write there: No such file" in found.said and "storage that all machines mount" in found.remedy
    (found,) = off(list(doctor(Options(tmp_path, needed_bytes=1 << 60)).findings))
    assert found.name == "space" and "autopar checkpoint prune" in found.remedy


def test_the_command(tmp_path: Path) -> None:
    """Breaks if the exit code does not say whether something is off, or --json prints anything but JSON."""
    out, _ = run("doctor", "--folder", str(tmp_path))
    assert out.strip().endswith("nothing is off")
    data = json.loads(run("doctor", "--folder", str(tmp_path / "none"), "--json", code=1)[0])
    assert not data["ok"] and data["ranks"] == 1 and data["facts"][0]["packages"]["torch"]
    _, err = run("doctor", "--hardware", "h99x", code=1)
    assert "h99x" in err
    assert "torchrun" in run("doctor", "--help")[0]
