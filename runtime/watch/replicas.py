"""Replicas: what ranks hold alike, by the plan's placements, is alike bit by bit. Compared by sums of bit patterns.

A parameter split over dp and not over tp has as many pieces as dp has ranks, and each piece a replica on every rank of
tp. All gradients of a piece are sums that every replica gets the same, and each does the same step, so that replicas
stay equal; where one differs, memory, a link or a kernel did wrong on that rank, and nothing else would tell.

Tensors with the same replicas are one `Kind`; a digest of each kind is sent, and only where one differs those of its
tensors.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.base.torch_compat.distributed import is_split, local_tensor
from autopar.runtime.checks import bits_of
from autopar.runtime.engine import Engine
from autopar.runtime.holders import holders
from autopar.runtime.pieces import coordinates


class Kind(NamedTuple):
    """Which ranks hold the same piece. split: the axes whose ranks hold different ones. places: along the pipeline's
    axis, those that hold it; none: all.
    """

    split: tuple[str, ...]
    places: tuple[int, ...] = ()


class Held(NamedTuple):
    """A tensor of this rank. name: a parameter's or buffer's, or `exp_avg of layers.0.weight`."""

    name: str
    kind: Kind
    local: Tensor


@dataclass(frozen=True, slots=True)
class Odd:
    """Replicas that differ. odd: the ranks whose piece is none of the majority; without a majority all that have it.

    same: the ranks of the majority; none where there is none.
    """

    name: str
    odd: tuple[int, ...]
    same: tuple[int, ...]


def held(engine: Engine, optimizers: Iterable[Optimizer]) -> list[Held]:
    """Parameters, states of optimizers and buffers of this rank that have values."""
    interface = engine.interface
    assert interface is not None
    places = {name: tuple(where) for name, where in holders(interface).items()} if interface.pipeline else {}
    found: list[Held] = []
    names: dict[int, str] = {}
    of_tied = {alias: entry.name for entry in interface.parameters for alias in entry.aliases}
    for own_name, parameter in engine.model.named_parameters():
        name = of_tied.get(own_name, own_name)
        names[id(parameter)] = name
        found += _held(engine, name, parameter, places.get(name, ()))
    for optimizer in optimizers:
        for trained, states in optimizer.state.items():
            if id(trained) in names:
                name = names[id(trained)]
                for key, value in states.items():
                    found += _held(engine, f"{key} of {name}", value, places.get(name, ()))
    for name, buffer in engine.model.named_buffers():
        found += _held(engine, name, buffer, ())
    return found


def _held(engine: Engine, name: str, value: Any, places: tuple[int, ...]) -> Iterator[Held]:
    if isinstance(value, (bool, int, float)):
        value = torch.tensor(value)
    if not isinstance(value, Tensor) or value.is_meta:
        return
    split: tuple[str, ...] = ()
    if isinstance(value, DTensor):
        split = tuple(
            axis for axis, placed in zip(engine.inner.axes, value.placements, strict=True) if is_split(placed)
        )
        value = local_tensor(value)
    yield Held(name, Kind(split, places), value)


def digests(found: Sequence[Held]) -> dict[str, int]:
    """A number for each tensor's bits, by name."""
    by_device: dict[torch.device, list[Held]] = {}
    for each in found:
        by_device.setdefault(each.local.device, []).append(each)
    numbers: dict[str, int] = {}
    for some in by_device.values():  # one wait for each device
        bits = torch.stack([bits_of(each.local) for each in some]).tolist()
        numbers.update((each.name, number) for each, number in zip(some, bits, strict=True))
    return numbers


def digests_of_kinds(found: Sequence[Held], numbers: Mapping[str, int]) -> dict[Kind, int]:
    """One number for all tensors of a kind: which tensor has which bits counts."""
    texts: dict[Kind, Any] = {}
    for each in found:
        texts.setdefault(each.kind, hashlib.blake2b(digest_size=8)).update(
            f"{each.name}={numbers[each.name]}\n".encode()
        )
    return {kind: int.from_bytes(text.digest(), "big") for kind, text in texts.items()}


@dataclass(frozen=True, slots=True)
class Grid:
    """The whole mesh. axis: the pipeline's, or none."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    axis: str | None = None

    def replicas(self, kind: Kind, num_ranks: int) -> list[list[int]]:
        """The ranks that hold the same piece, for each piece."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(num_ranks):
            at = dict(zip(self.axes, coordinates(rank, self.sizes), strict=True))
            if kind.places and self.axis is not None and at[self.axis] not in kind.places:
                continue
            found.setdefault(tuple(at[axis] for axis in kind.split), []).append(rank)
        return list(found.values())


def differing(grid: Grid, found: Sequence[Mapping[Kind, int]]) -> list[Kind]:
    """The kinds of which replicas differ. found: of each rank."""
    kinds = dict.fromkeys(kind for each in found for kind in each)
    return [
        kind
        for kind in kinds
        if any(len({found[rank].get(kind) for rank in ranks}) > 1 for ranks in grid.replicas(kind, len(found)))
    ]


def odd_ones(grid: Grid, found: Sequence[Mapping[tuple[Kind, str], int]]) -> list[Odd]:
    """Which tensors differ, and on which ranks. found: of each rank, the digests of tensors of kinds that differ."""
    odd = []
    for kind, name in dict.fromkeys(key for each in found for key in each):
        for ranks in grid.replicas(kind, len(found)):
            held_by = {rank: found[rank].get((kind, name)) for rank in ranks}
            [(most, count), *others] = Counter(held_by.values()).most_common()
            if others:
                same = tuple(rank for rank in ranks if held_by[rank] == most) if count * 2 > len(ranks) else ()
                odd.append(Odd(name, tuple(rank for rank in ranks if rank not in same), same))
    return odd
