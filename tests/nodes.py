"""Processes of this machine as if two were a node, with a slower network between nodes."""

from __future__ import annotations

from importlib import resources
from pathlib import Path


def nodes_of_two(folder: str | Path) -> Path:
    """The profile `cpu` with two devices a node, as a file in a folder."""
    text = resources.files("autopar.machine").joinpath("data", "hardware", "cpu.toml").read_text(encoding="utf-8")
    assert "devices = 64" in text
    path = Path(folder) / "nodes_of_two.toml"
    path.write_text(text.replace("devices = 64", "devices = 2"), encoding="utf-8")
    return path
