"""Configurations of the attention kernels by measurement (`triton.autotune`), where AUTOPAR_TUNE=1 asks for it.

Ranks that tune apart may take different ones, whose results differ in the last bits: what ranks compute redundantly
would drift apart. So the default is a table (`attention_configs`). What was measured is kept in Triton's cache folder.

A candidate may spill a few registers where no default does: time decides. `aot` says which do (`tuned` in its names).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton

from autopar.runtime.kernels.attention_configs import KernelConfig, default_config, width

_BLOCKS = {
    "forward": ((64, 64, 4), (128, 64, 8), (128, 128, 8)),
    "dq": ((64, 64, 4), (128, 32, 8), (128, 64, 8)),
    "dkv": ((32, 64, 8), (64, 64, 8), (32, 128, 8), (64, 128, 8)),
}
# Whose tiles come by descriptors, and take no registers for addresses.
_BLOCKS_TMA = {"dkv": ((16, 128, 8), (64, 64, 4))}
# What the time depends on. Other lengths are measured again.
_KEY = (
    "S", "T", "H", "D", "E", "SOFTCAP", "BIAS", "KEYS", "SINKS", "DROPOUT", "LEFT", "RIGHT", "PREFIX", "QUERY_RUNS",
    "KEY_RUNS", "PRECISION",
)  # fmt: skip
_EVEN = {
    "EVEN_KEYS": lambda given: given["T"] // given["KEY_RUNS"] % given["BLOCK_N"] == 0,
    "EVEN_QUERIES": lambda given: given["S"] // given["QUERY_RUNS"] % given["BLOCK_M"] == 0,
}


def candidates(
    kind: str, arch: int, dtype: torch.dtype, size: int, value_size: int, *, plain: bool, rich: bool, crowded: bool
) -> list[KernelConfig]:
    """The default first, then those that may be faster; arguments as of `default_config`."""
    default = default_config(kind, arch, dtype, size, value_size, plain=plain, rich=rich, crowded=crowded)
    if dtype == torch.float32 or rich or kind == "dbias" or width(size, value_size) > 128:
        return [default]
    tma = plain and arch // 10 == 9
    blocks = _BLOCKS[kind] + (_BLOCKS_TMA.get(kind, ()) if tma else ())
    found = [KernelConfig(m, n, warps, stages, tma) for m, n, warps in blocks for stages in (2, 3)]
    return [default, *(each for each in found if each != default)]


@lru_cache
def tuned(
    kernel: Any, kind: str, arch: int, dtype: torch.dtype, size: int, value_size: int, plain: bool, rich: bool,
    crowded: bool = False,
) -> Any:  # fmt: skip
    """The kernel, which measures its candidates at its first call for each set of lengths and features."""
    configs = [
        triton.Config({k: v for k, v in each.switches().items() if k in kernel.arg_names}, **each.options())
        for each in candidates(kind, arch, dtype, size, value_size, plain=plain, rich=rich, crowded=crowded)
    ]
    even = {name: rule for name, rule in _EVEN.items() if name in kernel.arg_names}
    key = [name for name in _KEY if name in kernel.arg_names]
    return triton.autotune(configs, key, cache_results=True)(triton.heuristics(even)(kernel))
