"""Every candidate of the attention kernels' tables: is it right? Triton keeps what it compiled."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.attention import speed
from benchmarks.attention.contenders import Case
from benchmarks.first_light.attention import blocks, try_blocks
from benchmarks.first_light.section import Section


def run(section: Section) -> None:
    for head_dim in (128, 64) if section.on_cuda else (16,):
        for causal in (True, False):
            case = Case(head_dim, causal, 1024, 4, speed.WIDTH // head_dim)
            if not section.on_cuda:
                case = Case(head_dim, causal, 48, 2, 2, dtype=torch.float32, device="cpu")
            for kind, config in blocks(section, case):
                section.attempt(f"blocks {kind}", partial(try_blocks, section, case, kind, config, None))
