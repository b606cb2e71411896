"""What is asked of tensors that nobody who watches a trace minds: their types, and how they lie.

Each mode around `torch.export` sees every call of a function of torch, and hands it on to the next; so does torch
itself, which asks of each parameter some hundred such things before forward is traced. They are answered at once, as is
all that is asked while the model does not run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.base.torch_compat import tracing as compat
from autopar.passes.counted_rows import CountedRows

_ATTRIBUTES = (
    "device", "dtype", "layout", "ndim", "is_leaf", "requires_grad", "is_sparse", "is_sparse_csr", "is_quantized",
    "is_mkldnn", "is_nested", "is_meta", "is_cpu", "is_cuda", "_version", "grad_fn",
)  # fmt: skip
_METHODS = (
    Tensor.stride, Tensor.storage_offset, Tensor.dim, Tensor.ndimension, Tensor.is_floating_point, Tensor.is_complex,
    Tensor.is_inference, Tensor.is_conj, Tensor.is_neg, Tensor._is_view, Tensor.is_contiguous,
)  # fmt: skip
PLAIN = frozenset((*(getattr(Tensor, name).__get__ for name in _ATTRIBUTES), *_METHODS))
"""Functions that give no tensor, and to which no mode has another answer."""
SIZES = frozenset((Tensor.shape.__get__, Tensor.size, Tensor.numel))  # type: ignore[attr-defined]
"""What may be a number of rows that a mask chooses, while forward runs."""


class PlainReads(TorchFunctionMode):
    """While a model is traced: entered last, so that it is asked first. counted: knows whether forward runs."""

    def __init__(self, counted: CountedRows) -> None:
        super().__init__()
        self._counted = counted

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not compat.model_runs() or func in PLAIN or (func in SIZES and not self._counted.is_on):
            with compat.no_torch_functions():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
