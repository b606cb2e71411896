"""A tensor of a program's border in the notation of shardings."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.interface import TensorInterface
from autopar.ir.sharding import format_shape
from autopar.ir.tensor_type import dtype_name


def format_tensor(tensor: TensorInterface, axes: Sequence[str]) -> str:
    """`f32[4096/tp, 4096/dp]`."""
    return format_shape(dtype_name(tensor.dtype), tensor.shape, tensor.sharding, axes)
