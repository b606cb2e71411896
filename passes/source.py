"""What a model's source says at the place where a frame is: read with `ast`, lines as in its file."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType

Span = tuple[int, int, int, int]
"""Line, column, last line and column."""

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
