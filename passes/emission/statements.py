"""One line of Python per operator, as a person would write it."""

from __future__ import annotations

import math
import operator
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar.ir.tensor_type import TensorType
from autopar.passes.emission.literals import quoted

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
    "aten.squeeze.dim": "squeeze", "aten.amax.default": "amax", "aten.select.int": "select", "aten.sum.default": "sum",
    "aten.masked_fill.Scalar": "masked_fill", "aten.split.Tensor": "split", "aten.gather.default": "gather",
    "aten.argmax.default": "argmax",
}  # fmt: skip
_NEW = {f"aten.{name}.default": name for name in ("new_zeros", "new_ones", "new_full", "new_empty")}
_UNSAID = frozenset({"pin_memory", "layout"})
_SHAPE_METHODS = {
    "aten.view.default": "reshape", "aten._unsafe_view.default": "reshape", "aten.reshape.default": "reshape",
    "aten.expand.default": "expand", "aten.permute.default": "permute",
}  # fmt: skip
_TORCH = frozenset(
    (
        "rsqrt", "sqrt", "exp", "log", "cos", "sin", "tanh", "sigmoid", "relu", "neg", "where", "bmm", "cat", "stack",
        "cumsum", "abs", "reciprocal", "erf", "logical_not", "arange", "minimum", "maximum", "full_like", "ones_like",
        "zeros_like",
    )
)  # fmt: skip
_FUNCTIONAL = frozenset({"silu", "gelu"})
_IN_ORDER: Mapping[str, tuple[int, ...]] = {
    "aten.native_group_norm.default": (0, 1, 2),
    "aten.native_group_norm_backward.default": (0, 1, 2, 3, 4),
    "aten.adaptive_max_pool3d_backward.default": (2,),
    "aten.fractional_max_pool2d_backward.default": (4,),
    "aten.fractional_max_pool3d_backward.default": (4,),
}
"""Operands that torch reads as if they lay in row-major order (its functions copy them first: capture drops copies, and
moves between ranks make other orders). All calls of op_db's samples were run with each operand turned: these gave other
numbers, or none.
"""


END = (1 << 63) - 1
"""What ATen takes for the end of a dim, however long."""
SHAPE = "shape_text"
"""In a lowered node's meta: the local shape that it is given, as text."""

Text = Callable[[fx.Node], str]
"""The Python text of an operand."""


def statement(node: fx.Node, name: Text, operand: Text | None = None) -> str:
    """The right-hand side for one node. `name` gives the text of an argument, `operand` that of what stands before a
    dot or beside an operator's sign.
    """
    inner = operand or name
    if node.op == "call_method":
        target, *rest = node.args
        return f"{_text(target, inner)}.{node.target}({_arguments(rest, node.kwargs, name)})"
    if node.target is operator.getitem:
        return f"{_text(node.args[0], inner)}[{node.args[1]!r}]"
    if node.target in (operator.mul, operator.add):
        sign = "*" if node.target is operator.mul else "+"
        return f"{_text(node.args[0], inner)} {sign} {_text(node.args[1], inner)}"
    return _plain(node, inner) or _call(node, name)


def statement_lines(node: fx.Node, name: Text) -> list[str]:
    """A call of a method with many arguments, as lines: up to the parenthesis, operands, options."""
    target, *rest = node.args
    lines = [_arguments(rest, {}, name), _arguments((), node.kwargs, name)]
    return [f"{_text(target, name)}.{node.target}(", *(f"{line}," for line in lines if line)]


def _plain(node: fx.Node, name: Text) -> str:
    """An operator as a sign or a method; "" where it is written as a function."""
    target = str(node.target)
    first = _text(node.args[0], name) if node.args else ""
    if target in _INFIX and not node.kwargs and len(node.args) == 2:
        return f"{first} {_INFIX[target]} {_text(node.args[1], name)}"
    if target == "aten.neg.default":
        return f"-{first}"
    if target == "aten.clone.default":
        (user,) = node.users if len(node.users) == 1 else (node,)
        copies = str(user.target) in ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
        return first if copies else f"{first}.contiguous()"  # `reshape` copies where it has to
    if target in _METHODS:
        return f"{first}.{_METHODS[target]}({_arguments(node.args[1:], node.kwargs, name)})"
    if target in _SHAPE_METHODS and not node.kwargs:
        shape: Any = node.meta.get(SHAPE) or [_text(item, name) for item in node.args[1]]  # type: ignore[union-attr]
        return f"{first}.{_SHAPE_METHODS[target]}({', '.join(shape) or '()'})"
    if target == "aten.sum.dim_IntList" and not node.kwargs:
        _, dims, *keepdim = node.args
        return f"{first}.sum({_text(dims, name)}{', keepdim=True' if keepdim and keepdim[0] else ''})"
    if target == "aten._to_copy.default" and "dtype" in node.kwargs and set(node.kwargs) <= {"dtype", "device"}:
        return f"{first}.to({_text(node.kwargs['dtype'], name)})"
    if target == "aten.index.Tensor" and not node.kwargs:
        items = [":" if item is None else _text(item, name) for item in node.args[1]]  # type: ignore[union-attr]
        return f"{first}[{', '.join(items)}]"
    if target in _NEW:
        kwargs = {key: value for key, value in node.kwargs.items() if key not in _UNSAID}
        return f"{first}.{_NEW[target]}({_arguments(node.args[1:], kwargs, name)})"
    if target == "aten.slice.Tensor" and (index := _slice_index(node)) is not None:
        return f"{first}[{index}]"
    return ""


def _call(node: fx.Node, name: Text) -> str:
    target = str(node.target)
    base = target.split(".")[1]
    kwargs = {key: value for key, value in node.kwargs.items() if key not in _UNSAID}
    args, named = _without_defaults(node)
    in_order = [arg for place, arg in enumerate(args) if place in _IN_ORDER.get(target, ())]
    plain, name = name, lambda each: f"{plain(each)}.contiguous()" if each in in_order else plain(each)
    if target == "aten.arange.default" and SHAPE in node.meta:
        return f"torch.arange({_arguments((), kwargs, name).join([node.meta[SHAPE][0] + ', ', ''])})"
    arguments = _arguments(args, named | kwargs, name)
    if target.startswith("autopar."):
        return f"ops.{base}({arguments})"
    if not target.startswith("aten."):  # of a library: registered where the model's code is imported
        return f"torch.ops.{target}({arguments})"
    if target.endswith(".default") or target in ("aten.where.self", "aten.where.ScalarOther"):
        if base in _TORCH:
            return f"torch.{base}({arguments})"
        if base == "constant_pad_nd":
            return f"F.pad({_arguments(args[:2], {'value': args[2]} if len(args) > 2 else {}, name)})"
        if base in _FUNCTIONAL:
            return f"F.{base}({arguments})"
    return f"{target.removesuffix('.default')}({arguments})"


def _without_defaults(node: fx.Node) -> tuple[list[Any], dict[str, Any]]:
    """The arguments that say something: those behind a None that need not be said go by their names."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return list(node.args), {}
    pairs = list(zip(schema.arguments, node.args, strict=False))
    silent = [i for i, (known, value) in enumerate(pairs) if _says_nothing(value) and known.has_default_value()]
    first = min(silent, default=len(pairs))
    named = {known.name: value for i, (known, value) in enumerate(pairs) if i > first and i not in silent}
    return list(node.args[:first]), named


def _says_nothing(value: Any) -> bool:
    """None, or an end behind every end."""
    return value is None or (type(value) is int and value >= END)


def _slice_index(node: fx.Node) -> str | None:
    if len(node.args) > 4 or any(isinstance(arg, fx.Node) for arg in node.args[1:]):
        return None
    given: list[Any] = list(node.args[1:])
    dim, start, end = given + [0, None, None][len(given) :]
    if "type" not in node.meta:
        return None
    position = dim % len(node.meta["type"].shape)
    shape = node.meta["type"].shape
    stop = "" if _says_nothing(end) else str(end)
    head = ["..."] if position == len(shape) - 1 > 1 else [":"] * position
    return ", ".join([*head, f"{start or ''}:{stop}"])


def _arguments(args: Sequence[Any], kwargs: Mapping[str, Any], name: Text) -> str:
    parts = [_text(arg, name) for arg in args]
    parts += [f"{key}={'comm.device' if key == 'device' else _text(value, name)}" for key, value in kwargs.items()]
    return ", ".join(parts)


def _text(value: Any, name: Text) -> str:
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
        return quoted(value)
    return repr(value)


def comment(node: fx.Node, axes: Sequence[str]) -> str:
    """`f32[8/dp, 64]`: global dims, what splits them, what is still to be summed; empty where a node is not one
    tensor.
    """
    type_: TensorType | None = node.meta.get("type")
    if type_ is None:
        return ""
    return type_.text(node.meta["sharding"], axes)


def identifier(text: str) -> str:
    """A Python name for any name, keywords and builtins among them: whoever takes it sees to these."""
    plain = re.sub(r"\W", "_", text)
    plain = plain if plain.isidentifier() or plain[:1].isdigit() else re.sub(r"\W", "_", text, flags=re.ASCII)
    plain = plain if plain[:1].isidentifier() else f"_{plain}"
    # Python reads some letters as others (`ﬁ` as `fi`), and two names as one.
    return plain if unicodedata.normalize("NFKC", plain) == plain else re.sub(r"\W", "_", plain, flags=re.ASCII)
