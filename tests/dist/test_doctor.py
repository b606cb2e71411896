"""`autopar doctor` on several ranks, one of which has a fault: it is named, and nobody waits for long."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from autopar.api.doctor import Options, doctor, links, run
from autopar.base.errors import AutoparError
from tests.dist.launch import launch


def looked(folder: str, fault: str, timeout_s: float = 60.0) -> list[str]:
    """What is off, on this rank; rank 1 has the fault."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    changed = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ.update(changed)
    is_ill, collect = rank == 1, run.collect
    place = Path(folder) / ("elsewhere" if fault == "folder" and is_ill else "shared")
    if is_ill and fault == "clock":
        links.now = lambda: time.time() + 30.0
    if is_ill and fault == "hang":
        run.collect = lambda *given: time.sleep(timeout_s + 4) or collect(*given)  # type: ignore[func-returns-value]
    try:
        # CPUs of a test are shared: how fast their links are is not to be judged here.
        report = doctor(Options(place, needed_bytes=1, share=0.01, within_s=2.0, timeout_s=timeout_s))
    except AutoparError as error:
        return [str(error)]
    finally:
        links.now, run.collect = time.time, collect
        for name in changed:
            del os.environ[name]
    return [finding.said for finding in report.findings if finding.state == "off"]


def hung(folder: str) -> list[str]:
    """In a process group that gives up after two seconds."""
    rank, store = dist.get_rank(), f"file://{folder}/store"
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=2))
    return looked(folder, "hang", 2.0)


def test_all_ranks_are_looked_at(tmp_path: Path) -> None:
    """Breaks if a healthy job of three is found off, or ranks get different reports, or files are left."""
    (tmp_path / "shared").mkdir()
    assert launch(looked, 3, str(tmp_path), "") == [[], [], []]
    assert not list((tmp_path / "shared").iterdir())


def test_a_folder_that_is_not_shared(tmp_path: Path) -> None:
    """Breaks if ranks that write into folders of their own pass, or the trial waits for ever or leaves something."""
    for name in ("shared", "elsewhere"):
        (tmp_path / name).mkdir()
    first, second, third = launch(looked, 3, str(tmp_path), "folder")
    assert first == second == third and [
        said for said in first if said.startswith("ranks 0, 1 did not see") and said.endswith("wrote")
    ]
    assert not any(path.name.startswith(".doctor") for path in tmp_path.rglob("*"))


def test_a_clock_that_is_off(tmp_path: Path) -> None:
    """Breaks if a clock that is half a minute ahead passes, or another rank is named."""
    (tmp_path / "shared").mkdir()
    for found in launch(looked, 3, str(tmp_path), "clock"):
        assert found == ["the clock of rank 1 is 30.0 s ahead of most"]


def test_a_rank_that_does_not_answer(tmp_path: Path) -> None:
    """Breaks if a rank that hangs is waited for longer than was asked, or is not named with what it is at."""
    (tmp_path / "shared").mkdir()
    first, *_ = launch(hung, 2, str(tmp_path), timeout_s=30.0, gives_up=True)
    assert "rank 1 at versions, devices and limits" in first[0]
