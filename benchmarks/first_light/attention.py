"""Attention's kernels beside PyTorch's and FlexAttention, and beside themselves at other block sizes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.attention import speed
from benchmarks.attention.contenders import INTERPRETED, OURS, Case
from benchmarks.attention.contenders import autopar as ours
from benchmarks.first_light.section import Section

if TYPE_CHECKING:
    from autopar.runtime.kernels.attention_configs import KernelConfig

ROUNDS = 10
FLASH, CUDNN = "SDPA flash", "SDPA cuDNN"
"""Where the second is the faster, AUTOPAR_ATTENTION=cudnn is for programs of plain attention."""


def run(section: Section) -> None:
    if not section.on_cuda:
        for causal in (False, True):
            case = Case(16, causal, 48, 2, 2, dtype=torch.float32, device="cpu")
            section.attempt(str(case), partial(_check, section, case))
        return
    lengths = (1024, 16384) if section.quick else (16384, 4096, 1024)
    for head_dim in (128, 64):
        for causal in (False, True):
            for length in lengths:
                case = Case(head_dim, causal, length, speed.TOKENS // length, speed.WIDTH // head_dim)
                section.attempt(str(case), partial(_time, section, case))
            section.attempt(f"blocks {head_dim}", partial(_blocks, section, head_dim, causal))


def _check(section: Section, case: Case) -> None:
    _, missing = speed.prepare(case, INTERPRETED, case.tensors())
    section.row(str(case), not missing, missing=missing)


def _time(section: Section, case: Case) -> None:
    for row in speed.measure(case, ROUNDS):
        found = {
            name: row.case.flops(row.backward) / statistics.median(times) / 1e9
            for name, times in row.milliseconds.items()
            if times
        }
        way = "backward" if row.backward else "forward"
        section.row(f"{case} {way}", OURS not in row.missing, tflops=found, missing=dict(row.missing))
        if {FLASH, CUDNN} <= found.keys():
            section.row(f"{case} {way}: plain", None, cudnn_by_flash=found[CUDNN] / found[FLASH])


def _blocks(section: Section, head_dim: int, causal: bool) -> None:
    """Every candidate of a kernel's table, the other kernels at their defaults."""
    case = Case(head_dim, causal, 4096, speed.TOKENS // 4096, speed.WIDTH // head_dim)
    flushed = torch.empty(speed.FLUSHED_BYTES, dtype=torch.int8, device=section.device)
    for kind, config in blocks(section, case):
        if not section.is_late:
            try_blocks(section, case, kind, config, flushed)


def blocks(section: Section, case: Case) -> Iterator[tuple[str, KernelConfig]]:
    """The candidates for a case, of each kernel."""
    from autopar.runtime.kernels.attention_tuning import candidates
    from autopar.runtime.kernels.launch import capability

    arch, size = capability(section.device), case.head_dim
    for kind in ("forward", "dq", "dkv"):
        for config in candidates(kind, arch, case.dtype, size, size, plain=True, rich=False, crowded=False):
            yield kind, config


def try_blocks(section: Section, case: Case, kind: str, config: KernelConfig, flushed: Tensor | None) -> None:
    """Run a case with this configuration of one kernel; timed where there is a buffer to flush caches with."""
    from autopar.runtime.kernels import attention_launch

    chosen = attention_launch.choose
    name = f"blocks {kind} {case.head_dim} {'causal' if case.causal else 'full'} {config}"
    attention_launch.choose = lambda k, *rest: config if k == kind else chosen(k, *rest)
    try:
        tensors = case.tensors()
        prepared = ours(case, *tensors)
        errors = speed.errors(case, prepared, tensors)
        right = all(error <= speed.TOLERANCES[case.dtype] for error in errors.values())
        rate = None
        if flushed is not None:
            run = prepared.forward if kind == "forward" else prepared.backward
            assert run is not None
            timed = speed.time_in_turn({OURS: run}, ROUNDS, flushed)[OURS]
            rate = case.flops(kind != "forward") / statistics.median(timed) / 1e9
        section.row(name, right, tflops=rate, errors=errors)
    except Exception as error:  # too large for the device: the others are still tried
        section.row(name, None, error=f"{type(error).__name__}: {str(error)[:200]}")
    finally:
        attention_launch.choose = chosen
