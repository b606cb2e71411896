"""Operators that a device may have kernels of its own for: called through torch's dispatcher, which picks them.

`autopar.operators.rms_norm(...)`, as generated programs write it, is `torch.ops.autopar.rms_norm`: the Triton kernel
where one is registered for the tensors' device (autopar/runtime/kernels), else the PyTorch function of that name. Loops
are here for compilers, which take them as they are: text would be parsed in each of their traces.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.operators import registration  # noqa: F401 (defines torch.ops.autopar)

_ops: Any = torch.ops.autopar

attention = _ops.attention.default
attention_backward = _ops.attention_backward.default
attention_backward_bias = _ops.attention_backward_bias.default
cache_write = _ops.cache_write.default
cross_entropy_grad = _ops.cross_entropy_grad.default
experts = _ops.experts.default
experts_grad = _ops.experts_grad.default
experts_grad_bias = _ops.experts_grad_bias.default
iterate = _ops.iterate.default
iterate_grad = _ops.iterate_grad.default
rms_norm = _ops.rms_norm.default
rms_norm_backward = _ops.rms_norm_backward.default
rotary = _ops.rotary.default
rotary_backward = _ops.rotary_backward.default
rotary_write = _ops.rotary_write.default
sum_exp = _ops.sum_exp.default
