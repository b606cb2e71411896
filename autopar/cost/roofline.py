"""What a collective and an operator take: bytes and seconds, as pure functions of sizes and a hardware profile.

Communication follows the α-β model (Hockney 1994): a message of b bytes takes α + b/β. Collectives are rings, as in
Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005); all-reduce may
also be NCCL's double binary tree (Sanders, Speck and Träff 2009), or be summed in the switch (NVLink SHARP).
Computation follows the roofline (Williams, Waterman and Patterson 2009), with curves for how much of the roof an
operator of some size reaches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from autopar.machine.hardware import OP_CLASSES, Hardware, Link

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "permute"]
COLLECTIVE_KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)


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


def num_steps(kind: CollectiveKind, n: int) -> int:
    """Messages that follow one another in a ring of n: n − 1, for all-reduce 2(n − 1), for permute 1."""
    return 1 if kind == "permute" else (2 if kind == "all_reduce" else 1) * (n - 1)


def collective_time_s(kind: CollectiveKind, num_bytes: float, n: int, link: Link, launch_s: float) -> float:
    """Seconds for one collective over a group of n; `num_bytes` as in `collective_bytes`. Nothing for one rank.

    ring:  launch + steps·α + bytes_sent/β, with n−1 steps, 2(n−1) for all-reduce, 1 for permute;
    tree:  launch + 2·⌈log2 n⌉·α + 2·b/β, for all-reduce where it is faster (small tensors in large groups);
    NVLS:  launch + α_nvls + b/β_nvls, for all-reduce over more than two where the switch can sum, where it is faster
           (NCCL offers NVLS to groups of three and more: src/transport/nvls.cc).
    peers: one kernel in which every rank of a node reads the others' memory, in one shot or, after each has summed a
           part, in two, where programs have it (`Link.by_peers`) and it is faster:
           α_p + (n−1)·α_r + (n−1)·b/β_p,  or  2·α_p + (n−1)·α_r + 2·b·(n−1)/n/β_p.
    A ring gets the link's bandwidth; all-to-all and permute get a single device's wire. Where each pair of devices has
    its own wire, a ring gets at most n−1 of them, permute one. A kind that was measured has its own α and β for rings,
    and no other algorithm. Of an all-to-all that leaves a node, what goes to the n−m ranks in others takes the wire,
    and meanwhile what stays the node's link: max(bytes_sent·(n−m)/(n−1)/β, bytes_sent·(m−1)/(n−1)/β_node).
    """
    sent = collective_bytes(kind, num_bytes, n)
    if n == 1:
        return 0.0
    inside_s = 0.0
    if kind == "all_to_all" and 1 < link.members < n and link.inside_bandwidth_bytes_per_s:
        inside_s = sent * (link.members - 1) / (n - 1) / link.inside_bandwidth_bytes_per_s
        sent *= (n - link.members) / (n - 1)
    if (own := link.of(kind)) is not None:
        return launch_s + num_steps(kind, n) * own.latency_s + max(sent / own.bandwidth_bytes_per_s, inside_s)
    ring, alpha, direct = link.bandwidth_bytes_per_s, link.latency_s, link.direct_bandwidth_bytes_per_s
    if direct is not None:
        ring = min(ring, direct * (n - 1))
    if kind in ("all_to_all", "permute"):
        wire = link.wire_bandwidth_bytes_per_s or ring
        if direct is not None:
            wire = direct if kind == "permute" else ring
        return launch_s + num_steps(kind, n) * alpha + max(sent / wire, inside_s)
    taken = launch_s + num_steps(kind, n) * alpha + sent / ring
    if kind == "all_reduce":
        taken = min(taken, launch_s + 2 * math.ceil(math.log2(n)) * alpha + 2 * num_bytes / ring)
        if link.nvls_bandwidth_bytes_per_s is not None and n > 2:
            taken = min(taken, launch_s + link.nvls_latency_s + num_bytes / link.nvls_bandwidth_bytes_per_s)
        taken = min(taken, _by_peers_s(num_bytes, n, link))
    return taken


def _by_peers_s(num_bytes: float, n: int, link: Link) -> float:
    """Of an all-reduce in which ranks read each other's memory; inf where there is none."""
    if not link.by_peers or link.peer_bandwidth_bytes_per_s is None:
        return math.inf
    others = (n - 1) * link.peer_rank_s
    one_shot = link.peer_latency_s + (n - 1) * num_bytes / link.peer_bandwidth_bytes_per_s
    two_shots = 2 * link.peer_latency_s + 2 * num_bytes * (n - 1) / n / link.peer_bandwidth_bytes_per_s
    return others + min(one_shot, two_shots)


@dataclass(frozen=True, slots=True)
class Work:
    """What one operator does on one rank's shapes.

    op_class: one of `OP_CLASSES`. dtype: a torch dtype or its name. moved_bytes: read and written, counted once.
    dims: of a product (m, n, k, batch); of an attention (rows, seen keys, head size, whether all keys are seen), where
    rows are batch · heads · queries, and seen keys the average over queries; else nothing.
    variant: of an attention that kernels may not take: `softcap`, `dropout`, `bias`, `masked`; else "".
    few_rows: of an attention of few queries, which kernels serve that cut the keys: the rows that read a key head;
    else 0.
    around_bytes: read and written by kernels before, between and behind its products, which wait for each other.
    name: the operator's base name (`silu_backward`), for profiles that have its speed.
    launches: kernels that are launched for it.
    decoded: numbers that its kernels make of codes, each as often as a tile of rows needs it.
    """

    op_class: str
    dtype: object
    flops: float
    moved_bytes: float
    dims: tuple[float, float, float, float] | None = None
    name: str = ""
    variant: str = ""
    around_bytes: float = 0.0
    few_rows: float = 0.0
    launches: float = 1.0
    decoded: float = 0.0


def compute_time_s(work: Work, hardware: Hardware, *, in_step: bool = False) -> float:
    """Seconds for one operator on local shapes; for a view what the host takes for it, where that is waited for.

    launches + max(time of the FLOPs, time of the bytes) + time of the bytes around. FLOPs: products and attention by
    their curves (`autopar.curves`), an operator with a rate by that, else flops / (peak(dtype) · efficiency(op_class)).
    Bytes: moved_bytes / what the memory gives for so many; of attention that goes head by head, once more from the
    shared cache for each further query head of a key head (`Hardware.head_by_head`). What is decoded takes its time
    beside that of the FLOPs: of bf16 times MXFP4 Triton's kernels reached 49% of an H100's peak, where products of bf16
    reach 76% (triton-lang/triton, pull request 6833), and one after the other they are 0.11 and 0.34 ps a number and
    tile of 128 rows. Raises ValueError for an unknown
    class.

    in_step: not by itself for a moment, but among others in a run of minutes, where products and attention are slower
    (`Hardware.kept_speed`).
    """
    if work.op_class == "view":
        return hardware.view_s
    memory_s = work.moved_bytes / hardware.memory_bytes_per_s(work.moved_bytes, work.op_class, work.name)
    if hardware.head_by_head and work.few_rows > 1:
        memory_s += hardware.repeated_s(work.moved_bytes, work.few_rows - 1)
    flops_s = _flops_time_s(work, hardware) / (hardware.kept_speed(work.op_class) if in_step else 1.0)
    if work.decoded and hardware.decoded_per_s is not None:
        flops_s += work.decoded / hardware.decoded_per_s
    around_s = work.around_bytes / hardware.memory_bytes_per_s(work.around_bytes) if work.around_bytes else 0.0
    return work.launches * hardware.launch_overhead_s + max(flops_s, memory_s) + around_s


def _flops_time_s(work: Work, hardware: Hardware) -> float:
    if work.op_class == "matmul":
        curve = hardware.matmul.get(hardware.format_of(work.dtype))
        if curve is not None and work.dims is not None:
            speed = hardware.peak_flops_per_s(work.dtype) * curve.efficiency
            return curve.launch_s + work.flops / speed * curve.slowdown(*work.dims)
    elif work.dims is not None and work.op_class in ("attention", "attention_backward"):
        phase = "forward" if work.op_class == "attention" else "backward"
        attention = hardware.attention_curve(work.dtype, phase, work.variant)
        if attention is not None:
            rows, seen, head_size, sees_all = work.dims
            flops = work.flops
            if work.few_rows and attention.half_rows:  # all cores have keys; a tile is computed whole
                rows, flops = math.inf, flops * max(1.0, hardware.attention_rows / work.few_rows)
            fraction = attention.fraction(rows, seen, head_size, bool(sees_all))
            return flops / (hardware.peak_flops_per_s(work.dtype) * fraction)
    elif (rate := hardware.rates.get(work.name)) is not None:
        return work.flops / rate
    return work.flops / hardware.flops_per_s(work.dtype, work.op_class)


def optimizer_time_s(num_elements: float, stored_bytes: float, hardware: Hardware, num_tensors: int = 0) -> float:
    """Seconds of AdamW's update of one rank's parameters, with torch.optim.AdamW's defaults on the device.

    num_elements: that the rank updates; stored_bytes: of these, in the dtype in which they (and so their two states)
    are stored. num_tensors: how many parameters these are, each of which takes the host's time where a profile has
    measured it. Nothing for no elements. Where the profile has no measurement, passes over stored_bytes at the memory
    bandwidth: 20 for the default `foreach` on CUDA and the loop on CPU (torch/optim/adam.py, `_multi_tensor_adam`:
    decay 2, first moment 3, second moment 2 + 3, square root 2, bias correction 2, epsilon 2, update 4), 7 for
    `fused=True` (reads parameter, gradient, two states; writes parameter, two states).
    """
    if num_elements <= 0:
        return 0.0
    once = hardware.launch_overhead_s + num_tensors * hardware.optimizer_s_per_tensor
    if hardware.optimizer_s_per_byte is not None:
        return once + stored_bytes * hardware.optimizer_s_per_byte
    moved = hardware.optimizer_passes * stored_bytes
    return once + moved / hardware.memory_bytes_per_s(moved)


__all__ = [
    "COLLECTIVE_KINDS", "OP_CLASSES", "CollectiveKind", "Work", "collective_bytes", "collective_time_s",
    "compute_time_s", "num_steps", "optimizer_time_s",
]  # fmt: skip
