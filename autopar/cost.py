"""What a collective and an operator take: bytes and seconds, as pure functions of sizes and a hardware profile.

Communication follows the α-β model (Hockney 1994): a message of b bytes takes α + b/β. Collectives are rings, as in
Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005); all-reduce may
also be NCCL's double binary tree (Sanders, Speck and Träff 2009). Computation follows the roofline (Williams, Waterman
and Patterson 2009).
"""

from __future__ import annotations

import math
from typing import Literal, get_args

from autopar.hardware import Hardware, Link

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "permute"]
COLLECTIVE_KINDS: tuple[str, ...] = get_args(CollectiveKind)


def collective_bytes(kind: CollectiveKind, num_bytes: float, n: int) -> float:
    """Bytes that a rank of a group of n sends.

    ==============  ====================  ===============================================
    kind            bytes sent            num_bytes b is the size of
    ==============  ====================  ===============================================
    all_reduce      2·b·(n−1)/n           the full local tensor that is reduced
    all_gather      b·(n−1)/n             the gathered result
    reduce_scatter  b·(n−1)/n             the full local tensor before the reduction
    all_to_all      b·(n−1)/n             the local tensor
    broadcast       b·(n−1)/n             the tensor (mean over ranks: the ring's last one sends nothing)
    permute         b                     the local tensor (each rank sends it to one other)
    ==============  ====================  ===============================================
    """
    if n < 1:
        raise ValueError(f"a group has at least one rank, not {n}")
    if n == 1:
        return 0.0
    if kind == "permute":
        return float(num_bytes)
    if kind not in COLLECTIVE_KINDS:
        raise ValueError(f"collective {kind!r} is none of {', '.join(COLLECTIVE_KINDS)}")
    rounds = 2 if kind == "all_reduce" else 1
    return rounds * num_bytes * (n - 1) / n


def collective_time_s(kind: CollectiveKind, num_bytes: float, n: int, link: Link, launch_s: float) -> float:
    """Seconds for one collective over a group of n; `num_bytes` as in `collective_bytes`. Nothing for one rank.

    ring:  launch + steps·α + bytes_sent/β, with n−1 steps, 2(n−1) for all-reduce, 1 for permute;
    tree:  launch + 2·⌈log2 n⌉·α + 2·b/β, for all-reduce where it is faster (small tensors in large groups).
    A ring gets the link's bandwidth; all-to-all and permute get a single device's wire.
    """
    sent = collective_bytes(kind, num_bytes, n)
    if n == 1:
        return 0.0
    ring, alpha = link.bandwidth_bytes_per_s, link.latency_s
    if kind in ("all_to_all", "permute"):
        steps = 1 if kind == "permute" else n - 1
        return launch_s + steps * alpha + sent / (link.wire_bandwidth_bytes_per_s or ring)
    if kind == "all_reduce":
        tree_s = 2 * math.ceil(math.log2(n)) * alpha + 2 * num_bytes / ring
        return launch_s + min(2 * (n - 1) * alpha + sent / ring, tree_s)
    return launch_s + (n - 1) * alpha + sent / ring


def compute_time_s(flops: float, moved_bytes: float, dtype: object, op_class: str, hardware: Hardware) -> float:
    """Seconds for one operator on local shapes; nothing for a view.

    launch + max(flops / (peak(dtype)·efficiency(op_class)), moved_bytes / (memory bandwidth·efficiency("memory")))

    moved_bytes: what is read and written, counted once. dtype: a torch dtype or its name.
    """
    if op_class == "view":
        return 0.0
    flops_s = flops / hardware.flops_per_s(dtype, op_class)
    memory_s = moved_bytes / (hardware.memory_bandwidth_bytes_per_s * hardware.efficiency["memory"])
    return hardware.launch_overhead_s + max(flops_s, memory_s)
