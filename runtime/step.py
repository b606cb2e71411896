"""One forward of a generated program as a node of the user's autograd graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.interface import ProgramInterface
from autopar.runtime.comm import Communicator
from autopar.runtime.loader import LoadedProgram, Tensors
from autopar.runtime.placements import make_dtensor
from autopar.torch_compat.distributed import dtensor_like, local_tensor, tree_flatten, tree_unflatten


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """What one forward needs beside the parameters: the program, this rank's inputs and buffers, the dropout seed."""

    program: LoadedProgram
    interface: ProgramInterface
    comm: Communicator
    buffers: Tensors
    inputs: Tensors
    seed: Tensor

    def forward(self, parameters: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Any, Tensors]:
        """Run the program on DTensor parameters (in the interface's order); outputs, what backward needs, the state."""
        state = dict(self.buffers)
        for entry, parameter in zip(self.interface.parameters, parameters, strict=True):
            assert isinstance(parameter, DTensor)
            state.update(dict.fromkeys((entry.name, *entry.aliases), local_tensor(parameter)))
        with torch.no_grad():
            outputs, saved = self.program.forward(self.comm, state, self.inputs, self.seed)
        if len(outputs) != len(self.interface.outputs):
            raise AutoparError(
                f"forward returned {len(outputs)} outputs, {len(self.interface.outputs)} are planned",
                where=self.program.filename,
            )
        return tuple(outputs), saved, state


def run_step(call: Call, parameters: Sequence[Tensor]) -> list[Tensor]:
    """The outputs in the interface's order: scalars plain, larger ones DTensors in their planned sharding.

    Where gradients are recorded, they lead back to the DTensor parameters; without, nothing is saved.
    """
    if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters):
        outputs: Sequence[Tensor] = _Step.apply(call, *parameters)
    else:
        outputs, _, _ = call.forward(parameters)
    return [
        make_dtensor(value, _mesh_of(parameters), entry.sharding, entry.shape) if entry.shape else value
        for value, entry in zip(outputs, call.interface.outputs, strict=True)
    ]


def _mesh_of(parameters: Sequence[Tensor]) -> Any:
    first = parameters[0]
    assert isinstance(first, DTensor)
    return first.device_mesh


class _Step(torch.autograd.Function):
    """Inputs: the DTensor parameters. Outputs: this rank's outputs. Both passes are the generated program's."""

    @staticmethod
    def forward(ctx: Any, call: Call, *parameters: Tensor) -> tuple[Tensor, ...]:
        outputs, saved, state = call.forward(parameters)
        # Through save_for_backward, so that activations are freed with the graph, and kept by retain_graph.
        leaves, ctx.spec = tree_flatten(saved)
        ctx.is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        ctx.others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        ctx.save_for_backward(*(leaf for leaf in leaves if isinstance(leaf, Tensor)))
        ctx.call, ctx.state, ctx.parameters = call, state, parameters
        ctx.versions = [parameter._version for parameter in parameters]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(value for value, entry in zip(outputs, call.interface.outputs) if not entry.differentiable)
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        _check_unchanged(ctx.parameters, ctx.versions, call.interface)
        tensors, others = iter(ctx.saved_tensors), iter(ctx.others)
        saved = tree_unflatten([next(tensors) if is_tensor else next(others) for is_tensor in ctx.is_tensor], ctx.spec)
        given = tuple(
            grad.contiguous() if grad is not None else None
            for grad, entry in zip(grads, call.interface.outputs)
            if entry.differentiable
        )
        with torch.no_grad():
            gradients = call.program.backward(call.comm, ctx.state, saved, given)
        return (None, *_as_dtensors(gradients, ctx.parameters, call))


def _as_dtensors(gradients: Tensors, parameters: Sequence[DTensor], call: Call) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    for entry, parameter in zip(call.interface.parameters, parameters, strict=True):
        if not parameter.requires_grad or not entry.differentiable:
            found.append(None)
            continue
        name = next((name for name in (entry.name, *entry.aliases) if name in gradients), None)
        if name is None:
            raise AutoparError(f"backward returned no gradient for {entry.name}", where=call.program.filename)
        local = local_tensor(parameter)
        if gradients[name].shape != local.shape:
            raise AutoparError(
                f"backward returned a gradient of another shape for {entry.name}",
                where=call.program.filename,
                values=f"{tuple(gradients[name].shape)}, the rank holds {tuple(local.shape)}",
            )
        found.append(dtensor_like(parameter, gradients[name].to(local.dtype)))
    return found


def _check_unchanged(parameters: Sequence[DTensor], versions: list[int], interface: ProgramInterface) -> None:
    for parameter, version, entry in zip(parameters, versions, interface.parameters, strict=True):
        if parameter._version != version:
            raise AutoparError(
                f"{entry.name} was changed between forward and backward",
                remedy="Call optimizer.step() after backward()",
            )


def find_loss(output: Any, is_scalar: Callable[[Any], bool]) -> Tensor:
    """`output.loss`, `output["loss"]`, or the first scalar in the output.

    Raises:
        AutoparError: there is none.
    """
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, dict):
        loss = output.get("loss")
    if loss is None:
        leaves, _ = tree_flatten(output)
        loss = next((leaf for leaf in leaves if is_scalar(leaf)), None)
    if not isinstance(loss, Tensor):
        raise AutoparError(
            "train_step found no loss in the model's output",
            values=f"the output is a {type(output).__name__}",
            remedy="Pass labels, so that the model computes one, or use loss.backward() on one of your own",
        )
    return loss
