"""A step on plain tensors that every rank holds whole: in go whole tensors, out come whole outputs and gradients."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import tree_flatten, tree_unflatten
from autopar.ir.interface import TensorInterface
from autopar.runtime.apart import apart
from autopar.runtime.layout import shard
from autopar.runtime.loader import Tensors
from autopar.runtime.second import once
from autopar.runtime.step import Step, gathered


def run_plain(step: Step, state: Tensors) -> tuple[list[Tensor], Tensors]:
    """The outputs in the interface's order, whole on every rank; the new values of the buffers that forward changes.

    state: parameters and buffers by name, whole; the plan stores every one replicated. Where gradients are recorded,
    they lead back to the parameters, whole and reduced, the same on every rank.
    """
    trained = [entry for entry in step.batch.interface.parameters if entry.differentiable]
    updates: Tensors = {}
    if torch.is_grad_enabled() and any(state[entry.name].requires_grad for entry in trained):
        outputs: Sequence[Tensor] = _PlainNode.apply(step, state, updates, *(state[entry.name] for entry in trained))
        return list(outputs), updates
    with torch.no_grad():
        done = step.forward({name: value.detach() for name, value in state.items()})
        return _gathered(step, done.outputs), done.updates


class _PlainNode(torch.autograd.Function):
    """Inputs: the trained parameters, whole. Outputs: whole. Both passes are the generated program's."""

    @staticmethod
    def forward(ctx: Any, step: Step, state: Tensors, updates: Tensors, *trained: Tensor) -> tuple[Tensor, ...]:
        interface = step.batch.interface
        with torch.no_grad():
            done = step.forward(state)
            outputs = apart(_gathered(step, done.outputs))
        updates.update(done.updates)
        # The state too: autograd then says so itself when a parameter changes between forward and backward.
        leaves, ctx.spec = tree_flatten((done.saved, done.held, done.states))
        ctx.is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        ctx.others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        ctx.save_for_backward(*(leaf for leaf in leaves if isinstance(leaf, Tensor)))
        ctx.step, ctx.trained = step, trained
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(value for value, entry in zip(outputs, interface.outputs, strict=True) if not entry.may_receive)
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            found = _gradients(ctx, grads)
        return (None, None, None, *once(found, (*ctx.trained, *grads)))


def _gradients(ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Of the trained parameters."""
    step: Step = ctx.step
    interface = step.batch.interface
    tensors, others = iter(ctx.saved_tensors), iter(ctx.others)
    leaves = [next(tensors) if is_tensor else next(others) for is_tensor in ctx.is_tensor]
    saved, held, states = tree_unflatten(leaves, ctx.spec)
    comm = step.batch.comm
    pairs = zip(grads, interface.outputs, strict=True)
    local = [None if grad is None else shard(grad.contiguous(), entry.sharding, comm) for grad, entry in pairs]
    taken, given = step.for_gradients(local)
    if taken is not step:
        done = taken.forward(states[0])
        states, saved, held = done.states, done.saved, done.held
    gradients = taken.backward(states, saved, held, given)
    places = {place for place, grad in enumerate(grads) if grad is not None}
    trained = [entry for entry in taken.batch.interface.parameters if entry.differentiable]
    return [_gradient(taken, gradients, entry, places) for entry in trained]


def _gradient(step: Step, gradients: Tensors, entry: TensorInterface, places: Container[int]) -> Tensor | None:
    """places: of the outputs that have a gradient."""
    if not entry.is_reached(places):
        return None
    name = next((name for name in (entry.name, *entry.aliases) if name in gradients), None)
    if name is None or tuple(gradients[name].shape) != entry.shape:
        found = "none" if name is None else str(tuple(gradients[name].shape))
        raise AutoparError(
            f"backward returned no whole gradient for {entry.name}",
            where=step.batch.program.filename,
            values=f"{found}, the parameter is {entry.shape}",
        )
    return gradients[name]


def _gathered(step: Step, outputs: Sequence[Tensor]) -> list[Tensor]:
    """The step's outputs, whole on every rank."""
    comm = step.batch.comm
    comm.at("outputs")
    return [gathered(comm, value, entry) for value, entry in zip(outputs, step.batch.interface.outputs, strict=True)]
