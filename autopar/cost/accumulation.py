"""What adding up the gradients of microbatches takes: each is added to the sum of those before it."""

from __future__ import annotations

import math

from autopar.ir.program import Program
from autopar.ir.region import Region
from autopar.ir.sharding import local_shape


def added_bytes(program: Program, region: Region) -> tuple[int, int]:
    """What one call's backward adds to the sums over microbatches: (tensors, bytes read and written) on one rank.

    A sum is read and written in the dtype in which the parameter is stored, the gradient read in the one in which it
    was made: 10 bytes an element in bf16 beside fp32. Nothing with one microbatch, whose gradients are the step's. The
    first microbatch's, which are only stored, count as the others.
    """
    if program.microbatches == 1 or not program.training:
        return 0, 0
    variables = {variable.name: variable for variable in program.variables}
    _, call = next(program.calls_of(region.name))
    tensors = moved = 0
    for name in call.slots:
        variable, layout = variables[name], program.placed.parameters.get(name)
        if layout is not None and variable.trainable:
            elements = math.prod(local_shape(variable.seen.shape, layout.gradient, program.on_mesh.sizes))
            tensors += 1
            moved += elements * (2 * variable.stored_dtype.itemsize + variable.type.dtype.itemsize)
    return tensors, moved


def accumulation_seconds(program: Program, region: Region) -> float:
    """Seconds of `added_bytes`, for each microbatch."""
    hardware = program.on_mesh.hardware
    tensors, moved = added_bytes(program, region)
    if not tensors:
        return 0.0
    return tensors * hardware.launch_overhead_s + moved / hardware.memory_bytes_per_s(
        moved / tensors, "elementwise", "add"
    )
