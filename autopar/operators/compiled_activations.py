"""Which texts of experts' activations kernels take as part of a product, and how they read them."""

from __future__ import annotations

import ast
import math
from functools import lru_cache

_UNARY = ("silu", "sigmoid", "tanh", "relu", "exp", "neg", "wide", "narrow", "gelu", "gelu_tanh", "square")
_BINARY = ("mul", "add", "sub", "div")
_MOST_NODES = 64
"""Of a text that is made part of a kernel: others are computed between kernels."""


@lru_cache(maxsize=256)
def compilable(text: str) -> str | None:
    """A text of `activations.activate` as these kernels read it: "mul(silu(gate),up)", with numbers as they are written
    by Python, clamps as "clamp(x,low,high)"; None where they do not know one of its operators.
    """
    try:
        tree = ast.parse(text, mode="eval").body
        written = _written(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return written if sum(1 for _ in ast.walk(tree)) <= 4 * _MOST_NODES else None


def _written(node: ast.expr) -> str:
    """Raises ValueError for what the kernels do not know."""
    if isinstance(node, ast.Name) and node.id in ("gate", "up"):
        return node.id
    if not isinstance(node, ast.Call):
        return repr(_number(node))
    if not isinstance(node.func, ast.Name):
        raise ValueError(ast.unparse(node))
    name, given = node.func.id, list(node.args)
    options = {each.arg: each.value for each in node.keywords}
    if name in ("clamp", "clamp_min", "clamp_max"):
        return _clamped(name, given, options)
    if name == "gelu":
        name = "gelu_tanh" if _approximation(options.pop("approximate", None)) == "tanh" else "gelu"
    if name == "pow" and len(given) == 2 and _number(given[1]) == 2:
        name, given = "square", given[:1]
    if name == "pow" and len(given) == 2 and _number(given[1]) == 3 and not options:
        x = _written(given[0])
        return f"mul(square({x}),{x})"
    if options or len(given) != (1 if name in _UNARY else 2 if name in _BINARY else -1):
        raise ValueError(name)
    return f"{name}({','.join(map(_written, given))})"


def _clamped(name: str, given: list[ast.expr], options: dict[str | None, ast.expr]) -> str:
    names = {"clamp": ("min", "max"), "clamp_min": ("min",), "clamp_max": ("max",)}[name]
    limits: dict[str, ast.expr] = {
        **dict(zip(names, given[1:], strict=False)),
        **{str(k): v for k, v in options.items()},
    }
    if not given or len(given) - 1 + len(options) != len(limits) or not set(limits) <= set(names):
        raise ValueError(name)
    low, high = (_limit(limits.get(each)) for each in ("min", "max"))
    return f"clamp({_written(given[0])},{low},{high})"


def _limit(node: ast.expr | None) -> str:
    return "None" if node is None or (isinstance(node, ast.Constant) and node.value is None) else repr(_number(node))


def _number(node: ast.expr) -> float:
    value = ast.literal_eval(node)
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no number")
    return float(value)


def _approximation(node: ast.expr | None) -> str:
    value = "none" if node is None else ast.literal_eval(node)
    if value not in ("none", "tanh"):
        raise ValueError(f"gelu by {value!r}")
    return str(value)
