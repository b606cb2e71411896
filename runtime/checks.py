"""Checks before the first step: ranks that would hang, or quietly compute other things, say so instead.

gloo accepts collectives that are swapped between ranks (and mixes up their data); NCCL hangs. So every rank first runs
its program without peers, on meta tensors, and the ranks compare what they are about to send.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.interface import ProgramInterface
from autopar.runtime.comm import Communicator, RecordingComm
from autopar.runtime.layout import local_part_shape
from autopar.runtime.loader import LoadedProgram, load_program
from autopar.runtime.pieces import coordinates

T = TypeVar("T")


def check_order(comm: Communicator, interface: ProgramInterface, source: str) -> None:
    """Every rank is about to run the same text, and to issue the same collectives in the same order. Collective itself.

    A program with operations that have no meta implementation cannot be run dry; then the texts alone are compared.

    Raises:
        AutoparError: the first place where two ranks differ, with both collectives.
    """
    sequence = dry_run(comm, interface, source)
    text_digest = _digest(source)
    order_digest = None if sequence is None else _digest("\n".join(sequence))
    digests = gather_objects((text_digest, order_digest))
    for rank, (text, _) in enumerate(digests):
        if text != digests[0][0]:
            raise AutoparError(
                f"ranks 0 and {rank} run different generated programs",
                values=f"SHA-256 {digests[0][0][:12]} and {text[:12]}",
                remedy="Let every rank read the same file and the same plan",
            )
    orders = {order for _, order in digests}
    if None in orders or len(orders) == 1:
        return
    _report_first_difference(gather_objects(sequence or []))


def dry_run(comm: Communicator, interface: ProgramInterface, source: str) -> list[str] | None:
    """The collectives this rank would issue, forward and backward, in words; None where meta tensors do not suffice."""
    recorder = RecordingComm(comm.axes, comm.sizes, comm.rank, "meta")
    program = load_program(source, "<dry run>")
    try:
        with torch.no_grad(), torch.device("meta"):
            _run_dry(recorder, interface, program)
    except (NotImplementedError, RuntimeError, TypeError):
        return None
    return [str(event) for event in recorder.log or ()]


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
    """The ranks hold the same real weights before they are cut: a few elements of each, compared. Collective itself.

    Raises:
        AutoparError: the first parameter that differs, and the ranks that differ from rank 0.
    """
    digests = gather_objects({name: _tensor_digest(_sample(x)) for name, x in parameters.items()})
    for name in parameters:
        different = [rank for rank, digest in enumerate(digests) if digest.get(name) != digests[0].get(name)]
        if different:
            raise AutoparError(
                f"the ranks hold different weights: {name} differs from rank 0's on {_ranks(different)}",
                remedy="Seed every rank the same before building the model, or load the same checkpoint",
            )


def gather_objects(mine: T) -> list[T]:
    """Every rank's object, in rank order."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _run_dry(comm: RecordingComm, interface: ProgramInterface, program: LoadedProgram) -> None:
    def empty(shape: tuple[int, ...], dtype: str) -> Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

    state: dict[str, Tensor] = {}
    for entry in (*interface.parameters, *interface.buffers):
        here = coordinates(comm.rank, comm.sizes)
        shape = entry.block or local_part_shape(entry.shape, entry.sharding, interface.sizes, here)
        piece = empty(shape, entry.dtype)
        state.update(dict.fromkeys((entry.name, *entry.aliases), piece))
    inputs = program.split_inputs(comm, {entry.name: empty(entry.shape, entry.dtype) for entry in interface.inputs})
    seed = torch.zeros((), dtype=torch.int64, device="meta")
    held: dict[str, Tensor] = {}
    done = [program.forward(comm, state, held, inputs, seed) for _ in range(interface.microbatches)]
    if any(parameter.differentiable for parameter in interface.parameters):
        sums: dict[str, Tensor] = {}
        for number, (outputs, saved) in enumerate(done, start=1):
            grads = tuple(
                torch.empty_like(value) for value, entry in zip(outputs, interface.outputs) if entry.differentiable
            )
            program.backward(comm, state, held, saved, grads, sums, number == interface.microbatches)


def _report_first_difference(sequences: list[list[str]]) -> None:
    for rank, sequence in enumerate(sequences):
        for place, (first, other) in enumerate(zip_longest(sequences[0], sequence, fillvalue="nothing")):
            if first != other:
                raise AutoparError(
                    f"ranks 0 and {rank} would issue different collectives",
                    where=f"collective {place} of the step",
                    values=f"rank 0: {first}; rank {rank}: {other}",
                    remedy="Give every rank the same program; it must not branch on the rank",
                )


def _sample(x: Tensor, num: int = 64) -> Tensor:
    flat = x.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // num)][: 2 * num]


def _tensor_digest(x: Tensor) -> str:
    held = x.detach().to("cpu").contiguous()
    content = held.reshape(-1).view(torch.uint8).numpy().tobytes() if held.numel() else b""
    return _digest(f"{tuple(x.shape)} {x.dtype}", content)


def _digest(text: str, content: bytes = b"") -> str:
    return hashlib.sha256(text.encode() + b"\0" + content).hexdigest()


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
