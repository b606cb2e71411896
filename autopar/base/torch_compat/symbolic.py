"""What torch's symbolic sizes say of a trace: for which sizes the model does the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.base.torch_compat.tracing import tree_leaves_with_path

AUTO = torch.export.Dim.AUTO
_PLAIN = (sympy.Integer, sympy.Symbol, sympy.Add, sympy.Mul, sympy.Pow)
"""What expressions of sizes may consist of: polynomials."""


def input_symbols(exported: torch.export.ExportedProgram, batch: Mapping[str, Any]) -> dict[tuple[str, int], Any]:
    """The symbols of an exported program's inputs, by the path of an input and its dim."""
    paths = [path for path, value in tree_leaves_with_path(dict(batch))]
    names = [spec.arg.name for spec in exported.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    holders = {node.name: node for node in exported.graph_module.graph.nodes if node.op == "placeholder"}
    found = {}
    for path, name in zip(paths, names, strict=True):
        value = holders[name].meta.get("val") if name in holders else None
        if isinstance(value, torch.Tensor):
            sizes: list[Any] = list(value.shape)
            found.update({(path, dim): s.node._expr for dim, s in enumerate(sizes) if not isinstance(s, int)})
    return found


def shape_env_of(graph: fx.Graph) -> Any:
    """The environment in which a graph was traced; None where nothing in it is symbolic."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            return getattr(value, "fake_mode").shape_env  # noqa: B009 (of fake tensors alone)
    return None


def holds(env: Any, values: Mapping[sympy.Symbol, int]) -> bool:
    """Whether all that a trace took for granted of sizes is so for these."""
    named = {str(symbol): value for symbol, value in values.items()}

    def at(expression: Any) -> Any:
        own = {symbol: named[str(symbol)] for symbol in expression.free_symbols if str(symbol) in named}
        return expression.subs(own) if hasattr(expression, "subs") else expression

    if any(at(guard.expr) != sympy.true for guard in env.guards):
        return False
    for asserts in env.deferred_runtime_asserts.values():
        if any(at(each.expr) != sympy.true for each in asserts):
            return False
    for symbol, instead in env.replacements.items():
        if str(symbol) in named and at(instead) != named[str(symbol)]:
            return False
    ranges = {str(symbol): range_ for symbol, range_ in env.var_to_range.items()}
    return all(name not in ranges or value in ranges[name] for name, value in named.items())


def is_polynomial(graph: fx.Graph) -> bool:
    """Whether every size in a graph is a polynomial of the inputs' sizes."""
    return all(isinstance(part, _PLAIN) and not _divides(part) for e in _expressions(graph) for part in _parts(e))


def _divides(part: sympy.Basic) -> bool:
    return isinstance(part, sympy.Pow) and not (part.exp.is_Integer and part.exp > 0)


def _parts(expression: sympy.Expr) -> Iterable[sympy.Basic]:
    found: Iterable[sympy.Basic] = sympy.preorder_traversal(expression)
    return found


def _expressions(graph: fx.Graph) -> Iterator[sympy.Expr]:
    for node in graph.nodes:
        values = pytree.tree_leaves([node.args, dict(node.kwargs), node.meta.get("val")])
        for value in values:
            if isinstance(value, torch.Tensor):
                sizes: list[Any] = list(value.shape)
                yield from (size.node.expr for size in sizes if not isinstance(size, int))
            elif isinstance(value, torch.SymInt):
                yield value.node.expr
