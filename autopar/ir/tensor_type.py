"""Shape and dtype of a value, and how they are printed: `f32[8, 64]`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from autopar.ir.sharding import Sharding, format_shape

_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "b8",
    torch.complex64: "c64",
}  # fmt: skip


def dtype_name(dtype: str | torch.dtype) -> str:
    """`float32` or torch.float32 to `f32`."""
    found = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    return _NAMES.get(found, str(found).removeprefix("torch."))


@dataclass(frozen=True, slots=True)
class TensorType:
    """Global shape and dtype of a value."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(value: torch.Tensor) -> TensorType:
        return TensorType(tuple(int(size) for size in value.shape), value.dtype)

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    @property
    def is_float(self) -> bool:
        """Whether it may have a gradient: floating or complex."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    def text(self, sharding: Sharding, axes: Sequence[str]) -> str:
        """`f32[8/dp, 64]`: global dims with what splits them."""
        return format_shape(dtype_name(self.dtype), self.shape, sharding, axes)

    def __str__(self) -> str:
        return self.text((), ())
