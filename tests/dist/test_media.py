"""Scripts that train on images, sound, images beside text, and diffusion, three lines changed, against one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist import media
from tests.dist.launch import launch

ROUNDINGS = {"wav2vec2": 1e-5, "hubert": 1e-5, "llava": 1e-6, "paligemma": 1e-6}
"""Of those whose losses transformers computes in float32, whatever the model's precision: CTC's sums exponentials at
each step, cross entropy's once. The others are in float64 throughout.
"""
CASES: list[tuple[list[str], tuple[str, ...], tuple[int, ...], Any]] = [
    (["swin", "wav2vec2"], ("dp",), (2,), "zero3"),
    (["hubert", "whisper"], ("dp",), (2,), "zero3"),
    (["llava", "paligemma"], ("dp",), (2,), "zero3"),
    (["diffusion", "flow"], ("dp",), (2,), "zero3"),
    (["llava", "flow"], ("dp", "tp"), (2, 2), {"dp": "zero3", "tp": "tensor"}),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("names", "axes", "sizes", "strategy"), CASES)
def test_losses_gradients_and_parameters(
    names: list[str], axes: tuple[str, ...], sizes: tuple[int, ...], strategy: Any
) -> None:
    """Breaks if a model of these kinds is refused, or five steps of its script give other numbers than one process."""
    num = sizes[0] * sizes[-1] if len(sizes) > 1 else sizes[0]
    for found in launch(media.pairs, num, names, axes, sizes, strategy, timeout_s=400.0):
        for name, (expected, ours) in zip(names, found, strict=True):
            assert ours == pytest.approx(expected, rel=ROUNDINGS.get(name, 1e-9)), name
