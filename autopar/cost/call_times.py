"""What calls of regions compute and move, and the step in which gathers and reductions run beside the compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypedDict

from autopar.cost.accumulation import accumulation_seconds
from autopar.cost.collectives import bucket_rows, phase_collectives
from autopar.cost.operator_time import region_seconds
from autopar.cost.step_time import CallTime, Chain, Lane, Message, Walk, step_walk
from autopar.cost.under_way import hidden_beside
from autopar.ir.placement import Overlap, SharedParameter
from autopar.ir.program import Program
from autopar.ir.region import Bucket, Region
from autopar.machine.mesh import Mesh


def overlapped_seconds(program: Program, overlap: Overlap) -> float:
    """Seconds of a step as `overlap` lets gathers and reductions run beside the compute."""
    return step_walk(calls_of(program), **_options(program, overlap), events=False).seconds


def overlapped_walk(program: Program, overlap: Overlap) -> Walk:
    """The same step with all that happens in it; calls are numbered as the program's."""
    return step_walk(calls_of(program), **_options(program, overlap))


def calls_of(program: Program) -> list[CallTime]:
    """What every call of a lowered program computes and moves, in order."""
    times = {region.name: call_time(program, region) for region in program.regions}
    calls = [times[call.region] for call in program.calls]
    for shared in program.shared:
        calls = with_shared(program, shared, calls)
    return calls


def hidden_seconds(program: Program, overlap: Overlap, calls: Sequence[CallTime]) -> tuple[float, float]:
    """Seconds of a step of these calls with nothing beside anything else, and what `overlap` hides of them, as
    `estimate` counts it: not what collectives take the device for (`Hardware.collective_busy`).
    """

    def sent(chains: Sequence[Chain]) -> float:
        return sum(message.seconds for chain in chains for message in chain)

    once = sum(sent(call.once) + sent(call.reduce) * program.training for call in calls)
    each = sum(call.forward_s + call.backward_s + sent(call.gather) + sent(call.again) for call in calls)
    total = once + program.microbatches * each
    hidden = max(0.0, total - step_walk(calls, **_options(program, overlap), events=False).seconds)
    return total, hidden * (1.0 - program.on_mesh.hardware.collective_busy)


class _Options(TypedDict):
    microbatches: int
    prefetch: bool
    at_end: bool
    training: bool
    slowdown: float


def _options(program: Program, overlap: Overlap) -> _Options:
    """How a step of the program goes: `step_walk`'s options."""
    return {
        "microbatches": program.microbatches,
        "prefetch": overlap.prefetch,
        "at_end": overlap.at_end,
        "training": program.training,
        "slowdown": program.on_mesh.hardware.overlap_slowdown,
    }


def with_shared(program: Program, shared: SharedParameter, calls: Sequence[CallTime]) -> list[CallTime]:
    """The calls, the first of those that use a parameter gathering it for all, in the forward and in the backward; its
    gradient is whole when the first one is through backward.
    """
    users = [number for number, call in enumerate(program.calls) if shared.name in call.slots]
    found = list(calls)
    first, last = users[0], users[-1]
    if shared.gather is not None:
        once, each = _chains(program, "gather", shared.gather, [shared.name])
        again = _chains(program, "gather_for_backward", shared.gather, [shared.name])[1]
        found[first] = replace(found[first], once=found[first].once + once, gather=found[first].gather + each)
        found[last] = replace(found[last], again=found[last].again + again)
    if shared.reduce is not None:
        _, chains = _chains(program, "reduce", shared.reduce, [shared.name])
        found[first] = replace(found[first], reduce=found[first].reduce + chains)
    return found


def call_time(program: Program, region: Region) -> CallTime:
    """What one call of a region computes and moves, in one microbatch; the backward is 0 in inference."""
    mesh = program.on_mesh
    seconds = {"forward": 0.0, "backward": 0.0}
    computed = region_seconds(region, mesh)
    for name, taken in computed.items():
        seconds["forward" if name in region.forward_nodes else "backward"] += taken
    inside: dict[str, dict[Lane, float]] = {"forward": {}, "backward": {}}
    for phase in seconds:
        for row in phase_collectives(program, region, phase, 1) if phase in region.lowered else ():
            lane = lane_of(mesh, row.axis)
            inside[phase][lane] = inside[phase].get(lane, 0.0) + row.seconds
            seconds[phase] += row.seconds
        seconds[phase] -= hidden_beside(program, region, phase, computed)
    moved = transfer_times(program, region)
    return replace(
        moved,
        forward_s=seconds["forward"],
        backward_s=seconds["backward"] + moved.backward_s,
        forward_inside=inside["forward"],
        backward_inside=inside["backward"],
    )


def transfer_times(program: Program, region: Region) -> CallTime:
    """What one call of a region gathers and reduces; beside that it only adds up gradients over microbatches."""
    _, first = next(program.calls_of(region.name))
    moved: dict[str, tuple[tuple[Chain, ...], tuple[Chain, ...]]] = {}
    for which, buckets in region.transfers.items():
        both = [_chains(program, which, b, [first.slots[move.slot] for move in b.moves]) for b in buckets]
        moved[which] = (tuple(c for once, _ in both for c in once), tuple(c for _, each in both for c in each))
    nothing: tuple[tuple[Chain, ...], tuple[Chain, ...]] = ((), ())
    return CallTime(
        0.0,
        accumulation_seconds(program, region),
        once=moved.get("gather", nothing)[0],
        gather=moved.get("gather", nothing)[1],
        again=moved.get("gather_for_backward", nothing)[1],
        reduce=moved.get("reduce", nothing)[1],
    )


def _chains(
    program: Program, which: str, bucket: Bucket, names: Sequence[str]
) -> tuple[tuple[Chain, ...], tuple[Chain, ...]]:
    """What a bucket sends once a step, and at each use (of a reduction, which is once a step, all)."""
    # In a step of two microbatches what is done for each use is done twice.
    rows = list(bucket_rows(program, which, bucket, names, 1, "", uses=2))
    once: list[Message] = []
    each: list[Message] = []
    for row in rows:
        kept = row.times == 1 and which != "reduce"
        (once if kept else each).append(Message(lane_of(program.on_mesh, row.axis), row.seconds / row.times, row))
    return (tuple(once),) * bool(once), (tuple(each),) * bool(each)


def lane_of(mesh: Mesh, axis: str) -> Lane:
    """What carries the collectives of an axis."""
    return "network" if mesh.crosses_nodes(axis) else "node"
