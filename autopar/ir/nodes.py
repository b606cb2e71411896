"""What passes ask of a node of a graph: its arguments, and the tensor that it makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autopar.ir import TensorType


def type_of(node: object) -> TensorType | None:
    """The shape and dtype of a node's value; None for what is no tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return TensorType.of(value) if isinstance(value, torch.Tensor) else None


def shape_of(node: object) -> tuple[int, ...]:
    """The shape of a node's value; () for what is no tensor."""
    type_ = type_of(node)
    return type_.shape if type_ else ()


def dtype_of(node: fx.Node) -> torch.dtype:
    """The dtype of a node's value, a tensor."""
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def is_float(node: fx.Node) -> bool:
    """Whether a node's value is a tensor of floating point."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of a call, given by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def operand_of(node: fx.Node, position: int = 0) -> fx.Node:
    """An argument of a call that is a node."""
    found = node.args[position]
    assert isinstance(found, fx.Node), (node, position)
    return found


def frozen(value: Any) -> Any:
    """Arguments as a key of a dict; 1, 1.0 and True are three."""
    if isinstance(value, list | tuple):
        return tuple(map(frozen, value))
    if isinstance(value, Mapping):
        return tuple(sorted((key, frozen(item)) for key, item in value.items()))
    return (type(value), value) if isinstance(value, int | float) else value
