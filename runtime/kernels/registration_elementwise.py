"""The Triton implementations of operators that go over rows, for CUDA tensors."""

from __future__ import annotations

from torch.library import Library

from autopar.runtime.kernels import cross_entropy, rms_norm, rotary, rotary_write

_KERNELS = {
    "rms_norm": rms_norm.rms_norm,
    "rms_norm_backward": rms_norm.rms_norm_backward,
    "rotary": rotary.rotary,
    "rotary_backward": rotary.rotary_backward,
    "rotary_write": rotary_write.rotary_write,
    "rotary_write_": rotary_write.rotary_write_,
    "cache_write": rotary_write.cache_write,
    "cache_write_": rotary_write.cache_write_,
    "sum_exp": cross_entropy.sum_exp,
    "cross_entropy_grad": cross_entropy.cross_entropy_grad,
}


def register_elementwise(library: Library) -> None:
    """Implement these operators for CUDA in a library of the namespace `autopar` that is open for implementations."""
    for name, kernel in _KERNELS.items():
        library.impl(name, kernel, "CUDA")
