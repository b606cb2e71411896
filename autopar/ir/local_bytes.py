"""Bytes of one rank's part of a value in a lowered graph."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import fx

from autopar.ir.sharding import local_shape
from autopar.ir.tensor_type import TensorType


def local_bytes(node: fx.Node, sizes: Sequence[int]) -> int:
    """Bytes of a node's value on one rank (0 where it is not one tensor)."""
    type_: TensorType | None = node.meta.get("type")
    if type_ is None:
        return 0
    return math.prod(local_shape(type_.shape, node.meta["sharding"], sizes)) * type_.dtype.itemsize
