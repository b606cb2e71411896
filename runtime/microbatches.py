"""Cut a step's batch into microbatches, and put together again what they compute.

    n  groups of rows: the product of the sizes of the axes that split the inputs' batch dim
    m  microbatches

The rows of the global batch are seen as (n, m, rest), and microbatch i is [:, i, :]: each rank's local rows are cut
into m consecutive chunks, and nothing moves between ranks. Shapes in the interface are those of one microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import local_tensor
from autopar.ir.batching import is_of_batch
from autopar.ir.interface import ProgramInterface, TensorInterface
from autopar.ir.sharding import REPLICATE, Shard, Sharding, num_pieces, replicated
from autopar.runtime.communicator import Communicator
from autopar.runtime.draws import RANGE
from autopar.runtime.layout import redistribute
from autopar.runtime.loader import LoadedProgram, Tensors
from autopar.runtime.placements import from_dtensor_placements

SEED_STEP = 2**40
"""From one microbatch's seed to the next one's: the calls of a program count up from it."""


def whole_batch(entry: TensorInterface, microbatches: int) -> TensorInterface:
    """The entry with the shape that all microbatches have together."""
    if entry.batch_dim is None or microbatches == 1:
        return entry
    shape = list(entry.shape)
    shape[entry.batch_dim] *= microbatches
    return replace(entry, shape=tuple(shape))


def whole_output(entry: TensorInterface, microbatches: int) -> TensorInterface:
    """An output of the step: longer where the microbatches' are concatenated."""
    return whole_batch(entry, microbatches) if entry.combine == "concat" else entry


def seed_of(seed: int | Tensor, microbatch: int, device: torch.device) -> Tensor:
    """The seed of one microbatch of a step, an int64 scalar. Wraps around: any int64 is a good seed.

    A number is written by the device itself: a copy from the host would wait for all that the device has yet to do.
    """
    own = (seed + microbatch * SEED_STEP) % RANGE
    if isinstance(own, Tensor):
        return own.to(device, torch.int64)
    return torch.full((), own, dtype=torch.int64, device=device)


def seeds_of(seed: int | Tensor, group: Sequence[int], device: torch.device) -> Tensor | tuple[Tensor, ...]:
    """What a program gets for microbatches that go through it at once: the seed of one, or a tuple of each one's."""
    seeds = tuple(seed_of(seed, i, device) for i in group)
    return seeds[0] if len(seeds) == 1 else seeds


def num_groups(interface: ProgramInterface) -> int:
    """n, the same for all inputs, so that a row of each belongs to the same sample.

    Raises:
        AutoparError: two inputs' batch dims are split so differently that no cut keeps both on their ranks.
    """
    pieces = {
        entry.name: _pieces_along(entry.sharding, entry.batch_dim, interface.sizes)
        for entry in interface.inputs
        if entry.batch_dim is not None
    }
    most = max(pieces.values(), default=1)
    for name, number in pieces.items():
        if most % number:
            raise AutoparError(
                f"microbatches cannot be cut alike from all inputs: the batch of {name} is in {number} pieces",
                values=", ".join(f"{other} {count}" for other, count in pieces.items()),
                remedy="plan with one microbatch",
            )
    return most


def take_rows(x: Tensor, dim: int, microbatch: int, num: int, groups: int) -> Tensor:
    """`x` with `dim` seen as (groups, num, rest) to [:, microbatch, :]: 1/num as long, a view where it can be.

    Raises:
        AutoparError: the dim does not divide.
    """
    if x.shape[dim] % (groups * num):
        raise AutoparError(
            f"a batch {tuple(x.shape)} cannot be cut into {num} microbatches",
            values=f"dim {dim} has {x.shape[dim]} rows in {groups} groups",
            remedy=f"make it a multiple of {groups * num}, or plan with fewer microbatches",
        )
    rest = x.shape[dim] // (groups * num)
    return x.unflatten(dim, (groups, num, rest)).select(dim + 1, microbatch).flatten(dim, dim + 1)


def join_rows(parts: Sequence[Tensor], dim: int, groups: int) -> Tensor:
    """The inverse of `take_rows` for all microbatches, in order."""
    if groups == 1:
        return torch.cat(list(parts), dim)
    split = [part.unflatten(dim, (groups, part.shape[dim] // groups)) for part in parts]
    return torch.stack(split, dim + 1).flatten(dim, dim + 2)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The inputs of a step, and how they and what is computed from them divide into microbatches.

    inputs: global tensors or DTensors by name, of the whole batch.
    weights: of each microbatch in a weighted average; empty where no output needs them.
    """

    program: LoadedProgram
    interface: ProgramInterface
    comm: Communicator
    inputs: Mapping[str, Tensor]
    weights: tuple[float, ...]
    groups: int

    @property
    def num(self) -> int:
        """m, how many microbatches."""
        return self.interface.microbatches

    @property
    def together(self) -> list[tuple[int, ...]]:
        """The microbatches that go through the program at once, in order. Where some have no part in an average, each
        goes alone, twice: what it computes as 0 / 0 is no number, also times the other's nothing.
        """
        size = self.interface.together
        if size == 1:
            return [(i,) for i in range(self.num)]
        if self.weights and not all(self.weights):
            return [(i,) * size for i in range(self.num)]
        return [tuple(range(first, first + size)) for first in range(0, self.num, size)]

    def inputs_of(self, group: Sequence[int], own: frozenset[str] | None = None) -> Tensors:
        """What the program gets for these microbatches: `local_inputs` of each, by the names that they have there."""
        suffixes = ("", self.interface.beside)
        return {
            name + suffix: x
            for i, suffix in zip(group, suffixes, strict=False)
            for name, x in self.local_inputs(i, own).items()
        }

    def local_inputs(self, microbatch: int, own: frozenset[str] | None = None) -> Tensors:
        """This rank's part of one microbatch, on the communicator's device. own: the inputs that are here; None: all.

        Only the microbatch's rows are copied there, without waiting: what lies in pinned memory may be read after this
        has returned, as with `tensor.to(device, non_blocking=True)`.
        """
        here = [entry for entry in self.interface.inputs if own is None or entry.name in own]
        pieces = [entry for entry in here if isinstance(self.inputs[entry.name], DTensor)]
        local: Tensors = {}
        if len(pieces) < len(here):
            plain = {entry.name for entry in here} - {entry.name for entry in pieces}
            parts = {
                entry.name: self._rows_here(self.inputs[entry.name], entry, microbatch)
                if entry.name in plain
                else torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")
                for entry in self.interface.inputs
            }
            local = {name: x for name, x in self.program.split_inputs(self.comm, parts).items() if name in plain}
        for entry in pieces:
            local[entry.name] = self._from_dtensor(self.inputs[entry.name], entry, microbatch)
        return local

    def with_values(self, state: Tensors) -> Tensors:
        """The state, with what microbatches read of the whole batch.

        Raises:
            AutoparError: the program does not define `of_batch`.
        """
        names = [entry.name for entry in self.interface.buffers if is_of_batch(entry.name)]
        if not names:
            return state
        if self.program.of_batch is None:
            raise _lacks(self.program, "of_batch", "which gives what microbatches read of the whole batch")
        found = self.program.of_batch(_WholeInputs(self.inputs, self.comm, "of_batch"), state)
        return {**state, **{name: found[name].to(self.comm.device) for name in names}}

    def output(self, place: int, values: Sequence[Tensor]) -> Tensor:
        """Output number `place` of the step from those of its microbatches; all local tensors."""
        return self.together_of(self.interface.outputs[place], values)

    def together_of(self, entry: TensorInterface, values: Sequence[Tensor]) -> Tensor:
        """An output, or the new value of a buffer, of the step from those of its microbatches; all local tensors."""
        if self.num == 1:
            return values[0]
        if entry.combine == "concat":
            return self._concatenated(entry, values)
        return _weighted_sum(values, [self.scale(entry, i) for i in range(self.num)])

    def joined(self, entry: TensorInterface, values: Sequence[Tensor]) -> Tensor:
        """The gradient of an input of the step from those of its microbatches, which have rows of it, or all."""
        if self.num == 1:
            return values[0]
        return _weighted_sum(values, [1] * self.num) if entry.batch_dim is None else self._concatenated(entry, values)

    def _concatenated(self, entry: TensorInterface, values: Sequence[Tensor]) -> Tensor:
        assert entry.batch_dim is not None
        groups, gathered = self._local_groups(entry.sharding, entry.batch_dim)
        moved = [redistribute(value, entry.sharding, gathered, self.comm) for value in values]
        whole = join_rows(moved, entry.batch_dim, groups)
        return redistribute(whole, gathered, entry.sharding, self.comm)

    def gradient(self, place: int, gradient: Tensor | None, microbatch: int) -> Tensor | None:
        """The part of an output's (local) gradient that goes to one microbatch; None where it does not depend on it."""
        entry = self.interface.outputs[place]
        if gradient is None or self.num == 1:
            return gradient
        if entry.combine == "concat":
            assert entry.batch_dim is not None
            groups, gathered = self._local_groups(entry.sharding, entry.batch_dim)
            whole = redistribute(gradient, entry.sharding, gathered, self.comm)
            part = take_rows(whole, entry.batch_dim, microbatch, self.num, groups)
            return redistribute(part, gathered, entry.sharding, self.comm).contiguous()
        scale = self.scale(entry, microbatch)
        return None if scale is None else gradient * scale

    def scale(self, entry: TensorInterface, microbatch: int) -> float | None:
        """The factor of a microbatch's output in the step's; None where it has no part in it."""
        if entry.combine == "mean":
            return 1 / self.num
        if entry.combine == "sum":
            return 1
        if entry.combine == "same":
            return 1 if microbatch == 0 else None
        if entry.combine != "weighted":
            raise AutoparError(f"the output {entry.name} combines as {entry.combine!r}, which is not known")
        total = sum(self.weights)
        if total == 0:
            return math.nan  # as eager: an average over nothing
        # A microbatch without weight may have computed 0 / 0; it has no part in the whole batch's average.
        return self.weights[microbatch] / total if self.weights[microbatch] else None

    def rows(self, x: Tensor, entry: TensorInterface, microbatch: int) -> Tensor:
        """The rows of a (global) input that one microbatch has."""
        if self.num == 1 or entry.batch_dim is None:
            return x
        return take_rows(x, entry.batch_dim, microbatch, self.num, self.groups)

    def _rows_here(self, x: Tensor, entry: TensorInterface, microbatch: int) -> Tensor:
        """`rows` on the communicator's device."""
        return self.rows(x.detach(), entry, microbatch).to(self.comm.device, non_blocking=True)

    def _from_dtensor(self, x: Tensor, entry: TensorInterface, microbatch: int) -> Tensor:
        assert isinstance(x, DTensor)
        local, source = local_tensor(x), from_dtensor_placements(x.placements)
        pieces = (_pieces_along(source, dim, self.comm.sizes) for dim in range(x.dim()))
        if any(size % num for size, num in zip(x.shape, pieces, strict=True)):  # ours are even, or padded
            local, source = x.full_tensor(), replicated(len(source))
        if self.num > 1 and entry.batch_dim is not None:
            groups, gathered = self._local_groups(source, entry.batch_dim)
            local, source = redistribute(local, source, gathered, self.comm), gathered
            local = take_rows(local, entry.batch_dim, microbatch, self.num, groups).contiguous()
        return redistribute(local, source, entry.sharding, self.comm)

    def _local_groups(self, sharding: Sharding, dim: int) -> tuple[int, Sharding]:
        """How many groups a rank holds, and under which sharding: the given one, if whole groups lie on the ranks.

        Else (stripes, or more pieces than groups) the dim has to be gathered.
        """
        pieces = _pieces_along(sharding, dim, self.comm.sizes)
        striped = any(isinstance(p, Shard) and p.dim == dim and p.outer > 1 for p in sharding)
        if not striped and self.groups % pieces == 0:
            return self.groups // pieces, sharding
        return self.groups, tuple(REPLICATE if isinstance(p, Shard) and p.dim == dim else p for p in sharding)


def make_batch(
    program: LoadedProgram, interface: ProgramInterface, comm: Communicator, inputs: Mapping[str, Tensor]
) -> Batch:
    """The batch of one step.

    Raises:
        AutoparError: an input of another length than planned, or no `loss_weight` where the program needs one.
    """
    if interface.microbatches == 1:
        return Batch(program, interface, comm, inputs, (), 1)
    for entry in interface.inputs:
        planned = whole_batch(entry, interface.microbatches).shape
        if tuple(inputs[entry.name].shape) != planned:
            raise AutoparError(
                f"the input {entry.name} is {tuple(inputs[entry.name].shape)}, planned as {planned}",
                values=f"{interface.microbatches} microbatches of {entry.shape}",
            )
    batch = Batch(program, interface, comm, inputs, (), num_groups(interface))
    if not any(entry.combine == "weighted" for entry in (*interface.outputs, *interface.updates)):
        return batch
    if program.loss_weight is None:
        raise _lacks(program, "loss_weight", "which its microbatches' average needs")
    whole = _WholeInputs(inputs, comm, "loss_weight")
    weights = [program.loss_weight(_Rows(whole, batch, i)) for i in range(batch.num)]
    # One look at the device for all of them; none where the labels are still on the host.
    return replace(batch, weights=tuple(torch.stack([weight.double() for weight in weights]).tolist()))


def _lacks(program: LoadedProgram, name: str, what: str) -> AutoparError:
    return AutoparError(
        f"the program does not define {name}, {what}",
        where=program.filename,
        remedy="Restore the function, or let autopar write the program again",
    )


class _WholeInputs:
    """Global inputs by name; DTensors are gathered when they are asked for, at a place of this name."""

    def __init__(self, inputs: Mapping[str, Tensor], comm: Communicator, place: str) -> None:
        self.inputs, self.comm, self.place = inputs, comm, place
        self.found: Tensors = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.found:
            x = self.inputs[name].detach()
            if isinstance(x, DTensor):
                source = from_dtensor_placements(x.placements)
                self.comm.at(self.place)
                x = redistribute(local_tensor(x), source, replicated(len(self.comm.axes)), self.comm)
            self.found[name] = x
        return self.found[name]


class _Rows(Mapping[str, Tensor]):
    """The global inputs of one microbatch, made when they are asked for."""

    def __init__(self, whole: _WholeInputs, batch: Batch, microbatch: int) -> None:
        self.whole, self.batch, self.microbatch = whole, batch, microbatch
        self.entries = {entry.name: entry for entry in batch.interface.inputs}

    def __getitem__(self, name: str) -> Tensor:
        return self.batch.rows(self.whole[name], self.entries[name], self.microbatch)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def _pieces_along(sharding: Sharding, dim: int, sizes: Sequence[int]) -> int:
    return num_pieces(tuple(p if isinstance(p, Shard) and p.dim == dim else REPLICATE for p in sharding), sizes)


def _weighted_sum(values: Sequence[Tensor], scales: Sequence[float | None]) -> Tensor:
    """Σ scale · value over those that have a part, in float32 at least."""
    dtype = values[0].dtype
    wide = torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
    terms = [
        value if scale == 1 else value.to(wide) * scale
        for value, scale in zip(values, scales, strict=True)
        if scale is not None
    ]
    total = terms[0].to(wide)
    for term in terms[1:]:
        total = total + term
    return total.to(dtype)
