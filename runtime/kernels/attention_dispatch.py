"""`autopar::attention` and its gradients on CUDA: by the Triton kernels or by PyTorch's own."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.library import Library

from autopar.base import environment
from autopar.operators import scaled_dot_product as reference
from autopar.operators.attention_options import AttentionOptions
from autopar.operators.visibility import sees_plainly
from autopar.runtime.kernels import attention_backward as backward_kernels
from autopar.runtime.kernels import attention_forward as forward_kernel
from autopar.runtime.kernels import decode_launch
from autopar.runtime.kernels.attention_problem import supports


def register_attention(library: Library, device: str) -> None:
    """Implement the three operators for the dispatch key of a device, "CUDA" ("CPU": interpreted)."""
    for name in ("attention", "attention_backward", "attention_backward_bias"):
        library.impl(name, globals()[name], device)


def attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, keys: Tensor | None = None,
    sinks: Tensor | None = None, seed: Tensor | None = None, *, storage: str = "", key_scales: Tensor | None = None,
    value_scales: Tensor | None = None, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `autopar.operators.attention`."""
    said = AttentionOptions(**options)
    if storage and key_scales is not None and value_scales is not None:
        codes = decode_launch.Codes(storage, key_scales, value_scales)
        # Whatever takes plain calls: any other kernel would have all keys written out as numbers first.
        if environment.attention_backend() != "sdpa" and decode_launch.unfit(q, k, v, said, codes) is None:
            return decode_launch.decode_attention(q, k, v, bias, keys, sinks, options=said, codes=codes)
    k, v = reference.numbers_of(k, storage, key_scales), reference.numbers_of(v, storage, value_scales)
    if takes_kernels(q, k, v, bias, keys, sinks, said):
        if decode_launch.unfit(q, k, v, said) is None:
            return decode_launch.decode_attention(q, k, v, bias, keys, sinks, options=said)
        return forward_kernel.attention_forward(q, k, v, bias, keys, sinks, seed, options=said)
    return reference.attention(q, k, v, bias, keys, sinks, seed, **options)


def attention_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, keys: Tensor | None, sinks: Tensor | None,
    seed: Tensor | None, out: Tensor, lse: Tensor, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """As `autopar.operators.attention_backward`."""
    said = AttentionOptions(**options)
    if takes_kernels(q, k, v, bias, keys, sinks, said):
        return backward_kernels.attention_backward(g, q, k, v, bias, keys, sinks, seed, out, lse, options=said)
    return reference.attention_backward(g, q, k, v, bias, keys, sinks, seed, out, lse, **options)


def attention_backward_bias(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, keys: Tensor | None, sinks: Tensor | None,
    seed: Tensor | None, out: Tensor, lse: Tensor, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """As `autopar.operators.attention_backward_bias`."""
    said = AttentionOptions(**options)
    if takes_kernels(q, k, v, bias, keys, sinks, said):
        return backward_kernels.attention_backward(
            g, q, k, v, bias, keys, sinks, seed, out, lse, options=said, bias_grad=True
        )
    return reference.attention_backward_bias(g, q, k, v, bias, keys, sinks, seed, out, lse, **options)


def takes_kernels(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, keys: Tensor | None, sinks: Tensor | None,
    options: AttentionOptions,
) -> bool:  # fmt: skip
    """Whether this call goes to the Triton kernels: AUTOPAR_ATTENTION decides, and what they support.

    Plain calls go to PyTorch's flash attention, or cuDNN's (`scaled_dot_product.takes_cudnn`), until the kernels here
    are measured to be faster.
    """
    backend = environment.attention_backend()
    if backend == "sdpa" or (backend in ("auto", "cudnn", "flash") and _is_plain(q, k, bias, keys, sinks, options)):
        return False
    reason = supports(q, k, v, options)
    if reason:
        _warn(reason)
    return reason is None


def _is_plain(
    q: Tensor, k: Tensor, bias: Tensor | None, keys: Tensor | None, sinks: Tensor | None, options: AttentionOptions
) -> bool:
    masked = bias is not None or keys is not None or sinks is not None or options.softcap or options.dropout_p
    return not masked and sees_plainly(options, q, k)


@lru_cache
def _warn(reason: str) -> None:
    warnings.warn(f"Attention runs without autopar's Triton kernels: {reason}.", RuntimeWarning, stacklevel=4)
