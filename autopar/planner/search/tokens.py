"""What a search for `generate()` compares: meshes and batches, by seconds a token and tokens a second."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.planner.search.candidate import divisors, factorizations

MOST_TENSOR_RANKS = 64


@dataclass(frozen=True, slots=True)
class TokenPoint:
    """A mesh and what its axes do. pp: stages; dp: replicas with rows of their own; ep: ranks with other rows and other
    experts, inside dp; tp: ranks that share every matrix.
    """

    pp: int
    dp: int
    ep: int
    tp: int

    @property
    def axes(self) -> dict[str, int]:
        """Of the mesh, slowest link first; axes of one rank are left out, but for the last one that is left."""
        sizes = {"pp": self.pp, "dp": self.dp, "ep": self.ep, "tp": self.tp}
        return {axis: size for axis, size in sizes.items() if size > 1} or {"dp": 1}

    @property
    def strategy(self) -> dict[str, str]:
        """By axis, as `autopar.plan_generation` takes it."""
        names = {"pp": "pipeline(1f1b)", "dp": "ddp", "ep": "expert", "tp": "tensor"}
        return {axis: names[axis] for axis in self.axes}

    @property
    def num_devices(self) -> int:
        return self.pp * self.dp * self.ep * self.tp

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.axes.items())


@dataclass(frozen=True, slots=True)
class TokenCandidate:
    """A point with a batch, and what it is estimated to take: seconds to the first token and for each other one, bytes
    of the fullest rank, and those of caches among them. new_tokens: of each sequence.
    """

    point: TokenPoint
    batch: int
    new_tokens: int
    time_to_first_token_s: float
    time_per_token_s: float
    peak_bytes: float
    cache_bytes: float
    fits: bool

    @property
    def total_s(self) -> float:
        """Of all tokens of a batch; the prompt gives the first."""
        return self.time_to_first_token_s + (self.new_tokens - 1) * self.time_per_token_s

    @property
    def tokens_per_s_per_device(self) -> float:
        """New tokens, with the seconds of their prompts."""
        return self.batch * self.new_tokens / self.total_s / self.point.num_devices


@dataclass(frozen=True, slots=True)
class OtherWay:
    """What axes of a point's mesh may do otherwise. name: in words. axes: of the mesh, slowest link first. strategy: of
    each, as `autopar.plan_generation` takes it. ways: in how many pieces caches are cut along their length.
    """

    name: str
    axes: Mapping[str, int]
    strategy: Mapping[str, str]
    ways: int = 1

    @property
    def mesh(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.axes.items())


def other_ways(point: TokenPoint) -> list[OtherWay]:
    """What no estimate has sizes to put in for: replicas that share parameters (`zero3`), ranks of `tp`, half of them
    or all, that cut caches along their length (`split_kv`; `helix`, which splits products, too), and `auto` on every
    axis but a pipeline's.
    """
    axes, named = point.axes, point.strategy
    found = []
    if point.dp > 1:
        found.append(OtherWay("zero3", axes, {**named, "dp": "zero3"}))
    for cut in sorted({point.tp // 2 if point.tp % 2 == 0 else 1, point.tp} - {1}) if point.tp > 1 else ():
        for name in ("split_kv", "helix"):
            sizes = {**{axis: size for axis, size in axes.items() if axis != "tp"}, "cp": cut}
            asked = {**{axis: name for axis, name in named.items() if axis != "tp"}, "cp": name}
            if cut < point.tp:
                sizes, asked = {**sizes, "tp": point.tp // cut}, {**asked, "tp": "tensor"}
            found.append(OtherWay(name, sizes, asked, cut))
    if point.num_devices > point.pp:
        kept = {axis: name if axis == "pp" else "auto" for axis, name in named.items()}
        found.append(OtherWay("auto", axes, kept))
    return found


def token_points(num_devices: int, limits: Mapping[str, int], experts: int) -> Iterator[TokenPoint]:
    """Every pp × dp × tp of the devices, and of models with experts every part of dp that divides these.

    limits: the largest size of an axis; dp: of all ranks with rows of their own. experts: 1 for models without.
    """
    sizes = {"pp": limits["pp"], "dp": limits["dp"], "tp": min(limits["tp"], MOST_TENSOR_RANKS)}
    for found in factorizations(num_devices, sizes):
        for ranks in divisors(math.gcd(found["dp"], experts)):
            yield TokenPoint(found["pp"], found["dp"] // ranks, ranks, found["tp"])


def token_frontier(candidates: Iterable[TokenCandidate]) -> list[TokenCandidate]:
    """Of those that fit, the ones that nothing beats in both seconds a token and tokens a second and device; the fewest
    seconds first. Of equals the one with the fewer axes is taken.
    """

    def order(each: TokenCandidate) -> tuple[object, ...]:
        return each.time_per_token_s, -each.tokens_per_s_per_device, len(each.point.axes), str(each.point), each.batch

    found: list[TokenCandidate] = []
    for each in sorted((each for each in candidates if each.fits), key=order):
        if not found or each.tokens_per_s_per_device > found[-1].tokens_per_s_per_device:
            found.append(each)
    return found


def spread_over(frontier: Sequence[TokenCandidate], count: int) -> list[TokenCandidate]:
    """So many of a frontier, evenly: its last one (the most tokens a second), its first one, and those between."""
    last = len(frontier) - 1
    if count <= 1 or last <= 0:
        return list(frontier[-1:]) if count > 0 else []
    places = {round(number * last / (min(count, last + 1) - 1)) for number in range(min(count, last + 1))}
    return [frontier[place] for place in sorted(places)]


def trace_rows(batches: Sequence[int]) -> dict[int, int]:
    """Batch -> the rows that are traced for it: the largest of the batches that it divides, and that others share."""
    traced: list[int] = []
    found = {}
    for batch in sorted(set(batches), reverse=True):
        rows = next((each for each in traced if each % batch == 0), None)
        if rows is None:
            rows = batch
            traced.append(batch)
        found[batch] = rows
    return found
