"""Experts that multiply, product by product, the rows that chose them: one operator.

    a = where(number == 0, x @ w1[0], 0); a = where(number == 1, x @ w1[1], a); …    each row by its own expert's matrix
    y = where(number == 0, silu(a) @ w2[0], 0); …                               →   y = experts(x, number, 1, w1, w2, …)

So are experts read that work on slices of sorted tokens (`ragged.py`), once these lie where they were (`unsorted.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.ir.nodes import drop_dead
from autopar.operators.experts import experts  # noqa: F401 (the operator that this writes)
from autopar.passes.expert_products import Product, experts_of, parameters_of, product_of, read_expert, stripped
from autopar.passes.indices import Builder
from autopar.passes.said import Said, shape_of

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten.reshape.default, _aten.flatten.using_ints)
_ZEROS = (_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default)


@dataclass(frozen=True, slots=True)
class _Grouped:
    """A product of each row x[N, in] and the matrix of all, [E, …], that numbers[N] say; numbers beyond give 0."""

    product: Product
    numbers: fx.Node


def simplify_grouped_experts(graph: fx.Graph, origins: dict[str, str]) -> None:
    """Two such products of the same numbers, with a nonlinearity between them, become an operator."""
    found = {node: each for node in graph.nodes if (each := _grouped_of(node)) is not None}
    for node, each in reversed(found.items()):
        known = {
            other: one.product for other, one in found.items() if one.numbers is each.numbers and other is not node
        }
        _write(Builder(graph, node, origins), each, known)
    drop_dead(graph)


def _write(build: Builder, last: _Grouped, known: Mapping[fx.Node, Product]) -> None:
    node: Any = build.node
    expert = read_expert(last.product, lambda each: False, Said(), known)
    if expert is None or any(each not in known.values() for each in expert.first):
        return
    x, dtype = expert.x, node.meta["val"].dtype
    if len(shape_of(x)) != 2 or {x.meta["val"].dtype, last.product.x.meta["val"].dtype} != {dtype}:
        return
    if (tokens := _of_tokens(node, x, last.numbers)) is not None:
        summed, x, index, weights = tokens
        build = replace(build, node=summed)
    else:
        summed, index = node, build(_aten.unsqueeze.default, last.numbers, 1)
        weights = build(_aten.new_ones.default, x, [shape_of(x)[0], 1])
    parameters = parameters_of(build, [expert], lambda parts: parts[0])
    summed.replace_all_uses_with(experts_of(build, x, index, weights, parameters, expert))


def _of_tokens(made: Any, x: Any, numbers: Any) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node] | None:
    """Where rows are tokens, each as often as it has experts, and what is made of them is weighed and summed: that sum,
    the tokens[T, D], their experts[T, K] and weights[T, K].
    """
    wide = x.args[0] if x.target is _aten.reshape.default else x
    source = wide.args[0] if wide.target is _aten.expand.default else wide
    if source.target is not _aten.unsqueeze.default or source.args[1] != 1 or numbers.target not in _VIEWS:
        return None
    tokens, index = source.args[0], numbers.args[0]
    shape = shape_of(index)
    if len(shape) != 2 or shape != shape_of(wide)[:2] or shape_of(tokens)[:1] != shape[:1]:
        return None
    apart = _only_user(made)
    if apart is None or apart.target not in _VIEWS or shape_of(apart) != (*shape, shape_of(made)[-1]):
        return None
    times = _only_user(apart)
    summed = None if times is None or times.target is not _aten.mul.Tensor else _only_user(times)
    if times is None or summed is None or summed.target is not _aten.sum.dim_IntList or summed.kwargs:
        return None
    other: Any = times.args[1] if times.args[0] is apart else times.args[0]
    if list(summed.args[1:]) != [[1]] or not isinstance(other, fx.Node) or shape_of(other) != (*shape, 1):
        return None
    weights = stripped(other, views=True)
    alike = shape_of(weights) == shape and weights.meta["val"].dtype == made.meta["val"].dtype
    return (summed, tokens, index, weights) if alike else None


def _only_user(node: Any) -> Any:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _grouped_of(node: Any) -> _Grouped | None:
    """The product that a node is the last part of, each part of those rows that one number has."""
    if _part_of(node) is None or any(user.target is _aten.where.self and user.args[2] is node for user in node.users):
        return None
    parts: dict[int, Product] = {}
    numbers: set[fx.Node] = set()
    while (part := _part_of(node)) is not None:
        numbers.add(part[0])
        if part[1] in parts:
            return None
        parts[part[1]], node = part[2], stripped(part[3])
    if node.target not in _ZEROS or len(numbers) != 1 or sorted(parts) != list(range(len(parts))):
        return None
    matrices = {_of_all(each.matrix, number) for number, each in parts.items()}
    biases = {None if each.bias is None else _of_all(each.bias, number) for number, each in parts.items()}
    first, matrix, bias = parts[0], next(iter(matrices)), next(iter(biases))
    alike = {(each.x, each.transposed, each.bias is None) for each in parts.values()}
    if len(alike) != 1 or len(matrices) != 1 or len(biases) != 1 or matrix is None or shape_of(matrix)[0] != len(parts):
        return None
    if first.bias is not None and (bias is None or shape_of(bias)[0] != len(parts)):
        return None
    return _Grouped(replace(first, matrix=matrix, bias=bias), numbers.pop())


def _part_of(node: Any) -> tuple[fx.Node, int, Product, fx.Node] | None:
    """Of `where(numbers == number, x @ matrix, before)`: the numbers, the number, the product of all rows, and what is
    there before.
    """
    if getattr(node, "target", None) is not _aten.where.self:
        return None
    mask, value, before = node.args
    marked, product = _number_of(mask), product_of(value)
    if marked is None or product is None or shape_of(before) != shape_of(node) or len(shape_of(node)) != 2:
        return None
    x = stripped(product.x, views=True)
    if x.target is _aten.where.self and _number_of(x.args[0]) == marked:  # others' rows hold what does no harm
        x = stripped(x.args[1], views=True)
    if shape_of(x)[:1] != shape_of(marked[0]) or len(shape_of(x)) != 2:
        return None
    return *marked, replace(product, x=x), before


def _number_of(mask: Any) -> tuple[fx.Node, int] | None:
    """The numbers[N], and the one that they have where a mask [N, 1] is set."""
    marked = stripped(mask, views=True)
    if marked.target is not _aten.eq.Scalar or len(shape_of(marked)) != 1 or type(marked.args[1]) is not int:
        return None
    return (marked.args[0], marked.args[1]) if shape_of(mask) == (*shape_of(marked), 1) else None


def _of_all(parameter: Any, number: int) -> fx.Node | None:
    """What a parameter is the part of one number of."""
    parameter = stripped(parameter)
    if parameter.target is not _aten.select.int or parameter.args[1] != 0 or parameter.args[2] != number:
        return None
    source: fx.Node = parameter.args[0]
    return source
