"""Experts placed by load, between steps: methods of `CompiledModule`.

    compiled.expert_loads()               from here on tokens are counted
    ...                                   some steps
    compiled.place_experts()              experts move between the ranks of their axis, with all that is kept of them
    compiled.experts_home()               and back

What moves are rows of parameters, their gradients and optimizers' states, of all copies of the model (averages,
teachers): one message a tensor. No number of the run changes but for the order of sums. Everything that can fail is
known, on all ranks, before anything moves.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import local_tensor, tree_leaves
from autopar.machine.imbalance import summed_loads
from autopar.machine.packing import busiest, packed, replicated
from autopar.runtime.any_operator import is_watched
from autopar.runtime.engine import Engine
from autopar.runtime.expert_layers import ExpertLayer, has_guests, is_by_slots, is_placed, moved
from autopar.runtime.holders import held_by
from autopar.runtime.known import copies_of, optimizers
from autopar.runtime.meeting import gathered, meet, together
from autopar.runtime.optimizers import gathers, is_elementwise
from autopar.runtime.optimizers import held_by as trained_by
from autopar.runtime.repeats import Repeats
from autopar.runtime.state import cut_states

WHAT = "place experts"
_ON_ALL = "Call it on every rank, with the same loads: experts move between ranks"


@dataclass(frozen=True, slots=True)
class ExpertsPlaced:
    """A layer after `place_experts`. name: its module. before, after: the tokens of the busiest rank, for each that a
    rank gets on the average, by the loads given. moved: how many experts went to another rank. guests: on all ranks.
    """

    name: str
    before: float
    after: float
    moved: int
    guests: int = 0


def expert_loads(self: Any) -> dict[str, list[int]]:
    """How many tokens chose each expert, on all ranks, since this was asked last: layer -> [experts], by the
    model's numbers. Asked for the first time it begins to count, which costs an addition a layer. Collective.

    Raises:
        AutoparError: no plan yet, or none that sends tokens to experts.
    """
    engine: Engine = self.autopar
    return _loads(engine, _layers(engine))


def place_experts(self: Any, loads: Mapping[str, Any] | None = None, *, replicas: int = 0) -> tuple[ExpertsPlaced, ...]:
    """Move experts between the ranks of their axis, as many on each, so that each gets about as many tokens: the
    heaviest first to the rank that has least. Collective, between steps.

    Losses, gradients and parameters are what they would be, but for the order of sums. What is saved, and seen
    whole, has the model's order; `state_dict()` and what loads bring experts home. A layer that would not gain stays as
    it is.

    Args:
        loads: layer -> tokens of each expert, [experts] or [steps, experts], as `expert_loads` names layers; those
            left out stay. None: what was counted since `expert_loads()` was last asked.
        replicas: how many experts of others each rank may have as guests, which take a part of their tokens: where one
            expert has more than a rank's part, no other place of it helps. A guest's parameters go to it whenever its
            layer runs, and its gradients back; that is sent, and takes its memory, beside what was planned.

    Raises:
        AutoparError: before anything moves, on all ranks: no number of replicas; loads of other layers or sizes, or
            that differ between ranks; a plan that sends no tokens to experts; what cannot follow (an optimizer that is
            none of single elements, states of other shapes, hooks on the experts' gradients), with its name.
    """
    engine: Engine = self.autopar
    layers = _layers(engine)
    by = "loads that were counted" if loads is None else "loads that it was given"
    meet(f"{WHAT} by {by}, {replicas} replicas a rank", engine.comm.timeout_s, _ON_ALL)
    given = together(WHAT, lambda: _checked(layers, loads, replicas))
    counts = _loads(engine, layers) if given is None else given
    if not any(map(sum, counts.values())):
        raise AutoparError(
            "no tokens were counted by which experts could be placed",
            remedy="Call compiled.expert_loads() some steps before, which begins to count, or hand loads in",
        )
    new = {layer.name: packed(counts[layer.name], layer.ranks, layer.slots)
           for layer in layers if sum(counts.get(layer.name, ()))}  # fmt: skip
    guests = {layer.name: replicated(counts[layer.name], layer.ranks, new[layer.name], replicas)
              for layer in layers if layer.name in new}  # fmt: skip
    found = [
        _gain(layer, counts[layer.name], new[layer.name], guests[layer.name]) for layer in layers if layer.name in new
    ]
    _move(engine, layers, new, guests)
    return tuple(found)


def experts_home(self: Any) -> None:
    """Every expert back to the slot of its number, and no guests. Collective; nothing where it is so."""
    engine: Engine = self.autopar
    if is_placed(engine.inner) or has_guests(engine.inner):
        meet("bring experts home", engine.comm.timeout_s, "Call it on every rank: experts move between ranks")
        layers = [layer for layer in engine.inner.experts.values() if layer is not None]
        _move(engine, layers, {layer.name: tuple(range(layer.num)) for layer in layers})


def bring_home(engine: Engine, but: Optimizer | None = None) -> None:
    """As `CompiledModule.experts_home`. but: an optimizer whose states are at home already. Collective."""
    if is_placed(engine.inner):
        layers = [layer for layer in engine.inner.experts.values() if layer is not None]
        _move(engine, layers, {layer.name: tuple(range(layer.num)) for layer in layers}, but=but)


def _layers(engine: Engine) -> list[ExpertLayer]:
    if engine.interface is None:
        raise AutoparError(
            "experts have no place yet: there is no plan before the first batch",
            remedy="Run a step first, or give autopar.compile example_inputs",
        )
    found = [layer for layer in engine.inner.experts.values() if layer is not None]
    if not found:
        has_some = bool(engine.inner.experts)
        raise AutoparError(
            "this plan sends no tokens to experts that could be placed by load",
            values="its layers of experts share a block, or parameters with other parts" if has_some else None,
            remedy='Split tokens and experts by one axis: strategy={"dp": "expert"} or {"dp": "zero3", "ep": "expert"}',
        )
    return found


def _loads(engine: Engine, layers: Sequence[ExpertLayer]) -> dict[str, list[int]]:
    """Of all ranks; counted from 0 again."""
    assert engine.interface is not None
    here = {entry.name for entry in held_by(engine.interface, engine.place_along(engine.interface))}
    own: dict[str, list[int]] = {}
    engine.inner.at("loads of experts")
    for layer in layers:
        if layer.planned.parameters[0] not in here:
            continue
        total = layer.loads
        if total is not None:
            for axis in layer.planned.token_axes:
                total = engine.inner.all_reduce(total, axis)
            own[layer.name] = total.tolist()
        layer.loads = torch.zeros(layer.num, dtype=torch.int64, device=engine.comm.device)
    every = gathered("count tokens of experts", own)
    found = {name: counts for each in every for name, counts in each.items()}
    return {layer.name: found.get(layer.name, [0] * layer.num) for layer in layers}


def _checked(
    layers: Sequence[ExpertLayer], loads: Mapping[str, Any] | None, replicas: int
) -> dict[str, list[float]] | None:
    """Tokens of each expert, as they are handed in; None where they are to be those counted."""
    if type(replicas) is not int or replicas < 0:
        raise AutoparError(f"{replicas!r} replicas a rank", remedy="Give a whole number from 0")
    if loads is None:
        return None
    known = {layer.name: layer for layer in layers}
    if unknown := sorted(set(loads) - set(known)):
        raise AutoparError(
            f"loads of {unknown[0]}, which is no layer of experts of this plan",
            values=f"layers are {', '.join(list(known)[:4])}{', …' if len(known) > 4 else ''}",
            remedy="Name layers as compiled.expert_loads() does",
        )
    return {name: summed_loads(name, given, known[name].num) for name, given in loads.items()}


def _gain(
    layer: ExpertLayer, loads: Sequence[float], slots: Sequence[int], guests: Sequence[Sequence[int]]
) -> ExpertsPlaced:
    room, mean = layer.num // layer.ranks, sum(loads) / layer.ranks
    before = busiest(loads, layer.ranks, layer.slots, layer.guests) / mean
    after = busiest(loads, layer.ranks, slots, guests) / mean
    went = sum(one // room != other // room for one, other in zip(layer.slots, slots, strict=True))
    return ExpertsPlaced(layer.name, before, after, went, sum(map(len, guests)))


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Tensors of this rank whose rows move with a layer's experts; the parameters among them, which are written."""

    layer: ExpertLayer
    tensors: tuple[DTensor, ...]
    parameters: tuple[Tensor, ...]


def _move(
    engine: Engine, layers: Sequence[ExpertLayer], new: Mapping[str, tuple[int, ...]],
    guests: Mapping[str, Sequence[Sequence[int]]] | None = None, but: Optimizer | None = None,
) -> None:  # fmt: skip
    """Experts to their new slots, with all that lies as they do; guests: who visits whom then. Collective."""
    for optimizer, copy in product(optimizers(), copies_of(engine)):
        if optimizer is not but:
            cut_states(optimizer, engine.inner, copy.parameter_ids)  # whole states that were loaded, as before a step
    gc.collect()  # a copy that one rank still has and another does not would be moved by one alone
    rows, said = together(WHAT, partial(_prepared, engine, layers, new, but))
    every = gathered(WHAT, ((said[0], sorted((guests or {}).items())), *said[1:]))
    if odd := [rank for rank, each in enumerate(every) if each[0] != every[0][0]]:
        raise AutoparError(
            f"ranks would place experts otherwise: rank {odd[0]} than rank 0",
            values=f"{every[odd[0]][0]}, rank 0 {every[0][0]}"[:400],
            remedy=_ON_ALL,
        )
    alike = [other for other in range(len(every)) if every[other][1] == said[1]]
    if odd := [rank for rank in alike if every[rank][2] != every[alike[0]][2]]:
        raise AutoparError(
            f"ranks {alike[0]} and {odd[0]} keep other tensors of their experts",
            values=f"{every[odd[0]][2]}, {every[alike[0]][2]}"[:400],
            remedy="Keep optimizers and copies of the model on every rank alike",
        )
    engine.inner.at(WHAT)
    with torch.no_grad():
        for each in rows:
            layer = each.layer
            for x in each.tensors:
                local = local_tensor(x)
                go = (layer.planned.axis, layer.slots, new[layer.name])
                local.copy_(moved(local, engine.inner, *go))
            torch.autograd.graph.increment_version(each.parameters)
    for layer in layers:
        if layer.name in new:
            layer.place(new[layer.name], (guests or {}).get(layer.name, ()))
    for copy in copies_of(engine):
        copy.repeats = Repeats()


def _prepared(
    engine: Engine, layers: Sequence[ExpertLayer], new: Mapping[str, tuple[int, ...]], but: Optimizer | None
) -> tuple[list[_Rows], tuple[Any, ...]]:
    """What is to move, and what ranks have to agree on: the new slots; and those of one stage, on its tensors."""
    copies = copies_of(engine)
    if any(copy.interface is None for copy in copies):
        raise AutoparError(
            "a copy of this model has seen no batch, so that its experts have no place yet",
            remedy="Run a batch through the copy, or place experts first and copy the model then",
        )
    assert engine.interface is not None
    stage = engine.place_along(engine.interface)
    here = {entry.name for entry in held_by(engine.interface, stage)}
    rows: list[_Rows] = []
    for layer in layers:
        if layer.planned.parameters[0] not in here or new.get(layer.name, layer.slots) == layer.slots:
            continue
        parameters = [copy.model.get_parameter(name) for copy in copies for name in layer.planned.parameters]
        tensors = [each for parameter in parameters for each in _of_parameter(parameter, layer, engine, but)]
        rows.append(_Rows(layer, tuple(tensors), tuple(parameters)))
    kept = [(each.layer.name, [(tuple(x.shape), str(x.dtype)) for x in each.tensors]) for each in rows]
    return rows, (sorted(new.items()), stage, kept)


def _of_parameter(parameter: Tensor, layer: ExpertLayer, engine: Engine, but: Optimizer | None) -> Iterator[DTensor]:
    """It, its gradient, and what optimizers keep of it.

    Raises:
        AutoparError: something of it cannot follow.
    """
    assert isinstance(parameter, DTensor)
    if is_watched(parameter):
        raise AutoparError(
            f"a hook looks at the gradient of experts of {layer.name}, whose rows would be other experts'",
            remedy="Remove the hook before experts are placed, or leave them at home",
        )
    yield parameter
    if parameter.grad is not None:
        yield _row_of(parameter.grad, layer, "a gradient")
    for optimizer in optimizers():
        if optimizer is but or not any(each is parameter for each in trained_by(optimizer)):
            continue
        name = type(optimizer).__name__
        if not is_elementwise(optimizer) and gathers(optimizer) is None:
            raise AutoparError(
                f"experts of {layer.name} cannot be placed: {name} is not known to treat each element by itself",
                remedy="Use an elementwise optimizer such as AdamW, or leave experts at home",
            )
        for key, value in optimizer.state.get(parameter, {}).items():
            yield from _of_state(value, layer, f"{name}'s {key}", gathers(optimizer) is not None)


def _of_state(value: Any, layer: ExpertLayer, what: str, whole: bool) -> Iterator[DTensor]:
    """What of a state has rows by slots. whole: whole tensors have the model's order, and stay."""
    for leaf in tree_leaves(value):
        is_plain = isinstance(leaf, Tensor) and not isinstance(leaf, DTensor)
        if not isinstance(leaf, Tensor) or leaf.numel() == 1 or (is_plain and whole):
            continue
        yield _row_of(leaf, layer, what)


def _row_of(x: Tensor, layer: ExpertLayer, what: str) -> DTensor:
    if not is_by_slots(x, layer):
        raise AutoparError(
            f"{what} of experts of {layer.name} cannot follow them",
            values=f"{tuple(x.shape)}, which does not lie in rows of {layer.num} experts over {layer.planned.axis}",
            remedy="Use an optimizer whose states lie as parameters do, such as AdamW, or leave experts at home",
        )
    assert isinstance(x, DTensor)
    return x
