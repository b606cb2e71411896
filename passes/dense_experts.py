"""Experts that are all given all tokens, of which a router's scores leave few: the operator that multiplies these.

    score = sigmoid(full(-inf).scatter(1, index, top))      [T, E], 0 where the router did not choose
    given = x.repeat(E, 1) * score.t().reshape(-1, 1)       [E T, D]
    y = bmm(act(bmm(given, w1)), w2).sum(0)             →   y = experts(x * sigmoid(top), index, 1, w1, w2, …)

Where a score is 0, the expert is given 0 and gives 0, or what it gives counts for nothing: neither it nor its gradient
reaches anything, for the score is a constant there. So the two are the same, with every gradient; that they are is read
off the graph: what scores are where nothing was chosen, and what experts make of 0, is computed.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.ir.nodes import drop_dead
from autopar.operators.activations import activate
from autopar.passes.chosen_experts import weighed_inward
from autopar.passes.expert_products import (
    Expert,
    experts_of,
    is_cast,
    parameters_of,
    product_of,
    read_expert,
    stripped,
    swapped,
)
from autopar.passes.indices import Builder
from autopar.passes.said import Said, shape_of

_aten = torch.ops.aten
_VIEWS = (
    _aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.unsqueeze.default,
    _aten.squeeze.dim, _aten.flatten.using_ints, _aten.contiguous.default, _aten.clone.default,
)  # fmt: skip
_FILLED = {_aten.full_like.default: 1, _aten.full.default: 1, _aten.new_full.default: 2}
"""What has one number everywhere, and the place of it."""
_ZEROS = (_aten.zeros_like.default, _aten.zeros.default, _aten.new_zeros.default)
_DIFFERENT = (_aten.topk.default, _aten.sort.default)


@dataclass(frozen=True, slots=True)
class _Scores:
    """Scores [T, E] that are 0 but for those of indices[T, K], which differ: made of top[T, K] by `steps`, in order."""

    indices: fx.Node
    top: fx.Node
    steps: tuple[fx.Node, ...]


def simplify_dense_experts(graph: fx.Graph, origins: dict[str, str]) -> None:
    """All experts on all tokens become an operator where a router leaves few."""
    for node in list(graph.nodes):
        if node.target is _aten.sum.dim_IntList and len(node.args) == 2 and not node.kwargs:
            _write(Builder(graph, node, origins))
    drop_dead(graph)


def _write(build: Builder) -> None:
    node: Any = build.node
    shape = shape_of(node.args[0])
    if [dim % max(1, len(shape)) for dim in node.args[1]] != [0] or len(shape) != 3:
        return
    num, tokens, width = shape
    made, outward = _flat(node.args[0]), None
    if (times := _times_scores(made, num, tokens)) is not None:
        made, outward = times
    expert = read_expert(product_of(made), lambda each: False, Said())
    if expert is None or shape_of(expert.first[0].matrix)[:-2] != (num,) or shape_of(expert.second.matrix)[0] != num:
        return
    given, inward = _flat(expert.x), None
    if outward is None and (times := _times_scores(given, num, tokens)) is not None:
        given, inward = times
    x, scores = _repeated(given, num), outward or inward
    if x is None or scores is None or shape_of(x) != (tokens, width) or x.meta["val"].dtype != node.meta["val"].dtype:
        return
    if inward is not None and not _gives_nothing_of_0(expert):
        return
    top = scores.top
    for step in scores.steps:
        top = build(step.target, *(top if each is step.args[0] else each for each in step.args), **step.kwargs)
    parameters = parameters_of(build, [expert], lambda parts: _of_experts(build, parts[0], num))
    write = weighed_inward if inward is not None else experts_of
    node.replace_all_uses_with(write(build, x, scores.indices, top, parameters, expert))


def _of_experts(build: Builder, parameter: Any, num: int) -> fx.Node:
    """A parameter of all experts: biases may lie as [E, 1, out]."""
    shape = shape_of(parameter)
    if len(shape) == 3 and shape[1] == 1 and math.prod(shape) == num * shape[-1]:
        return build(_aten.reshape.default, parameter, [num, shape[-1]])
    return parameter


def _flat(node: Any) -> Any:
    """What a value is a view of, which lays dims together or takes them apart."""
    node = stripped(node)
    while isinstance(node, fx.Node) and node.target in _VIEWS:
        node = stripped(node.args[0])
    return node


def _times_scores(node: Any, num: int, tokens: int) -> tuple[fx.Node, _Scores] | None:
    """Of a product of rows [E T, D], or [E, T, D], and scores: both."""
    if node.target is not _aten.mul.Tensor:
        return None
    for rows, column in (node.args, node.args[::-1]):
        if not isinstance(rows, fx.Node) or not isinstance(column, fx.Node):
            continue
        if shape_of(column) not in ((num * tokens, 1), (num, tokens, 1)):
            continue
        by_expert = _flat(column)
        table = swapped(by_expert) if len(shape_of(by_expert)) == 2 else None
        if table is not None and shape_of(table) == (tokens, num) and (found := _scores(table)) is not None:
            return rows, found
    return None


def _scores(table: Any) -> _Scores | None:
    steps: list[fx.Node] = []
    node = stripped(table)
    while _is_step(node):
        steps.insert(0, node)
        node = stripped(node.args[0])
    if node.target is not _aten.scatter.src or len(node.args) != 4 or node.kwargs:
        return None
    base, dim, indices, top = node.args
    rest = _number_of(base)
    if dim not in (1, -1) or rest is None or shape_of(top) != shape_of(indices) or not _differ(indices):
        return None
    if shape_of(indices)[0] != shape_of(base)[0] or base.meta["val"].dtype != top.meta["val"].dtype:
        return None
    value = torch.full((1,), rest, dtype=base.meta["val"].dtype)
    for step in steps:
        compute: Any = step.target
        value = compute(*(value if each is step.args[0] else each for each in step.args), **step.kwargs)
    return _Scores(indices, top, tuple(steps)) if value.item() == 0 else None


def _is_step(node: Any) -> bool:
    """Whether a node computes each number of its operand alone, of nothing else."""
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ()) or is_cast(node)
    return node.op == "call_function" and pointwise and list(node.all_input_nodes) == [node.args[0]]


def _number_of(node: Any) -> float | None:
    """The one number that a tensor has everywhere."""
    if node.target in _ZEROS:
        return 0.0
    place = _FILLED.get(node.target)
    value = None if place is None else node.args[place]
    return float(value) if isinstance(value, int | float) else None


def _differ(indices: Any) -> bool:
    """Whether those of a token are all different: the places that a sort gives."""
    node = stripped(indices)
    if node.target is not operator.getitem or node.args[1] != 1:
        return False
    choice: Any = node.args[0]
    if choice.target not in _DIFFERENT:
        return False
    place = 2 if choice.target is _aten.topk.default else 1
    dim = choice.args[place] if len(choice.args) > place else choice.kwargs.get("dim", -1)
    return dim in (1, -1) and len(shape_of(indices)) == 2


def _repeated(node: Any, num: int) -> fx.Node | None:
    """x[T, D] of which a value [E T, D], or [E, T, D], has so many copies, one after the other; x itself, too."""
    while node.target in _VIEWS and len(shape_of(node)) == 3:
        node = stripped(node.args[0])
    source: Any = node
    if node.target is _aten.repeat.default:
        source, times = node.args
        return source if len(shape_of(source)) == 2 and list(times) in ([num, 1], [num, 1, 1]) else None
    if node.target is _aten.expand.default:
        source = stripped(node.args[0])
        if shape_of(source)[:1] != (1,) or source.target not in _VIEWS:
            return None
        source = stripped(source.args[0])
    return source if len(shape_of(source)) == 2 else None


def _gives_nothing_of_0(expert: Expert) -> bool:
    """Whether an expert makes 0 of 0."""
    if any(each.bias is not None for each in (*expert.first, expert.second)):
        return False
    nothing = torch.zeros(1, dtype=torch.float64)
    found = activate(expert.act, nothing, nothing if expert.gated else None)
    return math.isfinite(found.item()) and found.item() == 0
