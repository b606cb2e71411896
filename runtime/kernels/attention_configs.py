"""Block sizes, warps and stages of the attention kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from autopar.runtime.kernels.attention_problem import AttentionProblem
from autopar.runtime.kernels.launch import capability


@dataclass(frozen=True, slots=True)
class KernelConfig:
    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 2
    tma: bool = False
    warp_specialize: bool = False

    def switches(self) -> dict[str, Any]:
        return {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "TMA": self.tma, "WARP_SPECIALIZE": self.warp_specialize}

    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def forward_config(problem: AttentionProblem, q: Tensor) -> KernelConfig:
    return KernelConfig(16, 16)


def dq_config(problem: AttentionProblem, q: Tensor) -> KernelConfig:
    return KernelConfig(16, 16)


def dkv_config(problem: AttentionProblem, q: Tensor) -> KernelConfig:
    return KernelConfig(16, 16)


def bias_config(problem: AttentionProblem, q: Tensor) -> KernelConfig:
    return KernelConfig(16, 16)
