"""Triton kernels for CUDA, registered beside the PyTorch operators they replace."""

from __future__ import annotations

import importlib.util

import torch
from torch.library import Library

import autopar.operators  # noqa: F401  (defines what is implemented here)
from autopar.base import environment

_LIBRARIES: list[Library] = []


def register() -> bool:
    """Implement autopar's operators by the kernels, once in a process; whether they are.

    For CUDA, where there is a device and Triton can be imported. On the CPU only to try them: with TRITON_INTERPRET=1
    and AUTOPAR_ATTENTION=triton, attention goes through Triton's interpreter, with AUTOPAR_EXPERTS=triton experts do.
    """
    if _LIBRARIES:
        return True
    if importlib.util.find_spec("triton") is None:
        return False
    interprets, experts = environment.interprets_triton(), environment.experts_backend()
    has_attention, has_experts = environment.attention_backend() == "triton", experts == "triton"
    interpreted = interprets and (has_attention or has_experts)
    if not (torch.cuda.is_available() or interpreted):
        return False
    from autopar.runtime.kernels.attention_dispatch import register_attention
    from autopar.runtime.kernels.experts import register_experts
    from autopar.runtime.kernels.registration_elementwise import register_elementwise

    library = Library("autopar", "IMPL")
    if has_attention or not interpreted:
        register_attention(library, "CPU" if interpreted else "CUDA")
    if has_experts if interpreted else experts != "torch":
        register_experts(library, "CPU" if interpreted else "CUDA")
    if not interpreted:
        register_elementwise(library)
    _LIBRARIES.append(library)
    return True
