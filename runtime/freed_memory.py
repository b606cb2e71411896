"""Memory that a step frees, for the next one."""

from __future__ import annotations

import torch


def keep_freed_memory() -> None:
    """Let glibc's malloc keep up to 64 MiB of what a step frees for the next one; elsewhere without effect.

    It gives free memory at the end of the heap back to the system beyond twice the largest block that it was ever
    given back, of at most 32 MiB (mallopt(3), M_MMAP_THRESHOLD). A step whose largest tensor is smaller returns its
    memory and takes it again all the time: 18,000 page faults, a tenth of the CPU time of a Llama of 13 million
    parameters. So it is given such a block once, which no page of is ever touched. Who sets MALLOC_TRIM_THRESHOLD_ or
    MALLOC_MMAP_THRESHOLD_ keeps what was set.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8)
