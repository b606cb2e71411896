"""Collectives in flight: what a program gathers or reduces while it goes on computing.

    gather = comm.transfers(held, at)
    gather.bucket("all_gather dp", {"weight": (state["weight"], 0), "bias": (state["bias"], 0)})     issued, not waited
    ...
    p = gather.wait()                                                                                name -> tensor

A bucket is a chain of steps that all its tensors go through together, each step one flat collective:

    steps ::= step {", " step}        step ::= kind " " axis
    all_reduce                        takes no argument
    all_gather, reduce_scatter, slice take dim | (dim, outer) | (dim, outer, size)
    all_to_all                        takes (dim, outer, from_dim, from_outer)

`size` says that the whole dim has `size` elements, which the axis need not divide: pieces are those of `comm.piece_of`,
and travel padded to the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.ir.redistribution import StepKind
from autopar.runtime.communicator import Communicator
from autopar.runtime.pieces import cut, join, piece_of
from autopar.runtime.streams import Event, Streams

Numbers = tuple[int, ...]
Argument = int | Numbers
_Waiting = Callable[[], list[Tensor]]


class Transfers:
    """Some tensors on their way. Made by `MeshComm.transfers`.

    held: a dict that outlives this object, or None; buckets with `keep` leave tensors there under `at` + name, and take
    them from there the next time. Results may be views of one flat tensor.

    On CPU the first step of a bucket is under way when `bucket` returns, the others follow in `wait`. On CUDA the whole
    chain is queued on a stream of its own, and `wait` makes the current stream wait, not the host. Chains over axes of
    one rank move nothing, and are done at once.

    Memory that crosses streams is held by order, as FSDP2 does, not by `record_stream`, which lets it go only when the
    host sees that the device is done, so that the allocator takes more the further the host runs ahead: what is sent
    is kept until the sender's stream has waited; what arrives is memory of the side stream, which gives it out again
    only after it has waited for all that the stream that read it was told before.
    """

    def __init__(self, comm: Communicator, held: dict[str, Tensor] | None = None, at: str = "") -> None:
        self._comm, self._held, self._at = comm, held, at
        self._values: dict[str, Tensor] = {}
        self._buckets: list[_Bucket] = []
        self._queued: list[tuple[Event, list[Tensor]]] = []

    def put(self, name: str, tensor: Tensor) -> Transfers:
        """A value that needs nothing. Returns this object."""
        self._values[name] = tensor
        return self

    def bucket(
        self,
        steps: str,
        tensors: Mapping[str, Tensor | tuple[Tensor, *tuple[Argument, ...]]],
        keep: int = 0,
        owned: bool = False,
    ) -> Transfers:
        """Start to move some tensors of one dtype together. Returns this object.

        tensors: name -> (tensor, one argument for each step that takes one), or the tensor where none does.
        owned: nobody else reads the tensors, now or later; a reduction may overwrite them.
        keep: the results of the first `keep` steps stay in `held`; where all are there already, the steps are skipped.

        Raises:
            AutoparError: no such step or axis, a wrong number of arguments, several dtypes, dims that do not divide.
        """
        if not tensors:
            return self
        moves = _parse(steps, self._comm.axes)
        if keep > len(moves):
            raise AutoparError(f"the results of {keep} steps cannot be kept", where=steps, values=f"{len(moves)} steps")
        bucket = _Bucket(self._comm, moves, _split_arguments(steps, moves, tensors), keep, self._held, self._at)
        bucket.owned = owned
        if all(self._comm.size(move.axis) == 1 for move in moves):
            self._values.update(bucket.finish())
        elif self._comm.streams is not None:
            self._queue(bucket, self._comm.streams)
        else:
            bucket.issue()
            self._buckets.append(bucket)
        return self

    def wait(self) -> dict[str, Tensor]:
        """Every tensor by its name; the same dict each time."""
        buckets, self._buckets = self._buckets, []
        for bucket in buckets:
            self._values.update(bucket.finish())
        if self._queued and self._comm.streams is not None:
            self._comm.side.wait(self._comm.streams, [event for event, _ in self._queued])
            self._queued = []
        return self._values

    def _queue(self, bucket: _Bucket, streams: Streams) -> None:
        sent = bucket.tensors
        found, event = self._comm.side.run(streams, bucket.finish)
        self._values.update(found)
        self._queued.append((event, sent))


@dataclass(frozen=True, slots=True)
class _Move:
    """One step: what kind, over which axis."""

    kind: StepKind
    axis: str


def parse_bucket(
    steps: str, axes: Sequence[str], tensors: Mapping[str, Any], keep: int = 0
) -> tuple[list[tuple[StepKind, str]], dict[str, tuple[Tensor, tuple[Numbers, ...]]]]:
    """What `Transfers.bucket` is asked for: (kind, axis) of each step; each tensor with a full argument for every step.

    Raises:
        AutoparError: as `bucket`.
    """
    moves = _parse(steps, tuple(axes))
    if keep > len(moves):
        raise AutoparError(f"the results of {keep} steps cannot be kept", where=steps, values=f"{len(moves)} steps")
    return [(move.kind, move.axis) for move in moves], _split_arguments(steps, moves, tensors)


class _Bucket:
    """Tensors of one dtype in the middle of their chain of steps."""

    def __init__(
        self,
        comm: Communicator,
        moves: tuple[_Move, ...],
        tensors: Mapping[str, tuple[Tensor, tuple[Numbers, ...]]],
        keep: int,
        held: dict[str, Tensor] | None,
        at: str,
    ) -> None:
        self.comm, self.moves, self.where = comm, moves, comm.where
        self.names = list(tensors)
        self.tensors = [tensor for tensor, _ in tensors.values()]
        self.arguments = [arguments for _, arguments in tensors.values()]
        self.held, self.keys = held, [at + name for name in self.names]
        self.keep = keep if held is not None else 0
        self.place = 0
        self.owned = False
        self.waiting: _Waiting | None = None
        if self.keep and held is not None and all(key in held for key in self.keys):
            self.tensors = [held[key] for key in self.keys]
            self.place = self.keep

    def issue(self) -> None:
        """Start the next step, if there is one."""
        if self.place < len(self.moves):
            arguments = [given[self.place] for given in self.arguments]
            owned = self.owned and self.place == 0
            self.waiting = _begin(self.comm, self.moves[self.place], self.tensors, arguments, owned)

    def finish(self) -> dict[str, Tensor]:
        """Go through all steps that are left; the results by name."""
        now, self.comm.where = self.comm.where, self.where
        try:
            while self.place < len(self.moves):
                if self.waiting is None:
                    self.issue()
                assert self.waiting is not None
                self.tensors, self.waiting = self.waiting(), None
                self.place += 1
                if self.place == self.keep and self.held is not None:
                    self.held.update(zip(self.keys, self.tensors, strict=True))
        finally:
            self.comm.where = now
        return dict(zip(self.names, self.tensors, strict=True))


def _begin(comm: Communicator, move: _Move, tensors: list[Tensor], arguments: list[Numbers], owned: bool) -> _Waiting:
    num = comm.size(move.axis)
    if num == 1:
        return lambda: tensors
    if move.kind == "slice":
        pieces = [_slice(comm, move.axis, x, given) for x, given in zip(tensors, arguments, strict=True)]
        return lambda: pieces
    if move.kind == "all_gather":
        return _begin_gather(comm, move, tensors, arguments)
    if move.kind == "all_reduce":
        return _begin_reduce(comm, move, tensors, owned)
    return _begin_exchange(comm, move, tensors, arguments)


def _begin_gather(comm: Communicator, move: _Move, tensors: list[Tensor], arguments: list[Numbers]) -> _Waiting:
    num, index = comm.size(move.axis), comm.index(move.axis)
    pieces: list[Tensor] = []
    for x, given in zip(tensors, arguments, strict=True):
        if _is_uneven(given, num):
            x = _padded(x, given[0], piece_of(given[2], num, index)[1], -(-given[2] // num))
        pieces.append(x)
    wait = comm.begin(move.kind, move.axis, _flat([piece.reshape(-1) for piece in pieces]))
    shapes = [piece.shape for piece in pieces]

    def finish() -> list[Tensor]:
        parts = _unpacked(wait(), shapes)
        return [_joined(part, given, num) for part, given in zip(parts, arguments, strict=True)]

    return finish


def _begin_reduce(comm: Communicator, move: _Move, tensors: list[Tensor], owned: bool) -> _Waiting:
    flat = _flat([x.reshape(-1) for x in tensors])
    wait = comm.begin(move.kind, move.axis, flat, owned=owned or len(tensors) > 1)
    shapes = [x.shape for x in tensors]
    return lambda: _unpacked(wait(), shapes)


def _begin_exchange(comm: Communicator, move: _Move, tensors: list[Tensor], arguments: list[Numbers]) -> _Waiting:
    """reduce_scatter and all_to_all: each tensor cut into one piece a rank."""
    num = comm.size(move.axis)
    stacks: list[Tensor] = []
    for x, given in zip(tensors, arguments, strict=True):
        if move.kind == "all_to_all" and given[0] == given[2]:
            raise AutoparError(
                f"all_to_all over {move.axis} from dim {given[0]} to itself",
                where=comm.where or None,
                remedy="all_gather and slice instead",
            )
        if move.kind == "reduce_scatter" and _is_uneven(given, num):
            x = _padded(x, given[0], given[2], num * -(-given[2] // num))
        stacks.append(cut(x, num, given[0], given[1]))
    flat = _flat([stack.reshape(num, -1) for stack in stacks])
    wait = comm.begin(move.kind, move.axis, flat)
    shapes = [stack.shape[1:] for stack in stacks]

    def finish() -> list[Tensor]:
        parts = _unpacked(wait(), shapes)
        if move.kind == "all_to_all":
            return [join(part, given[2], given[3]) for part, given in zip(parts, arguments, strict=True)]
        return [_own_part(comm, move.axis, part, given) for part, given in zip(parts, arguments, strict=True)]

    return finish


def _slice(comm: Communicator, axis: str, x: Tensor, argument: Numbers) -> Tensor:
    if not _is_uneven(argument, comm.size(axis)):
        return comm.slice(x, axis, argument[0], argument[1])
    start, length = piece_of(argument[2], comm.size(axis), comm.index(axis))
    return x.narrow(argument[0], start, length).contiguous()


def _own_part(comm: Communicator, axis: str, piece: Tensor, argument: Numbers) -> Tensor:
    """This rank's piece without the padding."""
    if not _is_uneven(argument, comm.size(axis)):
        return piece
    return piece.narrow(argument[0], 0, piece_of(argument[2], comm.size(axis), comm.index(axis))[1]).contiguous()


def _joined(stacked: Tensor, argument: Numbers, num: int) -> Tensor:
    """All ranks' pieces [n, *piece_shape] to the whole, without the padding."""
    whole = join(stacked, argument[0], argument[1])
    return whole.narrow(argument[0], 0, argument[2]).contiguous() if _is_uneven(argument, num) else whole


def _padded(x: Tensor, dim: int, length: int, wanted: int) -> Tensor:
    """`x`, whose dim should have `length` elements, with zeros up to `wanted`."""
    if x.shape[dim] != length:
        raise AutoparError(f"dim {dim} of a tensor {tuple(x.shape)} should have {length} elements")
    if length == wanted:
        return x
    shape = list(x.shape)
    shape[dim] = wanted - length
    return torch.cat([x, x.new_zeros(shape)], dim)


def _is_uneven(argument: Numbers, num: int) -> bool:
    if len(argument) != 3 or argument[2] % (num * argument[1]) == 0:
        return False
    if argument[1] != 1:
        raise AutoparError(
            f"a dim of {argument[2]} elements in {argument[1]} stripes cannot be cut into {num} pieces",
            remedy="only a dim of one stripe may be cut unevenly",
        )
    return True


def _flat(parts: list[Tensor]) -> Tensor:
    """All parts behind each other along the last dim; a single one as it is."""
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, -1)


def _unpacked(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """The inverse of `_flat`: [..., numel] to views [..., *shape]."""
    if len(shapes) == 1:
        return [flat.view((*flat.shape[:-1], *shapes[0]))]
    parts = flat.split([shape.numel() for shape in shapes], -1)
    return [part.unflatten(-1, shape) if shape else part.squeeze(-1) for part, shape in zip(parts, shapes, strict=True)]


_MOST_ARGUMENTS = {"all_gather": 3, "reduce_scatter": 3, "slice": 3, "all_to_all": 4, "all_reduce": 0}
_DEFAULTS = (0, 1, 0, 1)


@lru_cache(maxsize=1024)
def _parse(steps: str, axes: tuple[str, ...]) -> tuple[_Move, ...]:
    moves: list[_Move] = []
    for text in steps.split(","):
        kind, _, axis = text.strip().partition(" ")
        if kind not in _MOST_ARGUMENTS or axis not in axes:
            raise AutoparError(
                f"{text.strip()!r} is no step of a bucket",
                where=steps,
                values=f"kinds {', '.join(_MOST_ARGUMENTS)}; axes {', '.join(axes)}",
                remedy='write "kind axis, kind axis, …"',
            )
        moves.append(_Move(cast(StepKind, kind), axis))
    return tuple(moves)


def _split_arguments(
    steps: str, moves: tuple[_Move, ...], tensors: Mapping[str, Any]
) -> dict[str, tuple[Tensor, tuple[Numbers, ...]]]:
    """Each tensor with a full argument for every step: (dim, outer), (dim, outer, size) or all_to_all's four."""
    found: dict[str, tuple[Tensor, tuple[Numbers, ...]]] = {}
    wanted = sum(1 for move in moves if _MOST_ARGUMENTS[move.kind])
    for name, given in tensors.items():
        tensor, *arguments = given if isinstance(given, tuple) else (given,)
        if len(arguments) != wanted:
            raise AutoparError(
                f"{name} comes with {len(arguments)} arguments, the bucket's steps take {wanted}", where=steps
            )
        left = iter(arguments)
        numbers = [_full(move, next(left), name) if _MOST_ARGUMENTS[move.kind] else () for move in moves]
        found[name] = tensor, tuple(numbers)
    dtypes = {tensor.dtype: name for name, (tensor, _) in found.items()}
    if len(dtypes) > 1:
        raise AutoparError(
            "the tensors of a bucket have different dtypes",
            where=steps,
            values=", ".join(f"{name} {dtype}" for dtype, name in dtypes.items()),
            remedy="make one bucket for each dtype",
        )
    return found


def _full(move: _Move, argument: Argument, name: str) -> Numbers:
    given: Numbers = argument if isinstance(argument, tuple) else (argument,)
    most = _MOST_ARGUMENTS[move.kind]
    if not 0 < len(given) <= most:
        raise AutoparError(f"{move.kind} of {name} takes at most {most} numbers", values=str(argument))
    if move.kind == "all_to_all":
        return given + _DEFAULTS[len(given) :]
    return given if len(given) > 1 else (*given, 1)
