"""Short-time Fourier transforms as frames, of which each row has its own: torch's look at strides, and at values.

    torch.stft(x, n, hop, window=w)     →  rfft(x.unfold(-1, n, hop) * w).mT
    torch.istft(z, n, hop, window=w)    →  fold(irfft(z.mT) * w) / fold(w²)

That windows overlap everywhere, which `torch.istft` asks of values, is not asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _stft(
    input: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    pad_mode: str = "reflect",
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> Tensor:
    """As torch's, of input[T] or [B, T]: [B, frequencies, frames]. What torch refuses is left to it."""
    hop, length = hop_length or n_fft // 4, win_length or n_fft
    is_complex = input.is_complex() or (window is not None and window.is_complex())
    fits = input.dim() in (1, 2) and 0 < length <= n_fft and (center or n_fft <= input.shape[-1])
    if not fits or not return_complex or align_to_window is not None or (is_complex and onesided):
        return torch.stft(
            input, n_fft, hop_length, win_length, window, center, pad_mode, normalized, onesided, return_complex,
            align_to_window,
        )  # fmt: skip
    x = input if input.dim() == 2 else input[None]
    x = F.pad(x[:, None], (n_fft // 2, n_fft // 2), mode=pad_mode)[:, 0] if center else x
    frames = x.unfold(-1, n_fft, hop)
    shape = _window(window, length, n_fft)
    frames = frames if shape is None else frames * shape
    is_onesided = not is_complex if onesided is None else onesided
    transform: Any = torch.fft.rfft if is_onesided else torch.fft.fft
    found: Tensor = transform(frames, norm="ortho" if normalized else "backward").transpose(-1, -2)
    return found if input.dim() == 2 else found[0]


def _istft(
    input: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Tensor:
    """As torch's, of input[B, frequencies, frames], or without B: [B, T]. What torch refuses is left to it."""
    hop, width = hop_length or n_fft // 4, win_length or n_fft
    is_onesided = input.shape[-2] != n_fft if onesided is None else onesided
    fits = input.is_complex() and input.dim() in (2, 3) and 0 < hop <= width <= n_fft and not return_complex
    if not fits or input.shape[-2] != (n_fft // 2 + 1 if is_onesided else n_fft):
        return torch.istft(
            input, n_fft, hop_length, win_length, window, center, normalized, onesided, length, return_complex
        )
    z = (input if input.dim() == 3 else input[None]).transpose(-1, -2)
    norm = "ortho" if normalized else "backward"
    frames = torch.fft.irfft(z, n_fft, norm=norm) if is_onesided else torch.fft.ifft(z, norm=norm).real
    shape = _window(window, width, n_fft)
    shape = frames.new_ones(n_fft) if shape is None else shape
    total = n_fft + hop * (frames.shape[1] - 1)
    sums = _overlapping(frames * shape, total, hop)
    weights = _overlapping(shape.square().expand(1, *frames.shape[1:]), total, hop)
    start = n_fft // 2 if center else 0
    end = total - start if length is None else min(start + length, total)
    found = sums[:, start:end] / weights[:, start:end]
    if length is not None and start + length > total:
        found = F.pad(found, (0, start + length - total))
    return found if input.dim() == 3 else found[0]


def _window(window: Tensor | None, length: int, n_fft: int) -> Tensor | None:
    """[n_fft], with zeros around a shorter one; None for one of ones."""
    if window is None and length == n_fft:
        return None
    left = (n_fft - length) // 2
    return F.pad(torch.ones(length) if window is None else window, (left, n_fft - length - left))


def _overlapping(frames: Tensor, total: int, hop: int) -> Tensor:
    """frames[B, frames, n], each `hop` after the one before, added up: [B, total]."""
    width = frames.shape[-1]
    return F.fold(frames.transpose(-1, -2), (1, total), (1, width), stride=(1, hop))[:, 0, 0]


FUNCTIONS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.stft: _stft,
    Tensor.stft: _stft,
    torch.istft: _istft,
    Tensor.istft: _istft,
}
