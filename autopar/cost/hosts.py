"""What the host takes to launch a forward, operator by operator, where no CUDA graph has recorded it.

    host    | launch | launch | launch | …            queues kernels while the device computes
    device       |  kernel  |kernel| (waits) |…       a step is through no sooner than its last launch

On several GPUs a program's operators and collectives are queued one by one. A token's kernels are so short that the
device is through with each before the next is queued: the step takes what its launches take.
"""

from __future__ import annotations

import math

from autopar.cost.collectives import collectives, num_calls
from autopar.cost.fusion import groups
from autopar.cost.operator_time import operator_work
from autopar.ir.program import Program
from autopar.ir.region import Region
from autopar.machine.mesh import Mesh


def host_seconds(program: Program) -> float:
    """Seconds in which the host queues all that a forward runs; 0 where a graph does, for training, whose operators
    are long, and where a profile does not say what a launch takes.
    """
    hardware = program.on_mesh.hardware
    if program.training or program.pipeline is not None or hardware.graphs or not hardware.host_kernel_s:
        return 0.0
    kernels = sum(_launches(region, program.on_mesh) * num_calls(program, region.name) for region in program.regions)
    sent = sum(row.times for row in collectives(program))
    return kernels * hardware.host_kernel_s + sent * hardware.host_collective_s


def _launches(region: Region, mesh: Mesh) -> float:
    """Kernels of one call; operators that are compiled into one count once."""
    fused = sum(len(names) - 1 for names in groups(region)) if mesh.hardware.compiled else 0
    alone = 0.0
    for name, strategy in region.strategies.items():
        call, rule = region.ops[name]
        if not rule.alias and name in region.forward_nodes:
            alone += math.ceil(operator_work(call, rule, strategy, mesh).launches)
    return max(0.0, alone - fused)
