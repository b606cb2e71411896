"""A step of a pipeline on the user's side: DTensors in, gradients on the parameters, DTensors out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Size, Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import local_tensor
from autopar.ir.interface import ProgramInterface, TensorInterface
from autopar.runtime.branches import Late
from autopar.runtime.communicator import Communicator
from autopar.runtime.input_gradients import as_handed_in, wanted_of
from autopar.runtime.layout import local_part_shape
from autopar.runtime.loader import Tensors
from autopar.runtime.microbatches import whole_output
from autopar.runtime.pipeline import PipelineProgram, PipelineResult, PipelineStep
from autopar.runtime.placements import contiguous_stride, make_dtensor
from autopar.runtime.seen_whole import Coming, SeenWhole
from autopar.runtime.step import as_gradient

Found = tuple[list[Tensor | None], Tensors]


@dataclass(frozen=True, slots=True, eq=False)
class PipelineRun:
    """One step. device_mesh: of a stage. parameters: this rank's, by name. buffers: all, local."""

    step: PipelineStep
    device_mesh: DeviceMesh
    parameters: Mapping[str, nn.Parameter]
    buffers: Tensors

    def forward(self) -> Found:
        """The outputs in the interface's order, zeros without memory where they are on other ranks, of states (caches)
        what stands for them; the new values of buffers.

        Where gradients are recorded, the backward of an output is an error: one rank cannot run it alone.
        """
        with torch.no_grad():
            result = self.step.forward(self._state())
        zeros = [None if value is not None else self._zeros(place) for place, value in enumerate(result.outputs)]
        outputs = tuple(own if zero is None else zero for own, zero in zip(result.outputs, zeros, strict=True))
        return self._outputs(replace(result, outputs=outputs), refuses=torch.is_grad_enabled()), result.updates

    def train(self, loss: int, late: Late) -> Found:
        """The whole schedule. loss: its place among the outputs. late: gets the gradients.

        Raises:
            AutoparError: the loss is no scalar that parameters lead to.
        """
        interface = self.step.program.interface
        entry = interface.outputs[loss]
        if entry.shape or not entry.differentiable:
            raise AutoparError(
                "the loss does not depend on any trainable parameter" if not entry.shape else "the loss is no scalar",
                where=entry.name,
            )
        one = torch.ones((), dtype=getattr(torch, entry.dtype), device=self.step.comm.device)
        places = [place for place, output in enumerate(interface.outputs) if output.differentiable]
        wanted = wanted_of(interface, self.step.batch.inputs)
        with torch.no_grad():
            result = self.step.train(self._state(), tuple(one if place == loss else None for place in places))
            late += [
                (self.parameters[entry.name], gradient)
                for entry in interface.parameters
                if (gradient := self._gradient(entry, result.gradients, loss)) is not None
            ]
            found = as_handed_in(self.step.batch, result.inputs, wanted, (loss,))
            late += [(x, gradient) for x, gradient in zip(wanted, found, strict=True) if gradient is not None]
        return self._outputs(result, refuses=False), result.updates

    def _state(self) -> Tensors:
        state = dict(self.buffers)
        interface = self.step.program.interface
        for entry in interface.buffers:
            for alias in entry.aliases:
                state[alias] = state[entry.name]
        for entry in interface.parameters:
            parameter = self.parameters.get(entry.name)
            if parameter is not None:
                assert isinstance(parameter, DTensor)
                state.update(dict.fromkeys((entry.name, *entry.aliases), local_tensor(parameter)))
        return state

    def _gradient(self, entry: TensorInterface, gradients: Tensors, loss: int) -> Tensor | None:
        parameter = self.parameters.get(entry.name)
        is_trained = entry.differentiable and entry.is_reached((loss,))
        if parameter is None or not parameter.requires_grad or not is_trained:
            return None
        assert isinstance(parameter, DTensor)
        return as_gradient(gradients, entry, parameter, self.step.program.program.filename)

    def _outputs(self, result: PipelineResult, refuses: bool) -> list[Tensor | None]:
        interface = self.step.program.interface
        found: list[Tensor | None] = []
        states = interface.states
        for output, value in zip(interface.outputs, result.outputs, strict=True):
            if value is not None and refuses and output.may_receive:
                value = _NoBackward.apply(torch.zeros((), requires_grad=True), value)
            if value is None and output.name in states:
                value = torch.empty(self._local_shape(output), dtype=getattr(torch, output.dtype), device="meta")
            if value is not None and output.shape:
                entry = whole_output(output, interface.microbatches)
                value = make_dtensor(value, self.device_mesh, entry.sharding, entry.shape)
            found.append(value)
        return found

    def _zeros(self, place: int) -> Tensor | None:
        """In the place of an output that another stage makes: of its shape, in the memory of one number."""
        if place not in self.step.program.made_apart:
            return None
        entry = self.step.program.interface.outputs[place]
        zero = torch.zeros((), dtype=getattr(torch, entry.dtype), device=self.step.comm.device)
        return zero.expand(self._local_shape(whole_output(entry, self.step.program.interface.microbatches)))

    def _local_shape(self, entry: TensorInterface) -> tuple[int, ...]:
        inner = self.step.batch.comm
        return local_part_shape(entry.shape, entry.sharding, inner.sizes, [inner.index(axis) for axis in inner.axes])


class _NoBackward(torch.autograd.Function):
    """The identity, whose backward says what to call instead."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise AutoparError(
            "backward() cannot run a pipeline: its stages go forward and backward in the order of a schedule",
            remedy="Call compiled.train_step(**batch) in place of compiled(**batch) and loss.backward()",
        )


def let_arrive(
    seen: Sequence[Any], program: PipelineProgram, comm: Communicator, arrive: Callable[[str, str, Tensor], Tensor]
) -> None:
    """Have the outputs that one stage alone made come to all ranks where these look at them.

    arrive: of an output's name, the pipeline's axis, and this rank's piece, the piece of the rank that made it.
    """
    axis = program.pipeline.axis
    for place in program.made_apart:
        if isinstance(output := seen[place], SeenWhole):
            name = program.interface.outputs[place].name
            is_here = program.rank_of_output(place) == comm.index(axis)
            output._coming = Coming(partial(arrive, name, axis), is_here)


def stand_ins(interface: ProgramInterface) -> list[Tensor]:
    """Meta tensors in the place of the outputs, to find the loss among them before there is any."""
    return [torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta") for entry in interface.outputs]


def on_mesh(x: Tensor, device_mesh: DeviceMesh, name: str) -> Tensor:
    """A DTensor input on the mesh of a stage; others as they are. It may lie on the whole mesh, replicated over stages.

    Raises:
        AutoparError: an axis that the mesh of a stage lacks splits it.
    """
    if not isinstance(x, DTensor) or x.device_mesh == device_mesh:
        return x
    names, wanted = x.device_mesh.mesh_dim_names or (), device_mesh.mesh_dim_names or ()
    placed = dict(zip(names, x.placements, strict=False))
    split = [axis for axis, placement in placed.items() if axis not in wanted and not placement.is_replicate()]
    if split or not set(names) & set(wanted):
        raise AutoparError(
            f"the input {name} is a DTensor on another mesh",
            values=f"axes {', '.join(names)}, placed {x.placements}; a stage has {', '.join(wanted)}",
            remedy="Use compiled.shard_loader, or replicate it over the pipeline's axis",
        )
    placements = [placed.get(axis, Replicate()) for axis in wanted]
    return DTensor.from_local(
        local_tensor(x),
        device_mesh,
        placements,
        run_check=False,
        shape=Size(x.shape),
        stride=contiguous_stride(x.shape),
    )
