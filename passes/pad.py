"""pad: vocabularies that an axis does not divide get rows that count for nothing.

Requires: phase `outlined`.
Ensures: the same phase and numbers. The slots of an embedding table, of a head and of its bias whose size is no
    multiple of `multiple` are padded to one (`Variable.padded`, rows of zeros); the head's product has -inf in the
    columns of padding (`autopar.linear(…, valid=V)`), so that no maximum, sum of exponentials, label or gradient sees
    them; an output made of it has the padded type, and the user's shape as `Port.logical`. A vocabulary is left as it
    is where anything reads the logits but a cross entropy and the program's outputs, or more than an eighth would be
    added.

    logits = linear(x, w[50257, D]); loss = cross_entropy(view(logits, [-1, 50257]), labels)
    →  logits = autopar.linear(x, w[50264, D], valid=50257); loss = cross_entropy(view(logits, [-1, 50264]), labels)

A rank's block of the padded dim begins with what `torch.chunk` gives it of the unpadded one
(`autopar.blocks.chunks_are_blocks`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autopar import operators  # noqa: F401 (defines torch.ops.autopar)
from autopar.ir.nodes import copy_graph, shape_of
from autopar.ir.program import Program
from autopar.ir.region import Region
from autopar.ir.tensor_type import TensorType
from autopar.ir.values import Slot, Variable
from autopar.passes.class_dims import moved_dim

aten = torch.ops.aten

MOST = 1 / 8
"""The largest part of a vocabulary that may be added: a table of two rows is not worth splitting eight ways."""


def padded_size(size: int, multiple: int) -> int:
    """The least multiple that is no smaller."""
    return -(-size // multiple) * multiple


def pad(program: Program, *, multiple: int) -> Program:
    """Pad every vocabulary that `multiple` ranks cannot share equally, and that can be padded."""
    sizes = {}
    for variable in program.variables:
        size = variable.type.shape[0] if variable.type.shape else 0
        wanted = padded_size(size, multiple)
        if variable.is_parameter and 0 < wanted - size <= size * MOST:
            sizes[variable.name] = wanted
    # What a head adds to its product is padded with it, or neither is: drop candidates until what is left fits.
    while sizes:
        plans = {region.name: _plan(program, region, sizes) for region in program.regions}
        refused = set().union(*(plan.refused for plan in plans.values())) | _lonely(program, sizes)
        if not refused & set(sizes):
            return _apply(program, sizes, plans)
        sizes = {name: wanted for name, wanted in sizes.items() if name not in refused}
    return program


@dataclass(slots=True)
class _RegionPlan:
    """What a region needs: nodes whose result grows, with the dim and both sizes; variables that cannot be padded."""

    grown: dict[fx.Node, tuple[int, int, int]] = field(default_factory=dict)
    heads: set[fx.Node] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)


def _lonely(program: Program, sizes: Mapping[str, int]) -> set[str]:
    """Candidates that no region uses, or that a repeated one does."""
    used = {name for call in program.calls if program.num_calls(call.region) == 1 for name in call.slots}
    repeated = {name for call in program.calls if program.num_calls(call.region) > 1 for name in call.slots}
    return {name for name in sizes if name not in used or name in repeated}


def _slots(program: Program, region: Region, sizes: Mapping[str, int]) -> Iterator[tuple[fx.Node, str]]:
    holders = [node for node in region.graph.nodes if node.op == "placeholder"]
    for _, call in program.calls_of(region.name):
        yield from ((node, name) for node, name in zip(holders, call.slots, strict=False) if name in sizes)


def _plan(program: Program, region: Region, sizes: Mapping[str, int]) -> _RegionPlan:
    plan = _RegionPlan()
    names = dict(_slots(program, region, sizes))
    for holder, name in names.items():
        if region.module or not all(_is_use(user, holder, names, sizes) for user in holder.users):
            plan.refused.add(name)
            continue
        for user in holder.users:
            if user.target is aten.linear.default and user.args[1] is holder:
                plan.heads.add(user)
                if not _grow(program, region, user, sizes[name], plan):
                    plan.refused.add(name)
    return plan


def _is_use(user: fx.Node, holder: fx.Node, names: Mapping[fx.Node, str], sizes: Mapping[str, int]) -> bool:
    """Whether padding a slot leaves the meaning of a use: a table that ids look up, a head, the bias of one."""
    if user.target is aten.embedding.default:
        rescales = [*user.args[3:], *user.kwargs.values()]
        return user.args[0] is holder and user.args[1] is not holder and not any(rescales)
    if user.target is not aten.linear.default or user.args[0] is holder:
        return False
    weight, bias = user.args[1], user.args[2] if len(user.args) > 2 else None
    pair = [node for node in (weight, bias) if node is not None]
    return all(isinstance(node, fx.Node) and node in names for node in pair) and (
        len({sizes[names[node]] for node in pair if isinstance(node, fx.Node)}) == 1
    )


def _grow(program: Program, region: Region, head: fx.Node, wanted: int, plan: _RegionPlan) -> bool:
    """Follow a head's product to its readers; False where one of them would see the padding."""
    size = shape_of(head)[-1]
    stack = [(head, len(shape_of(head)) - 1)]
    while stack:
        node, dim = stack.pop()
        plan.grown[node] = (dim, size, wanted)
        for user in node.users:
            if user.op == "output":
                if not _only_leaves(program, region, node):
                    return False
            elif not _is_cross_entropy(user, node, dim):
                moved = moved_dim(user, node, dim)
                if moved is None:
                    return False
                stack.append((user, moved))
    return True


def _only_leaves(program: Program, region: Region, node: fx.Node) -> bool:
    """Whether a result of the region is an output of the program, and no call reads it."""
    output = next(n for n in region.graph.nodes if n.op == "output")
    indices = {i for i, value in enumerate(output.args[0]) if value is node}
    own = {call for call, _ in program.calls_of(region.name)}
    return not any(ref.call in own and ref.index in indices for call in program.calls for ref in call.arguments)


def _is_cross_entropy(user: fx.Node, logits: fx.Node, dim: int) -> bool:
    """Whether a node is a cross entropy of these logits that is made of `sum_exp` and `take_label`."""
    if user.target is not aten.cross_entropy_loss.default or user.args[0] is not logits or user.args[1] is logits:
        return False
    names = ("weight", "reduction", "ignore_index", "label_smoothing")
    given = dict(zip(names, user.args[2:])) | dict(user.kwargs)
    labels = user.args[1].meta["val"] if isinstance(user.args[1], fx.Node) else None
    plain = given.get("weight") is None and not given.get("label_smoothing")
    return plain and labels is not None and not labels.is_floating_point() and dim == min(1, len(shape_of(logits)) - 1)


# ------------------------------------------------------------------------------------------------------- the rewrite


def _apply(program: Program, sizes: Mapping[str, int], plans: Mapping[str, _RegionPlan]) -> Program:
    regions = {}
    for region in program.regions:
        names = dict(_slots(program, region, sizes))
        if names:
            regions[region.name] = _rewrite(region, plans[region.name], {n: sizes[name] for n, name in names.items()})
    variables = tuple(_padded(variable, sizes.get(variable.name)) for variable in program.variables)
    added = ", ".join(f"{v.name} {v.type.shape[0]} to {v.padded[0]}" for v in variables if v.padded)
    return program.with_regions(regions, variables=variables, notes=(*program.notes, f"padded: {added} rows"))


def _padded(variable: Variable, size: int | None) -> Variable:
    return variable if size is None else replace(variable, padded=(size, *variable.type.shape[1:]))


def _rewrite(region: Region, plan: _RegionPlan, slots: Mapping[fx.Node, int]) -> Region:
    graph, copies = copy_graph(region.graph)
    for node, size in slots.items():
        _set_shape(copies[node], (size, *shape_of(node)[1:]))
    for node, (dim, size, wanted) in plan.grown.items():
        copy = copies[node]
        _set_shape(copy, (*shape_of(node)[:dim], wanted, *shape_of(node)[dim + 1 :]))
        if node in plan.heads:
            copy.target = torch.ops.autopar.linear.default
            copy.kwargs = {**copy.kwargs, "valid": size}
        elif copy.target in (aten.view.default, aten.reshape.default, aten._unsafe_view.default):
            copy.args = (copy.args[0], _view_shape(copy.args[1], size, wanted))
    holders = [node for node in region.graph.nodes if node.op == "placeholder"]
    changed = {i: slots[node] for i, node in enumerate(holders) if node in slots}
    output = next(node for node in region.graph.nodes if node.op == "output")
    ports = tuple(
        replace(port, type=TensorType.of(copies[value].meta["val"]), logical=port.type.shape)
        if value in plan.grown
        else port
        for port, value in zip(region.outputs, output.args[0], strict=True)
    )
    seen = tuple(_grown_slot(slot, changed.get(i)) for i, slot in enumerate(region.slots))
    return replace(region, graph=graph, slots=seen, outputs=ports)


def _grown_slot(slot: Slot, size: int | None) -> Slot:
    return slot if size is None else replace(slot, type=TensorType((size, *slot.type.shape[1:]), slot.type.dtype))


def _view_shape(shape: Any, size: int, wanted: int) -> list[int]:
    """The last dim of a view is the vocabulary; -1 there is worked out anew."""
    *lead, last = list(shape)
    return [*lead, wanted if last == size else last]


def _set_shape(node: fx.Node, shape: tuple[int, ...]) -> None:
    value = node.meta["val"]
    node.meta = {**node.meta, "val": torch.empty(shape, dtype=value.dtype, device=value.device)}
