"""Block sizes, warps and stages of the attention kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.kernels.attention_problem import AttentionProblem
from autopar.runtime.kernels.launch import capability


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """block_m queries and block_n keys a step; tma: tiles by tensor descriptors; warp_specialize: of the inner loop."""

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 2
    tma: bool = False
    warp_specialize: bool = False

    def switches(self) -> dict[str, Any]:
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "TMA": self.tma,
            "WARP_SPECIALIZE": self.warp_specialize,
        }

    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def default_config(kind: str, arch: int, dtype: torch.dtype, size: int, value_size: int, *, plain: bool) -> KernelConfig:
    return KernelConfig(64, 64, 4, 2)


def choose(kind: str, problem: AttentionProblem, q: Tensor) -> KernelConfig:
    """The configuration of "forward", "dq", "dkv" or "dbias" for this call."""
    arch = capability(q.device)
    if not arch:
        return INTERPRETED[kind]
    size, value_size = problem.switches["D"], problem.switches["E"]
    return default_config(kind, arch, q.dtype, size, value_size, plain=problem.is_plain)


# Small, and not square, so that small tensors are several blocks.
INTERPRETED = {
    "forward": KernelConfig(16, 32),
    "dq": KernelConfig(32, 16),
    "dkv": KernelConfig(16, 32),
    "dbias": KernelConfig(16, 16),
}
