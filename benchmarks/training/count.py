"""Count what torch.distributed is really asked to send, whoever asks; knows nothing of Communicator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

from autopar.base.torch_compat.distributed import TorchDispatchMode
from autopar.runtime.agreement import SENT

MOST_AXES = 4
"""Of a mesh."""


@dataclass(frozen=True, slots=True)
class Sent:
    """One collective operator, or one tensor sent to a peer. bytes_sent: per rank, for a ring (all_to_all: a direct
    exchange; `exchange`: one of unequal pieces, what goes to others).
    """

    kind: str
    group: str
    num_ranks: int
    shape: tuple[int, ...]
    dtype: str
    bytes_sent: int | float


class CollectiveCounter(TorchDispatchMode):
    """`with CollectiveCounter() as counter: ...` and then `counter.sent`, `counter.bytes_by_kind()`.

    Sees the c10d and functional operators below every API (all_reduce, DTensor, …), in forward and backward; leaves out
    what ranks compare before a step (`runtime/agreement.py`), which is no part of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Sent] = []

    def bytes_by_kind(self) -> dict[str, int | float]:
        """Total bytes per kind of collective."""
        totals: dict[str, int | float] = {}
        for entry in self.sent:
            totals[entry.kind] = totals.get(entry.kind, 0) + entry.bytes_sent
        return totals

    def total_bytes(self) -> int | float:
        """Bytes sent by this rank, all kinds together."""
        return sum(entry.bytes_sent for entry in self.sent)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Write the operator down if it is a collective, and run it."""
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor goes first, and the collectives it issues come here
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func, args, dict(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = func._schema.name.split("::")[1]
        if name not in _KINDS:
            return
        kind, which, sent_bytes = _KINDS[name]
        named = {argument.name: value for argument, value in zip(func._schema.arguments, args)} | kwargs
        group = _group(named.get("process_group", named.get("group_name")))
        num = group.size()
        tensor = _first_tensor(named[which])
        if num > 1 and not _is_agreement(kind, tensor):
            total = sent_bytes(tensor.nbytes, num)
            if splits := named.get("input_split_sizes"):
                kind, own = "exchange", splits[dist.get_group_rank(group, dist.get_rank())]
                total = tensor.nbytes // max(1, sum(splits)) * (sum(splits) - own)
            entry = Sent(kind, str(group.group_name), num, tuple(tensor.shape), str(tensor.dtype)[6:], total)
            self.sent.append(entry)


def _is_agreement(kind: str, tensor: Tensor) -> bool:
    """Whether it is what ranks compare: these numbers, and one for each axis on which they hold something alike."""
    is_numbers = kind == "all_gather" and tensor.dtype == torch.int64 and tensor.dim() == 1
    return is_numbers and len(SENT) <= len(tensor) <= len(SENT) + MOST_AXES


def _group(given: Any) -> dist.ProcessGroup:
    """What a c10d operator was called with: boxed, or its name."""
    if isinstance(given, str):
        return distributed_c10d._resolve_process_group(given)  # type: ignore[arg-type]
    return dist.ProcessGroup.unbox(given)


def _first_tensor(value: Any) -> Tensor:
    while isinstance(value, list | tuple):
        value = value[0]
    assert isinstance(value, Tensor)
    return value


def _divided(total: int, num: int) -> int | float:
    return total // num if total % num == 0 else total / num


def _all_reduce(size_bytes: int, num: int) -> int | float:
    return _divided(2 * (num - 1) * size_bytes, num)


def _gather(piece_bytes: int, num: int) -> int | float:
    return (num - 1) * piece_bytes


def _scatter(whole_bytes: int, num: int) -> int | float:
    return _divided((num - 1) * whole_bytes, num)


# operator: (kind, the argument that is this rank's input, bytes it sends given that input's bytes and the ranks)
_KINDS: dict[str, tuple[str, str, Callable[[int, int], int | float]]] = {
    "allreduce_": ("all_reduce", "tensors", _all_reduce),
    "all_reduce": ("all_reduce", "input", _all_reduce),
    "all_reduce_": ("all_reduce", "input", _all_reduce),
    "_allgather_base_": ("all_gather", "input_tensor", _gather),
    "allgather_": ("all_gather", "input_tensors", _gather),
    "all_gather_into_tensor": ("all_gather", "input", _gather),
    "all_gather_into_tensor_out": ("all_gather", "input", _gather),
    "_reduce_scatter_base_": ("reduce_scatter", "input_tensor", _scatter),
    "reduce_scatter_tensor": ("reduce_scatter", "input", _scatter),
    "reduce_scatter_tensor_out": ("reduce_scatter", "input", _scatter),
    "alltoall_base_": ("all_to_all", "input", _scatter),
    "all_to_all_single": ("all_to_all", "input", _scatter),
    "send": ("send", "tensors", lambda size_bytes, num: size_bytes),
    "broadcast_": ("broadcast", "tensors", lambda size_bytes, num: _divided((num - 1) * size_bytes, num)),
    "broadcast": ("broadcast", "input", lambda size_bytes, num: _divided((num - 1) * size_bytes, num)),
}
