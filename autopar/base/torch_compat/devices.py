"""What torch.cuda has for tests of order and time, without a public name."""

from __future__ import annotations

import torch

_CYCLES_PER_S = 2.0e9
"""Not under any GPU's clock by much: a device that runs slower sleeps longer."""


def sleep_on(device: torch.device, seconds: float) -> None:
    """Keep the current stream of a CUDA device busy for so many seconds, or longer, while the host goes on."""
    with torch.cuda.device(device):
        torch.cuda._sleep(max(1, int(seconds * _CYCLES_PER_S)))
