"""Arrays and addresses of tensors that lie in pieces: of the memory itself where a rank has all of it, else of a copy.

    state["w"].numpy(), np.asarray(p.detach())     whole on every rank: its memory, to read and to write
                                                   in pieces: a copy of the whole, an array that is read-only
    state["w"].data_ptr(), .untyped_storage()      in pieces: a copy's, which stays where it is as long as the tensor
                                                   is there, and is filled anew each time (safetensors reads so)
    torch.from_dlpack(p.detach())                  in pieces: refused

What is written to a copy past torch and NumPy (`torch.from_numpy` of it, an address) is found by the numbers that are
in it, and told at the next forward (`lost_writes.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import local_tensor
from autopar.runtime import lost_writes
from autopar.runtime.expert_layers import LAYER

ARRAYS = frozenset({"__array__", "numpy"})
SHARED = frozenset({"__dlpack__"})
ADDRESSES = frozenset({"data_ptr", "storage", "untyped_storage"})


def own_memory(x: DTensor) -> Tensor | None:
    """The memory of a tensor that this rank has all of, as it is; None of others."""
    is_part = vars(x).get("_autopar_view") is not None  # a copy of it, whose pieces lie elsewhere
    if is_part or vars(x).get(LAYER) is not None or any(not each.is_replicate() for each in x.placements):
        return None
    return local_tensor(x).detach()


def array_of(original: Callable[..., Any], copy: Tensor, args: Any, kwargs: Any) -> Any:
    """An array of a copy of a whole tensor, which nobody takes for the tensor."""
    found = original(copy, *args, **kwargs)
    memory = copy.detach()
    if memory.numel() and found.size and found.__array_interface__["data"][0] == memory.data_ptr():
        found.flags.writeable = False
        holder = found.base if isinstance(found.base, Tensor) else copy
        lost_writes.watch_memory(holder, memory)
    return found


def refused() -> AutoparError:
    """What is said to who asks for the memory of what lies in pieces, to share it."""
    return AutoparError(
        "the memory of a tensor that lies in pieces is to be shared (DLPack): no rank has it whole",
        remedy="Hand in x.full_tensor(), a copy of the whole on every rank, or x.to_local(), this rank's piece",
    )


def take_arrays() -> None:
    """Have DTensors, parameters and gradients among them, be seen as such; idempotent."""
    kind: Any = DTensor
    if getattr(kind, "_autopar_arrays", False):
        return
    kind._autopar_arrays = True
    for name in sorted(ARRAYS | SHARED):
        setattr(kind, name, _of_whole(getattr(Tensor, name)))


def _of_whole(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def read(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        if type(self) is not DTensor:
            return original(self, *args, **kwargs)
        if self.requires_grad and not kwargs.get("force"):  # refused by torch, in its words
            return original(torch.empty(0, requires_grad=True), *args, **kwargs)
        memory = own_memory(self)
        if memory is not None:
            return original(memory, *args, **kwargs)
        if original.__name__ in SHARED:
            raise refused()
        detached: Any = self.detach()
        return array_of(original, detached.full_tensor(), args, kwargs)

    return read
