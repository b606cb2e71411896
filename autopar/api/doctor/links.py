"""What links carry, against a profile and against each other; and whose clock is off."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from autopar.api.doctor.findings import Finding, note, off, ok, who
from autopar.api.doctor.ranks import Ranks
from autopar.cost.calibration.collectives import Axis, axes_of, measure_axis
from autopar.cost.roofline import collective_bytes, collective_time_s
from autopar.machine.hardware import Hardware

BYTES = {"cuda": 1 << 28, "cpu": 1 << 22}
"""Of a tensor: latencies do not count."""
BUDGET_S = 0.2
ROUNDS, PAIR_ROUNDS = 8, 10
now = time.time


def clock_offsets(ranks: Ranks) -> list[tuple[float, float]]:
    """Of each rank's clock to rank 0's, and by how much that may be wrong; seconds. The quickest of a few questions
    counts (as in NTP: Cristian, 1989). Collective.
    """
    ranks.begin("comparing clocks")
    if ranks.num == 1:
        return [(0.0, 0.0)]
    group: Any = dist.new_group(backend="gloo")
    answer, mine = torch.zeros(1, dtype=torch.float64), (0.0, 0.0)
    for rank in range(1, ranks.num):
        found = []
        for _ in range(ROUNDS if ranks.rank in (0, rank) else 0):
            if ranks.rank == 0:
                dist.recv(answer, rank, group)
                answer[0] = now()
                dist.send(answer, rank, group)
            else:
                begun = now()
                dist.send(answer, 0, group)
                dist.recv(answer, 0, group)
                ended = now()
                found.append(((ended - begun) / 2, (begun + ended) / 2 - float(answer)))
        if found:
            error, offset = min(found)
            mine = offset, error
    return ranks.all(mine)


def look(
    ranks: Ranks, per_node: int, device: torch.device, hardware: Hardware | None, share: float, hosts: Sequence[str]
) -> list[Finding]:
    """Time an all-reduce over the ranks of each machine, and one rank of each machine, and a message between
    neighbours. share: of what the profile says, or the median of its like; what is slower is off. Collective.
    """
    if ranks.num == 1:
        return []
    ranks.begin("timing links")
    if ranks.num % per_node:
        return [note("links", f"{ranks.num} ranks, {per_node} on a machine: not all have as many, so no link is timed")]
    num_bytes, found = BYTES[device.type], []
    for axis in axes_of(ranks.num, per_node):
        samples = measure_axis(axis, ["all_reduce"], [num_bytes], device, BUDGET_S, lambda text: None)
        found += judge_axis(axis, num_bytes, ranks.all(samples[0].seconds), hardware, share, hosts)
    found += judge_pairs(ranks.all(_to_next(ranks, num_bytes // 4, device)), per_node, num_bytes // 4, share, hosts)
    return found


def judge_axis(
    axis: Axis, num_bytes: int, seconds: Sequence[float], hardware: Hardware | None, share: float, hosts: Sequence[str]
) -> list[Finding]:
    """seconds: of each rank. Of the groups of an axis, each is held against the profile, or the median of them."""
    n, of_group = axis.size, [max(seconds[rank] for rank in group) for group in axis.groups]
    sent = collective_bytes("all_reduce", num_bytes, n)
    what = "ranks of a machine" if axis.section == "node" else "machines"
    said = f"{what}: {sent / statistics.median(of_group) / 1e9:.3g} GB/s in an all-reduce of {n}"
    if hardware is not None:
        link = hardware.node if axis.section == "node" else hardware.network
        usual = collective_time_s("all_reduce", num_bytes, n, link, hardware.collective_launch_s)
        by = f"{sent / usual / 1e9:.3g} GB/s by the profile {hardware.name}"
    else:
        usual, by = statistics.median(of_group), f"{sent / statistics.median(of_group) / 1e9:.3g} GB/s in other groups"
    slow = [number for number, took in enumerate(of_group) if took * share > usual]
    if not slow:
        return [ok("links", said if hardware is None else f"{said}, {by}")]
    worst = max(slow, key=lambda number: of_group[number])
    return [
        off(
            "links",
            f"{who(axis.groups[worst], hosts)}: {sent / of_group[worst] / 1e9:.3g} GB/s in an all-reduce of {n}, {by}",
            "nvidia-smi topo -m, nvidia-smi nvlink --status, NCCL_DEBUG=INFO say which way messages take; where the "
            "profile is of other machines, autopar calibrate measures these"
            if axis.section == "node"
            else "NCCL_DEBUG=INFO says which cards it takes (NCCL_SOCKET_IFNAME, NCCL_IB_HCA); ibstat or ethtool, how "
            "fast they are; where the profile is of other machines, autopar calibrate measures these",
        )
    ]


def _to_next(ranks: Ranks, num_bytes: int, device: torch.device) -> float:
    """Seconds of a message from this rank to the next one and back; pairs do not share a rank while they are timed."""
    sent, got = torch.zeros(num_bytes // 4, device=device), torch.zeros(num_bytes // 4, device=device)
    rank, num, took = ranks.rank, ranks.num, float("inf")
    for turn in range(3 if num % 2 else 2):
        ranks.all(None)
        # (0 1) (2 3) …, then (1 2) (3 4) … (n−1 0); of an odd number, the last one comes by itself.
        last = num - 1 if num % 2 else num
        firsts = range(turn, last, 2) if turn < 2 else [num - 1]
        for first in firsts:
            if num == 2 and turn == 1:
                continue
            other = (first + 1) % num
            if rank not in (first, other):
                continue
            for _ in range(PAIR_ROUNDS):
                begun = time.perf_counter()
                if rank == first:
                    dist.send(sent, other)
                    dist.recv(got, other)
                else:
                    dist.recv(got, first)
                    dist.send(sent, first)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                if rank == first:
                    took = min(took, time.perf_counter() - begun)
    return took


def judge_pairs(
    seconds: Sequence[float], per_node: int, num_bytes: int, share: float, hosts: Sequence[str]
) -> list[Finding]:
    """seconds: from each rank to the next one and back; infinite where it was not timed."""
    found = []
    inside = [rank // per_node == (rank + 1) % len(seconds) // per_node for rank in range(len(seconds))]
    for is_inside in (True, False):
        timed = [rank for rank in range(len(seconds)) if inside[rank] == is_inside and seconds[rank] < float("inf")]
        if len(timed) < 3:
            continue
        usual = statistics.median(seconds[rank] for rank in timed)
        for rank in timed:
            if seconds[rank] * share > usual:
                other = (rank + 1) % len(seconds)
                speed, of_others = (2 * num_bytes / each / 1e9 for each in (seconds[rank], usual))
                found.append(
                    off(
                        "links",
                        f"{who([rank, other], hosts)}: {speed:.3g} GB/s between them, {of_others:.3g} between others",
                        "See their cards and cables (ibstat, ethtool, nvidia-smi nvlink --errorcounters)",
                    )
                )
    return found
