"""Computations as text: nested calls of operators on named values. Text is parsed, never run as Python."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor

Evaluated = Callable[[Mapping[str, Tensor]], Any]
"""From values by their names to what the text says of them."""
Called = Callable[..., Any]
"""`function(values, *arguments, **options)`."""


def evaluated(node: ast.expr, names: Collection[str], function_of: Callable[[str], Called]) -> Evaluated:
    """What an expression says of values of these names. function_of: what a call of that name does.

    Raises:
        ValueError: what is no number, no list, none of the names and no call.
    """
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, int | float | str)):
        constant = node.value
        return lambda values: constant
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        negated = -node.operand.value  # type: ignore[operator]
        return lambda values: negated
    if isinstance(node, ast.Name) and node.id in names:
        name = node.id
        return lambda values: values[name]
    if isinstance(node, ast.List):
        items = [evaluated(each, names, function_of) for each in node.elts]
        return lambda values: [each(values) for each in items]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        function = function_of(node.func.id)
        given = [evaluated(each, names, function_of) for each in node.args]
        options = {each.arg: evaluated(each.value, names, function_of) for each in node.keywords if each.arg}

        def call(values: Mapping[str, Tensor]) -> Any:
            named = {key: each(values) for key, each in options.items()}
            return function(values, *(each(values) for each in given), **named)

        return call
    raise ValueError(f"{ast.unparse(node)[:40]} is neither a number nor a call")
