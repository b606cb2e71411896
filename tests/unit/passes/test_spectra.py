"""Short-time Fourier transforms in a model."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.passes import spectra


@pytest.mark.filterwarnings("ignore:The length of signal is shorter")
@pytest.mark.parametrize("center", [True, False])
def test_as_torch_has_them(center: bool) -> None:
    """Breaks if a frame, a window that is padded, a norm or a length is another than torch's."""
    draw = torch.Generator().manual_seed(0)
    for n, hop, width in ((8, 2, 8), (8, 3, 6), (9, None, None)):
        window = torch.rand(width or n, generator=draw) + 0.1
        for shape, normalized, onesided in itertools.product(((25,), (2, 25)), (True, False), (True, False)):
            x = torch.randn(*shape, generator=draw)
            given: dict[str, Any] = {"center": center, "normalized": normalized, "onesided": onesided}
            z = torch.stft(x, n, hop, width, window, return_complex=True, **given)
            torch.testing.assert_close(spectra._stft(x, n, hop, width, window, return_complex=True, **given), z)
            if center or width in (n, None):
                for length in (None, 20, 30) if width != 6 else (None, 20):
                    wanted = torch.istft(z, n, hop, width, window, length=length, **given)
                    torch.testing.assert_close(spectra._istft(z, n, hop, width, window, length=length, **given), wanted)


class Vocoder(nn.Module):
    """Magnitudes and phases become sound, of which the loss takes magnitudes."""

    window: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 10)
        self.register_buffer("window", torch.hann_window(8))

    def forward(self, x: Tensor) -> Tensor:
        scale, phase = self.linear(x).mT.chunk(2, 1)
        sound = torch.istft(torch.polar(scale.exp(), phase), 8, 2, window=self.window)
        return (
            torch.stft(sound, 8, 2, window=torch.hann_window(8), return_complex=True).abs().clamp(min=1e-3).log().mean()
        )


@pytest.mark.moderate
def test_each_rank_transforms_its_rows() -> None:
    """Breaks if a test of the window's values ends the trace, or rows are gathered for what each has of its own."""
    given = {"x": torch.randn(4, 7, 6)}
    plan = autopar.plan(Vocoder(), autopar.Mesh({"dp": 2}), strategy="ddp", example_inputs=given)
    assert plan.verify().ok
    assert not any("gather" in each.kind for each in plan.collectives)
