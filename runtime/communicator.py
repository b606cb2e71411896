"""What every communicator does: the layout of pieces (sharding.py), logging; how tensors move is left to its kinds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.ir.positions import starts
from autopar.ir.sharding import Shard, local_shape, parse_sharding, splits_of
from autopar.runtime.event import Event, Message, Notes, Pending
from autopar.runtime.nearby import Nearby
from autopar.runtime.pieces import coordinates, cut, join, take
from autopar.runtime.streams import Side, Streams, streams_of
from autopar.runtime.trail import Trail


class Communicator:
    """One rank's view of a mesh. Axes from slowest to fastest, ranks row-major, as in `DeviceMesh`.

    log: None, or a list to which every collective over an axis of more than one rank is appended; one for all views
    (`within`). where: free text, set by the generated program, that events and errors carry. timeout_s: the longest
    that a wait for another rank takes (seconds). recorder: None, or who writes down when everything ran. streams: the
    device's, None where it has none. trail: of this rank, for all views. experts: layers whose experts may move, by the
    call that has them (runtime/expert_layers.py). nearby: what small messages go through now, for all views, or None.
    """

    def __init__(
        self, axes: Sequence[str], sizes: Sequence[int], rank: int, device: torch.device | str = "cpu"
    ) -> None:
        self.axes = tuple(axes)
        self.sizes = tuple(sizes)
        self.rank = rank
        self.device = torch.device(device)
        self.streams: Streams | None = streams_of(self.device)
        self.where = ""
        self.timeout_s = 1800.0
        self.recorder: Notes | None = None
        self.trail = Trail()
        self.experts: dict[str, Any] = {}
        self._journal: list[list[Event] | None] = [None]
        self._nearby: list[Nearby | None] = [None]
        self._sides: dict[str, Side] = {}
        self._views: dict[tuple[str, ...], Any] = {}
        self._index = dict(zip(self.axes, coordinates(rank, self.sizes), strict=True))
        self._size = dict(zip(self.axes, self.sizes, strict=True))
        self._positions: dict[tuple[tuple[int, ...], str], list[Tensor]] = {}
        self._starts: dict[tuple[int, str], list[int]] = {}

    @property
    def log(self) -> list[Event] | None:
        """What was issued since it was set to a list."""
        return self._journal[0]

    @log.setter
    def log(self, events: list[Event] | None) -> None:
        self._journal[0] = events

    @property
    def nearby(self) -> Nearby | None:
        """Set alike on all ranks, between the same collectives."""
        return self._nearby[0]

    @nearby.setter
    def nearby(self, found: Nearby | None) -> None:
        self._nearby[0] = found

    def neighbours(self) -> Nearby | None:
        """A way for small messages between all ranks of the job, if there is one. Collective."""
        return None

    def beside(self, x: Tensor, axis: str) -> Tensor | None:
        """The pieces [n, …] of an axis, of what is none of a program's (and not logged), where they go by `nearby`;
        None where they do not. Collective.
        """
        return None

    def within(self, axes: Sequence[str]) -> Self:
        """This rank among those that share its place on all other axes. An axis that the mesh lacks has one rank.

        Collective the first time.
        """
        key = tuple(axes)
        if key not in self._views:
            view = self._within(key)
            view._journal, view._sides, view.streams = self._journal, self._sides, self.streams
            view._nearby = self._nearby
            view.trail = self.trail
            self._views[key] = view
        return self._views[key]

    @property
    def side(self) -> Side:
        """Where there are streams: the one of this rank's transfers, for all views."""
        return self._side_of("transfers")

    def _side_of(self, what: str) -> Side:
        assert self.streams is not None
        if what not in self._sides:
            self._sides[what] = Side(self.streams.new())
        return self._sides[what]

    def at(self, where: str) -> None:
        """Name the place in the program from which the next collectives come."""
        self.where = where
        if self.recorder is not None:
            self.recorder.mark(where)

    def index(self, axis: str) -> int:
        """The coordinate of this rank along `axis`."""
        return self._index[axis]

    def size(self, axis: str) -> int:
        """How many ranks `axis` has."""
        return self._size[axis]

    def slice(self, x: Tensor, axis: str, dim: int, outer: int = 1, zigzag: bool = False) -> Tensor:
        """The piece of `dim` that is this rank's; no communication. Contiguous; for dim 0 it may be a view.

        outer, zigzag: how the axis splits the dim, here and below: those of `Shard`.

        Raises:
            AutoparError: the dim does not divide.
        """
        num = self._size[axis]
        return x if num == 1 else take(x, num, self._index[axis], dim, outer, zigzag).contiguous()

    def all_gather(self, x: Tensor, axis: str, dim: int, outer: int = 1, zigzag: bool = False) -> Tensor:
        """The inverse of `slice`: local_shape with `dim` n times as long, the same on every rank of the axis."""
        num = self._size[axis]
        if num == 1:
            return x
        event = self._record("all_gather", axis, x, (num - 1) * x.nbytes)
        return join(self._all_gather(x, event), dim, outer, zigzag)

    def all_reduce(self, x: Tensor, axis: str, op: str = "sum") -> Tensor:
        """`op` ("sum", "max", "min") over the ranks of the axis, out of place."""
        num = self._size[axis]
        if num == 1:
            return x
        event = self._record("all_reduce", axis, x, _divided(2 * (num - 1) * x.nbytes, num), op)
        return self._all_reduce(x, event)

    def reduce_scatter(
        self, x: Tensor, axis: str, dim: int, outer: int = 1, op: str = "sum", zigzag: bool = False
    ) -> Tensor:
        """`slice(all_reduce(x, op), dim)` with half the bytes."""
        num = self._size[axis]
        if num == 1:
            return x
        event = self._record("reduce_scatter", axis, x, _divided((num - 1) * x.nbytes, num), op)
        return self._reduce_scatter(cut(x, num, dim, outer, zigzag), event)

    def all_to_all(
        self,
        x: Tensor,
        axis: str,
        dim: int,
        outer: int = 1,
        from_dim: int = 0,
        from_outer: int = 1,
        zigzag: bool = False,
        from_zigzag: bool = False,
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
        return join(self._all_to_all(cut(x, num, dim, outer, zigzag), event), from_dim, from_outer, from_zigzag)

    def exchange_rows(self, x: Tensor, axis: str, rows: Sequence[Sequence[float]]) -> Tensor:
        """Rows of x to the ranks of the axis, as many as each is to get: x[S, …] -> [R, …], those of the first rank
        first.

        rows[i][j]: how many rank i has for rank j, the same on every rank; x has those of this one in order. Fractions
        where nothing is sent (a program that is run dry): what is expected.
        """
        return self._exchange_rows(x, self._record_rows(x, axis, rows), [list(map(round, each)) for each in rows])

    def begin_rows(self, x: Tensor, axis: str, rows: Sequence[Sequence[float]]) -> Callable[[], Tensor]:
        """`exchange_rows` beside what is computed meanwhile; the function returned waits for what comes. x must not be
        changed before.

        On CUDA rows travel on a stream of their own, so that they do not queue behind parameters (`transfers`).
        """
        event, counts = self._record_rows(x, axis, rows), [list(map(round, each)) for each in rows]
        if self.streams is None:
            return self._begin_rows(x, event, counts)
        streams, side = self.streams, self._side_of("rows")
        found, place = side.run(streams, lambda: self._exchange_rows(x, event, counts))
        sent = [x]  # kept until this stream has waited: its memory is not given out again before

        def wait() -> Tensor:
            side.wait(streams, [place])
            sent.clear()
            return found

        return wait

    def _record_rows(self, x: Tensor, axis: str, rows: Sequence[Sequence[float]]) -> Event:
        here = self._index[axis]
        own = rows[here]
        away = sum(own) - own[here]
        row_bytes = math.prod(x.shape[1:]) * x.dtype.itemsize
        shape = (round(sum(map(sum, rows))), *x.shape[1:])
        dtype = str(x.dtype).removeprefix("torch.")
        event = Event("exchange", axis, shape, dtype, away * row_bytes, self.where)
        self._note(event)
        return event

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
                    found[placement.dim] = self.slice(found[placement.dim], axis, 0, placement.outer, placement.zigzag)
            self._positions[key] = found
        return self._positions[key]

    def starts(self, size: int, sharding_text: str) -> list[int]:
        """Where the equal runs of consecutive elements begin that this rank holds of one dim of `size`; cached.

        As many on every rank (`autopar.operators.starts`). sharding_text: of that dim alone, as if of a tensor
        [size]: `cp=S(0, outer=2, zigzag)`.

        Raises:
            AutoparError: the text is no sharding of one dim over these axes, or a split does not divide.
        """
        key = (size, sharding_text)
        if key not in self._starts:
            sharding = parse_sharding(sharding_text, self.axes)
            local_shape((size,), sharding, self.sizes)
            at = [self._index[axis] for axis in self.axes]
            splits = splits_of(sharding, 0)
            own = [(at[axis], self.sizes[axis], outer, zigzag) for axis, outer, zigzag in splits]
            self._starts[key] = starts(size, *own)
        return self._starts[key]

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

    def send(self, tensors: Sequence[Tensor], axis: str, to: int, tag: str) -> Pending:
        """Send tensors to the rank at place `to` of the axis, which must receive as many, in the same order.

        Returns at once; `wait()` until they have left. They must not be changed before. `where` names the action.
        """
        return self.exchange(axis, [(to, x, tag) for x in tensors], [])

    def receive(
        self, wanted: Sequence[tuple[tuple[int, ...], torch.dtype]], axis: str, source: int, tag: str
    ) -> Pending:
        """Receive tensors of these shapes and dtypes from the rank at place `source` of the axis: `wait()` gives them.

        The wait raises an AutoparError that names the action (`where`) and both ranks when none come in `timeout_s`.
        """
        return self.exchange(axis, [], [(source, shape, dtype, tag) for shape, dtype in wanted])

    def exchange(
        self,
        axis: str,
        sends: Sequence[tuple[int, Tensor, str]],
        receives: Sequence[tuple[int, tuple[int, ...], torch.dtype, str]],
        *,
        together: bool = False,
    ) -> Pending:
        """Several sends (to, tensor, tag) and receives (source, shape, dtype, tag) that do not wait for each other.

        together: all ranks of the axis call this at the same place of the program; they then send and receive in both
        directions at once on NCCL too. `wait()` gives what was received, in the order asked for.
        """
        messages = [
            Message(self._post("send", axis, tuple(x.shape), x.dtype, to, tag), to, x, x.dtype) for to, x, tag in sends
        ]
        messages += [
            Message(self._post("receive", axis, shape, dtype, source, tag), source, None, dtype)
            for source, shape, dtype, tag in receives
        ]
        return self._exchange(axis, messages, together)

    def rank_at(self, axis: str, place: int) -> int:
        """The rank that differs from this one only by its place along `axis`."""
        stride = 1
        for size in self.sizes[self.axes.index(axis) + 1 :]:
            stride *= size
        return self.rank + (place - self._index[axis]) * stride

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
        self._note(event)
        return event

    def _note(self, event: Event) -> None:
        self.trail.issued += 1
        if self.log is not None:
            self.log.append(event)

    def _post(self, kind: str, axis: str, shape: tuple[int, ...], dtype: torch.dtype, peer: int, tag: str) -> Event:
        sent = math.prod(shape) * dtype.itemsize if kind == "send" else 0
        event = Event(kind, axis, shape, str(dtype).removeprefix("torch."), sent, self.where, "", peer, tag)
        self._note(event)
        return event

    def _within(self, axes: tuple[str, ...]) -> Communicator:
        raise NotImplementedError

    def _exchange(self, axis: str, messages: Sequence[Message], together: bool) -> Pending:
        """Start all messages. together: see `exchange`."""
        raise NotImplementedError

    def _inner(self, axes: tuple[str, ...]) -> tuple[tuple[int, ...], int]:
        """The sizes of a view's axes, and the rank in it."""
        sizes = tuple(self._size.get(axis, 1) for axis in axes)
        rank = 0
        for axis, size in zip(axes, sizes, strict=True):
            rank = rank * size + self._index.get(axis, 0)
        return sizes, rank

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

    def _exchange_rows(self, x: Tensor, event: Event, rows: list[list[int]]) -> Tensor:
        """rows[i][j] rows of rank i's `x` go to rank j; contiguous."""
        raise NotImplementedError

    def _begin_rows(self, x: Tensor, event: Event, rows: list[list[int]]) -> Callable[[], Tensor]:
        """The same; subclasses may return before it has ended."""
        result = self._exchange_rows(x, event, rows)
        return lambda: result


def _divided(total: int, num: int) -> int | float:
    return total // num if total % num == 0 else total / num
