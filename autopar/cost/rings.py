"""What a ring of a program takes: the calls that it is lowered to, bytes, time beside the computing, buffers.

While a rank works on one block, the next is on its way: only what the computing does not hide is charged. All ranks are
followed, step by step, because under a causal mask some have less to do, and what they send waits for nobody.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.cost.roofline import collective_time_s
from autopar.ir.choices import Choice, is_home
from autopar.ir.op_call import OpCall, TensorSpec
from autopar.ir.region import NodeStrategy
from autopar.ir.rule import Rule
from autopar.ir.sharding import Sharding, local_shape
from autopar.machine.mesh import Mesh
from autopar.operators.basic import wide_dtype
from autopar.operators.rules.attention_cost import pairs_by_place, pairs_by_rank, visits

Seconds = Callable[[float], float]
"""Of one block's computing, given its floating point operations."""


@dataclass(frozen=True, slots=True)
class Ring:
    """A ring of one operator. visits: how far from home its blocks go.

    blocks, gradients: bytes of what travels from one visit to the next; gradients also home. axis: its number.
    """

    axis: int
    visits: tuple[int, ...]
    blocks: int
    gradients: int

    @property
    def bytes_sent(self) -> int:
        """By each rank, in one call."""
        moves = len(self.visits) if self.visits[-1] else 0
        return (len(self.visits) - 1) * self.blocks + moves * self.gradients


def ring_axis(choices: Sequence[Choice]) -> int | None:
    """The axis that is a ring for a node; None where none is."""
    return next((axis for axis, choice in enumerate(choices) if choice.kind == "ring"), None)


def ring_of(call: OpCall, rule: Rule, strategy: NodeStrategy, sizes: Sequence[int]) -> Ring | None:
    """The ring of an operator under these choices, if there is one."""
    axis = ring_axis(strategy.choices)
    if axis is None or rule.ring is None:
        return None
    travelling = [_local_bytes(call.operands[i], strategy.operands[i], sizes) for i in rule.ring.travelling]
    home = [
        _local_bytes(spec, sharding, sizes, wide=True)
        for dims, spec, sharding in zip(rule.results, call.results, strategy.results, strict=True)
        if dims is not None and spec is not None and sharding is not None and is_home(rule, dims)
    ]
    return Ring(axis, visits(call, rule, strategy.choices, sizes), sum(travelling), sum(home))


def longest_s(call: OpCall, rule: Rule, choices: Sequence[Choice], sizes: Sequence[int], one: Seconds) -> float:
    """Seconds that the rank computes which has most to do. one: see `Seconds`."""
    return float(_seconds(call, rule, choices, sizes, one).sum(1).max())


def exposed_s(call: OpCall, rule: Rule, strategy: NodeStrategy, mesh: Mesh, one: Seconds) -> float:
    """Seconds that a ring takes longer than the slowest rank's computing: what waits for blocks or for others."""
    ring = ring_of(call, rule, strategy, mesh.sizes)
    if ring is None or len(ring.visits) == 1:
        return 0.0
    seconds = _seconds(call, rule, strategy.choices, mesh.sizes, one)
    num, link = len(seconds), mesh.link(mesh.axis_names[ring.axis])
    block_s, gradient_s = (
        collective_time_s("permute", size, num, link, mesh.hardware.collective_launch_s) if size else 0.0
        for size in (ring.blocks, ring.gradients)
    )
    return max(0.0, _simulate(seconds, ring.visits, block_s, gradient_s) - float(seconds.sum(1).max()))


def _seconds(
    call: OpCall, rule: Rule, choices: Sequence[Choice], sizes: Sequence[int], one: Seconds
) -> NDArray[np.float64]:
    """[place, block]: the computing at each place of the ring's axis; nothing where nothing is seen."""
    pairs = pairs_by_place(call, rule, choices, sizes)
    total = pairs_by_rank(call, rule, choices, sizes).sum()
    assert rule.ring is not None
    others = math.prod(
        size
        for size, choice in zip(sizes, choices, strict=True)
        if choice.kind == "factor" and choice.factor != rule.ring.query
    )
    counts, where = np.unique(pairs, return_inverse=True)
    taken = np.array([one(rule.flops * float(n) / float(total) / others) if n else 0.0 for n in counts])
    found: NDArray[np.float64] = taken[where].reshape(pairs.shape)
    return found


def _simulate(seconds: NDArray[np.float64], visits: Sequence[int], block_s: float, gradient_s: float) -> float:
    """When the last rank is through, gradients home. seconds: [place, block]. A rank's messages leave one by one."""
    num = len(seconds)
    places = np.arange(num)
    free, wire, here, behind = (np.zeros(num) for _ in range(4))
    for step, distance in enumerate(visits):
        begin = np.maximum(free, here)
        is_last = step + 1 == len(visits)
        shift = (num if is_last else visits[step + 1]) - distance
        if not is_last:
            wire = np.maximum(begin, wire) + block_s
            here = np.roll(wire, shift)
        free = np.maximum(begin + seconds[places, (places - distance) % num], behind)
        if gradient_s:
            wire = np.maximum(free, wire) + gradient_s
            behind = np.roll(wire, shift)
    return float(np.maximum(free, behind).max())


def buffer_bytes(call: OpCall, rule: Rule, strategy: NodeStrategy, sizes: Sequence[int]) -> int:
    """The most that a ring holds beside its operands and results: blocks that visit, what is being summed."""
    ring = ring_of(call, rule, strategy, sizes)
    if ring is None:
        return 0
    visiting = min(2, len(ring.visits) - 1) * ring.blocks
    stays = [
        (spec, sharding)
        for dims, spec, sharding in zip(rule.results, call.results, strategy.results, strict=True)
        if dims is not None and spec is not None and sharding is not None and not is_home(rule, dims)
    ]
    sums = sum(_local_bytes(spec, sharding, sizes, wide=True) for spec, sharding in stays)
    parts = sum(_local_bytes(spec, sharding, sizes) for spec, sharding in stays)
    if not ring.gradients:
        # Merging weighs both sides, and adds them.
        return visiting + 4 * sums + parts
    # Gradients of a block: summed here, on their way here, on their way on; and one block's own.
    return visiting + 3 * ring.gradients + ring.blocks + sums + parts


def _local_bytes(spec: TensorSpec, sharding: Sharding, sizes: Sequence[int], *, wide: bool = False) -> int:
    """Bytes of one rank's part; wide: in the dtype in which sums are taken."""
    dtype = wide_dtype(spec.dtype) if wide else spec.dtype
    return math.prod(local_shape(spec.shape, sharding, sizes)) * dtype.itemsize
