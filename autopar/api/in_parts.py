"""The eager model's step in microbatches, where what it draws depends on which rows each of them has.

What a microbatch draws follows from its number. The model runs on one after the other, and its outputs are put together
as the program says; what weights them is then compared with the model on the whole batch, where nothing is drawn
(`Steady`). Where a program reads of the whole batch, no microbatch of the model's own is a term of its loss: the model
runs once, with the draws of all microbatches, joined.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.api.draws import Steady, draws_of, handed, joined
from autopar.base.copies import copied
from autopar.base.torch_compat import tracing
from autopar.ir.program import Program
from autopar.ir.values import ValueRef
from autopar.passes.emit import interface_of
from autopar.runtime.comm import RecordingComm
from autopar.runtime.loader import load_program
from autopar.runtime.microbatches import Batch, join_rows, make_batch, seed_of

Draws = handed | Steady
Run = Callable[[Program, nn.Module, Mapping[str, Any], Draws, Mapping[ValueRef, float] | None], tuple[Tensor, ...]]
"""Runs the model, its backward too unless there are no scales."""


def with_tensors(inputs: Mapping[str, Any], others: Mapping[str, Tensor]) -> Mapping[str, Any]:
    """The batch with other tensors in the place of some, by name."""
    leaves, spec = tracing.tree_flatten(dict(inputs))
    paths = [path for path, _ in tracing.tree_leaves_with_path(dict(inputs))]
    found: Mapping[str, Any] = tracing.tree_unflatten(
        [others.get(path, leaf) for path, leaf in zip(paths, leaves, strict=True)], spec
    )
    return found


def batch_of(program: Program, source: str, tensors: Mapping[str, Tensor]) -> Batch:
    """How the program's text cuts a batch."""
    interface = interface_of(program)
    comm = RecordingComm(interface.axes, interface.sizes, 0)
    return make_batch(load_program(source, "<generated program>"), interface, comm, tensors)


def by_microbatches(
    program: Program, model: nn.Module, inputs: Mapping[str, Any], batch: Batch, seed: int, run: Run
) -> tuple[Tensor, ...]:
    """The outputs of the step; gradients add up."""
    seeds = [int(seed_of(seed, i, torch.device("cpu"))) for i in range(batch.num)]
    if program.batching is not None and program.batching.of_batch:
        draws = joined([draws_of(program, each) for each in seeds], batch.groups)
        return run(program, model, inputs, handed(draws), {})
    entries = batch.interface.outputs
    scales = [[1.0 if e.combine == "concat" else batch.scale(e, i) or 0.0 for e in entries] for i in range(batch.num)]
    rows = [_rows(batch, inputs, i) for i in range(batch.num)]
    left_out = _left_out(program, model, inputs, rows, batch, scales, run)
    parts: list[tuple[Tensor, ...]] = []
    for own, given, each in zip(scales, rows, seeds, strict=True):
        roots = dict(zip(program.outputs, own, strict=True))
        parts.append(run(program, model, given, handed(draws_of(program, each)), roots))
    outputs: list[Tensor] = []
    for place, entry in enumerate(entries):
        values = [part[place] for part in parts]
        if entry.combine == "concat":
            assert entry.batch_dim is not None
            outputs.append(join_rows(values, entry.batch_dim, batch.groups))
        else:
            outputs.append(_sum(values, [own[place] for own in scales]) + left_out.get(place, 0))
    return tuple(outputs)


def _rows(batch: Batch, inputs: Mapping[str, Any], i: int) -> Mapping[str, Any]:
    entries = batch.interface.inputs
    own = {entry.name: batch.rows(batch.inputs[entry.name], entry, i).contiguous() for entry in entries}
    return with_tensors(inputs, own)


def _sum(values: Sequence[Tensor], scales: Sequence[float]) -> Tensor:
    terms = [value * scale for value, scale in zip(values, scales, strict=True) if scale]
    return torch.stack(terms).sum(0) if len(terms) > 1 else terms[0]


def _left_out(
    program: Program,
    model: nn.Module,
    inputs: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    batch: Batch,
    scales: Sequence[Sequence[float]],
    run: Run,
) -> dict[int, Tensor]:
    """Of weighted outputs, by place, what that of the whole batch has and those of microbatches have not together,
    where nothing is drawn: rounding, if the program weights them right. Its weights are on both sides of the proof, so
    that this alone tells whether they are the model's.
    """
    places = [place for place, entry in enumerate(batch.interface.outputs) if entry.combine == "weighted"]
    if not places:
        return {}
    found: list[tuple[Tensor, ...]] = []
    for given in (inputs, *rows):
        steady = Steady()
        with torch.no_grad():
            found.append(run(program, copied(model), given, steady, None))
        if not steady.is_steady:
            return {}
    whole, *parts = found
    return {
        place: whole[place] - _sum([part[place] for part in parts], [own[place] for own in scales]) for place in places
    }
