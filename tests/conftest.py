"""Marks each test with its tier, from the folder it lies in, and skips the gpu tier where there is no GPU."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import collector

# Before torch is imported anywhere: tests share few cores, and never ask a hub for anything.
collector.collect_less_often()
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# An example is as slow as the machine is busy: that is no error.
settings.register_profile("autopar", deadline=None)
settings.load_profile("autopar")

TIERS = ("unit", "browser", "dist", "gpu")
TAKES_LONG = ("slow", "moderate", "dist")
"""Marks of tests of which few cases run, unless all are asked for."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-case", action="store_true", help="run all cases of tests that take long, or are marked `sampled`"
    )
    parser.addoption("--update-golden", action="store_true", help="write the golden files of the tests that are run")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, None, None]:
    """Marks tiers before pytest leaves out what `-m` does not ask for, and samples what remains."""
    root = Path(__file__).parent
    for item in items:
        tier = item.path.relative_to(root).parts[0] if item.path.is_relative_to(root) else ""
        if tier in TIERS:
            item.add_marker(tier)
        if tier == "gpu":
            import torch

            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
    yield
    if not config.getoption("--every-case") and not any("[" in argument for argument in config.args):
        _sample(config, items)


def _sample(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of each test marked `sampled(n)`, n cases of those that this run collects, and a third of any other one that
    takes long, two at least: always the same, by digest.
    """
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if any(item.get_closest_marker(name) is not None for name in ("sampled", *TAKES_LONG)):
            cases[item.nodeid.partition("[")[0]].append(item)
    dropped: set[pytest.Item] = set()
    for group in cases.values():
        marker = group[0].get_closest_marker("sampled")
        num = marker.args[0] if marker is not None else max(2, (len(group) + 2) // 3)
        group.sort(key=lambda item: hashlib.sha256(item.nodeid.encode()).hexdigest())
        dropped.update(group[num:])
    if dropped:
        config.hook.pytest_deselected(items=[item for item in items if item in dropped])
        items[:] = [item for item in items if item not in dropped]


def pytest_collection_finish() -> None:
    collector.keep_what_lives()
