"""Launching one of the three large attention kernels: by its default configuration, or tuned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from autopar.base import environment
from autopar.runtime.kernels.attention_configs import KernelConfig, choose, is_plain
from autopar.runtime.kernels.attention_problem import AttentionProblem, is_crowded, is_rich
from autopar.runtime.kernels.attention_tuning import tuned
from autopar.runtime.kernels.launch import capability, is_interpreted, launch


def launch_attention(
    kind: str, kernel: Any, problem: AttentionProblem, arguments: Mapping[str, Any], *rows: Tensor
) -> None:
    """Launch "forward", "dq" or "dkv", which reads blocks of `rows`."""
    device = rows[0].device
    if environment.tunes() and not is_interpreted(kernel):
        size, value_size = problem.switches["D"], problem.switches["E"]
        plain = is_plain(problem, *rows)
        tuning = tuned(
            kernel, kind, capability(device), rows[0].dtype, size, value_size, plain=plain,
            rich=is_rich(problem.switches), crowded=is_crowded(problem.switches),
        )  # fmt: skip
        if programs(kind, problem, 1, 1):
            launch(tuning, lambda meta: (programs(kind, problem, meta["BLOCK_M"], meta["BLOCK_N"]),), device, arguments)
        return
    config = choose(kind, problem, *rows)
    count = programs(kind, problem, config.block_m, config.block_n)
    even = _even(problem, config)
    launch(kernel, count, device, {**arguments, **config.switches(), **even}, **config.options())


def programs(kind: str, problem: AttentionProblem, block_m: int, block_n: int) -> int:
    """How many programs write the result: one for each block of it."""
    if kind == "dkv":
        return problem.batch * problem.kv_heads * problem.key_blocks(block_n)
    return problem.batch * problem.heads * problem.query_blocks(block_m)


def _even(problem: AttentionProblem, config: KernelConfig) -> dict[str, bool]:
    return {
        "EVEN_KEYS": problem.keys // problem.key_runs % config.block_n == 0,
        "EVEN_QUERIES": problem.queries // problem.query_runs % config.block_m == 0,
    }
