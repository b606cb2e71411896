"""Packed documents as transformers tells its flash attention of them, beside positions that restart.

DataCollatorWithFlattening(return_flash_attn_kwargs=True)  →  position_ids; cu_seq_lens_q, …, max_length_k
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

POSITIONS = "position_ids"
LIMITS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Where documents begin in a row, and how long the longest is: what `POSITIONS` say, in other words."""


@contextmanager
def without_flash_attention(configs: list[Any]) -> Iterator[None]:
    """Inside, models call torch's attention where they would call a library's for CUDA: a trace shall see it."""
    found = [config for config in configs if is_flash(getattr(config, "_attn_implementation", None))]
    before = [config._attn_implementation for config in found]
    for config in found:
        config._attn_implementation_internal = "sdpa"
    try:
        yield
    finally:
        for config, name in zip(found, before, strict=True):
            config._attn_implementation_internal = name


def is_flash(name: object) -> bool:
    """`flash_attention_2`, `kernels-community/flash-attn3` and the like."""
    return isinstance(name, str) and "flash" in name and "attn" in name.replace("attention", "attn")
