"""Marks each test with its tier, from the folder it lies in, and skips the gpu tier where there is no GPU."""

from __future__ import annotations

import os
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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files of the tests that are run")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    root = Path(__file__).parent
    for item in items:
        tier = item.path.relative_to(root).parts[0] if item.path.is_relative_to(root) else ""
        if tier in TIERS:
            item.add_marker(tier)
        if tier == "gpu":
            import torch

            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


def pytest_collection_finish() -> None:
    collector.keep_what_lives()
