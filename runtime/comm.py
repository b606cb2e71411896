"""Communicators: what a generated program calls to move tensors over a mesh axis.

    Communicator        layout of pieces, logging (communicator.py); four collectives are left to the subclasses
      MeshComm          the whole of what a program calls
      .transfers()      the same collectives on many tensors at once, while the program goes on (transfers.py)
      ProcessGroupComm  one process per rank, torch.distributed (gloo, NCCL) on a DeviceMesh
      RecordingComm     no peers: tensors of the right shape, for writing down what a program would send
      SimulatedComm     one thread per rank (simulated_comm.py)

Stages of a pipeline also send to one peer (`send`, `receive`, `exchange`; p2p.py), and see the mesh without the
pipeline's axis (`within`). Legend: n the size of the axis; *piece*: pieces.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.base import environment
from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import all_gather_single, default_timeout_s, reduce_scatter_single
from autopar.runtime.communicator import Communicator
from autopar.runtime.event import Event, Message, Pending
from autopar.runtime.exchange import Coming, Sent, exchange_experts, exchange_experts_grad, send_tokens
from autopar.runtime.nearby import Nearby
from autopar.runtime.nearby import connect as connect_neighbours
from autopar.runtime.p2p import Departures, as_sendable, connect, issue, issue_together, tells_of_time
from autopar.runtime.ring import ring_attention, ring_attention_backward
from autopar.runtime.transfers import Transfers


class MeshComm(Communicator):
    """What a generated program calls: one tensor at a time, many on their way, attention that goes round a ring, tokens
    that go to their experts.
    """

    def transfers(self, held: dict[str, Tensor] | None = None, at: str = "") -> Transfers:
        """An empty set of transfers: fill it with `put` and `bucket`, then `wait`. held, at: see `Transfers`."""
        return Transfers(self, held, at)

    def ring_attention(
        self,
        axis: str,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None = None,
        keys: Tensor | None = None,
        sinks: Tensor | None = None,
        seed: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """`autopar.operators.attention` to the keys of all ranks of the axis, which visit each other (runtime/ring.py).

        q: this rank's queries (`query_starts`). k, v[B, G, T / n, …]: its keys, S(2) over the axis; outer, zigzag: as
        `Shard` says. bias[…, T], keys[B, T], key_documents[B, T]: of all keys, in order. visits: how many places from
        home each block is read, ascending from 0; none given: everywhere. Sends k and v as often as it has visits after
        the first.
        """
        return ring_attention(self, axis, (q, k, v, bias, keys, sinks, seed), options)

    def ring_attention_backward(self, axis: str, *tensors: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        """`autopar.operators.attention_backward`, as `ring_attention`: dq, and dk, dv of this rank's own keys.

        Sends k and v as forward, and their gradients (float32, or float64) once more: home.
        """
        return ring_attention_backward(self, axis, tensors, options, with_bias=False)

    def ring_attention_backward_bias(self, axis: str, *tensors: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        """As `ring_attention_backward`, and the gradient of the float bias to this rank's queries."""
        return ring_attention_backward(self, axis, tensors, options, with_bias=True)

    def send_tokens(self, axis: str, *tensors: Tensor, experts: int) -> Sent | None:
        """Let the tokens of an exchange leave for their experts, while the program goes on: `exchange_experts(sent=…)`.

        tensors: x, indices, weights as that takes them; g before them for `exchange_experts_grad`. experts: of this
        rank. The host waits for how many rows come. None where the axis has one rank.
        """
        return send_tokens(self, axis, tensors, experts)

    def take_tokens(self, coming: Coming) -> Tensor | tuple[Tensor, ...]:
        """Wait for what comes home of an exchange(later=True): its result, or the gradients of tokens and weights.

        Raises:
            AutoparError: it was taken before.
        """
        found = coming.take(self.where)
        return found[0] if len(found) == 1 else found

    def exchange_experts(
        self, axis: str, *tensors: Tensor | None, sent: Sent | None = None, later: bool = False, **options: Any
    ) -> Tensor | Coming:
        """`autopar.operators.experts` of this rank's tokens with the experts of all ranks of the axis, to whom the
        tokens go (runtime/exchange.py).

        x[T / n, D], indices, weights: of this rank's tokens, with the experts' numbers among all. first, second, bias:
        of its E / n experts, S(0) over the axis. sent: what `send_tokens` gave for the same tokens, if they have left.
        later: the result is for `take_tokens`, and comes home while the program goes on.

        Raises:
            AutoparError: what was sent is another exchange's.
        """
        return exchange_experts(self, axis, tensors, options, sent, later)

    def exchange_experts_grad(
        self, axis: str, *tensors: Tensor | None, sent: Sent | None = None, later: bool = False, **options: Any
    ) -> tuple[Any, ...]:
        """`autopar.operators.experts_grad`, as `exchange_experts`: of this rank's tokens and weights, and of its own
        experts' parameters, from all tokens. later: the first two are one result, for `take_tokens`.
        """
        return exchange_experts_grad(self, axis, tensors, options, sent, later)

    def exchange_experts_grad_bias(
        self, axis: str, *tensors: Tensor | None, sent: Sent | None = None, later: bool = False, **options: Any
    ) -> tuple[Any, ...]:
        """As `exchange_experts_grad`, and the gradient of the bias."""
        return exchange_experts_grad(self, axis, tensors, options, sent, later)


class RecordingComm(MeshComm):
    """A rank without peers: every collective returns a tensor of the right shape, and is logged.

    On meta tensors nothing is computed. On real ones the values are this rank's own, repeated.
    """

    def __init__(
        self, axes: Sequence[str], sizes: Sequence[int], rank: int, device: torch.device | str = "meta"
    ) -> None:
        super().__init__(axes, sizes, rank, device)
        self.log = []

    def _within(self, axes: tuple[str, ...]) -> Communicator:
        return RecordingComm(axes, *self._inner(axes), self.device)

    def _exchange(self, axis: str, messages: Sequence[Message], together: bool) -> Pending:
        received = [m for m in messages if m.tensor is None]
        return Pending([partial(torch.empty, m.event.shape, dtype=m.dtype, device=self.device) for m in received])

    def _all_gather(self, x: Tensor, event: Event) -> Tensor:
        return x.unsqueeze(0).expand(self._size[event.axis], *x.shape)

    def _all_reduce(self, x: Tensor, event: Event) -> Tensor:
        return x.clone()

    def _reduce_scatter(self, pieces: Tensor, event: Event) -> Tensor:
        return pieces[self._index[event.axis]].contiguous()

    def _all_to_all(self, pieces: Tensor, event: Event) -> Tensor:
        return pieces

    def _exchange_rows(self, x: Tensor, event: Event, rows: list[list[int]]) -> Tensor:
        return x.new_zeros((sum(each[self._index[event.axis]] for each in rows), *x.shape[1:]))


_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class ProcessGroupComm(MeshComm):
    """The ranks of a DeviceMesh, each its own process; axes are the mesh's dim names.

    No wait of gloo takes longer than the default process group's timeout (`init_process_group(timeout=…)`), whatever
    the timeouts of the mesh's groups are; of NCCL these end what hangs.

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
            if sum(size > 1 for size in device_mesh.shape) > 1:
                environment.order_launches()
        super().__init__(names, tuple(device_mesh.shape), rank, device)
        self.device_mesh = device_mesh
        self._group = {axis: device_mesh.get_group(axis) for axis, size in zip(names, self.sizes) if size > 1}
        self._ranks = {axis: dist.get_process_group_ranks(group) for axis, group in self._group.items()}
        self._departures = Departures()
        self.timeout_s = default_timeout_s(self.device) or self.timeout_s

    def neighbours(self) -> Nearby | None:
        """Sockets between all ranks of the job, if they have any (`nearby.py`). Collective."""
        return connect_neighbours()

    def _within(self, axes: tuple[str, ...]) -> Communicator:
        mesh, missing = self.device_mesh, [axis for axis in axes if axis not in self.axes]
        if missing:
            shape = (*self.sizes, *(1 for _ in missing))
            mesh = init_device_mesh(mesh.device_type, shape, mesh_dim_names=(*self.axes, *missing))
        return ProcessGroupComm(mesh[tuple(axes)])

    def connect(self, axis: str, peers: Sequence[int]) -> None:
        """Connect this rank to these places of the axis before a step needs it. Each of them does the same."""
        if peers:
            connect(self, self._group[axis], axis, peers)

    def _exchange(self, axis: str, messages: Sequence[Message], together: bool) -> Pending:
        start = self.recorder.now() if self.recorder is not None else None
        if together and self.device.type == "cuda":
            pending = issue_together(self, self._group[axis], messages)
        else:
            pending = issue(self, self._group[axis], messages, self._departures)
        if self.recorder is not None and messages:
            pending.when_waited = self.recorder.messages([message.event for message in messages], start)
        return pending

    def _all_gather(self, x: Tensor, event: Event) -> Tensor:
        found = self._among_neighbours(x, event)
        return self._issue(x, event)() if found is None else found

    def _all_reduce(self, x: Tensor, event: Event) -> Tensor:
        found = self._among_neighbours(x, event)
        return self._issue(x, event)() if found is None else found

    def _among_neighbours(self, x: Tensor, event: Event) -> Tensor | None:
        """The result of a small collective that is waited for at once, where neighbours exchange it (`nearby.py`)."""
        nearby, ranks = self.nearby, self._ranks[event.axis]
        if nearby is None or not nearby.serves(ranks, x):
            return None
        sent, recorder = as_sendable(x), self.recorder
        start = recorder.now() if recorder is not None else None
        with self._waiting_for(event):
            if event.kind == "all_gather":
                found = nearby.gather(ranks, sent, self.timeout_s).view(len(ranks), *sent.shape)
            else:
                self._reduce_op(event.op, x)
                op = "max" if x.dtype == torch.bool else event.op
                found = nearby.reduce(ranks, sent, op, self.timeout_s)
        if recorder is not None:
            recorder.collective(event, start, None)
        return found.view(x.dtype)

    def beside(self, x: Tensor, axis: str) -> Tensor | None:
        """See `Communicator`."""
        event = Event("all_gather", axis, tuple(x.shape), str(x.dtype).removeprefix("torch."), 0, "beside a program")
        return x.unsqueeze(0) if self._size[axis] == 1 else self._among_neighbours(x, event)

    def _reduce_scatter(self, pieces: Tensor, event: Event) -> Tensor:
        return self._issue(pieces, event)()

    def _all_to_all(self, pieces: Tensor, event: Event) -> Tensor:
        return self._issue(pieces, event)()

    def _exchange_rows(self, x: Tensor, event: Event, rows: list[list[int]]) -> Tensor:
        return self._issue(x, event, rows=rows)()

    def _begin_rows(self, x: Tensor, event: Event, rows: list[list[int]]) -> Callable[[], Tensor]:
        return self._issue(x, event, rows=rows)

    def _begin(self, x: Tensor, event: Event, owned: bool) -> Callable[[], Tensor]:
        return self._issue(x, event, owned)

    def _issue(
        self, x: Tensor, event: Event, owned: bool = False, rows: list[list[int]] | None = None
    ) -> Callable[[], Tensor]:
        sent, recorder = as_sendable(x), self.recorder
        start = recorder.now() if recorder is not None else None
        result, work = self._start(sent, x, event, owned) if rows is None else self._start_rows(sent, event, rows)
        waited = recorder.collective(event, start, work) if recorder is not None else None
        in_flight = (work, sent)

        def wait() -> Tensor:
            if in_flight[0] is not None:
                self._wait_for(in_flight[0], event)
            if waited is not None:
                waited()
            return result.view(x.dtype)

        return wait

    def _wait_for(self, work: Any, event: Event) -> None:
        with self._waiting_for(event):
            work.wait(timedelta(seconds=self.timeout_s))

    @contextmanager
    def _waiting_for(self, event: Event) -> Iterator[None]:
        begun = time.monotonic()
        try:
            with self.trail.waiting(event):
                yield
        except RuntimeError as error:
            is_late = time.monotonic() - begun >= self.timeout_s or tells_of_time(error)
            others = [rank for rank in self._ranks[event.axis] if rank != dist.get_rank()]
            named = f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
            does = f"waited {self.timeout_s:g} s for" if is_late else "lost"
            raise AutoparError(
                f"rank {dist.get_rank()} {does} {named}",
                where=event.where or None,
                values=str(event) if is_late else f"{event}: {str(error).splitlines()[0]}",
                remedy="See what they do, or the error that one of them ended with",
            ) from error

    def _start(self, sent: Tensor, x: Tensor, event: Event, owned: bool) -> tuple[Tensor, Any]:
        """The tensor that will hold the result, and what to wait for."""
        # On CUDA the host never waits anyway: the caller chooses the stream, and a synchronous collective runs there.
        options: dict[str, Any] = {"group": self._group[event.axis], "async_op": self.device.type != "cuda"}
        # Flat: gloo takes pieces concatenated along dim 0 only, NCCL does not care.
        if event.kind == "all_gather":
            result = sent.new_empty((self._size[event.axis], *sent.shape))
            return result, all_gather_single(result.view(-1), sent.view(-1), **options)
        if event.kind == "all_reduce":
            result = sent if owned else sent.clone(memory_format=torch.contiguous_format)
            return result, dist.all_reduce(result, op=self._reduce_op(event.op, x), **options)
        if event.kind == "reduce_scatter":
            result = sent.new_empty(sent.shape[1:])
            op = self._reduce_op(event.op, x)
            return result, reduce_scatter_single(result.view(-1), sent.view(-1), op=op, **options)
        result = torch.empty_like(sent)
        return result, dist.all_to_all_single(result.view(-1), sent.view(-1), **options)

    def _start_rows(self, sent: Tensor, event: Event, rows: list[list[int]]) -> tuple[Tensor, Any]:
        here = self._index[event.axis]
        received = [each[here] for each in rows]
        result = sent.new_empty((sum(received), *sent.shape[1:]))
        work = dist.all_to_all_single(
            result, sent, received, rows[here], group=self._group[event.axis], async_op=self.device.type != "cuda"
        )
        return result, work

    def _reduce_op(self, op: str, x: Tensor) -> dist.ReduceOp.RedOpType:
        # A mask's "sum" is its "or"; adding uint8 could wrap around.
        return reduction("max" if x.dtype == torch.bool and op == "sum" else op, _REDUCE_OPS, self.where)


T = TypeVar("T")


def reduction(op: str, table: dict[str, T], where: str) -> T:
    """`table[op]`, or the error that names the reductions there are."""
    if op not in table:
        raise AutoparError(f"unknown reduction {op!r}", where=where or None, remedy=f"Use one of {', '.join(table)}")
    return table[op]
