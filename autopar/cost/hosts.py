"""What the host takes to launch a forward, operator by operator, where no CUDA graph has recorded it.

    host    | launch | launch | launch | …            queues kernels while the device computes
    device       |  kernel  |kernel| (waits) |…       a step is through no sooner than its last launch

On several GPUs a program's operators and collectives are queued one by one. A token's kernels are so short that the
device is through with each before the next is queued: the step takes what its launches take. Of a pipeline's stages all
hosts begin at once: the first one's launches are waited for, those of later stages are queued when their input comes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.cost.collectives import collectives, num_calls, phase_collectives
from autopar.cost.fusion import groups
from autopar.cost.operator_time import operator_work
from autopar.ir.program import Program
from autopar.ir.region import Region
from autopar.machine.mesh import Mesh


def host_seconds(program: Program) -> float:
    """Seconds in which the hosts queue all that a forward runs, those of all stages together; 0 where a graph does, for
    training, whose operators are long, and where a profile does not say what a launch takes.
    """
    hardware = program.on_mesh.hardware
    if program.training or hardware.graphs or not hardware.host_kernel_s:
        return 0.0
    kernels = sum(_launches(region, program.on_mesh) * num_calls(program, region.name) for region in program.regions)
    sent = sum(row.times for row in collectives(program))
    return kernels * hardware.host_kernel_s + sent * hardware.host_collective_s


def host_seconds_of_calls(program: Program) -> list[float]:
    """[calls]: `host_seconds`, by calls; gathers of parameters are shared evenly."""
    total, hardware = host_seconds(program), program.on_mesh.hardware
    if not total:
        return [0.0] * len(program.calls)
    own = {
        region.name: _launches(region, program.on_mesh) * hardware.host_kernel_s
        + sum(row.times for row in phase_collectives(program, region, "forward", 1)) * hardware.host_collective_s
        for region in program.regions
    }
    found = [own[call.region] for call in program.calls]
    rest = (total - sum(found)) / len(found)
    return [each + rest for each in found]


def waited_for_hosts(host_s: Sequence[float], ends_s: Sequence[float], ranks: Sequence[int]) -> float:
    """Seconds by which the last stage of a forward is later through than without what hosts take to queue it.

    host_s: [stages], what each takes to be queued. ends_s: [stages], when each is through without that, messages
    counted. ranks: [stages], whose host queues it: one stage behind the other. A stage is through when the one before
    is and its own work is done, and no sooner than its last launch; so what makes the last one late is some stage's
    host, with the devices behind it.
    """
    queued, late = dict.fromkeys(ranks, 0.0), 0.0
    for host, end, rank in zip(host_s, ends_s, ranks, strict=True):
        queued[rank] += host
        late = max(late, queued[rank] - end)
    return late


def _launches(region: Region, mesh: Mesh) -> float:
    """Kernels of one call; operators that are compiled into one count once."""
    fused = sum(len(names) - 1 for names in groups(region)) if mesh.hardware.compiled else 0
    alone = 0.0
    for name, strategy in region.strategies.items():
        call, rule = region.ops[name]
        if not rule.alias and name in region.forward_nodes:
            alone += math.ceil(operator_work(call, rule, strategy, mesh).launches)
    return max(0.0, alone - fused)
