"""Bytes of what travels together."""

from __future__ import annotations

import math

import torch

from autopar.ir.program import Program
from autopar.ir.sharding import Sharding, local_shape
from autopar.ir.values import Variable


def shared_names(program: Program) -> frozenset[str]:
    """Parameters that several calls use."""
    uses: dict[str, int] = {}
    for call in program.calls:
        for name in call.slots:
            uses[name] = uses.get(name, 0) + 1
    return frozenset(v.name for v in program.variables if v.is_parameter and uses.get(v.name, 0) > 1)


def local_bytes(program: Program, variable: Variable, sharding: Sharding, dtype: torch.dtype) -> int:
    """Bytes that one rank holds of a parameter in this sharding and dtype."""
    return math.prod(local_shape(variable.seen.shape, sharding, program.on_mesh.sizes)) * dtype.itemsize
