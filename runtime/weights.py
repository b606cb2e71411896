"""Give a taken-over model its values: fresh ones, or a checkpoint's. One module, or one tensor, in memory at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.base.errors import AutoparError
from autopar.base.huggingface.huggingface import initializer
from autopar.base.torch_compat.distributed import WriteRecorder, local_tensor, storage_key
from autopar.runtime.communicator import Communicator
from autopar.runtime.holders import Absent
from autopar.runtime.layout import shard
from autopar.runtime.placements import from_dtensor_placements

Site = tuple[nn.Module, str]


def init_weights(
    model: nn.Module,
    comm: Communicator,
    seed: int,
    *,
    only_meta_buffers: bool = False,
    absent: Sequence[Absent] = (),
) -> None:
    """The model's own initialization, the same numbers for a seed whatever the mesh.

    Every rank runs it for one submodule at a time, in full and on the CPU, from a seed made of `seed` and the
    submodule's name, and keeps its pieces. Children come first; a parent may draw (part of) a child's weight again.

    only_meta_buffers: leave parameters and real buffers as they are (after loading a checkpoint). absent: parameters
    that only other ranks hold: the model's initialization meets them, their numbers are not drawn.

    Raises:
        AutoparError: a parameter, or a buffer on meta, that nothing initializes.
    """
    initialize = initializer(model)
    with _stand_ins(model, comm, absent) as tensors:
        draws = _Draws(tensors, initialize, seed, comm)
        for name, module in _children_first(model):
            written = draws.written_by(name, module)
            wanted = [tensor for tensor in written if tensor.is_buffer or not only_meta_buffers]
            if mine := [tensor for tensor in wanted if tensor.original is not None]:
                draws.draw(name, module, mine)
            for tensor in wanted:
                tensor.is_done = True
        lacking = [t for t in tensors if not t.is_done and (t.is_buffer or not only_meta_buffers)]
    if lacking:
        kind = "buffer" if lacking[0].is_buffer else "parameter"
        raise AutoparError(
            f"nothing initializes the {kind} {lacking[0].name}",
            where=type(model.get_submodule(lacking[0].name.rpartition(".")[0])).__name__,
            remedy="Give its module a reset_parameters(), load a checkpoint, or build the model with real weights",
        )


def materialize_buffers(model: nn.Module, comm: Communicator, absent: Sequence[Absent] = ()) -> None:
    """Real values for buffers that are still on meta, by the model's own initialization; parameters stay."""
    if any(buffer.is_meta for buffer in model.buffers()):
        init_weights(model, comm, 0, only_meta_buffers=True, absent=absent)


def store(parameter: DTensor, whole: Tensor, comm: Communicator) -> None:
    """Write this rank's piece of a global tensor into the parameter, in place."""
    piece = shard(whole.detach(), from_dtensor_placements(parameter.placements), comm)
    with torch.no_grad():
        local_tensor(parameter).copy_(piece)


@dataclass(slots=True, eq=False)
class _Initialized:
    """One parameter or meta buffer while its model is being initialized. original: None where other ranks hold it."""

    name: str
    sites: list[Site]
    original: Tensor | None
    stand_in: Tensor
    is_buffer: bool
    is_done: bool = False
    writers: list[tuple[str, nn.Module]] = field(default_factory=list)

    def put(self, value: Tensor | None) -> None:
        for module, name in self.sites:
            (module._buffers if self.is_buffer else module._parameters)[name] = value  # type: ignore[assignment]

    def full(self) -> Tensor:
        """An uninitialized real tensor of the global shape, on the CPU."""
        empty = torch.zeros(self.stand_in.shape, dtype=self.stand_in.dtype)
        return empty if self.is_buffer else nn.Parameter(empty, requires_grad=self.stand_in.requires_grad)


@contextmanager
def _stand_ins(model: nn.Module, comm: Communicator, absent: Sequence[Absent]) -> Iterator[list[_Initialized]]:
    """Meta tensors in the place of all parameters and meta buffers; afterwards the parameters are back."""
    found: dict[int, _Initialized] = {}
    for prefix, module in model.named_modules():
        for is_buffer, entries in ((False, module._parameters), (True, module._buffers)):
            for name, tensor in entries.items():
                if tensor is None or (is_buffer and not tensor.is_meta):
                    continue
                if id(tensor) not in found:
                    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                    stand_in = empty if is_buffer else nn.Parameter(empty, requires_grad=tensor.requires_grad)
                    full_name = f"{prefix}.{name}" if prefix else name
                    found[id(tensor)] = _Initialized(full_name, [], tensor, stand_in, is_buffer)
                found[id(tensor)].sites.append((module, name))
    tensors = list(found.values())
    for each in absent:
        empty = torch.empty(each.parameter.shape, dtype=each.parameter.dtype, device="meta")
        stand_in = nn.Parameter(empty, requires_grad=each.parameter.requires_grad)
        tensors.append(_Initialized(each.names[0], list(each.sites), None, stand_in, False))
    for tensor in tensors:
        tensor.put(tensor.stand_in)
    try:
        yield tensors
    finally:
        for tensor in tensors:
            is_new = tensor.is_buffer and tensor.is_done and tensor.original is not None
            tensor.put(tensor.original.to(comm.device) if is_new and tensor.original is not None else tensor.original)


class _Draws:
    """Runs the initialization of single submodules, first on meta to see what it writes, then for real."""

    def __init__(
        self, tensors: list[_Initialized], initialize: Callable[[nn.Module], None], seed: int, comm: Communicator
    ) -> None:
        self.tensors, self.initialize, self.seed, self.comm = tensors, initialize, seed, comm
        self.by_storage = {storage_key(tensor.stand_in): tensor for tensor in tensors}

    def written_by(self, name: str, module: nn.Module) -> list[_Initialized]:
        """The tensors that the submodule's initialization writes; remembered as its writer."""
        recorder = WriteRecorder()
        with recorder, torch.random.fork_rng(devices=[]), torch.no_grad():
            self.initialize(module)
        written = [tensor for key, tensor in self.by_storage.items() if key in recorder.written]
        for tensor in written:
            tensor.writers.append((name, module))
        return written

    def draw(self, name: str, module: nn.Module, wanted: list[_Initialized]) -> None:
        """Initialize the submodule for real and keep the pieces of what it writes.

        What earlier submodules wrote into the same tensors is drawn again first: this one may change only a part.
        """
        chain = [writer for tensor in wanted for writer in tensor.writers[:-1]]
        chain = [*dict.fromkeys(chain), (name, module)]
        involved = [tensor for tensor in self.tensors if any(writer in chain for writer in tensor.writers)]
        real = {id(tensor): tensor.full() for tensor in involved}
        for tensor in involved:
            tensor.put(real[id(tensor)])
        own = [self.comm.device] if self.comm.device.type == "cuda" else []
        with torch.random.fork_rng(devices=own), torch.no_grad():
            for writer_name, writer in chain:
                torch.manual_seed(_derived_seed(self.seed, writer_name))
                self.initialize(writer)
        for tensor in involved:
            tensor.put(tensor.stand_in)
        for tensor in wanted:
            if tensor.is_buffer:
                tensor.original = real[id(tensor)]
            else:
                assert isinstance(tensor.original, DTensor)
                store(tensor.original, real[id(tensor)], self.comm)


def _children_first(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every submodule once, in the order of `Module.apply`."""
    names = {id(module): name for name, module in model.named_modules()}
    order: dict[int, tuple[str, nn.Module]] = {}
    model.apply(lambda module: order.setdefault(id(module), (names[id(module)], module)) and None)
    return list(order.values())


def _derived_seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "big")
