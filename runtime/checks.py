"""Checks before the first step: ranks that would hang, or quietly compute other things, say so instead.

gloo accepts collectives that are swapped between ranks (and mixes up their data); NCCL hangs. So every rank first runs
its program without peers, on meta tensors, and the ranks compare what they are about to send.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.base import environment
from autopar.base.errors import AutoparError
from autopar.ir.interface import ProgramInterface
from autopar.runtime.checker.program import check_types
from autopar.runtime.communicator import Communicator
from autopar.runtime.dry_run import dry_events
from autopar.runtime.order import digests, first_difference, report_difference, sequences

T = TypeVar("T")


def check_order(comm: Communicator, interface: ProgramInterface, source: str) -> tuple[int, ...]:
    """Every rank is about to run the same text, what they send fits together (runtime/order.py), and the text computes
    what one device would (runtime/checker). Collective itself.

    A program with operations that have no meta implementation cannot be run dry; then the texts alone are compared.

    Returns:
        The places along the pipeline's axis that this rank exchanges messages with, where all ranks know theirs.

    Raises:
        AutoparError: the first place where two ranks differ, with both collectives, or messages; the first statement
            that is not right.
    """
    pipeline, events, problem = interface.pipeline, None, ""
    try:
        events = dry_events(comm, interface, source)
        if environment.read().types:
            check_types(source, interface, identity=environment.read().identity)
    except AutoparError as error:  # of one rank alone: the others must not wait for it
        problem = str(error)
    orders = None if events is None else digests(events)
    plans = gather_objects((_digest(source), _digest(repr(pipeline)), orders, problem))
    for rank, plan in enumerate(plans):
        for what, here, there in zip(("generated programs", "pipeline schedules"), plans[0], plan):
            if here != there:
                raise AutoparError(
                    f"ranks 0 and {rank} run different {what}",
                    values=f"SHA-256 {str(here)[:12]} and {str(there)[:12]}",
                    remedy="Let every rank read the same file and the same plan",
                )
        if plan[3]:
            raise AutoparError(f"rank {rank} cannot run its part: {plan[3]}")
    found = [order for _, _, order, _ in plans if order is not None]
    if len(found) < len(plans):
        return ()
    difference = first_difference(comm, "" if pipeline is None else pipeline.axis, found)
    if difference is not None:
        report_difference(difference, gather_objects(sequences(events or [])))
    if pipeline is None:
        return ()
    return tuple(sorted({e.peer for e in events or () if e.peer >= 0 and e.axis == pipeline.axis}))


def check_same_batch(inputs: Mapping[str, Tensor]) -> None:
    """The ranks were given the same global batch (DTensors are theirs to split). Collective itself.

    Raises:
        AutoparError: the first input that differs, and the ranks that differ from rank 0.
    """
    digests = gather_objects({name: _tensor_digest(x) for name, x in inputs.items() if not isinstance(x, DTensor)})
    for name in sorted(set().union(*digests)):
        different = [rank for rank, digest in enumerate(digests) if digest.get(name) != digests[0].get(name)]
        if different:
            raise AutoparError(
                f"the ranks were given different batches: {name} differs from rank 0's on {_ranks(different)}",
                values=f"{tuple(inputs[name].shape)} {inputs[name].dtype}" if name in inputs else None,
                remedy="Pass the same global batch on every rank (same sampler seed), or use compiled.shard_loader",
            )


def check_same_weights(parameters: Mapping[str, Tensor]) -> None:
    """The ranks hold the same real weights before they are cut: a few elements of each, and the sum of all its bits.
    Collective itself.

    Raises:
        AutoparError: the first parameter that differs, the ranks that differ from rank 0, and on how many elements
            that are no numbers (NaN, infinite) ranks have.
    """
    sums = torch.stack([bits_of(x) for x in parameters.values()]).tolist() if parameters else []
    rows = zip(parameters.items(), sums, strict=True)
    digests = gather_objects({name: (_tensor_digest(_sample(x)), bits) for (name, x), bits in rows})
    for name in parameters:
        different = [rank for rank, digest in enumerate(digests) if digest.get(name) != digests[0].get(name)]
        if different:
            odd = gather_objects(int(parameters[name].detach().isfinite().logical_not().sum()))
            ranks, num = [rank for rank, number in enumerate(odd) if number], parameters[name].numel()
            raise AutoparError(
                f"the ranks hold different weights: {name} differs from rank 0's on {_ranks(different)}",
                values=f"NaN or infinite: {max(odd)} of {num} on {_ranks(ranks)}" if ranks else None,
                remedy="Seed every rank the same before building the model, or load the same checkpoint",
            )


def gather_objects(mine: T) -> list[T]:
    """Every rank's object, in rank order."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def bits_of(x: Tensor) -> Tensor:
    """The sum of a tensor's bytes, eight at a time as one number that wraps around: an int64 scalar on its device.

    A pass at the speed of memory (6 GB/s on one core), which sees every element; where it stands, samples see.
    """
    content = x.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = content.numel() // 8 * 8
    eights = content[:whole] if content.storage_offset() % 8 == 0 else content[:whole].clone()
    return eights.view(torch.int64).sum() + content[whole:].sum()


def _sample(x: Tensor, num: int = 64) -> Tensor:
    flat = x.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // num)][: 2 * num]


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Of shapes, dtypes and all values."""
    return _digest(" ".join(map(_tensor_digest, tensors)))


def _tensor_digest(x: Tensor) -> str:
    held = x.detach().to("cpu").contiguous()
    content = held.reshape(-1).view(torch.uint8).numpy().tobytes() if held.numel() else b""
    return _digest(f"{tuple(x.shape)} {x.dtype}", content)


def _digest(text: str, content: bytes = b"") -> str:
    return hashlib.sha256(text.encode() + b"\0" + content).hexdigest()


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
