"""Block sizes, warps and stages of the attention kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.kernels.attention_problem import AttentionProblem, is_crowded, is_rich
from autopar.runtime.kernels.launch import capability, next_block


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """block_m queries and block_n keys a step; tma: tiles by tensor descriptors.

    chunk: columns of a head that the backward's products over it take at a time; 0: all of them.
    max_registers: that a thread may take; 0: what ptxas thinks best.
    """

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 2
    tma: bool = False
    chunk: int = 0
    max_registers: int = 0

    def switches(self) -> dict[str, Any]:
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "TMA": self.tma,
            "CHUNK": self.chunk,
        }

    def options(self) -> dict[str, int]:
        limit = {"maxnreg": self.max_registers} if self.max_registers else {}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **limit}


_SMALL = (86, 89, 120, 121)
"""Compute capabilities that give a program 99 KiB of shared memory, others 163 and more."""

_HOPPER_ARCH, _BLACKWELL_ARCH = 90, 100
_full, _tma = partial(KernelConfig, max_registers=255), partial(KernelConfig, tma=True)

# By head size (the larger of both, rounded up to a power of two). Of Ampere, and of head size 256, chosen by registers,
# not yet by time: the largest blocks that spill nothing at head sizes 64 and 128 (`compile_specs`; max_registers=255,
# all that there are, where ptxas would spill some to make room for a second program) by Triton 3.6.0 and 3.7.1. At head
# size 64 Triton gives a warp 16 rows of its own: more than rows / 16 warps would compute the same twice.
_AMPERE = {
    "forward": {64: KernelConfig(128, 64, 8, 3), 128: KernelConfig(128, 64, 8, 3), 256: KernelConfig(64, 32, 8, 2)},
    "dq": {64: KernelConfig(128, 32, 8, 3), 128: KernelConfig(64, 32, 4, 2), 256: KernelConfig(64, 32, 8, 2)},
    "dkv": {64: KernelConfig(16, 128, 8, 2), 128: KernelConfig(32, 64, 8, 2), 256: KernelConfig(32, 32, 8, 1)},
}
# Of Hopper by time on an H100 (benchmarks/attention/blocks.py, results/first-light-2026-11-26.md), Triton 3.6.0: small
# blocks of four warps, of which several programs run beside each other, are faster than the largest.
_HOPPER = {
    "forward": {64: KernelConfig(64, 64, 4, 3), 128: KernelConfig(64, 64, 4, 3), 256: KernelConfig(64, 32, 8, 2)},
    "dq": {64: KernelConfig(64, 64, 4, 3), 128: KernelConfig(64, 64, 4, 2), 256: KernelConfig(64, 32, 8, 2)},
    "dkv": {64: KernelConfig(64, 64, 4, 2), 128: KernelConfig(32, 64, 4, 2), 256: KernelConfig(32, 32, 8, 1)},
}
# Of head size 64 not yet by time.
_HOPPER_PLAIN = {
    "forward": {64: _tma(128, 128, 8, 2), 128: _tma(64, 64, 4, 3), 256: _tma(128, 64, 8, 2)},
    "dq": {64: _tma(128, 64, 8, 3), 128: _tma(64, 64, 4, 2), 256: _tma(64, 64, 8, 2)},
    "dkv": {64: _tma(64, 128, 8, 2), 128: _tma(64, 64, 4, 2), 256: _tma(32, 64, 8, 2)},
}
# Padding, prefixes and runs take a few registers more than some of these blocks leave.
_AMPERE_CROWDED = {
    "forward": {**_AMPERE["forward"], 64: _full(128, 32, 8, 2), 128: _full(64, 32, 8, 2)},
    "dq": {**_AMPERE["dq"], 128: _full(64, 32, 8, 2)},
    "dkv": {**_AMPERE["dkv"], 64: KernelConfig(16, 128, 8, 1)},
}
# Of capabilities in _SMALL.
_AMPERE_SMALL = {**_AMPERE_CROWDED, "dq": {**_AMPERE_CROWDED["dq"], 256: KernelConfig(32, 32, 8, 2)}}
_HOPPER_CROWDED = {
    "forward": {**_HOPPER["forward"], 128: KernelConfig(64, 32, 4, 3)},
    "dq": {**_HOPPER["dq"], 64: KernelConfig(64, 32, 4, 3)},
    "dkv": {**_HOPPER["dkv"], 128: KernelConfig(32, 64, 4, 2)},
}
# Biases, soft-caps and dropout take registers of their own.
_RICH = {
    "forward": {64: KernelConfig(64, 32, 4, 2), 128: KernelConfig(64, 32, 8, 1), 256: KernelConfig(64, 32, 8, 1)},
    "dq": {64: KernelConfig(64, 16, 4, 2), 128: KernelConfig(64, 32, 8, 2), 256: KernelConfig(32, 32, 8, 1)},
    "dkv": {64: _full(16, 64, 4, 1), 128: _full(32, 32, 8, 1), 256: KernelConfig(32, 32, 8, 1)},
}
_HOPPER_RICH = {
    "forward": {**_RICH["forward"], 64: KernelConfig(64, 64, 4, 3), 128: KernelConfig(64, 64, 4, 2)},
    "dq": {**_RICH["dq"], 64: KernelConfig(64, 64, 4, 3), 128: KernelConfig(64, 64, 4, 2)},
    "dkv": {**_RICH["dkv"], 64: KernelConfig(64, 64, 4, 2), 128: KernelConfig(32, 64, 4, 3)},
}
# With padding, prefixes and runs, or together; of Hopper, too, not yet by time.
_RICH_CROWDED = {
    "forward": {64: _full(64, 16, 4, 1), 128: _full(64, 16, 8, 1), 256: KernelConfig(64, 32, 8, 1)},
    "dq": {64: _full(64, 16, 4, 1), 128: _full(32, 32, 8, 2), 256: KernelConfig(32, 32, 8, 1)},
    "dkv": {64: _full(16, 64, 4, 1), 128: _full(16, 32, 8, 1), 256: KernelConfig(32, 32, 8, 1)},
}
# Products of float32 are taken exactly, without tensor cores: operands lie in registers, all columns of a product at
# once, and the backward, which has two such products, takes slices of them instead.
_FLOAT32 = {
    "forward": {64: _full(32, 16, 8, 1), 128: _full(32, 16, 8, 1), 256: _full(16, 16, 8, 1)},
    "dq": {64: _full(32, 32, 8, 1, chunk=32), 128: _full(32, 32, 8, 1, chunk=32), 256: _full(16, 16, 8, 1, chunk=32)},
    "dkv": {64: _full(16, 32, 8, 1, chunk=32), 128: _full(16, 32, 8, 1, chunk=64), 256: _full(16, 16, 8, 1, chunk=64)},
}


def width(size: int, value_size: int) -> int:
    """The head size that tables have, for these of keys and values."""
    return max(64, next_block(max(size, value_size)))


def default_config(
    kind: str, arch: int, dtype: torch.dtype, size: int, value_size: int, *, plain: bool, rich: bool = False,
    crowded: bool = False,
) -> KernelConfig:  # fmt: skip
    """The configuration of kernel `kind` on compute capability `arch`.

    plain: nothing but a causal mask, in rows that tensor descriptors can read; rich: bias, soft-cap or dropout;
    crowded: as `is_crowded` says.
    """
    block = width(size, value_size)
    if kind == "dbias":
        return KernelConfig(32, 32, 4, 1) if dtype != torch.float32 and block < 256 else KernelConfig(16, 16, 4, 1)
    if dtype == torch.float32:
        return _FLOAT32[kind][block]
    if rich:
        return (_RICH_CROWDED if crowded else _HOPPER_RICH if arch == _HOPPER_ARCH else _RICH)[kind][block]
    if arch in _SMALL:
        return _AMPERE_SMALL[kind][block]
    if arch >= _HOPPER_ARCH:
        is_tma = plain and arch < _BLACKWELL_ARCH
        return (_HOPPER_CROWDED if crowded else _HOPPER_PLAIN if is_tma else _HOPPER)[kind][block]
    return (_AMPERE_CROWDED if crowded else _AMPERE)[kind][block]


def choose(kind: str, problem: AttentionProblem, *rows: Tensor) -> KernelConfig:
    """The configuration of "forward", "dq", "dkv" or "dbias" for this call, which reads blocks of `rows`."""
    arch = capability(rows[0].device)
    if not arch:
        config = INTERPRETED[kind]
        return replace(config, chunk=INTERPRETED_CHUNK) if rows[0].dtype == torch.float32 else config
    size, value_size, plain = problem.switches["D"], problem.switches["E"], is_plain(problem, *rows)
    rich, crowded = is_rich(problem.switches), is_crowded(problem.switches)
    return default_config(kind, arch, rows[0].dtype, size, value_size, plain=plain, rich=rich, crowded=crowded)


def is_plain(problem: AttentionProblem, *rows: Tensor) -> bool:
    """Whether nothing but a causal mask says what is seen, in rows that tensor descriptors can read."""
    return problem.is_plain and all(fits_descriptor(x) for x in rows)


def fits_descriptor(x: Tensor) -> bool:
    """Whether tensor descriptors can read rows of x[B, H, S, D]: addresses that are multiples of 16 bytes."""
    aligned = all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:-1])
    return aligned and x.data_ptr() % 16 == 0 and x.numel() > 0


INTERPRETED_CHUNK = 16
"""Of float32, as on a device."""
# Small, and not square, so that small tensors are several blocks.
INTERPRETED = {
    "forward": KernelConfig(16, 32),
    "dq": KernelConfig(32, 16),
    "dkv": KernelConfig(16, 32),
    "dbias": KernelConfig(16, 16),
}
