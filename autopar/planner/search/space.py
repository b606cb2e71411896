"""What a search enumerates: meshes, strategies, schedules, microbatches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.planner.search.candidate import Point, divisors, factorizations
from autopar.planner.search.cluster import Cluster
from autopar.strategies.pipelining import schedules

MOST_ROWS = 16
"""Rows of a microbatch on one rank, at most."""
MOST_STAGES = 8
MOST_MICROBATCHES = 4096
DATA = ("ddp", "zero1", "zero2", "zero3")
ACROSS = (("hsdp", "hsdp"), ("ddp", "zero2"), ("zero2", "zero3"))
"""What two data axes do, between nodes and inside them: `hsdp` copies pieces between nodes, as `zero2` inside does;
`zero2` around `zero3` is ZeRO++'s hpZ, states in pieces over all ranks, parameters gathered inside a node only.
"""
EXCHANGING = {
    "ddp": "expert", "zero1": "zero1+expert", "zero2": "zero2+expert", "zero3": "zero3+expert",
}  # fmt: skip
"""What an axis for experts inside a data axis does: to all other parameters the same."""
TENSOR = ("tensor", "tensor+sequence")
CONTEXTS = ("ring", "ulysses", "allgather_kv")
SCHEDULES = ("1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev")


@dataclass(frozen=True, slots=True)
class Space:
    """What is enumerated. limits: the largest size of each axis; dp counts the ranks of both data axes."""

    limits: Mapping[str, int]
    data: Sequence[str] = DATA
    across: Sequence[tuple[str, str]] = ACROSS
    tensor: Sequence[str] = TENSOR
    context: Sequence[str] = CONTEXTS
    schedules: Sequence[str] = SCHEDULES


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model and its batch decides which points there are. blocks: that repeat. experts: what axes that
    exchange tokens divide, 1 where there are none.
    """

    rows: int
    calls: int
    blocks: int
    experts: int = 1


def meshes(cluster: Cluster, space: Space) -> list[dict[str, int]]:
    """pp × dp × cp × tp of all devices. Those whose groups for one sample fill a node come first: of them some will fit
    and be fast, whatever the model, and bound what is worth working out of the others.
    """
    node = cluster.hardware.devices_per_node

    def order(sizes: Mapping[str, int]) -> tuple[float, int, int]:
        return abs(math.log2(sizes["cp"] * sizes["tp"] / node)), sizes["cp"], sizes["pp"]

    return sorted(factorizations(cluster.num_devices, space.limits), key=order)


def points(cluster: Cluster, space: Space, shape: Shape, sizes: Mapping[str, int], rows: int) -> Iterator[Point]:
    """All points of a mesh with so many rows a rank and microbatch that the batch admits, with nothing recomputed."""
    microbatches, rest = divmod(shape.rows, sizes["dp"] * rows)
    if rest or not microbatches or microbatches > MOST_MICROBATCHES:
        return
    tensors = space.tensor if sizes["tp"] > 1 else ("",)
    contexts = space.context if sizes["cp"] > 1 else ("",)
    own = dict(sizes)
    for schedule, stages in _schedules(space, shape, sizes["pp"], microbatches):
        data = _data(cluster, space, shape, sizes)
        for (own["node"], own["dp"], own["ep"], a, d, e), c, t in itertools.product(data, contexts, tensors):
            yield Point(**own, across=a, data=d, exchange=e, context=c, tensor=t, schedule=schedule,
                        stages_per_rank=stages, microbatches=microbatches, rows=rows, rematerialize="none")  # fmt: skip


def _data(
    cluster: Cluster, space: Space, shape: Shape, sizes: Mapping[str, int]
) -> Iterator[tuple[int, int, int, str, str, str]]:
    """node, dp, ep and what they do."""
    ranks = sizes["dp"]
    if ranks == 1:
        yield 1, 1, 1, "", "ddp", ""
        return
    # Gradients are reduced once a step behind the last backward of a stage: there zero1 is zero2.
    names = [name for name in space.data if name != "zero1" or sizes["pp"] == 1]
    yield from ((1, ranks, 1, "", name, "") for name in names)
    inside = math.gcd(ranks, max(1, cluster.hardware.devices_per_node // (sizes["cp"] * sizes["tp"])))
    if 1 < inside < ranks:
        yield from ((ranks // inside, inside, 1, across, data, "") for across, data in space.across)
    for experts in divisors(math.gcd(ranks, shape.experts))[1:] if sizes["cp"] == 1 else ():
        yield from ((1, ranks // experts, experts, "", name if ranks > experts else "ddp", EXCHANGING[name])
                    for name in names)  # fmt: skip


def _schedules(space: Space, shape: Shape, ranks: int, microbatches: int) -> Iterator[tuple[str, int]]:
    if ranks == 1:
        yield "", 1
        return
    for name in space.schedules:
        if name == "interleaved":
            if microbatches % ranks == 0:
                yield from ((name, stages) for stages in stages_per_rank(shape, ranks))
        else:
            stages = schedules.known_as(name).default
            fits = ranks * stages <= shape.calls
            if fits and schedules.refusal(name, ranks, microbatches, stages) is None:
                yield name, stages


def stages_per_rank(shape: Shape, ranks: int) -> Iterator[int]:
    """Those of several stages whose longest has fewer blocks than with fewer stages: others only send more."""
    least = math.inf
    for stages in range(2, MOST_STAGES + 1):
        longest = -(-shape.blocks // (ranks * stages))
        if ranks * stages <= shape.calls and longest < least:
            least = longest
            yield stages


def all_rows(batch: int) -> list[int]:
    """Rows of a rank and microbatch, ascending."""
    return [each for each in divisors(MOST_ROWS) if batch % each == 0]
