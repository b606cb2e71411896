"""What a batch can hold for a branch on values not to be met.

    if position_ids is None:
        position_ids = self.get_rope_index(input_ids, ...)      # which reads tokens in Python

A forward that computes what it was not given decides nothing where it is given.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import traceback
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from autopar.base.torch_compat import tracing as compat


def argument_instead(error: BaseException, forward: Callable[..., Any]) -> tuple[str, str] | None:
    """The argument of a forward that makes a failing line needless, and the line that asks for it; None where there is
    none.
    """
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return None
    open_ended = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    names = {each.name for each in parameters}
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if compat.is_tracer_file(code.co_filename):
            continue
        for name in _made_where_missing(code, line):
            if name in names or open_ended:
                return name, f"{code.co_filename.rpartition('/')[2]}:{line}"
    return None


def _made_where_missing(code: CodeType, line: int) -> Iterator[str]:
    """The arguments of a function that it makes around a line because they are None."""
    own = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    try:
        lines, first = inspect.getsourcelines(code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError):
        return
    at = line - max(first, 1) + 1
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and node.body[0].lineno <= at <= (node.body[-1].end_lineno or at):
            yield from (name for name in _missing(node.test) if name in own and name in _assigned(node.body))


def _missing(test: ast.expr) -> Iterator[str]:
    """The names that have to be None for a test to hold."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        for each in test.values:
            yield from _missing(each)
    if isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and isinstance(test.ops[0], ast.Is):
        right = test.comparators[0]
        if isinstance(right, ast.Constant) and right.value is None:
            yield test.left.id


def _assigned(body: list[ast.stmt]) -> set[str]:
    stores = (node for each in body for node in ast.walk(each) if isinstance(node, ast.Name))
    return {node.id for node in stores if isinstance(node.ctx, ast.Store)}
