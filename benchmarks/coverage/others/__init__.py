"""Models of libraries that autopar does not know, by what they are for."""

from __future__ import annotations

from benchmarks.coverage.others import diffusion, graphs, images, scripts, sequences
from benchmarks.coverage.others.entry import Entry


def entries() -> list[Entry]:
    """All of them, in the order in which they are asked."""
    return [
        *scripts.entries(), *sequences.entries(), *graphs.entries(), *diffusion.entries(), *images.entries(),
    ]  # fmt: skip
