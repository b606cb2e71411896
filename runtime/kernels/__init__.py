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
    and AUTOPAR_ATTENTION=triton, attention goes through Triton's interpreter.
    """
    if _LIBRARIES:
        return True
    if importlib.util.find_spec("triton") is None:
        return False
    interpreted = environment.attention_backend() == "triton" and environment.interprets_triton()
    if not (torch.cuda.is_available() or interpreted):
        return False
    from autopar.runtime.kernels.attention_dispatch import register_attention
    from autopar.runtime.kernels.experts import register_experts
    from autopar.runtime.kernels.registration_elementwise import register_elementwise

    library = Library("autopar", "IMPL")
    register_attention(library, "CPU" if interpreted else "CUDA")
    if not interpreted:
        register_elementwise(library)
        register_experts(library)
    _LIBRARIES.append(library)
    return True
