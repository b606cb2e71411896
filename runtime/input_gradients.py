"""Gradients of a step's inputs: those of its microbatches put together, and as the caller handed each input in."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import dtensor_like
from autopar.ir.interface import ProgramInterface, TensorInterface
from autopar.ir.sharding import REPLICATE, Shard, Sharding, num_pieces, replicated
from autopar.ir.values import gradient_key
from autopar.runtime.communicator import Communicator
from autopar.runtime.layout import local_part_shape, redistribute, shard
from autopar.runtime.loader import Tensors
from autopar.runtime.microbatches import Batch, whole_batch
from autopar.runtime.placements import from_dtensor_placements


class InputGradients:
    """Collects what the backwards of one step return of its inputs, microbatch by microbatch."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self._of: dict[str, dict[int, Tensor]] = {entry.name: {} for entry in batch.interface.wanted}

    def take(self, group: Sequence[int], gradients: Tensors) -> None:
        """Take them out of what a backward returned for these microbatches. What stands in a group twice counts once.

        Raises:
            AutoparError: there is none of an input, or it has another shape than the rank's piece.
        """
        for name, found in self._of.items():
            for place, i in enumerate(group):
                suffix = self.batch.interface.beside if place else ""
                gradient = gradients.pop(gradient_key(name + suffix), None)
                if gradient is None:
                    where = self.batch.program.filename
                    raise AutoparError(f"backward returned no gradient for the input {name}", where=where)
                found.setdefault(i, gradient)

    def take_some(self, group: Sequence[int], terms: Tensors) -> None:
        """Add those that one stage of a pipeline returned for these microbatches, by the inputs' names there."""
        for name, found in self._of.items():
            for place, i in enumerate(group):
                term = terms.get(name + (self.batch.interface.beside if place else ""))
                if term is not None and i not in group[:place]:
                    found[i] = found[i] + term if i in found else term

    def joined_over(self, comm: Communicator, axis: str, places: Container[int]) -> Tensors:
        """As `joined`, the same on all ranks of the pipeline's axis: the sums of what its stages have. Collective.

        places: of the outputs that have a gradient.
        """
        mine = self.joined()
        made: Tensors = {}
        for entry in (each for each in self.batch.interface.wanted if each.is_reached(places)):
            key = gradient_key(entry.name)
            own = mine.get(key)
            term = _nothing(whole_batch(entry, self.batch.num), self.batch) if own is None else own
            comm.at(f"the gradient of {entry.name}")
            made[key] = comm.all_reduce(term.contiguous(), axis)
        return made

    def joined(self) -> Tensors:
        """Local gradients of the step's inputs, laid out as these, by `gradient_key`; zeros for rows of microbatches
        that no output's gradient came to, nothing where it came to none.
        """
        batch = self.batch
        made: Tensors = {}
        for entry in batch.interface.wanted:
            if found := self._of[entry.name]:
                parts = [found[i] if i in found else _nothing(entry, batch) for i in range(batch.num)]
                made[gradient_key(entry.name)] = batch.joined(entry, parts)
        return made


def _nothing(entry: TensorInterface, batch: Batch) -> Tensor:
    comm = batch.comm
    at = [comm.index(axis) for axis in comm.axes]
    shape = local_part_shape(entry.shape, entry.sharding, comm.sizes, at)
    return torch.zeros(shape, dtype=getattr(torch, entry.dtype), device=comm.device)


def wanted_of(interface: ProgramInterface, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """The inputs whose gradients a program returns, as they were handed in.

    Raises:
        AutoparError: one has left the graph on its way in.
    """
    found = [inputs[entry.name] for entry in interface.wanted]
    for x, entry in zip(found, interface.wanted, strict=True):
        if not x.requires_grad:
            raise AutoparError(
                f"input {entry.name} requires a gradient, is in pieces, and has to be padded or moved, which loses it",
                remedy="Hand it in whole, the same on every rank, or make batches that the mesh divides",
            )
    return found


def as_handed_in(
    batch: Batch, gradients: Mapping[str, Tensor], wanted: Sequence[Tensor], places: Container[int]
) -> list[Tensor | None]:
    """The gradients of inputs: whole on every rank where the input is, else a DTensor placed as it is. Collective.

    gradients: local, of `InputGradients.joined`. places: of the outputs that have a gradient.
    """
    found: list[Tensor | None] = []
    for entry, x in zip(batch.interface.wanted, wanted, strict=True):
        gradient = gradients.get(gradient_key(entry.name)) if entry.is_reached(places) else None
        if gradient is None:
            found.append(None)
            continue
        batch.comm.at(f"the gradient of {entry.name}")
        target = from_dtensor_placements(x.placements) if isinstance(x, DTensor) else None
        local = _moved(gradient, entry, tuple(x.shape), target, batch)
        found.append(dtensor_like(x, local.to(x.dtype)) if isinstance(x, DTensor) else local.to(x.device, x.dtype))
    return found


def _moved(
    gradient: Tensor, entry: TensorInterface, shape: Sequence[int], target: Sharding | None, batch: Batch
) -> Tensor:
    """A local gradient from its input's planned sharding to another; whole where that is None."""
    comm = batch.comm
    if target is not None and _is_even(shape, target, comm.sizes):
        return redistribute(gradient, entry.sharding, target, comm)
    whole = redistribute(gradient, entry.sharding, replicated(len(comm.axes)), comm)
    return whole if target is None else shard(whole, target, comm)


def _is_even(shape: Sequence[int], sharding: Sharding, sizes: Sequence[int]) -> bool:
    """Whether every rank's piece is as long."""
    for dim, size in enumerate(shape):
        along = tuple(p if isinstance(p, Shard) and p.dim == dim else REPLICATE for p in sharding)
        if size % num_pieces(along, sizes):
            return False
    return True
