"""What a taken-over model runs on: its placed parameters, its programs, its communicator, its dropout seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import swap_tensors

from autopar.errors import AutoparError
from autopar.interface import ProgramInterface, TensorInterface
from autopar.runtime.checks import check_order, check_same_batch, check_same_weights
from autopar.runtime.comm import ProcessGroupComm
from autopar.runtime.executable import Executable
from autopar.runtime.layout import redistribute, shard
from autopar.runtime.loader import LoadedProgram, Tensors, load_program
from autopar.runtime.placements import from_dtensor_placements, make_dtensor
from autopar.runtime.step import Call, run_step
from autopar.sharding import Sharding, format_sharding, replicated
from autopar.torch_compat.distributed import local_tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Prepare = Callable[[tuple[Any, ...], dict[str, Any]], Executable]


class Engine:
    """Behind `compiled.autopar`. Until a first plan is known, parameters are replicated; then they are cut, once.

    comm: the communicator (set `comm.log = []` to write down what it sends).
    """

    def __init__(self, model: nn.Module, device_mesh: DeviceMesh, prepare: Prepare) -> None:
        self.model, self.device_mesh, self.prepare = model, device_mesh, prepare
        self.comm = ProcessGroupComm(device_mesh)
        self.interface: ProgramInterface | None = None
        self._programs: dict[Executable, LoadedProgram] = {}
        self._deferred: list[Callable[[], None]] = []
        self._num_forwards = 0
        self._base_seed = _agreed_seed()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One forward on the user's inputs; the model's own kind of output."""
        executable = self.prepare(args, kwargs)
        self.place(executable.interface)
        inputs = executable.flatten_inputs(args, kwargs)
        program = self._program(executable, inputs)
        interface = executable.interface
        # Wraps around at 2^62: any int64 is a good seed.
        seed = torch.tensor((self._base_seed + self._num_forwards) % 2**62, dtype=torch.int64, device=self.comm.device)
        self._num_forwards += 1
        with torch.no_grad():
            local_inputs = self._split_inputs(program, interface, inputs)
        buffers = {entry.name: self.model.get_buffer(entry.name) for entry in interface.buffers}
        call = Call(program, interface, self.comm, buffers, local_inputs, seed)
        parameters = [self.model.get_parameter(entry.name) for entry in interface.parameters]
        return executable.rebuild_output(run_step(call, parameters))

    def place(self, interface: ProgramInterface) -> None:
        """Cut the parameters as planned, in place: optimizers made since `take_over` keep them. Later plans must agree.

        Raises:
            AutoparError: another mesh than the process group's, shapes that differ, weights that differ between ranks.
        """
        if self.interface is not None:
            self._check_same_storage(interface)
            return
        if (interface.axes, interface.sizes) != (self.comm.axes, self.comm.sizes):
            raise AutoparError(
                "the plan is for another mesh",
                values=f"planned {_mesh_text(interface.axes, interface.sizes)}, "
                f"running on {_mesh_text(self.comm.axes, self.comm.sizes)}",
                remedy="Plan for this mesh, or start as many processes as the plan has ranks",
            )
        found = {entry.name: self.model.get_parameter(entry.name) for entry in interface.parameters}
        local = {name: local_tensor(p) for name, p in found.items() if isinstance(p, DTensor)}
        check_same_weights({name: value for name, value in local.items() if not value.is_meta})
        for entry in interface.parameters:
            self._cut(found[entry.name], entry)
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    module._buffers[name] = buffer.to(self.comm.device)
        self.interface = interface
        for action in self._deferred:
            action()
        self._deferred = []

    def when_placed(self, action: Callable[[], None]) -> None:
        """Run `action` now, or as soon as the first plan has cut the parameters."""
        if self.interface is not None:
            action()
        else:
            self._deferred.append(action)

    def _cut(self, parameter: nn.Parameter, entry: TensorInterface) -> None:
        if tuple(parameter.shape) != entry.shape:
            raise AutoparError(f"{entry.name} is {tuple(parameter.shape)}, planned as {entry.shape}")
        assert isinstance(parameter, DTensor)
        whole = local_tensor(parameter)
        piece = shard(whole, entry.sharding, self.comm)
        if whole.is_meta:
            local = torch.zeros(piece.shape, dtype=piece.dtype, device=self.comm.device)
        else:
            # Never a view: the whole tensor is to be freed.
            local = piece.to(self.comm.device, copy=True, memory_format=torch.contiguous_format)
        placed = as_parameter(local, self.device_mesh, entry.sharding, parameter)
        swap_tensors(parameter, placed)

    def _check_same_storage(self, interface: ProgramInterface) -> None:
        assert self.interface is not None
        if interface.parameters is self.interface.parameters:
            return
        for now, then in zip(interface.parameters, self.interface.parameters, strict=True):
            if (now.name, now.sharding) != (then.name, then.sharding):
                raise AutoparError(
                    f"{then.name} would have to be stored otherwise for this batch",
                    values=f"{format_sharding(then.sharding, self.comm.axes)}, now "
                    f"{now.name} {format_sharding(now.sharding, self.comm.axes)}",
                    remedy="Plan the new batch with the first plan's stored shardings",
                )

    def _program(self, executable: Executable, inputs: Mapping[str, Tensor]) -> LoadedProgram:
        """Load a program at its first use, and check on all ranks that they are about to do the same."""
        if executable not in self._programs:
            check_same_batch(inputs)
            check_order(self.comm, executable.interface, executable.source)
            self._programs[executable] = load_program(executable.source, executable.filename)
        return self._programs[executable]

    def _split_inputs(
        self, program: LoadedProgram, interface: ProgramInterface, inputs: Mapping[str, Tensor]
    ) -> Tensors:
        device = self.comm.device
        if not any(isinstance(x, DTensor) for x in inputs.values()):
            return program.split_inputs(self.comm, {name: x.detach().to(device) for name, x in inputs.items()})
        local: Tensors = {}
        for entry in interface.inputs:
            x = inputs[entry.name]
            if isinstance(x, DTensor):
                source = from_dtensor_placements(x.placements)
                local[entry.name] = redistribute(local_tensor(x), source, entry.sharding, self.comm)
            else:
                local[entry.name] = shard(x.detach().to(device), entry.sharding, self.comm)
        return local


def as_parameter(
    local: Tensor, device_mesh: DeviceMesh, sharding: Sharding | None, original: nn.Parameter
) -> nn.Parameter:
    """A Parameter(DTensor) in the place of `original`: its requires_grad and whatever users hung on it."""
    placed = sharding or replicated(device_mesh.ndim)
    dtensor = make_dtensor(local.detach(), device_mesh, placed, original.shape)
    parameter = nn.Parameter(dtensor, requires_grad=original.requires_grad)
    vars(parameter).update(vars(original))
    return parameter


def _agreed_seed() -> int:
    """Rank 0's seed, on every rank."""
    seed: list[Any] = [torch.initial_seed() % 2**62]
    dist.broadcast_object_list(seed, src=0)
    return int(seed[0])


def _mesh_text(axes: tuple[str, ...], sizes: tuple[int, ...]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in zip(axes, sizes, strict=True))
