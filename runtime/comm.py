"""Communicators: what a generated program calls to move tensors over a mesh axis.

    Communicator        layout of pieces (sharding.py), logging; four collectives are left to the subclasses
      .transfers()      the same collectives on many tensors at once, while the program goes on (transfers.py)
      ProcessGroupComm  one process per rank, torch.distributed (gloo, NCCL) on a DeviceMesh
      RecordingComm     no peers: tensors of the right shape, for writing down what a program would send
      SimulatedComm     one thread per rank (simulated_comm.py)

Legend: n the size of the axis; a *piece* is what one rank holds of a dim seen as (outer, n, rest), cut along n.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import AutoparError
from autopar.sharding import Shard, local_shape, parse_sharding
from autopar.torch_compat.distributed import all_gather_single, reduce_scatter_single

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from autopar.runtime.transfers import Transfers


@dataclass(frozen=True, slots=True)
class Event:
    """One collective as one rank issued it.

    shape, dtype: of the local tensor handed in. bytes_sent: what a ring (all_to_all: a direct exchange) sends per rank.
    op: of a reduction, else "". where: the place in the program that `Communicator.where` named.
    """

    kind: str
    axis: str
    shape: tuple[int, ...]
    dtype: str
    bytes_sent: int | float
    where: str = ""
    op: str = ""

    def __str__(self) -> str:
        op = f" {self.op}" if self.op else ""
        where = f" at {self.where}" if self.where else ""
        return f"{self.kind}{op} over {self.axis} of {self.dtype}{list(self.shape)}{where}"

    def agrees_with(self, other: Event) -> bool:
        """Whether two ranks of a group may issue these two together."""
        return (self.kind, self.axis, self.shape, self.dtype, self.op) == (
            other.kind,
            other.axis,
            other.shape,
            other.dtype,
            other.op,
        )


class Communicator:
    """One rank's view of a mesh. Axes from slowest to fastest, ranks row-major, as in `DeviceMesh`.

    log: None, or a list to which every collective over an axis of more than one rank is appended.
    where: free text, set by the generated program, that events and errors carry.
    """

    def __init__(
        self, axes: Sequence[str], sizes: Sequence[int], rank: int, device: torch.device | str = "cpu"
    ) -> None:
        self.axes = tuple(axes)
        self.sizes = tuple(sizes)
        self.rank = rank
        self.device = torch.device(device)
        self.log: list[Event] | None = None
        self.where = ""
        self._index = dict(zip(self.axes, coordinates(rank, self.sizes), strict=True))
        self._size = dict(zip(self.axes, self.sizes, strict=True))
        self._positions: dict[tuple[tuple[int, ...], str], list[Tensor]] = {}

    def at(self, where: str) -> None:
        """Name the place in the program from which the next collectives come."""
        self.where = where

    def index(self, axis: str) -> int:
        """The coordinate of this rank along `axis`."""
        return self._index[axis]

    def size(self, axis: str) -> int:
        """How many ranks `axis` has."""
        return self._size[axis]

    def slice(self, x: Tensor, axis: str, dim: int, outer: int = 1) -> Tensor:
        """The piece of `dim` that is this rank's; no communication. Contiguous; for dim 0 it may be a view.

        Raises:
            AutoparError: the dim does not divide.
        """
        num = self._size[axis]
        if num == 1:
            return x
        piece = _split(x, num, dim, outer)[self._index[axis]]
        return piece.flatten(dim, dim + 1).contiguous()

    def all_gather(self, x: Tensor, axis: str, dim: int, outer: int = 1) -> Tensor:
        """The inverse of `slice`: local_shape with `dim` n times as long, the same on every rank of the axis."""
        num = self._size[axis]
        if num == 1:
            return x
        event = self._record("all_gather", axis, x, (num - 1) * x.nbytes)
        return join(self._all_gather(x, event), dim, outer)

    def all_reduce(self, x: Tensor, axis: str, op: str = "sum") -> Tensor:
        """`op` ("sum", "max", "min") over the ranks of the axis, out of place."""
        num = self._size[axis]
        if num == 1:
            return x
        event = self._record("all_reduce", axis, x, _divided(2 * (num - 1) * x.nbytes, num), op)
        return self._all_reduce(x, event)

    def reduce_scatter(self, x: Tensor, axis: str, dim: int, outer: int = 1, op: str = "sum") -> Tensor:
        """`slice(all_reduce(x, op), dim)` with half the bytes."""
        num = self._size[axis]
        if num == 1:
            return x
        event = self._record("reduce_scatter", axis, x, _divided((num - 1) * x.nbytes, num), op)
        return self._reduce_scatter(cut(x, num, dim, outer), event)

    def all_to_all(
        self, x: Tensor, axis: str, dim: int, outer: int = 1, from_dim: int = 0, from_outer: int = 1
    ) -> Tensor:
        """From pieces of `from_dim` to pieces of `dim`: `slice(all_gather(x, from_dim), dim)` without the whole tensor.

        Raises:
            AutoparError: `dim` and `from_dim` are one dim, or `dim` does not divide.
        """
        num = self._size[axis]
        if num == 1:
            return x
        if dim == from_dim:
            raise AutoparError(
                f"all_to_all over {axis} from dim {from_dim} to itself",
                where=self.where or None,
                remedy="all_gather and slice instead",
            )
        event = self._record("all_to_all", axis, x, _divided((num - 1) * x.nbytes, num))
        return join(self._all_to_all(cut(x, num, dim, outer), event), from_dim, from_outer)

    def positions(self, global_shape: Sequence[int], sharding_text: str) -> list[Tensor]:
        """Per dim the global index (int64, 1-D, on `device`) of each local element under `sharding_text`; cached.

        Raises:
            AutoparError: the text is no sharding of these axes, or a split does not divide.
        """
        key = (tuple(global_shape), sharding_text)
        if key not in self._positions:
            sharding = parse_sharding(sharding_text, self.axes)
            local_shape(global_shape, sharding, self.sizes)
            found = [torch.arange(size, device=self.device) for size in global_shape]
            for axis, placement in zip(self.axes, sharding, strict=True):
                if isinstance(placement, Shard):
                    found[placement.dim] = self.slice(found[placement.dim], axis, 0, placement.outer)
            self._positions[key] = found
        return self._positions[key]

    def transfers(self, held: dict[str, Tensor] | None = None, at: str = "") -> Transfers:
        """An empty set of transfers: fill it with `put` and `bucket`, then `wait`. held, at: see `Transfers`."""
        from autopar.runtime.transfers import Transfers

        return Transfers(self, held, at)

    def accumulate(
        self,
        sums: dict[str, Tensor],
        gradients: Mapping[str, Tensor],
        at: str,
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        """Add each gradient to `sums[at + name]`. The first one is stored as it is, or in `dtypes[name]` if given.

        Never in place: what is stored may be a view, or the gradient of two parameters.
        """
        for name, gradient in gradients.items():
            total = sums.get(at + name)
            if total is not None:
                sums[at + name] = total + gradient
            else:
                sums[at + name] = gradient.to(dtypes[name]) if dtypes and name in dtypes else gradient

    def begin(self, kind: str, axis: str, x: Tensor, owned: bool = False) -> Callable[[], Tensor]:
        """Issue a collective over an axis of more than one rank; the function returned waits for its result.

        x: all_gather and all_reduce [numel]; reduce_scatter and all_to_all [n, numel / n]. The result: [n, numel],
        [numel], [numel / n], [n, numel / n]. Sums. Logged as of the shape (numel,). owned: x may be overwritten.
        """
        num, whole = self._size[axis], (self._size[axis] - 1) * x.nbytes
        if kind == "all_gather":
            bytes_sent: int | float = whole
        else:
            bytes_sent = _divided(2 * whole if kind == "all_reduce" else whole, num)
        op = "sum" if kind in ("all_reduce", "reduce_scatter") else ""
        event = self._record(kind, axis, x.reshape(-1), bytes_sent, op)
        return self._begin(x, event, owned)

    def _record(self, kind: str, axis: str, x: Tensor, bytes_sent: int | float, op: str = "") -> Event:
        event = Event(kind, axis, tuple(x.shape), str(x.dtype).removeprefix("torch."), bytes_sent, self.where, op)
        if self.log is not None:
            self.log.append(event)
        return event

    def _begin(self, x: Tensor, event: Event, owned: bool) -> Callable[[], Tensor]:
        """One of the four collectives below; subclasses may return before it has ended."""
        collectives = {
            "all_gather": self._all_gather,
            "all_reduce": self._all_reduce,
            "reduce_scatter": self._reduce_scatter,
            "all_to_all": self._all_to_all,
        }
        result = collectives[event.kind](x, event)
        return lambda: result

    # The four collectives of a subclass. `pieces` is stacked: [n, *piece_shape], not necessarily contiguous.

    def _all_gather(self, x: Tensor, event: Event) -> Tensor:
        """Every rank's `x`, stacked in rank order: [n, *x.shape]."""
        raise NotImplementedError

    def _all_reduce(self, x: Tensor, event: Event) -> Tensor:
        raise NotImplementedError

    def _reduce_scatter(self, pieces: Tensor, event: Event) -> Tensor:
        """Reduced over ranks, this rank's entry of dim 0."""
        raise NotImplementedError

    def _all_to_all(self, pieces: Tensor, event: Event) -> Tensor:
        """Entry j goes to rank j; the result's entry j came from rank j."""
        raise NotImplementedError


class RecordingComm(Communicator):
    """A rank without peers: every collective returns a tensor of the right shape, and is logged.

    On meta tensors nothing is computed. On real ones the values are this rank's own, repeated.
    """

    def __init__(
        self, axes: Sequence[str], sizes: Sequence[int], rank: int, device: torch.device | str = "meta"
    ) -> None:
        super().__init__(axes, sizes, rank, device)
        self.log = []

    def _all_gather(self, x: Tensor, event: Event) -> Tensor:
        return x.unsqueeze(0).expand(self._size[event.axis], *x.shape)

    def _all_reduce(self, x: Tensor, event: Event) -> Tensor:
        return x.clone()

    def _reduce_scatter(self, pieces: Tensor, event: Event) -> Tensor:
        return pieces[self._index[event.axis]].contiguous()

    def _all_to_all(self, pieces: Tensor, event: Event) -> Tensor:
        return pieces


_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class ProcessGroupComm(Communicator):
    """The ranks of a DeviceMesh, each its own process; axes are the mesh's dim names.

    Raises:
        AutoparError: the mesh has no names, or this process is not part of it.
    """

    def __init__(self, device_mesh: DeviceMesh) -> None:
        names, coordinate = device_mesh.mesh_dim_names, device_mesh.get_coordinate()
        if names is None:
            raise AutoparError(
                "the device mesh has no axis names",
                values=f"shape {tuple(device_mesh.shape)}",
                remedy='Pass mesh_dim_names=("dp", ...) to init_device_mesh',
            )
        if coordinate is None:
            raise AutoparError("this process is not part of the device mesh", values=f"rank {dist.get_rank()}")
        rank = 0
        for size, position in zip(device_mesh.shape, coordinate, strict=True):
            rank = rank * size + position
        device: torch.device | str = device_mesh.device_type
        if device == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        super().__init__(names, tuple(device_mesh.shape), rank, device)
        self.device_mesh = device_mesh
        self._group = {axis: device_mesh.get_group(axis) for axis, size in zip(names, self.sizes) if size > 1}

    def _all_gather(self, x: Tensor, event: Event) -> Tensor:
        return self._issue(x, event)()

    def _all_reduce(self, x: Tensor, event: Event) -> Tensor:
        return self._issue(x, event)()

    def _reduce_scatter(self, pieces: Tensor, event: Event) -> Tensor:
        return self._issue(pieces, event)()

    def _all_to_all(self, pieces: Tensor, event: Event) -> Tensor:
        return self._issue(pieces, event)()

    def _begin(self, x: Tensor, event: Event, owned: bool) -> Callable[[], Tensor]:
        # On CUDA the host never waits anyway: the caller chooses the stream, and a synchronous collective runs there.
        return self._issue(x, event, owned, asynchronous=self.device.type != "cuda")

    def _issue(self, x: Tensor, event: Event, owned: bool = False, asynchronous: bool = False) -> Callable[[], Tensor]:
        sent = _as_sendable(x)
        options: dict[str, Any] = {"group": self._group[event.axis], "async_op": asynchronous}
        # Flat: gloo takes pieces concatenated along dim 0 only, NCCL does not care.
        if event.kind == "all_gather":
            result = sent.new_empty((self._size[event.axis], *sent.shape))
            work = all_gather_single(result.view(-1), sent.view(-1), **options)
        elif event.kind == "all_reduce":
            result = sent if owned else sent.clone(memory_format=torch.contiguous_format)
            work = dist.all_reduce(result, op=self._reduce_op(event.op, x), **options)
        elif event.kind == "reduce_scatter":
            result = sent.new_empty(sent.shape[1:])
            work = reduce_scatter_single(result.view(-1), sent.view(-1), op=self._reduce_op(event.op, x), **options)
        else:
            result = torch.empty_like(sent)
            work = dist.all_to_all_single(result.view(-1), sent.view(-1), **options)
        in_flight = (work, sent)

        def wait() -> Tensor:
            if in_flight[0] is not None:
                in_flight[0].wait()
            return result.view(x.dtype)

        return wait

    def _reduce_op(self, op: str, x: Tensor) -> dist.ReduceOp.RedOpType:
        # A mask's "sum" is its "or"; adding uint8 could wrap around.
        return reduction("max" if x.dtype == torch.bool and op == "sum" else op, _REDUCE_OPS, self.where)


T = TypeVar("T")


def reduction(op: str, table: dict[str, T], where: str) -> T:
    """`table[op]`, or the error that names the reductions there are."""
    if op not in table:
        raise AutoparError(f"unknown reduction {op!r}", where=where or None, remedy=f"Use one of {', '.join(table)}")
    return table[op]


def coordinates(rank: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The place of a rank along each axis, row-major."""
    found: list[int] = []
    for size in reversed(sizes):
        found.append(rank % size)
        rank //= size
    return tuple(reversed(found))


def piece_of(size: int, num: int, index: int) -> tuple[int, int]:
    """Where the piece of one of `num` ranks begins in a dim that need not divide, and its length (0 when none is left).

    As torch.chunk and DTensor's Shard: ⌈size / num⌉ elements each, the last ranks fewer or none.
    """
    most = -(-size // num)
    start = min(index * most, size)
    return start, min(most, size - start)


def cut(x: Tensor, num: int, dim: int, outer: int = 1) -> Tensor:
    """All pieces of `dim` seen as (outer, num, rest), stacked: [num, *piece_shape]. A view where it can be.

    Raises:
        AutoparError: the dim does not divide by outer·num.
    """
    return _split(x, num, dim, outer).flatten(dim + 1, dim + 2)


def _split(x: Tensor, num: int, dim: int, outer: int) -> Tensor:
    """[..., outer·num·rest, ...] to a view [num, ..., outer, rest, ...]."""
    length = x.shape[dim]
    if length % (outer * num):
        raise AutoparError(
            f"dim {dim} of a tensor {tuple(x.shape)} cannot be cut into {num} pieces",
            values=f"{length} elements in {outer} stripes" if outer > 1 else f"{length} elements",
            remedy="choose an axis size that divides it",
        )
    return x.unflatten(dim, (outer, num, length // (outer * num))).movedim(dim + 1, 0)


def join(pieces: Tensor, dim: int, outer: int = 1) -> Tensor:
    """The inverse of `cut`: [num, *piece_shape] to the tensor with `dim` whole, contiguous.

    Raises:
        AutoparError: the pieces do not have `outer` stripes.
    """
    shape = pieces.shape[1:]
    if shape[dim] % outer:
        raise AutoparError(f"dim {dim} of pieces {tuple(shape)} does not have {outer} stripes")
    split = pieces.unflatten(dim + 1, (outer, shape[dim] // outer)).movedim(0, dim + 1)
    return split.flatten(dim, dim + 2).contiguous()


def _as_sendable(x: Tensor) -> Tensor:
    """Contiguous, and as bytes where the backends refuse the dtype (bool, float8)."""
    refused = x.dtype == torch.bool or (x.dtype.is_floating_point and x.dtype.itemsize == 1)
    return x.contiguous().view(torch.uint8) if refused else x.contiguous()


def _divided(total: int, num: int) -> int | float:
    return total // num if total % num == 0 else total / num
