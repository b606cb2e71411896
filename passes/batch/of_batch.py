"""What microbatches read of the whole batch, so that what they compute are terms of one mean.

    cross_entropy(x, labels) + mse(x, y)
    →  m * (cross_entropy(x, labels, reduction=sum) / of_batch_0) + mse(x, y)

where of_batch_0 is `(labels != -100).sum()` of all rows, and m the number of microbatches, whose mean is the loss.

An average over some of the rows and a mean over all of them are not one sum over microbatches: a microbatch counts in
the first by how many of its rows count. Where the batch alone tells their number, it is known before anything runs: a
microbatch divides by that of the whole batch, which is then a constant like any other. So is whatever else is made of
inputs and buffers alone and is of all rows (`mask.sum().clamp(min=1)`, the share of positive labels). What is a sum
beside a mean, or beside what is the same for all rows, is multiplied by the number of microbatches.

`Edits` notes what is to be done while the graph is analysed; `edited` does it, in two captures alike. That it is right
is for the analysis of these to say: it takes nothing from here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autopar.ir.batching import OF_BATCH
from autopar.ir.graphs import operands_of
from autopar.ir.nodes import copy_graph, is_float, map_nodes
from autopar.ir.op_call import OpCall
from autopar.ir.program import Program
from autopar.ir.tensor_type import TensorType
from autopar.ir.values import Slot, Variable
from autopar.passes.batch.composites import ORIGINAL
from autopar.passes.batch.states import Coupled, State, Terms, Whole

aten = torch.ops.aten
MOST_ELEMENTS = 4096
"""Of a value that is read of the whole batch: counts and shares, not rows."""
SUM = 2
"""What torch calls the reduction of a loss that is a sum."""


@dataclass(slots=True)
class Edits:
    """What is done to nodes of the larger capture, flattened.

    pairs: the nodes of the smaller one. is_known: whether inputs and buffers alone tell a node. read: values that are
    those of the whole batch. averages: losses that are divided by a count of the whole batch, and the count. scaled: of
    an operator, the operand that is multiplied by the number of microbatches, and how often.
    """

    pairs: Mapping[fx.Node, fx.Node]
    is_known: Callable[[fx.Node], bool]
    read: list[fx.Node] = field(default_factory=list)
    averages: dict[fx.Node, fx.Node] = field(default_factory=dict)
    scaled: dict[tuple[fx.Node, int], int] = field(default_factory=dict)

    @property
    def values(self) -> list[fx.Node]:
        """The nodes whose values are read of the whole batch, each once."""
        return list(dict.fromkeys((*self.read, *self.averages.values())))

    def reads(self, node: fx.Node, states: Sequence[State]) -> bool:
        """Whether a value is read of the whole batch: it is of all rows, small, and known before anything runs."""
        value = node.meta.get("val")
        if len(states) != 1 or not isinstance(states[0], Terms | Coupled) or not isinstance(value, torch.Tensor):
            return False
        same = value.shape == self.pairs[node].meta["val"].shape and value.numel() <= MOST_ELEMENTS
        if not same or not self._is_there(node) or not self.is_known(node):
            return False
        self.read.append(node)
        return True

    def averages_over(self, node: fx.Node, count: fx.Node) -> bool:
        """Whether a loss that torch averages is divided by the count of the whole batch. A sum in half precision may
        not be finite where its average is.
        """
        if not self._is_there(node) or node.meta["val"].dtype == torch.float16 or not self.is_known(count):
            return False
        self.averages[node] = count
        return True

    def as_means(self, node: fx.Node, states: Sequence[State], indices: Sequence[int]) -> bool:
        """Whether operands of a sum are all made means, or what is the same for all rows."""
        if not self._is_there(node):
            return False
        found: dict[tuple[fx.Node, int], int] = {}
        operands = operands_of(node)
        for state, index in zip(states, indices, strict=True):
            if isinstance(state, Terms) and state.count is None:
                power = state.power + 1
            elif isinstance(state, Whole):
                power = state.power
            else:
                return False
            if power < 0 and not is_float(operands[index]):
                return False
            if power:
                found[node, index] = power
        self.scaled |= found
        return True

    def _is_there(self, node: fx.Node) -> bool:
        """Whether it is an operator of the model's own graph, in both captures, and no part of one."""
        return ORIGINAL in node.meta and ORIGINAL in self.pairs[node].meta


def name_of_value(number: int) -> str:
    """The buffer that a program reads a value of the whole batch from."""
    return f"{OF_BATCH}{number}"


def edited(program: Program, edits: Edits, *, microbatches: int, smaller: bool) -> Program:
    """A captured program in which this is done. microbatches: 1 for the whole batch. smaller: it is the one whose nodes
    are the pairs.
    """
    region = program.regions[0]
    graph, mapping = copy_graph(region.graph)
    origins = dict(region.origins)
    nodes = dict.fromkeys((*edits.read, *edits.averages, *(node for node, _ in edits.scaled)))
    own = {node: mapping[(edits.pairs[node] if smaller else node).meta[ORIGINAL]] for node in nodes}
    slots, variables, holders = list(region.slots), list(program.variables), dict[fx.Node, fx.Node]()
    behind = [node for node in graph.nodes if node.op == "placeholder"][: len(slots)]
    first = next(iter(graph.nodes))
    loss_of = {count: own[node] for node, count in edits.averages.items()}
    for number, value in enumerate(edits.values):
        name, example = name_of_value(number), value.meta["val"]
        like = (own[value] if value in own else loss_of[value]).meta["val"]
        with graph.inserting_after(behind[-1]) if behind else graph.inserting_before(first):
            holder = graph.placeholder(name)
        holder.meta["val"] = like.new_empty(example.shape, dtype=example.dtype)
        behind.append(holder)
        holders[value] = holder
        type_ = TensorType.of(example)
        slots.append(Slot(name, type_, False, False))
        variables.append(Variable(name, type_, type_.dtype, False, False))
    for value in edits.read:
        own[value].replace_all_uses_with(holders[value])
    writer = _Writer(graph, origins)
    for node, count in edits.averages.items():
        writer.divide(own[node], holders[count])
    for (node, index), power in edits.scaled.items():
        writer.scale(own[node], index, microbatches**power)
    call = replace(program.calls[0], slots=tuple(slot.name for slot in slots))
    changed = replace(region, graph=graph, slots=tuple(slots), origins=origins)
    return replace(program, regions=(changed,), calls=(call,), variables=tuple(variables))


class _Writer:
    """Adds operators to a graph, at the line of those that they are for."""

    def __init__(self, graph: fx.Graph, origins: dict[str, str]) -> None:
        self.graph, self.origins = graph, origins

    def divide(self, loss: fx.Node, count: fx.Node) -> None:
        """The sum that a loss averages, divided by a count."""
        path = OpCall(loss.target, loss.args, loss.kwargs, (), ()).path("reduction")
        if isinstance(path[0], int):
            loss.args = (*loss.args[: path[0]], SUM, *loss.args[path[0] + 1 :])
        else:
            loss.kwargs = {**loss.kwargs, "reduction": SUM}
        with self.graph.inserting_after(loss):
            made = self._made(loss, aten.div.Tensor, (loss, count), loss.meta["val"])
        loss.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)

    def scale(self, reader: fx.Node, index: int, factor: float) -> None:
        """An operand times a number."""
        operands = iter(range(len(operands_of(reader))))
        with self.graph.inserting_before(reader):
            source = operands_of(reader)[index]
            made = self._made(reader, aten.mul.Tensor, (source, factor), source.meta["val"])
        reader.args, reader.kwargs = map_nodes(
            (reader.args, reader.kwargs), lambda node: made if next(operands) == index else node
        )

    def _made(self, like: fx.Node, target: Any, args: tuple[Any, ...], value: torch.Tensor) -> fx.Node:
        made = self.graph.call_function(target, args)
        made.meta |= {key: x for key, x in like.meta.items() if key not in ("val", "count", ORIGINAL)}
        made.meta["val"] = value
        self.origins[made.name] = self.origins.get(like.name, "")
        return made


def unknown(type_: TensorType) -> torch.Tensor:
    """What stands for a value of the whole batch as long as there is no batch."""
    return torch.full(type_.shape, math.nan if type_.dtype.is_floating_point else 0, dtype=type_.dtype)
