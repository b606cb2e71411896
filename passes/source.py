"""What a model's source says at the place where a frame is: read with `ast`, lines as in its file."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

Span = tuple[int, int, int, int]
"""Line, column, last line and column."""

_TENSORS = frozenset({
    "sum", "mean", "square", "pow", "abs", "exp", "log", "sqrt", "norm", "prod", "clamp", "float", "double", "detach",
    "view", "reshape", "matmul", "mm", "tanh", "relu",
})  # fmt: skip
"""Methods of tensors, and functions of torch, that give one tensor."""
WRITTEN_OUT = frozenset({"print", "str", "repr", "format", "debug", "info", "warning", "warn"})
"""Functions and methods that only write a number down."""
_UNDER_WAY = (
    ast.Call, ast.BinOp, ast.UnaryOp, ast.Subscript, ast.Compare, ast.FormattedValue, ast.JoinedStr,
)  # fmt: skip
_COLLECTING = frozenset({"cat", "concat", "concatenate", "vstack", "row_stack"})


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A function's. parents: of each part what it is a part of. indent: columns that the file has before it."""

    tree: ast.Module
    parents: Mapping[ast.AST, ast.AST]
    indent: int


@lru_cache(maxsize=256)
def source_of(code: CodeType) -> Source | None:
    """The source of a function; None where there is none, or no whole statement is one (some lambdas)."""
    try:
        lines, first = inspect.getsourcelines(code)
        tree = ast.parse(text := textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError):
        return None
    ast.increment_lineno(tree, max(first, 1) - 1)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    return Source(tree, parents, len(lines[0]) - len(text.splitlines(keepends=True)[0]))


def asked_at(frame: FrameType, source: Source) -> set[Span]:
    """Where the expression stands that a frame asks for. A jump stands where its statement does, what gave its value
    right before it.
    """
    positions, at = list(frame.f_code.co_positions()), frame.f_lasti // 2
    found = set()
    for line, last, column, end in positions[max(at - 1, 0) : at + 1]:
        if line is not None and last is not None and column is not None and end is not None:
            found.add((line, column - source.indent, last, end - source.indent))
    return found


def places_asked(frame: FrameType, source: Source) -> tuple[set[Span], set[Span]]:
    """Where what a frame asks for was made, as far as is known, and all of `asked_at`: of a test of several parts the
    jump stands where the first one does.
    """
    line, last, column, end = list(frame.f_code.co_positions())[max(frame.f_lasti // 2 - 1, 0)]
    both = asked_at(frame, source)
    if line is None or last is None or column is None or end is None:
        return both, both
    return {(line, column - source.indent, last, end - source.indent)}, both


def span(node: ast.expr) -> Span:
    """Where an expression stands."""
    return node.lineno, node.col_offset, node.end_lineno or node.lineno, node.end_col_offset or node.col_offset


def stands_at(node: ast.expr, line: int) -> bool:
    """Whether an expression has a part in a line."""
    return node.lineno <= line <= (node.end_lineno or line)


def names_read(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that some nodes, each without what is below it, read."""
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def outside_of(tree: ast.AST, left: Sequence[ast.stmt]) -> list[ast.AST]:
    """All nodes of a tree but those of some of its statements."""
    inside = {id(node) for statement in left for node in ast.walk(statement)}
    return [node for node in ast.walk(tree) if id(node) not in inside]


def call_asked(frame: FrameType, function: str) -> tuple[Source | None, ast.Call | None]:
    """The source of a frame, and the call of a function in it that is under way; None where that is not known."""
    source = source_of(frame.f_code)
    if source is None:
        return None, None
    places = asked_at(frame, source)
    found = [
        node for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function
        and span(node) in places
    ]  # fmt: skip
    return source, found[0] if len(found) == 1 else None


def expression_asked(frame: FrameType) -> tuple[Source | None, ast.expr | None]:
    """The source of a frame, and the call, operation or text in it that is under way; None where that is not known."""
    source = source_of(frame.f_code)
    if source is None:
        return None, None
    line, last, column, end = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    if line is None or last is None or column is None or end is None:
        return source, None
    place = line, column - source.indent, last, end - source.indent
    found = [node for node in ast.walk(source.tree) if isinstance(node, _UNDER_WAY) and span(node) == place]
    return source, found[0] if found else None


def is_said(node: ast.AST, source: Source) -> bool:
    """Whether nothing but a text that somebody reads comes of an expression: what is printed, logged or raised."""
    asked: ast.AST = node
    parent: ast.AST | None = node
    while isinstance(parent, ast.expr | ast.keyword):
        if isinstance(parent, ast.Call):
            name = parent.func.attr if isinstance(parent.func, ast.Attribute) else getattr(parent.func, "id", "")
            if name in WRITTEN_OUT - {"str", "repr", "format"}:
                return True
            if name not in WRITTEN_OUT and parent is not asked:
                return isinstance(source.parents.get(parent), ast.Raise)
        elif not isinstance(parent, ast.JoinedStr | ast.FormattedValue | ast.BinOp | ast.Tuple | ast.keyword):
            return False
        node, parent = parent, source.parents.get(parent)
    if isinstance(parent, ast.Expr):
        return not (node is asked and isinstance(node, ast.Call))  # which may change what it is called of
    return isinstance(parent, ast.Raise) or (isinstance(parent, ast.Assert) and node is parent.msg)


_OF_TEXTS = frozenset({"len", "float", "int", "hash", "eval", "exec", "getattr", "setattr", "hasattr", "set", "sorted"})


def is_gone_by(node: ast.AST, source: Source) -> bool:
    """Whether more may come of a text than that somebody reads it: it is a key, is compared, measured, taken apart or
    returned, under its name as well. What is handed to a function, as a check's message is, is read.
    """
    child, parent = node, source.parents.get(node)
    while isinstance(parent, ast.expr | ast.keyword):
        if isinstance(parent, ast.Call):
            name = parent.func.attr if isinstance(parent.func, ast.Attribute) else getattr(parent.func, "id", "")
            if name not in WRITTEN_OUT & {"str", "repr", "format"}:
                return name in _OF_TEXTS
        is_key = isinstance(parent, ast.Dict) and child in parent.keys
        if is_key or isinstance(parent, ast.Compare | ast.Subscript | ast.Attribute | ast.Set):
            return True
        child, parent = parent, source.parents.get(parent)
    if isinstance(parent, ast.Assign):
        names = {each.id for each in flat(parent.targets) if isinstance(each, ast.Name)}
        reads = (each for each in ast.walk(source.tree) if isinstance(each, ast.Name) and each.id in names)
        return any(is_gone_by(each, source) for each in reads if isinstance(each.ctx, ast.Load))
    return isinstance(parent, ast.Return)


def is_handed_out(asked: ast.AST, source: Source) -> bool:
    """Whether an expression goes into what its function returns, and nowhere else."""
    return _is_returned(asked, source, frozenset())


def is_only_handed_out(frame: FrameType, function: str) -> bool:
    """Whether what a frame asks of a function (`float(x)`) goes into what the frame's function returns, and nowhere
    else: into dicts, lists, tuples, arguments by name.
    """
    source, asked = call_asked(frame, function)
    return source is not None and asked is not None and _is_returned(asked, source, frozenset())


def is_only_added(frame: FrameType, function: str) -> bool:
    """Whether what a frame asks of a function is put into a list that a module has: `self.log.append(float(x))`."""
    source, asked = call_asked(frame, function)
    above = None if source is None or asked is None else source.parents.get(asked)
    if not isinstance(above, ast.Call) or not isinstance(above.func, ast.Attribute) or above.func.attr != "append":
        return False
    return isinstance(above.func.value, ast.Attribute | ast.Subscript)


def _is_returned(node: ast.AST, source: Source, names: frozenset[str]) -> bool:
    parent = source.parents.get(node)
    if isinstance(parent, ast.Return):
        return True
    if isinstance(parent, ast.Dict):
        return node in parent.values and _is_returned(parent, source, names)
    if isinstance(parent, ast.Tuple | ast.List):
        return _is_returned(parent, source, names)
    if isinstance(parent, ast.keyword):
        return _is_returned(source.parents[parent], source, names)
    if not isinstance(parent, ast.Assign) or len(parent.targets) != 1 or not isinstance(parent.targets[0], ast.Name):
        return False
    name = parent.targets[0].id
    named = [x for x in ast.walk(source.tree) if isinstance(x, ast.Name) and x.id == name]
    read = [x for x in named if isinstance(x.ctx, ast.Load)]
    once = len(named) == len(read) + 1 and name not in names
    return once and all(_is_returned(each, source, names | {name}) for each in read)


def is_tensor(node: ast.expr, source: Source, frame: FrameType, seen: frozenset[str] = frozenset()) -> bool:
    """Whether an expression is a tensor for certain: a function of tensors, what a module gives, reckoned with one."""
    if isinstance(node, ast.BinOp):
        return is_tensor(node.left, source, frame, seen) or is_tensor(node.right, source, frame, seen)
    if isinstance(node, ast.Name):
        if node.id in seen:
            return False
        named = [x for x in ast.walk(source.tree) if isinstance(x, ast.Name) and x.id == node.id]
        values = [_given(x, source) for x in named if not isinstance(x.ctx, ast.Load)]
        known = all(x is not None and is_tensor(x, source, frame, seen | {node.id}) for x in values)
        held = frame.f_locals.get(node.id, None if values else 0)
        return known and (held is None or isinstance(held, Tensor))
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute):
        of, name = node.func.value, node.func.attr
        held = _held(of, frame)
        if held in (torch, torch.nn.functional):
            return held is torch.nn.functional or name in _TENSORS
        if name in _TENSORS and is_tensor(of, source, frame, seen):
            return True
    called = node.func.value if isinstance(node.func, ast.Subscript) else node.func
    return isinstance(_held(called, frame), torch.nn.Module)


def _given(target: ast.Name, source: Source) -> ast.expr | None:
    """What an assignment gives a name; None of other ways to set one."""
    parent = source.parents[target]
    return parent.value if isinstance(parent, ast.Assign) and target in parent.targets else None


def _held(node: ast.expr, frame: FrameType) -> Any:
    """What a name, or a module of a module, is."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if not isinstance(node, ast.Attribute):
        return None
    within = _held(node.value, frame)
    return within._modules.get(node.attr) if isinstance(within, torch.nn.Module) else None


def is_read_first(left: Sequence[ast.stmt], name: str) -> bool:
    """Whether a statement reads a name before any has set it."""
    for statement in left:
        names = [node for node in ast.walk(statement) if isinstance(node, ast.Name) and node.id == name]
        sets_it = any(isinstance(node.ctx, ast.Store) for node in names)
        if any(isinstance(node.ctx, ast.Load) for node in names) or (sets_it and isinstance(statement, ast.AugAssign)):
            return True
        if names:
            return False
    return False


def flat(targets: Sequence[ast.expr]) -> Iterator[ast.expr]:
    """The targets of an assignment, those in tuples and lists one by one."""
    for target in targets:
        if isinstance(target, ast.Tuple | ast.List):
            yield from flat(target.elts)
        else:
            yield target


def is_only_joined(outside: Sequence[ast.AST], name: str) -> bool:
    """Whether a list is used for nothing but to join its elements, and to ask whether it has any."""
    allowed: set[int] = set()
    for node in outside:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _COLLECTING:
            allowed.update(id(each) for each in node.args[:1])
        if isinstance(node, ast.If | ast.IfExp):
            test = node.test
            asks = isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id == "len"
            allowed.update(id(each) for each in (test.args if asks and isinstance(test, ast.Call) else [test]))
    named = [node for node in outside if isinstance(node, ast.Name) and node.id == name]
    return all(isinstance(node.ctx, ast.Store) or id(node) in allowed for node in named)
