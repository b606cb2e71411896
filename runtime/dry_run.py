"""What one rank would send in a step: the program run without peers, on meta tensors."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Hashable
from dataclasses import replace

import torch
from torch import Tensor

from autopar.base.recent import Recent
from autopar.ir.interface import ProgramInterface, TensorInterface
from autopar.runtime.comm import RecordingComm
from autopar.runtime.communicator import Communicator
from autopar.runtime.data_dependent import LargestSizes
from autopar.runtime.event import Event
from autopar.runtime.holders import held_by
from autopar.runtime.layout import local_part_shape
from autopar.runtime.loader import LoadedProgram, Tensors, load_program, split_together
from autopar.runtime.microbatches import Batch, num_groups, whole_batch, whole_output
from autopar.runtime.pieces import coordinates
from autopar.runtime.pipeline import PipelineProgram, PipelineStep


def dry_events(comm: Communicator, interface: ProgramInterface, source: str) -> list[Event] | None:
    """What this rank would send and receive, forward and backward; None where meta tensors do not suffice.

    What is sent, and in which order, is the same for texts that differ in sizes alone: of those the first is run.

    comm: of the whole mesh.
    """
    key = (comm.axes, comm.sizes, comm.rank, replace(interface, inputs=(), outputs=(), meaning=None), _skeleton(source))
    return _KNOWN.get(key, lambda: _run_dry(comm, interface, source))


_KNOWN: Recent[Hashable, list[Event] | None] = Recent(64)
_LOOPS = re.compile(r"\b(range|if|while|STAGES|shard|index)\b")
"""In lines in which a number may decide more than a size."""


def _skeleton(source: str) -> str:
    """A digest of the text without the sizes in it."""
    lines = [line if _LOOPS.search(line) else re.sub(r"\b\d+\b", "#", line) for line in source.splitlines()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _run_dry(comm: Communicator, interface: ProgramInterface, source: str) -> list[Event] | None:
    recorder = RecordingComm(comm.axes, comm.sizes, comm.rank, "meta")
    program = load_program(source, "<dry run>")
    try:
        with torch.no_grad(), torch.device("meta"), LargestSizes():
            if interface.pipeline is None:
                _run(recorder, interface, program)
            else:
                _run_pipeline(recorder, PipelineProgram(program, interface), interface.pipeline.axis)
    except (NotImplementedError, RuntimeError, TypeError):
        return None
    return list(recorder.log or ())


def _run(comm: RecordingComm, interface: ProgramInterface, program: LoadedProgram) -> None:
    beside, interface = interface.beside, interface.of_program()
    state = _state(comm, interface, interface.parameters)
    whole = {entry.name: _empty(entry.shape, entry.dtype) for entry in interface.inputs}
    inputs = split_together(program, comm, whole, beside)
    seed = torch.zeros((), dtype=torch.int64, device="meta")
    held: dict[str, Tensor] = {}
    seeds = (seed, seed) if beside else seed
    done = [program.forward(comm, state, held, inputs, seeds) for _ in range(interface.microbatches)]
    if interface.is_trained:
        sums: dict[str, Tensor] = {}
        for number, (outputs, saved) in enumerate(done, start=1):
            grads = tuple(
                torch.empty_like(value) for value, entry in zip(outputs, interface.outputs) if entry.differentiable
            )
            program.backward(comm, state, held, saved, grads, sums, number == interface.microbatches)


def _run_pipeline(comm: RecordingComm, program: PipelineProgram, axis: str) -> None:
    """A step of which every microbatch counts; the gradient is that of the first scalar, as in training."""
    interface, inner = program.interface, comm.within(program.interface.axes)
    num = interface.microbatches
    inputs = {entry.name: _empty(whole_batch(entry, num).shape, entry.dtype) for entry in interface.inputs}
    groups = num_groups(interface) if num > 1 else 1
    batch = Batch(program.program, interface, inner, inputs, (1.0,) * num, groups)
    state = _state(inner, interface, tuple(held_by(interface, comm.index(axis))))
    step = PipelineStep(program, batch, comm, 0)
    outputs = [whole_output(entry, num) for entry in interface.outputs if entry.differentiable]
    if not outputs or not any(parameter.differentiable for parameter in interface.parameters):
        step.forward(state)
        return
    loss = next((place for place, entry in enumerate(outputs) if not entry.shape), 0)
    here = coordinates(inner.rank, inner.sizes)
    shape = local_part_shape(outputs[loss].shape, outputs[loss].sharding, inner.sizes, here)
    one = _empty(shape, outputs[loss].dtype)
    step.train(state, tuple(one if place == loss else None for place in range(len(outputs))))


def _state(comm: Communicator, interface: ProgramInterface, parameters: tuple[TensorInterface, ...]) -> Tensors:
    state: Tensors = {}
    here = coordinates(comm.rank, comm.sizes)
    for entry in (*parameters, *interface.buffers):
        shape = entry.block or local_part_shape(entry.shape, entry.sharding, interface.sizes, here)
        state.update(dict.fromkeys((entry.name, *entry.aliases), _empty(shape, entry.dtype)))
    return state


def _empty(shape: tuple[int, ...], dtype: str) -> Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
