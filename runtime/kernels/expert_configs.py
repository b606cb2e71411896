"""Tiles of the experts' kernels, by registers and shared memory as compiled ahead of time, not yet by time.

`rows` of an expert: how many of a call's it has on the average, at most. Few want small tiles: of a tile's rows what
the group does not fill is computed for nothing, and weights are what is read then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from autopar.operators.expert_tiles import rows_of_tile

KINDS = ("up", "up_grad", "rows", "columns")


@dataclass(frozen=True, slots=True)
class Tile:
    """block_m × block_n results (of gate and of up, as many), block_k terms a step; group_m: tiles of rows that share
    columns.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 3
    group_m: int = 8

    def switches(self) -> dict[str, Any]:
        return {
            "BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k, "GROUP_M": self.group_m,
        }  # fmt: skip

    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


_SMALL_MEMORY = (86, 89, 120, 121)
"""Compute capabilities that give a program 99 KiB of shared memory, others 163 and more."""

_HOPPER = {
    "up": {
        16: Tile(16, 64, 128, 4, 3),
        32: Tile(32, 64, 64, 4, 3),
        64: Tile(64, 64, 64, 4, 3),
        128: Tile(128, 64, 64, 8, 3),
    },
    "up_grad": {
        16: Tile(16, 64, 128, 4, 3),
        32: Tile(32, 64, 64, 4, 3),
        64: Tile(64, 64, 64, 8, 3),
        128: Tile(128, 64, 64, 8, 3),
    },
    "rows": {
        16: Tile(16, 128, 128, 4, 3),
        32: Tile(32, 128, 64, 4, 3),
        64: Tile(64, 128, 64, 4, 3),
        128: Tile(128, 128, 64, 8, 3),
    },
}
_AMPERE = {
    "up": {
        16: Tile(16, 64, 64, 4, 3),
        32: Tile(32, 64, 64, 4, 3),
        64: Tile(64, 64, 32, 4, 3),
        128: Tile(128, 64, 32, 8, 3),
    },
    "up_grad": {
        16: Tile(16, 64, 64, 4, 3),
        32: Tile(32, 64, 32, 4, 3),
        64: Tile(64, 32, 32, 4, 3),
        128: Tile(128, 32, 32, 8, 3),
    },
    "rows": {
        16: Tile(16, 128, 64, 4, 3),
        32: Tile(32, 128, 64, 4, 3),
        64: Tile(64, 128, 32, 4, 3),
        128: Tile(128, 128, 32, 8, 3),
    },
}
# Exact products of float32 take no tensor cores: operands lie in registers.
_FLOAT32 = {
    "up": {
        16: Tile(16, 32, 32, 4, 2),
        32: Tile(32, 32, 32, 4, 2),
        64: Tile(64, 32, 16, 8, 2),
        128: Tile(64, 32, 16, 8, 2),
    },
    "up_grad": {
        16: Tile(16, 32, 32, 4, 2),
        32: Tile(32, 32, 16, 4, 2),
        64: Tile(64, 32, 16, 8, 2),
        128: Tile(64, 32, 16, 8, 2),
    },
    "rows": {
        16: Tile(16, 64, 32, 4, 2),
        32: Tile(32, 64, 32, 4, 2),
        64: Tile(64, 64, 16, 8, 2),
        128: Tile(64, 64, 16, 8, 2),
    },
}
# Of sums over rows the tile is of features; rows are terms.
_COLUMNS = {"hopper": Tile(128, 128, 64, 8, 3), "ampere": Tile(128, 128, 32, 8, 3), "small": Tile(64, 64, 32, 4, 3)}
_INTERPRETED = Tile(16, 16, 16, group_m=2)


def tile_of(kind: str, arch: int, dtype: torch.dtype, rows: float) -> Tile:
    """kind: of `KINDS`. arch: compute capability, 0 where Triton interprets. rows: an expert's, on the average.

    Of one architecture and dtype always the same: ranks that compute the same get the same bits.
    """
    if not arch:
        return _INTERPRETED
    if dtype == torch.float32:
        return Tile(64, 64, 16, 8, 2) if kind == "columns" else _FLOAT32[kind][rows_of_tile(rows)]
    if kind == "columns":
        return _COLUMNS["small" if arch in _SMALL_MEMORY else "hopper" if arch >= 90 else "ampere"]
    return (_HOPPER if arch >= 90 and arch not in _SMALL_MEMORY else _AMPERE)[kind][rows_of_tile(rows)]
