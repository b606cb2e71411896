"""Whether some nodes of a graph are made as those of another, small one: a pattern."""

from __future__ import annotations

import torch
from torch import fx

from autopar.ir.nodes import dtype_of, shape_of

_aten = torch.ops.aten


def is_alike(own: object, node: object, found: dict[fx.Node, fx.Node]) -> bool:
    """Whether a value is made as `own` is; found: what stands for which node of the pattern."""
    if isinstance(own, list | tuple):
        if not isinstance(node, list | tuple) or len(own) != len(node):
            return False
        return all(is_alike(a, b, found) for a, b in zip(own, node, strict=True))
    if isinstance(own, fx.Node) and own.target is _aten.detach.default:  # what make_fx puts behind a view
        return is_alike(own.args[0], node, found)
    if not isinstance(own, fx.Node):
        return type(own) is type(node) and own == node
    if not isinstance(node, fx.Node):
        return False
    if own in found:
        return found[own] is node
    if own.op != "placeholder":
        if own.target is not node.target or own.kwargs.keys() != node.kwargs.keys():
            return False
        if not is_alike(own.args, node.args, found):
            return False
        if not all(is_alike(value, node.kwargs[name], found) for name, value in own.kwargs.items()):
            return False
    elif shape_of(own) != shape_of(node) or dtype_of(own) != dtype_of(node):
        return False
    found[own] = node
    return True
