"""One step of a generated program, over all its microbatches, as a node of the user's autograd graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import dtensor_like, local_tensor, tree_flatten, tree_unflatten
from autopar.ir.interface import ProgramInterface, TensorInterface
from autopar.ir.sharding import replicated
from autopar.runtime.apart import apart
from autopar.runtime.branches import Late
from autopar.runtime.communicator import Communicator
from autopar.runtime.input_gradients import InputGradients, as_handed_in, wanted_of
from autopar.runtime.layout import in_blocks, local_part_shape, piece_of_block, redistribute, resized, shard
from autopar.runtime.loader import Tensors
from autopar.runtime.microbatches import Batch, seeds_of, whole_output
from autopar.runtime.placements import make_dtensor
from autopar.runtime.recording import Recorder
from autopar.runtime.second import once

Grads = tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What the forwards of a step leave behind, all local: `saved` and the state that it saw, of each microbatch.

    outputs: the step's, in the interface's order. updates: the last values of the buffers that forward changes.
    """

    outputs: tuple[Tensor, ...]
    updates: Tensors
    saved: list[Any]
    states: list[Tensors]
    held: Tensors


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One step on one rank: the batch with its program, and the seed of its first microbatch's random draws.

    recorder: writes down when what ran. widened: names of outputs -> the same batch with a program whose backward takes
    gradients for all of them. received: the names of those for which gradients came, in steps of this program.
    hooked: the places of outputs at whose gradients the script looks.
    """

    batch: Batch
    seed: int | Tensor
    recorder: Recorder | None = None
    widened: Callable[[tuple[str, ...]], Batch] | None = None
    received: set[str] = field(default_factory=set)
    hooked: set[int] = field(default_factory=set)

    def forward(self, state: Tensors) -> Forwarded:
        """All microbatches' forwards, each from the buffers that the step found; new ones are joined as outputs are."""
        held: Tensors = {}
        state = self.batch.with_values(in_blocks(self.batch.interface, state))
        done: list[tuple[Tensor, ...]] = []
        kept: list[Any] = []
        changed: list[Tensors] = []
        for group in self.batch.together:
            outputs, saved, updates = self._forward_of(group, state, held)
            done += outputs
            kept.append(saved)
            changed.append(updates)
        return Forwarded(self._combined(done), self._updates(changed), kept, [state] * len(kept), held)

    def backward(self, states: Sequence[Tensors], saved: Sequence[Any], held: Tensors, grads: Grads) -> Tensors:
        """All microbatches' backwards; the local gradients by parameter name, and of inputs by `gradient_key`.

        grads: of the step's outputs, local, one for each differentiable output. A microbatch that none of them depends
        on is left out.
        """
        parts = [self._parts(grads, i) for i in range(self.batch.num)]
        groups = self.batch.together
        order = [number for number, group in enumerate(groups) if _reached(parts, group)]
        gradients: Tensors = {}
        sums: Tensors = {}
        inputs = InputGradients(self.batch)
        for number in order:
            group, is_last = groups[number], number == order[-1]
            with self._recorded(group[0]):
                gradients = self._backward_of(group, states[number], held, saved[number], parts, sums, is_last)
            inputs.take(group, gradients)
        return {**gradients, **inputs.joined()}

    def in_turn(self, state: Tensors, find_loss: Callable[[Sequence[Tensor]], int]) -> tuple[Forwarded, Tensors, int]:
        """Forward and backward of one microbatch after the other, so that only one's activations live, or those of as
        many as go through the program together.

        find_loss: outputs of a microbatch -> the place of the loss among them, whose gradient is 1.

        Returns:
            What the forwards leave behind (nothing saved), the local gradients by parameter name, the loss's place.
        """
        held: Tensors = {}
        sums: Tensors = {}
        gradients: Tensors = {}
        state = self.batch.with_values(in_blocks(self.batch.interface, state))
        done: list[tuple[Tensor, ...]] = []
        changed: list[Tensors] = []
        parts: list[Grads] = []
        loss, last = 0, self.batch.together[0]
        for group in self.batch.together:
            outputs, saved, updates = self._forward_of(group, state, held)
            done += outputs
            changed.append(updates)
            if not parts:
                loss = find_loss(outputs[0])
                parts = self._loss_parts(outputs[0], loss)
                last = [each for each in self.batch.together if _reached(parts, each)][-1]
            if _reached(parts, group):
                with self._recorded(group[0]):
                    found = self._backward_of(group, state, held, saved, parts, sums, group == last)
                    gradients = found or gradients
            del saved
        return Forwarded(self._combined(done), self._updates(changed), [], [], {}), gradients, loss

    def for_gradients(self, grads: Sequence[Tensor | None]) -> tuple[Step, Grads]:
        """The step with a program whose backward takes these gradients, and the gradients as it takes them.

        That is mostly this step. The first gradient for an output other than those it differentiates gets a program of
        its own, on all ranks together.

        grads: of all outputs, local.
        """
        entries = self.batch.interface.outputs
        given = [(entry, grad) for entry, grad in zip(entries, grads, strict=True) if grad is not None]
        self.received.update(entry.name for entry, _ in given)
        missing = [entry.name for entry, _ in given if not entry.differentiable]
        if not missing:
            return self, tuple(grad for grad, entry in zip(grads, entries, strict=True) if entry.differentiable)
        if self.widened is None:
            raise AutoparError(
                f"a gradient came for {', '.join(missing)}, which this program does not differentiate",
                where=self.batch.program.filename,
                remedy=f"plan with roots={tuple(entry.name for entry, _ in given)}",
            )
        batch = self.widened(tuple(entry.name for entry in entries if entry.name in self.received))
        by_name = {entry.name: _moved(batch.comm, grad, entry, batch.interface) for entry, grad in given}
        roots = [entry.name for entry in batch.interface.outputs if entry.differentiable]
        return replace(self, batch=batch), tuple(by_name.get(name) for name in roots)

    def _recorded(self, microbatch: int) -> AbstractContextManager[None]:
        return nullcontext() if self.recorder is None else self.recorder.program(self.batch.comm, microbatch)

    def _forward_of(
        self, group: tuple[int, ...], state: Tensors, held: Tensors
    ) -> tuple[list[tuple[Tensor, ...]], Any, Tensors]:
        """Outputs of each microbatch of a group, what backward needs, and the new buffers."""
        batch, interface = self.batch, self.batch.interface
        inputs = batch.inputs_of(group)
        seeds = seeds_of(self.seed, group, batch.comm.device)
        with self._recorded(group[0]):
            outputs, saved = batch.program.forward(batch.comm, state, held, inputs, seeds)
        count = len(interface.outputs)
        cut = count * interface.together
        if len(outputs) != cut + len(interface.updates):
            raise AutoparError(
                f"forward returned {len(outputs)} values, {cut + len(interface.updates)} are planned",
                where=batch.program.filename,
                values=f"{cut} outputs, {len(interface.updates)} new buffers",
            )
        updates = {entry.name: value for entry, value in zip(interface.updates, outputs[cut:], strict=True)}
        results = [
            tuple(
                piece_of_block(batch.comm, value, entry)
                for value, entry in zip(outputs[place * count : (place + 1) * count], interface.outputs, strict=True)
            )
            for place in range(len(dict.fromkeys(group)))
        ]
        return results, saved, updates

    def _backward_of(
        self,
        group: tuple[int, ...],
        state: Tensors,
        held: Tensors,
        saved: Any,
        parts: Sequence[Grads],
        sums: Tensors,
        last: bool,
    ) -> Tensors:
        """parts: of each microbatch, the gradients of its outputs. What stands in a group twice counts once."""
        batch = self.batch
        outputs = [entry for entry in batch.interface.outputs if entry.differentiable]
        nothing: Grads = (None,) * len(outputs)
        of_group = [parts[i] if i not in group[:place] else nothing for place, i in enumerate(group)]
        given = tuple(
            given_gradient(batch.comm, grad, entry)
            for grads in of_group
            for grad, entry in zip(grads, outputs, strict=True)
        )
        gradients = batch.program.backward(batch.comm, state, held, saved, given, sums, last)
        for entry in batch.interface.parameters:
            for name in (entry.name, *entry.aliases):
                if name in gradients:
                    gradients[name] = piece_of_block(batch.comm, gradients[name], entry)
        return gradients

    def _combined(self, done: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        return tuple(self.batch.output(place, values) for place, values in enumerate(zip(*done, strict=True)))

    def _updates(self, changed: Sequence[Tensors]) -> Tensors:
        """changed: the new buffers of each microbatch."""
        entries = self.batch.interface.updates
        return {e.name: self.batch.together_of(e, [each[e.name] for each in changed]) for e in entries}

    def _parts(self, grads: Grads, i: int) -> Grads:
        places = [place for place, entry in enumerate(self.batch.interface.outputs) if entry.differentiable]
        return tuple(self.batch.gradient(place, grad, i) for place, grad in zip(places, grads, strict=True))

    def _loss_parts(self, outputs: Sequence[Tensor], loss: int) -> list[Grads]:
        """Each microbatch's part of the loss's gradient, 1."""
        entries = enumerate(self.batch.interface.outputs)
        one = torch.ones_like(outputs[loss])
        grads = tuple(one if place == loss else None for place, entry in entries if entry.differentiable)
        if all(grad is None for grad in grads):
            raise AutoparError(
                "the loss does not depend on any trainable parameter", where=self.batch.interface.outputs[loss].name
            )
        return [self._parts(grads, i) for i in range(self.batch.num)]


def _reached(parts: Sequence[Grads], group: Sequence[int]) -> bool:
    """Whether a gradient comes for any microbatch of a group."""
    return any(grad is not None for i in group for grad in parts[i])


def _moved(comm: Communicator, grad: Tensor, source: TensorInterface, interface: ProgramInterface) -> Tensor:
    """The gradient of an output as another program lays that output out; local tensors."""
    target = next(entry for entry in interface.outputs if entry.name == source.name)
    if (source.sharding, source.block) == (target.sharding, target.block):
        return grad
    comm.at("outputs")
    return shard(gathered(comm, grad, source), target.sharding, comm)


def gathered(comm: Communicator, value: Tensor, entry: TensorInterface) -> Tensor:
    """An output, or its gradient, whole on every rank."""
    target = replicated(len(comm.axes))
    if entry.block is None:
        return redistribute(value, entry.sharding, target, comm)
    # Uneven pieces are blocks of equal size with the padding at the very end of the dim.
    whole = redistribute(resized(value, entry.block), entry.sharding, target, comm)
    return resized(whole, entry.shape)


def given_gradient(comm: Communicator, grad: Tensor | None, entry: TensorInterface) -> Tensor | None:
    """An output's gradient as the program takes it: zeros for an output that nothing depends on, but None for an
    average that a microbatch without weight has no part in (zero times what it computed as 0 / 0 is no number).
    """
    if grad is None and entry.combine == "weighted":
        return None
    if grad is not None:
        return grad if entry.block is None else resized(grad, entry.block)
    at = [comm.index(axis) for axis in comm.axes]
    shape = entry.block or local_part_shape(entry.shape, entry.sharding, comm.sizes, at)
    return torch.zeros(shape, dtype=getattr(torch, entry.dtype), device=comm.device)


def state_of(interface: ProgramInterface, parameters: Sequence[Tensor], buffers: Tensors) -> Tensors:
    """Local tensors by name and alias, of DTensor parameters in the interface's order."""
    state = dict(buffers)
    for entry, parameter in zip(interface.parameters, parameters, strict=True):
        assert isinstance(parameter, DTensor)
        state.update(dict.fromkeys((entry.name, *entry.aliases), local_tensor(parameter)))
    return state


def run_step(step: Step, parameters: Sequence[Tensor], buffers: Tensors) -> tuple[list[Tensor], Tensors]:
    """The outputs in the interface's order: scalars plain, larger ones DTensors in their planned sharding; the updates.

    Where gradients are recorded, they lead back to the DTensor parameters, and to the inputs that require one; without,
    nothing is saved.
    """
    updates: Tensors = {}
    wanted = wanted_of(step.batch.interface, step.batch.inputs)
    if torch.is_grad_enabled() and (wanted or any(parameter.requires_grad for parameter in parameters)):
        outputs: Sequence[Tensor] = StepNode.apply(step, buffers, updates, len(parameters), *parameters, *wanted)
    else:
        with torch.no_grad():
            done = step.forward(state_of(step.batch.interface, parameters, buffers))
        outputs, updates = done.outputs, done.updates
    return _as_outputs(step, outputs, parameters), updates


def run_step_in_turn(
    step: Step, parameters: Sequence[Tensor], buffers: Tensors, find_loss: Callable[[Sequence[Tensor]], int], late: Late
) -> tuple[list[Tensor], Tensors]:
    """As `run_step` and `loss.backward()`: one microbatch after the other. late: gets the gradients."""
    with torch.no_grad():
        done, gradients, loss = step.in_turn(state_of(step.batch.interface, parameters, buffers), find_loss)
    found = zip(parameters, _as_dtensors(gradients, parameters, step.batch, {loss}), strict=True)
    late += [(parameter, gradient) for parameter, gradient in found if gradient is not None]
    return _as_outputs(step, done.outputs, parameters), done.updates


def _as_outputs(step: Step, outputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    interface = step.batch.interface
    entries = [whole_output(entry, interface.microbatches) for entry in interface.outputs]
    return [
        make_dtensor(value, _mesh_of(parameters), entry.sharding, entry.shape) if entry.shape else value
        for value, entry in zip(outputs, entries, strict=True)
    ]


def _mesh_of(parameters: Sequence[Tensor]) -> Any:
    first = parameters[0]
    assert isinstance(first, DTensor)
    return first.device_mesh


class StepNode(torch.autograd.Function):
    """Inputs: the DTensor parameters, as many as `count`, then the inputs that require a gradient. Outputs: this rank's
    outputs. Both passes are the generated program's.
    """

    @staticmethod
    def forward(
        ctx: Any, step: Step, buffers: Tensors, updates: Tensors, count: int, *given: Tensor
    ) -> tuple[Tensor, ...]:
        interface, parameters = step.batch.interface, given[:count]
        with torch.no_grad():
            done = step.forward(state_of(interface, parameters, buffers))
            outputs = apart(done.outputs)
        updates.update(done.updates)
        # Through save_for_backward, so that activations, and parameters held for the step, are freed with the graph,
        # and kept by retain_graph.
        leaves, ctx.spec = tree_flatten((done.saved, done.held))
        ctx.is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        ctx.others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        ctx.save_for_backward(*(leaf for leaf in leaves if isinstance(leaf, Tensor)))
        ctx.step, ctx.states, ctx.parameters, ctx.wanted = step, done.states, parameters, given[count:]
        ctx.versions = [parameter._version for parameter in parameters]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(value for value, entry in zip(outputs, interface.outputs) if not entry.may_receive)
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        step: Step = ctx.step
        interface = step.batch.interface
        _check_unchanged(ctx.parameters, ctx.versions, interface)
        places = {place for place, grad in enumerate(grads) if grad is not None}
        _check_hooks(step.hooked, places, interface)
        saved, held = _take_saved(ctx)
        states = ctx.states
        # The user may call backward() under autocast.
        with torch.no_grad(), torch.autocast(step.batch.comm.device.type, enabled=False):
            taken, given = step.for_gradients([None if grad is None else grad.contiguous() for grad in grads])
            if taken is not step:
                del saved, held
                done = taken.forward(states[0])
                states, saved, held = done.states, done.saved, done.held
                del done
            gradients = taken.backward(states, saved, held, given)
            of_inputs = as_handed_in(taken.batch, gradients, ctx.wanted, places)
        found = _as_dtensors(gradients, ctx.parameters, taken.batch, places)
        return (None, None, None, None, *once([*found, *of_inputs], (*ctx.parameters, *ctx.wanted, *grads)))


def _check_hooks(hooked: Container[int], places: Collection[int], interface: ProgramInterface) -> None:
    """Raises an AutoparError where a script looks at an output's gradient, of which a part comes from inside."""
    outputs = interface.outputs
    for place, entry in enumerate(outputs):
        others = [outputs[other].name for other in places if other != place]
        if place in hooked and others:
            raise AutoparError(
                f"a hook of the output {entry.name} does not see what comes to it through {', '.join(others)}, which a "
                "program computes inside",
                remedy=f"Compute the loss outside of the model, from {entry.name} alone, or put the hook on a tensor "
                "in the model's forward, as an autograd.Function",
            )


def _take_saved(ctx: Any) -> tuple[list[Any], Tensors]:
    """What was saved, and what is held, in new containers: the program empties them as it goes.

    Unless the graph is retained, nothing else keeps the tensors, so that they are freed during the backward.
    """
    tensors, others = iter(ctx.saved_tensors), iter(ctx.others)
    ctx.maybe_clear_saved_tensors()
    leaves = [next(tensors) if is_tensor else next(others) for is_tensor in ctx.is_tensor]
    saved, held = tree_unflatten(leaves, ctx.spec)
    return saved, held


def _as_dtensors(
    gradients: Tensors, parameters: Sequence[Tensor], batch: Batch, places: Container[int]
) -> list[Tensor | None]:
    """places: of the outputs that have a gradient."""
    found: list[Tensor | None] = []
    for entry, parameter in zip(batch.interface.parameters, parameters, strict=True):
        assert isinstance(parameter, DTensor)
        if not parameter.requires_grad or not entry.differentiable or not entry.is_reached(places):
            found.append(None)
            continue
        found.append(as_gradient(gradients, entry, parameter, batch.program.filename))
    return found


def as_gradient(gradients: Tensors, entry: TensorInterface, parameter: DTensor, where: str) -> DTensor:
    """The local gradient of a parameter, under whichever of its names, as a DTensor placed like it.

    Raises:
        AutoparError: there is none, or it has another shape than the rank's piece.
    """
    name = next((name for name in (entry.name, *entry.aliases) if name in gradients), None)
    if name is None:
        raise AutoparError(f"backward returned no gradient for {entry.name}", where=where)
    local = local_tensor(parameter)
    if gradients[name].shape != local.shape:
        raise AutoparError(
            f"backward returned a gradient of another shape for {entry.name}",
            where=where,
            values=f"{tuple(gradients[name].shape)}, the rank holds {tuple(local.shape)}",
        )
    return dtensor_like(parameter, gradients[name].to(local.dtype))


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
    loss = loss_in(output, is_scalar)
    if loss is None:
        raise AutoparError(
            "train_step found no loss in the model's output",
            values=f"the output is a {type(output).__name__}",
            remedy="Pass labels, so that the model computes one, or use loss.backward() on one of your own",
        )
    return loss


def is_scalar(leaf: Any) -> bool:
    """Whether it is a tensor of no dim."""
    return isinstance(leaf, Tensor) and leaf.ndim == 0


def loss_in(output: Any, is_loss: Callable[[Any], bool] = is_scalar) -> Tensor | None:
    """As `find_loss`; None where there is none."""
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, dict):
        loss = output.get("loss")
    if loss is None:
        leaves, _ = tree_flatten(output)
        loss = next((leaf for leaf in leaves if is_loss(leaf)), None)
    return loss if isinstance(loss, Tensor) else None
