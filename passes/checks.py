"""Checks of values that a forward makes before it raises: a trace has no values, so it takes them as passed.

    if torch.any(var < 0):
        raise ValueError("var has negative entry/entries")

Where nothing but a `raise` follows, or in an `assert`, what `any` or `all` gives decides nothing that a program could
hold. What a forward makes of Python's own numbers alone (positions of a sequence) is known, and so is a branch on it.
Every other branch on values is refused.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autopar.base.torch_compat import tracing as compat
from autopar.passes.substitutes import FUNCTIONS

_DECIDING = (torch.any, torch.all, torch.Tensor.any, torch.Tensor.all)
_READING: Mapping[Callable[..., Any], Callable[[Any], Any]] = {
    torch.Tensor.__bool__: bool, torch.Tensor.__int__: int, torch.Tensor.__float__: float,
    torch.Tensor.__index__: int, torch.Tensor.item: lambda value: value,
}  # fmt: skip
"""What makes a tensor a number of Python's."""
_NN = str(Path(torch.nn.__file__).parent)
_MOST_FRAMES = 64


class ChecksPass(TorchFunctionMode):
    """While a model is traced: `any` and `all` in a check give what lets it pass, numbers that are known are read."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _DECIDING:
            frame = frame_of_model(sys._getframe(1))
            outcome = None if frame is None else _passing(frame.f_code, frame.f_lineno)
            if outcome is not None:
                return outcome
        if func in _READING and args[0].numel() == 1:
            value = compat.known_value(args[0])
            if value is not None:
                return _READING[func](_only(value))
        func = FUNCTIONS.get(func, func)
        return func(*args, **(kwargs or {}))


def _only(value: Any) -> Any:
    """The one number in nested lists."""
    return _only(value[0]) if isinstance(value, list) else value


def frame_of_model(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the model's code, or of torch.nn's."""
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return None
        name = frame.f_code.co_filename
        if name.startswith(_NN) or not (compat.is_tracer_file(name) or name == __file__):
            return frame
        frame = frame.f_back
    return None


def _passing(code: CodeType, line: int) -> bool | None:
    """What the test on a line has to give for a check to pass; None where no check stands there."""
    try:
        lines, first = inspect.getsourcelines(code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError):
        return None
    for node in ast.walk(tree):
        raises = isinstance(node, ast.If) and not node.orelse and all(isinstance(each, ast.Raise) for each in node.body)
        if not (raises or isinstance(node, ast.Assert)):
            continue
        assert isinstance(node, ast.If | ast.Assert)
        test, wanted = node.test, isinstance(node, ast.Assert)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, wanted = test.operand, not wanted
        here = test.lineno <= line - max(first, 1) + 1 <= (test.end_lineno or test.lineno)
        if here and isinstance(test, ast.Call) and _name(test.func) in ("any", "all"):
            return wanted
    return None


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
