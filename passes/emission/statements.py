"""One line of Python per operator, as a person would write it."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar.ir import TensorType
from autopar.sharding import local_shape

_INFIX = {
    "aten.add.Tensor": "+", "aten.sub.Tensor": "-", "aten.mul.Tensor": "*", "aten.div.Tensor": "/",
    "aten.mm.default": "@",
    "aten.mul.Scalar": "*", "aten.div.Scalar": "/", "aten.add.Scalar": "+", "aten.sub.Scalar": "-",
    "aten.pow.Tensor_Scalar": "**", "aten.bitwise_and.Tensor": "&", "aten.bitwise_or.Tensor": "|",
    "aten.eq.Tensor": "==", "aten.eq.Scalar": "==", "aten.ne.Tensor": "!=", "aten.ne.Scalar": "!=",
    "aten.le.Tensor": "<=", "aten.lt.Tensor": "<", "aten.ge.Tensor": ">=", "aten.gt.Tensor": ">",
    "aten.le.Scalar": "<=", "aten.lt.Scalar": "<", "aten.ge.Scalar": ">=", "aten.gt.Scalar": ">",
}  # fmt: skip
_METHODS = {
    "aten.transpose.int": "transpose", "aten.unsqueeze.default": "unsqueeze", "aten.t.default": "t",
    "aten.squeeze.dim": "squeeze", "aten.clone.default": "clone", "aten.amax.default": "amax",
}  # fmt: skip
_SHAPE_METHODS = {
    "aten.view.default": "reshape", "aten._unsafe_view.default": "reshape", "aten.reshape.default": "reshape",
    "aten.expand.default": "expand", "aten.permute.default": "permute",
}  # fmt: skip
_TORCH = frozenset(
    [
        "rsqrt",
        "sqrt",
        "exp",
        "log",
        "cos",
        "sin",
        "tanh",
        "sigmoid",
        "relu",
        "neg",
        "where",
        "bmm",
        "cat",
        "stack",
        "cumsum",
        "abs",
        "reciprocal",
        "erf",
        "logical_not",
    ]
)
_FUNCTIONAL = frozenset({"silu", "gelu"})


def statement(node: fx.Node, name: Callable[[fx.Node], str]) -> str:
    """The right-hand side for one node. `name` gives the Python name of an operand."""
    if node.op == "call_method":
        target, *rest = node.args
        return f"{_text(target, name)}.{node.target}({_arguments(rest, node.kwargs, name)})"
    if node.target is operator.getitem:
        return f"{_text(node.args[0], name)}[{node.args[1]!r}]"
    if node.target in (operator.mul, operator.add):
        sign = "*" if node.target is operator.mul else "+"
        return f"{_text(node.args[0], name)} {sign} {_text(node.args[1], name)}"
    return _operator(node, name)


def statement_lines(node: fx.Node, name: Callable[[fx.Node], str]) -> list[str]:
    """A call of a method with many arguments, as lines: up to the parenthesis, operands, options."""
    target, *rest = node.args
    lines = [_arguments(rest, {}, name), _arguments((), node.kwargs, name)]
    return [f"{_text(target, name)}.{node.target}(", *(f"{line}," for line in lines if line)]


def _operator(node: fx.Node, name: Callable[[fx.Node], str]) -> str:
    target = str(node.target)
    base = target.split(".")[1]
    first = _text(node.args[0], name) if node.args else ""
    if target in _INFIX and not node.kwargs and len(node.args) == 2:
        return f"{first} {_INFIX[target]} {_text(node.args[1], name)}"
    if target == "aten.neg.default":
        return f"-{first}"
    if target in _METHODS:
        return f"{first}.{_METHODS[target]}({_arguments(node.args[1:], node.kwargs, name)})"
    if target in _SHAPE_METHODS and not node.kwargs:
        shape: Any = node.args[1]
        return f"{first}.{_SHAPE_METHODS[target]}({', '.join(_text(item, name) for item in shape) or '()'})"
    if target == "aten.sum.dim_IntList" and not node.kwargs:
        _, dims, *keepdim = node.args
        return f"{first}.sum({_text(dims, name)}{', keepdim=True' if keepdim and keepdim[0] else ''})"
    if target == "aten._to_copy.default" and set(node.kwargs) == {"dtype"}:
        return f"{first}.to({_text(node.kwargs['dtype'], name)})"
    if target == "aten.slice.Tensor" and (index := _slice_index(node)) is not None:
        return f"{first}[{index}]"
    kwargs = {key: value for key, value in node.kwargs.items() if key not in ("pin_memory", "layout")}
    arguments = _arguments(node.args, kwargs, name)
    if target.startswith("autopar."):
        return f"ops.{base}({arguments})"
    if target.endswith(".default") or target in ("aten.where.self", "aten.where.ScalarOther"):
        if base in _TORCH:
            return f"torch.{base}({arguments})"
        if base in _FUNCTIONAL:
            return f"F.{base}({arguments})"
    return f"{target.removesuffix('.default')}({arguments})"


def _slice_index(node: fx.Node) -> str | None:
    if len(node.args) > 4 or any(isinstance(arg, fx.Node) for arg in node.args[1:]):
        return None
    given: list[Any] = list(node.args[1:])
    dim, start, end = given + [0, None, None][len(given) :]
    if "type" not in node.meta:
        return None
    position = dim % len(node.meta["type"].shape)
    stop = "" if end is None or end > 1 << 60 else str(end)
    head = ", ".join([":"] * position)
    return f"{head}{', ' if head else ''}{start or ''}:{stop}"


def _arguments(args: Sequence[Any], kwargs: Mapping[str, Any], name: Callable[[fx.Node], str]) -> str:
    parts = [_text(arg, name) for arg in args]
    parts += [f"{key}={'comm.device' if key == 'device' else _text(value, name)}" for key, value in kwargs.items()]
    return ", ".join(parts)


def _text(value: Any, name: Callable[[fx.Node], str]) -> str:
    if isinstance(value, fx.Node):
        return name(value)
    if isinstance(value, (list, tuple)):
        inner = ", ".join(_text(item, name) for item in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, torch.device):
        return "comm.device"
    if isinstance(value, str):
        return '"' + value.replace('"', '\\"') + '"'
    return repr(value)


def comment(node: fx.Node, axes: Sequence[str]) -> str:
    """`f32[8/dp, 64]`: global dims, what splits them, what is still to be summed; empty where a node is not one
    tensor.
    """
    type_: TensorType | None = node.meta.get("type")
    if type_ is None:
        return ""
    return type_.text(node.meta["sharding"], axes)


def local_bytes(node: fx.Node, sizes: Sequence[int]) -> int:
    """Bytes of a node's value on one rank (0 where it is not one tensor)."""
    type_: TensorType | None = node.meta.get("type")
    if type_ is None:
        return 0
    return math.prod(local_shape(type_.shape, node.meta["sharding"], sizes)) * type_.dtype.itemsize


def identifier(text: str) -> str:
    """A Python name for any name."""
    plain = re.sub(r"\W", "_", text)
    return f"_{plain}" if plain[:1].isdigit() else plain
