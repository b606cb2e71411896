"""Prompts on some devices, tokens on others: which rank hands what of the caches to which one.

    prefill = plan_generation(model, Mesh.parse("tp=2"), Generation(batch=1, prompt=2048, …))
    decode = plan_generation(model, Mesh.parse("tp=4,cp=2"), Generation(batch=64, …), strategy={"cp": "split_kv", …})
    moved = hand_over(prefill, decode)            # every box of every cache, its sender and its receiver
    moved.verify()                                # both plans' programs, one after the other, and the boxes

What a rank has of a cache is a product of runs of its dims, as its sharding says; what it gets is where two such boxes
meet. Positions that the prompt has filled are moved, in the rows that the prompt has in the other batch. Of ranks that
hold the same, the one that sends least so far sends.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from autopar.api.comparing import Comparison
from autopar.api.generation import GenerationPlan
from autopar.api.generation_proof import verify_generation
from autopar.api.plan import Plan
from autopar.api.proof import Proof
from autopar.api.stored import states_among
from autopar.base.errors import AutoparError
from autopar.base.text import format_bytes
from autopar.ir.interface import TensorInterface
from autopar.ir.positions import starts
from autopar.ir.sharding import Shard
from autopar.planner.generation import Generation
from autopar.runtime.checkpoint.boxes import Box, covers, intersection, why_not
from autopar.runtime.pieces import piece_of

MOST_NUMBERS = 1 << 22
"""Elements of a cache that are moved one by one in a proof; of larger ones boxes are counted."""


class Message(NamedTuple):
    """A box of a cache that one rank of the first mesh hands to one of the second.

    source, target: ranks, each of its own mesh, row-major. given, taken: the box in the whole cache of either plan,
    which differ where batches do. at, to: in the local tensors of either rank. num_bytes: of it.
    """

    cache: str
    source: int
    target: int
    given: Box
    taken: Box
    at: Box
    to: Box
    num_bytes: int


class _Part(NamedTuple):
    """What a rank has of a tensor: one box of it, and where that lies in the local tensor."""

    box: Box
    local: Box


@dataclass(frozen=True, slots=True)
class HandOver:
    """What `hand_over` gives. Bytes are those of one batch of prompts; seconds are predicted.

    filled: positions that are moved. row: where the prompts' rows begin in the second batch.
    """

    prefill: GenerationPlan
    decode: GenerationPlan
    messages: tuple[Message, ...]
    filled: int
    row: int
    bandwidth_bytes_per_s: float
    latency_s: float

    @property
    def num_bytes(self) -> int:
        """Of all messages."""
        return sum(message.num_bytes for message in self.messages)

    @property
    def sent(self) -> dict[int, int]:
        """Bytes by rank of the first mesh."""
        return self._bytes(self.prefill.prefill, (message.source for message in self.messages))

    @property
    def received(self) -> dict[int, int]:
        """Bytes by rank of the second mesh."""
        return self._bytes(self.decode.decode, (message.target for message in self.messages))

    def _bytes(self, plan: Plan, ranks: Iterable[int]) -> dict[int, int]:
        """ranks: of each message, one of the plan's mesh."""
        found = dict.fromkeys(range(plan.mesh.num_devices), 0)
        for rank, message in zip(ranks, self.messages, strict=True):
            found[rank] += message.num_bytes
        return found

    @property
    def seconds(self) -> float:
        """Of the rank that sends or receives most, when all do at once, one message after the other."""
        most = max([0, *self.sent.values(), *self.received.values()])
        counts = Counter(m.source for m in self.messages), Counter(m.target for m in self.messages)
        return most / self.bandwidth_bytes_per_s + self.latency_s * max([0, *counts[0].values(), *counts[1].values()])

    @property
    def time_to_first_token_s(self) -> float:
        """Of the prompt, and the caches behind it: the token itself is known before."""
        return self.prefill.time_to_first_token_s + self.seconds

    def of_sender(self, rank: int) -> tuple[Message, ...]:
        """What a rank of the first mesh hands over, in the order in which all ranks do."""
        return tuple(message for message in self.messages if message.source == rank)

    def of_receiver(self, rank: int) -> tuple[Message, ...]:
        """What a rank of the second mesh gets, in the same order."""
        return tuple(message for message in self.messages if message.target == rank)

    def verify(self, *, dtype: torch.dtype = torch.float64, seed: int = 0, tokens: int | None = None) -> Proof:
        """Prove both plans together: the first one's program of the prompt, the second one's of each token behind it,
        beside the eager model (see `GenerationPlan.verify`); and that messages move each element that a rank needs,
        once, from where it is. Numbers are moved where a cache has at most four million.

        Raises:
            AutoparError: as `GenerationPlan.verify`.
        """
        wanted = replace(self.decode.generation, **_of_prompt(self.prefill))
        phases = {"prefill": self.prefill.prefill, "decode": self.decode.decode}
        found = verify_generation(wanted, phases, dtype=dtype, seed=seed, tokens=tokens)
        return replace(found, comparisons=(*found.comparisons, *self._moved()))

    def _moved(self) -> Iterator[Comparison]:
        ends = _ends(self.prefill.prefill, self.decode.decode)
        by_cache: dict[str, list[Message]] = defaultdict(list)
        for message in self.messages:
            by_cache[message.cache].append(message)
        kinds: dict[Any, str] = {}
        for name, (one, other) in ends.items():
            shown = tuple(message[1:] for message in by_cache[name])
            kind = (one.entry.shape, *one.parts.items(), other.entry.shape, *other.parts.items(), shown)
            if kinds.setdefault(kind, name) == name:
                wrong = self._wrong(by_cache[name], one, other)
                said = f"what is handed over of {name}{wrong and f' ({wrong})'}"
                yield Comparison(said, float(bool(wrong)), not wrong)

    def _wrong(self, messages: Sequence[Message], one: _End, other: _End) -> str:
        """What is not right of the messages of one cache; nothing if all is."""
        _, region = _regions(one.entry, other.entry, self.prefill, self.decode, self.row)
        for rank, parts in other.parts.items():
            mine = [message for message in messages if message.target == rank]
            for part in parts:
                needed = intersection(part.box, region) if region.sizes else Box((), ())
                if needed is None:
                    continue
                have = [m.taken.within(needed) for m in mine if not region.sizes or intersection(m.taken, needed)]
                if region.sizes and not covers(have, needed.sizes):
                    return f"rank {rank}: {why_not(have, needed.sizes)}"
                if not region.sizes and len(have) != 1:
                    return f"rank {rank}: {len(have)} of 1 number"
        if math.prod(one.entry.shape) > MOST_NUMBERS or math.prod(other.entry.shape) > MOST_NUMBERS:
            return ""
        whole = torch.arange(math.prod(one.entry.shape)).view(one.entry.shape)
        wanted = torch.full(other.entry.shape, -1)
        first, _ = _regions(one.entry, other.entry, self.prefill, self.decode, self.row)
        wanted[region.slices()] = whole[first.slices()]
        held = {rank: _local(whole, parts) for rank, parts in one.parts.items()}
        for rank, parts in other.parts.items():
            expected = _local(wanted, parts)
            local = torch.full_like(expected, -1)
            for message in messages:
                if message.target == rank:
                    local[message.to.slices()] = held[message.source][message.at.slices()]
            if not torch.equal(local, expected):
                return f"rank {rank} has other elements than it needs"
        return ""

    def to_data(self) -> dict[str, Any]:
        """All of it, for machines: each message as [cache, source, target, at, to, bytes], where `at` and `to` are the
        offsets and sizes of boxes in the local tensors.
        """
        return {
            "from": _said(self.prefill.generation, self.prefill.prefill),
            "to": _said(self.decode.generation, self.decode.decode),
            "filled": self.filled,
            "row": self.row,
            "bytes": self.num_bytes,
            "seconds": self.seconds,
            "time_to_first_token_s": self.time_to_first_token_s,
            "messages": [[m.cache, m.source, m.target, *map(list, m.at), *map(list, m.to), m.num_bytes]
                         for m in self.messages],
        }  # fmt: skip

    def save(self, path: str | Path) -> None:
        """Write `to_data()` as JSON."""
        Path(path).write_text(json.dumps(self.to_data()), encoding="utf-8")

    def __str__(self) -> str:
        one, other = self.prefill.prefill.mesh, self.decode.decode.mesh
        sent, received = self.sent, self.received
        caches = {message.cache for message in self.messages}
        said = [
            f"prompts on {one}, tokens on {other}: {len(caches)} tensors of caches, {self.filled} positions, "
            f"{self.prefill.generation.rows} of {self.decode.generation.rows} rows",
            f"handed over: {format_bytes(self.num_bytes)} in {len(self.messages)} messages; a rank sends at most "
            f"{format_bytes(max(sent.values()))} and gets at most {format_bytes(max(received.values()))}",
            f"predicted: {1e3 * self.seconds:.3g} ms at {self.bandwidth_bytes_per_s / 1e9:.3g} GB/s a rank, the prompt "
            f"{1e3 * self.prefill.time_to_first_token_s:.3g} ms, a token {1e3 * self.decode.time_per_token_s:.3g} ms",
        ]
        pairs: Counter[tuple[int, int]] = Counter()
        for message in self.messages:
            pairs[message.source, message.target] += message.num_bytes
        for (source, target), num in sorted(pairs.items())[:MOST_LINES]:
            said.append(f"  rank {source} -> rank {target}: {format_bytes(num)}")
        if len(pairs) > MOST_LINES:
            said.append(f"  and {len(pairs) - MOST_LINES} other pairs")
        return "\n".join(said)


MOST_LINES = 16


class _End(NamedTuple):
    """A cache in one plan. parts: by rank."""

    entry: TensorInterface
    parts: Mapping[int, tuple[_Part, ...]]


def hand_over(
    prefill: GenerationPlan,
    decode: GenerationPlan,
    *,
    row: int = 0,
    bandwidth_bytes_per_s: float | None = None,
) -> HandOver:
    """Plan what of the caches goes from the devices that read prompts to those that make tokens.

    prefill: of whose phases the prompt's is run. decode: of whose phases the tokens' is. Plans of one model; meshes,
    strategies, batches and numbers of new tokens may differ. row: the first of the rows that the prompts have in
    decode's batch. bandwidth_bytes_per_s: of one rank, one direction; None: the slower network of both meshes.

    Raises:
        AutoparError: caches that are not of one model, or stored otherwise; a prompt that does not fit.
    """
    ends = _ends(prefill.prefill, decode.decode)
    filled = _filled(prefill)
    _check(prefill, decode, row, filled, ends)
    sent: Counter[int] = Counter()
    messages: list[Message] = []
    for name, (one, other) in ends.items():
        size = torch.empty((), dtype=getattr(torch, one.entry.dtype)).element_size()
        first, second = _regions(one.entry, other.entry, prefill, decode, row)
        shift = tuple(b - a for a, b in zip(first.offsets, second.offsets, strict=True))
        holders: dict[Box, list[tuple[int, _Part]]] = defaultdict(list)
        for rank, parts in one.parts.items():
            for part in parts:
                holders[part.box].append((rank, part))
        for target, parts in other.parts.items():
            for part in parts:
                for box, ranks in holders.items():
                    taken = _met(_shifted(_met(box, first), shift), part.box)
                    if taken is None:
                        continue
                    source, held = min(ranks, key=lambda each: (sent[each[0]], each[0]))
                    given = _shifted(taken, tuple(-each for each in shift))
                    assert given is not None
                    num = given.numel * size
                    sent[source] += num
                    messages.append(
                        Message(name, source, target, given, taken, _in(given, held), _in(taken, part), num)
                    )
    networks = [plan.mesh.hardware.network for plan in (prefill.prefill, decode.decode)]
    if bandwidth_bytes_per_s is not None and not 0 < bandwidth_bytes_per_s < math.inf:
        raise AutoparError(
            "a bandwidth is a positive number of bytes a second",
            values=f"bandwidth_bytes_per_s={bandwidth_bytes_per_s}",
        )
    bandwidth = bandwidth_bytes_per_s or min(each.bandwidth_bytes_per_s for each in networks)
    latency = max(each.latency_s for each in networks)
    return HandOver(prefill, decode, tuple(messages), filled, row, bandwidth, latency)


def _check(
    prefill: GenerationPlan, decode: GenerationPlan, row: int, filled: int, ends: Mapping[str, tuple[_End, _End]]
) -> None:
    rows = prefill.generation.rows, decode.generation.rows
    if row < 0 or row + rows[0] > rows[1]:
        raise AutoparError(
            "the prompts' rows are not in the batch that they go to",
            values=f"rows {row} to {row + rows[0] - 1}, of {rows[1]}",
            remedy="choose row=, or a plan of the tokens for a larger batch",
        )
    if prefill.generation.cache != decode.generation.cache:
        raise AutoparError(
            "the plans store keys and values otherwise",
            values=f"{prefill.generation.cache} and {decode.generation.cache}",
            remedy="plan both with the same Generation(cache=…)",
        )
    if prefill.generation.cache is not None and prefill.generation.cache.endswith("-channel"):
        raise AutoparError(
            "caches with a scale a channel are not handed over: how far they are coded is known as they are filled",
            values=f"cache={prefill.generation.cache!r}",
            remedy='Generation(cache="int8") or "fp8"',
        )
    for name, (one, other) in ends.items():
        shapes = enumerate(zip(one.entry.shape, other.entry.shape, strict=False))
        differing = [(a, b) for dim, (a, b) in shapes if a != b and dim]
        same = len(one.entry.shape) == len(other.entry.shape) and one.entry.dtype == other.entry.dtype
        lengths = all(_is_length(a, prefill) and _is_length(b, decode) for a, b in differing)
        if not same or not lengths or any(min(each) < filled for each in differing):
            raise AutoparError(
                f"the plans' caches do not fit: {name}",
                values=f"{one.entry.dtype}{list(one.entry.shape)} and {other.entry.dtype}{list(other.entry.shape)}, "
                f"{filled} positions",
                remedy="plan both of one model and precision, the tokens for prompts that are as long",
            )


def _of_prompt(plan: GenerationPlan) -> dict[str, Any]:
    wanted = plan.generation
    return {"batch": wanted.batch, "prompt": wanted.prompt, "chunk": wanted.chunk, "beams": wanted.beams}


def _said(generation: Generation, plan: Plan) -> dict[str, Any]:
    return {"axes": [list(axis) for axis in plan.mesh.axes], "generation": asdict(generation)}


def _filled(plan: GenerationPlan) -> int:
    """Positions that the prompt fills; those of a decoder behind an encoder are one."""
    return 1 if _has_encoder(plan) else plan.generation.prompt


def _has_encoder(plan: GenerationPlan) -> bool:
    return any(port.name.startswith("encoder_outputs") for port in plan.decode.interface.inputs)


def _regions(
    one: TensorInterface, other: TensorInterface, prefill: GenerationPlan, decode: GenerationPlan, row: int
) -> tuple[Box, Box]:
    """What is moved, in the whole cache of either plan: where one dim alone has its positions, those of the prompt."""
    offsets, sizes = [0] * len(one.shape), [min(a, b) for a, b in zip(one.shape, other.shape, strict=True)]
    into = list(offsets)
    if sizes:
        into[0] = row if one.shape[0] < other.shape[0] else 0
    shapes = enumerate(zip(one.shape, other.shape, strict=True))
    lengths = [dim for dim, (a, b) in shapes if dim and _is_length(a, prefill) and _is_length(b, decode)]
    if len(lengths) == 1:
        sizes[lengths[0]] = _filled(prefill)
    return Box(tuple(offsets), tuple(sizes)), Box(tuple(into), tuple(sizes))


def _is_length(size: int, plan: GenerationPlan) -> bool:
    """Whether a dim has as many elements as a cache has positions, which pieces may make more."""
    least = plan.generation.positions(behind_encoder=_has_encoder(plan))
    return least <= size < least + plan.decode.mesh.num_devices


def _met(box: Box | None, other: Box) -> Box | None:
    if box is None or not other.sizes:
        return box
    return intersection(box, other)


def _shifted(box: Box | None, by: Sequence[int]) -> Box | None:
    return box and Box(tuple(a + b for a, b in zip(box.offsets, by, strict=True)), box.sizes)


def _in(box: Box, part: _Part) -> Box:
    """A box of the whole, where a part of it lies in the local tensor."""
    within = box.within(part.box)
    return Box(tuple(a + b for a, b in zip(within.offsets, part.local.offsets, strict=True)), box.sizes)


def _local(whole: torch.Tensor, parts: Sequence[_Part]) -> torch.Tensor:
    """A rank's tensor, of what it has of the whole."""
    shape = [max(part.local.offsets[dim] + part.local.sizes[dim] for part in parts) for dim in range(whole.dim())]
    found = whole.new_full(shape, -1)
    for part in parts:
        found[part.local.slices()] = whole[part.box.slices()]
    return found


def _ends(prefill: Plan, decode: Plan) -> dict[str, tuple[_End, _End]]:
    """The caches that the prompt leaves and tokens read, by name."""
    left, read = ({each.name: each for each in states_among(plan.interface)} for plan in (prefill, decode))
    if left.keys() != read.keys() or not left:
        only = sorted(left.keys() ^ read.keys())
        raise AutoparError(
            "the plans are not of one model: their caches differ",
            values=", ".join(only[:3]) or "none of them keeps a cache",
            remedy="plan both of the same model",
        )
    return {name: (_end(prefill, left[name]), _end(decode, read[name])) for name in left}


def _end(plan: Plan, entry: TensorInterface) -> _End:
    interface = plan.interface
    sizes = dict(zip(interface.axes, interface.sizes, strict=True))
    stage: tuple[str, int] | None = None
    if interface.pipeline is not None:
        place = next(i for i, each in enumerate(interface.outputs) if each.name == entry.name)
        owner = next(i for i, each in enumerate(interface.pipeline.stages) if place in each.outputs)
        stage = interface.pipeline.axis, interface.pipeline.rank_of[owner]
        sizes = dict(zip(interface.pipeline.axes, interface.pipeline.sizes, strict=True))
    places = dict(zip(interface.axes, entry.sharding, strict=True))
    parts: dict[int, tuple[_Part, ...]] = {}
    for rank, at in enumerate(product(*map(range, sizes.values()))):
        where = dict(zip(sizes, at, strict=True))
        if stage is not None and where[stage[0]] != stage[1]:
            continue
        splits = tuple(
            (sizes[axis], where[axis], placement.dim, placement.outer, placement.zigzag)
            for axis, placement in places.items()
            if isinstance(placement, Shard)
        )
        found = _parts(entry.shape, splits)
        if found:
            parts[rank] = found
    return _End(entry, parts)


@lru_cache(maxsize=4096)
def _parts(shape: tuple[int, ...], splits: tuple[tuple[int, int, int, int, bool], ...]) -> tuple[_Part, ...]:
    """splits: size of an axis, the rank's place in it, and what it splits, in the mesh's order."""
    runs = [_runs(size, tuple(each for each in splits if each[2] == dim)) for dim, size in enumerate(shape)]
    return tuple(
        _Part(
            Box(tuple(start for start, _, _ in each), tuple(length for _, length, _ in each)),
            Box(tuple(place for _, _, place in each), tuple(length for _, length, _ in each)),
        )
        for each in product(*runs)
    )


def _runs(size: int, splits: Sequence[tuple[int, int, int, int, bool]]) -> list[tuple[int, int, int]]:
    """Of one dim: where runs begin, how long they are, and where they lie in what the rank has."""
    divided = [(at, num, outer, zigzag) for num, at, _, outer, zigzag in splits]
    try:
        begins = starts(size, *divided)
    except AutoparError:
        if any(outer > 1 for _, _, outer, _ in divided):
            raise
        begin, length = 0, size  # of axes that do not divide it, the last ranks have less
        for at, num, _, _ in divided:
            start, length = piece_of(length, num, at)
            begin += start
        begins = [begin]
    else:
        length = size // math.prod(num for _, num, _, _ in divided) // len(begins)
    return [(begin, length, place * length) for place, begin in enumerate(begins)] if length else []
