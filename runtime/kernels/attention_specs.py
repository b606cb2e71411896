"""The attention kernels in their default configurations, to be compiled ahead of time without a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from autopar.runtime.kernels import masks
from autopar.runtime.kernels.attention_backward_bias import attention_dbias_kernel
from autopar.runtime.kernels.attention_backward_keys import attention_dkv_kernel
from autopar.runtime.kernels.attention_backward_queries import attention_dq_kernel
from autopar.runtime.kernels.attention_configs import KernelConfig, default_config
from autopar.runtime.kernels.attention_forward import attention_forward_kernel
from autopar.runtime.kernels.attention_problem import is_crowded, is_rich
from autopar.runtime.kernels.attention_tuning import candidates
from autopar.runtime.kernels.compile_spec import CompileSpec
from autopar.runtime.kernels.launch import next_block

KERNELS = {
    "forward": attention_forward_kernel,
    "dq": attention_dq_kernel,
    "dkv": attention_dkv_kernel,
    "dbias": attention_dbias_kernel,
}
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

_HALVES = ("q", "k", "v", "g", "bias", "out", "dq", "dk", "dv", "dbias", "sinks")
_TYPES = {
    **dict.fromkeys(("lse", "log2_sum", "delta"), "*fp32"), "keys": "*u8",
    **dict.fromkeys(("extents", "key_spans", "query_spans"), "*i32"),
    **dict.fromkeys(("documents", "key_documents"), "*i64"),
    **dict.fromkeys(("dropout_state", "dropout_rows"), "*i64"), "threshold": "i64",
    **dict.fromkeys(("multiplier", "cap", "scale", "kept_factor"), "fp32"),
}  # fmt: skip


_FLOAT_BIAS = int(masks.FLOAT_BIAS.value)
_FEATURES: dict[str, dict[str, Any]] = {
    "full": {"EVEN_KEYS": True, "EVEN_QUERIES": True},
    "full uneven": {},
    "causal": {"RIGHT": True, "EVEN_KEYS": True, "EVEN_QUERIES": True},
    "causal uneven": {"RIGHT": True},
    "window": {"LEFT": True, "RIGHT": True, "SINKS": True},
    "padding": {"RIGHT": True, "KEYS": True},
    "documents": {"RIGHT": True, "DOCUMENTS": True},
    "runs": {"LEFT": True, "RIGHT": True, "KEYS": True, "SINKS": True, "QUERY_RUNS": 2, "KEY_RUNS": 2},
    "bias": {"RIGHT": True, "BIAS": _FLOAT_BIAS},
    "softcap": {"LEFT": True, "RIGHT": True, "SOFTCAP": True},
    "dropout": {"RIGHT": True, "DROPOUT": True},
    "everything": {
        **dict.fromkeys(("SOFTCAP", "KEYS", "DOCUMENTS", "SINKS", "DROPOUT", "LEFT", "RIGHT", "PREFIX"), True),
        "BIAS": _FLOAT_BIAS, "QUERY_RUNS": 2, "KEY_RUNS": 2,
    },
}  # fmt: skip


def compile_specs() -> list[CompileSpec]:
    """Each kernel × architecture × dtype × head size × features; at head size 32 every feature at once alone. Then what
    tuning tries in their place, plain and in bfloat16.
    """
    return [*_defaults(), *_tuned()]


def _tuned() -> list[CompileSpec]:
    """A candidate that is the same on several architectures is compiled for each."""
    found = []
    for arch, size, kind in itertools.product((80, 90), (64, 128), ("forward", "dq", "dkv")):
        tried = candidates(kind, arch, torch.bfloat16, size, size, plain=True, rich=False, crowded=False)[1:]
        for config, label in itertools.product(tried, ("full", "causal")):
            name = f"{label} tuned {config.block_m}x{config.block_n}"
            found.append(attention_spec(kind, arch, torch.bfloat16, size, size, config, name, **_FEATURES[label]))
    return found


def _defaults() -> list[CompileSpec]:
    return [
        _spec(kind, arch, dtype, size, label, switches)
        for arch in (80, 90)
        for dtype in DTYPES
        for size in (32, 64, 128, 256)
        for label, switches in _FEATURES.items()
        for kind in (KERNELS if switches.get("BIAS") else ("forward", "dq", "dkv"))
        if size > 32 or label == "everything"
    ]


def _spec(kind: str, arch: int, dtype: torch.dtype, size: int, label: str, switches: dict[str, Any]) -> CompileSpec:
    plain = label.startswith(("full", "causal"))
    rich, crowded = is_rich(switches), is_crowded(switches)
    config = default_config(kind, arch, dtype, size, size, plain=plain, rich=rich, crowded=crowded)
    return attention_spec(kind, arch, dtype, size, size, config, label, **switches)


def attention_spec(
    kind: str, arch: int, dtype: torch.dtype, size: int, value_size: int, config: KernelConfig, label: str,
    **switches: Any,
) -> CompileSpec:  # fmt: skip
    """The kernel as a launch with these switches would compile it; switches not given are off."""
    kernel = KERNELS[kind]
    given = {
        "D": size, "E": value_size, "BLOCK_D": next_block(size), "BLOCK_E": next_block(value_size),
        "QUERY_RUNS": 1, "KEY_RUNS": 1, "BIAS": 0, "PRECISION": "ieee", **config.switches(),
        **dict.fromkeys(("SHARED_B", "SHARED_H", "SHARED_S", "SHARED_T"), False), **switches,
    }  # fmt: skip
    constexprs = {p.name: given.get(p.name, False) for p in kernel.params if p.is_constexpr}
    if given["BIAS"]:
        constexprs["bias_t"] = 1
    signature, aligned = {}, []
    for name in kernel.arg_names:
        if name in constexprs:
            continue
        signature[name] = _type(name, dtype, given["QUERY_RUNS"], given["KEY_RUNS"])
        if signature[name].startswith("*") or (name.split("_")[-1] in "bhstg" and "_" in name):
            aligned.append(name)
    name = f"attention_{kind} {label}"
    return CompileSpec(
        name, kernel, signature, constexprs, config.num_warps, config.num_stages, tuple(aligned), (arch,),
        config.max_registers,
    )  # fmt: skip


def _type(name: str, dtype: torch.dtype, query_runs: int, key_runs: int) -> str:
    if name in _HALVES:
        return f"*{DTYPES[dtype]}"
    if (name == "query_starts" and query_runs > 1) or (name == "key_starts" and key_runs > 1):
        return "*i32"
    return _TYPES.get(name, "i32")
