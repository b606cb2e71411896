"""What torch.cuda has for tests of order and time, without a public name."""

from __future__ import annotations

from typing import Any

import torch

_CYCLES_PER_S = 2.0e9
"""Not under any GPU's clock by much: a device that runs slower sleeps longer."""


def sleep_on(device: torch.device, seconds: float) -> None:
    """Keep the current stream of a CUDA device busy for so many seconds, or longer, while the host goes on."""
    with torch.cuda.device(device):
        torch.cuda._sleep(max(1, int(seconds * _CYCLES_PER_S)))


def waiting_seeds() -> tuple[Any, ...]:
    """The seeds that GPUs get when torch first uses one."""
    waiting: Any = torch.cuda._lazy_seed_tracker
    return waiting.manual_seed_all_cb, waiting.manual_seed_cb, waiting.call_order


def set_waiting_seeds(seeds: tuple[Any, ...]) -> None:
    """Put back what `waiting_seeds` gave."""
    waiting: Any = torch.cuda._lazy_seed_tracker
    waiting.manual_seed_all_cb, waiting.manual_seed_cb, waiting.call_order = seeds


def seeds_gpus(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    """Whether somebody seeded GPUs alone between two `waiting_seeds`: `torch.manual_seed` seeds all that there is."""
    kept = ((place, seed) for place, seed in enumerate(now[:2]) if seed is not None and seed is not before[place])
    return any(not any("torch/random.py" in line for line in stack) for _, (_, stack) in kept)
