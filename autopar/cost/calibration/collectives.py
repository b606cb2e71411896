"""Times of collectives: each kind, over each axis, all groups of an axis at once, as programs run them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autopar.base.torch_compat.distributed import all_gather_single, reduce_scatter_single
from autopar.cost.calibration.fit import CollectiveSample
from autopar.cost.roofline import COLLECTIVE_KINDS, CollectiveKind


@dataclass(frozen=True, slots=True)
class Axis:
    """One way to cut all ranks into groups. section: which link they measure; None: both, so they are not fitted."""

    name: str
    groups: tuple[tuple[int, ...], ...]
    section: str | None

    @property
    def size(self) -> int:
        """The ranks of a group."""
        return len(self.groups[0])


def axes_of(num_ranks: int, per_node: int, named: Sequence[tuple[str, Sequence[Sequence[int]]]] = ()) -> list[Axis]:
    """The axes to measure: those named, or else all ranks of a node, and one rank of each node.

    per_node: ranks on a machine; rank r is on machine r // per_node.
    """
    if not named:
        nodes = num_ranks // per_node
        inner = [list(range(node * per_node, (node + 1) * per_node)) for node in range(nodes)]
        across = [list(range(first, num_ranks, per_node)) for first in range(per_node)]
        named = [("ranks of a node", inner), ("nodes", across)]
    found = []
    for name, groups in named:
        if len(groups[0]) < 2:
            continue
        machines = [len({rank // per_node for rank in group}) for group in groups]
        section = "node" if max(machines) == 1 else "network" if min(machines) == len(groups[0]) else None
        found.append(Axis(name, tuple(tuple(group) for group in groups), section))
    return found


def sizes_for(device_type: str, quick: bool) -> list[int]:
    """Bytes of the tensors that travel."""
    exponents = [12, 16, 20, 23, 26, 28] if device_type == "cuda" else [12, 16, 20, 23, 25]
    return [2**each for each in (exponents[::2] if quick else exponents)]


def launch_s(device: torch.device, budget_s: float) -> float:
    """What a collective takes before a byte moves: an all-reduce of a rank with itself. All ranks call it."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    x = torch.zeros(1, device=device)
    found = _seconds(lambda: dist.all_reduce(x, group=alone), device, budget_s)
    return max(1e-6, found)


def measure_axis(
    axis: Axis, kinds: Sequence[CollectiveKind], sizes: Sequence[int], device: torch.device, budget_s: float,
    advance: Callable[[str], None],
) -> list[CollectiveSample]:  # fmt: skip
    """The times of an axis on this rank. All ranks call it, with the same arguments."""
    handles = [dist.new_group(list(group)) for group in axis.groups]
    mine = next(i for i, group in enumerate(axis.groups) if dist.get_rank() in group)
    found = []
    for kind in kinds:
        for size in sizes:
            advance(f"{kind} of {size} bytes over {axis.name}")
            function = _collective(kind, size, axis.groups[mine], handles[mine], device)
            seconds = _seconds(function, device, budget_s)
            found.append(CollectiveSample(axis.section or "", kind, axis.size, float(size), seconds))
    return found


def busy_share(axis: Axis, device: torch.device) -> float:
    """The processor time of this process by the time of all-reduces that it waits for; at most 1. All ranks call it."""
    handles = [dist.new_group(list(group)) for group in axis.groups]
    mine = next(i for i, group in enumerate(axis.groups) if dist.get_rank() in group)
    function = _collective("all_reduce", 2**22, axis.groups[mine], handles[mine], device)
    function()
    dist.barrier()
    begun, used = time.perf_counter(), time.process_time()
    for _ in range(20):
        function()
    return min(1.0, (time.process_time() - used) / (time.perf_counter() - begun))


def num_steps(axes: Sequence[Axis], quick: bool, device_type: str) -> int:
    """How often `measure_axis` will advance."""
    return len(axes) * len(COLLECTIVE_KINDS) * len(sizes_for(device_type, quick))


def _collective(kind: str, size: int, ranks: Sequence[int], group: Any, device: torch.device) -> Callable[[], object]:
    """One collective of float32 tensors of `size` bytes in all."""
    n = len(ranks)
    whole = torch.zeros(max(n, size // 4 // n * n), device=device)
    piece = torch.zeros(whole.numel() // n, device=device)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if kind == "all_gather":
        return lambda: all_gather_single(whole, piece, group=group)
    if kind == "reduce_scatter":
        return lambda: reduce_scatter_single(piece, whole, group=group)
    if kind == "broadcast":
        return lambda: dist.broadcast(whole, src=ranks[0], group=group)
    other = torch.empty_like(whole)
    if kind == "all_to_all":
        return lambda: dist.all_to_all_single(other, whole, group=group)
    here = list(ranks).index(dist.get_rank())
    after, before = ranks[(here + 1) % n], ranks[here - 1]

    def permute() -> None:
        sends = [dist.P2POp(dist.isend, whole, after, group), dist.P2POp(dist.irecv, other, before, group)]
        for work in dist.batch_isend_irecv(sends):
            work.wait()

    return permute


def _seconds(function: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """The median time of one call on this rank; all ranks call it equally often, and begin together."""

    def elapsed(times: int) -> float:
        begun = time.perf_counter()
        for _ in range(times):
            function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - begun) / times

    elapsed(2)
    dist.barrier()
    count = torch.tensor([elapsed(3)], device=device)
    dist.all_reduce(count, op=dist.ReduceOp.MAX)
    inner = max(1, min(50, int(2e-3 / max(float(count), 1e-7))))
    samples = max(3, min(30, int(budget_s / max(float(count) * inner, 1e-7))))
    dist.barrier()
    return statistics.median(elapsed(inner) for _ in range(samples))
