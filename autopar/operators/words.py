"""What the functions that operators are made of call their values, for whoever reads a program that holds these."""

from __future__ import annotations

from torch import Tensor

from autopar.base.torch_compat import tracing
from autopar.ir.nodes import NAME


def called(name: str, value: Tensor) -> Tensor:
    """The value itself; where a trace records it, it is noted as what the model calls it."""
    if (node := tracing.recorded_node(value)) is not None:
        node.meta.setdefault(NAME, name)
    return value
