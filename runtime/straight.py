"""Which text of a program does nothing but compute tensors of tensors, and send them."""

from __future__ import annotations

import ast
from functools import lru_cache

import torch
from torch.overrides import get_overridable_functions

_MODULES = ("F", "aten", "ops", "math")
_BUILTINS = (
    "len", "min", "max", "int", "float", "bool", "tuple", "list", "range", "slice", "dict", "zip", "enumerate",
)  # fmt: skip
_FROM = {"torch": None, "torch.nn.functional": "F", "math": None}
_NEVER = (
    ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal, ast.Try, ast.With, ast.ClassDef, ast.AsyncFunctionDef,
    ast.FunctionDef, ast.Lambda, ast.Await, ast.Yield, ast.YieldFrom,
)  # fmt: skip
_MAKE = frozenset({"arange", "empty", "eye", "full", "linspace", "ones", "scalar_tensor", "tensor", "zeros"})


@lru_cache(maxsize=64)
def is_straight_program(source: str) -> bool:
    """Whether a forward of the program depends on its tensors alone, and leaves nothing behind but its outputs: no
    names but torch's, autopar's operators and its own, which are functions and numbers.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return False
    functions = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}
    known = {*functions, *_MODULES, *_BUILTINS}
    for each in tree.body:
        if isinstance(each, ast.Assign) and all(isinstance(target, ast.Name) for target in each.targets):
            names = [target.id for target in each.targets if isinstance(target, ast.Name)]
            if _is_number(each.value):
                known.update(names)
            elif names != ["aten"] or ast.unparse(each.value) != "torch.ops.aten":
                known.difference_update(names)
        elif isinstance(each, ast.Import):
            if any(alias.asname != _FROM.get(alias.name, alias.name) for alias in each.names):
                return False
        elif isinstance(each, ast.ImportFrom):
            if (each.module, [(x.name, x.asname) for x in each.names]) != ("autopar", [("operators", "ops")]):
                return False
        elif not isinstance(each, ast.FunctionDef) and not (
            isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
        ):
            return False
    return "forward" in functions and all(_is_straight(functions[name], known) for name in _reached(functions))


def _reached(functions: dict[str, ast.FunctionDef]) -> set[str]:
    """The functions that `forward` calls, and it."""
    found, left = set[str](), ["forward"]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += [n.id for n in ast.walk(functions[name]) if isinstance(n, ast.Name) and n.id in functions]
    return found


def _is_straight(function: ast.FunctionDef, known: set[str]) -> bool:
    if function.decorator_list:
        return False
    nodes = [node for statement in function.body for node in ast.walk(statement)]
    arguments = function.args
    own = {each.arg for each in (*arguments.args, *arguments.kwonlyargs, *arguments.posonlyargs)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    of_torch = {id(node.value) for node in nodes if isinstance(node, ast.Attribute) and _is_of_torch(node)}
    return not any(
        isinstance(node, _NEVER)
        or (isinstance(node, ast.Name) and node.id == "torch" and id(node) not in of_torch)
        or (isinstance(node, ast.Name) and node.id != "torch" and node.id not in own | known)
        for node in nodes
    )


def _is_of_torch(node: ast.Attribute) -> bool:
    """Whether `torch.…` is a function of tensors, one that makes a tensor, or a word such as a dtype."""
    found = getattr(torch, node.attr, None)
    if isinstance(found, torch.dtype | torch.memory_format | float):
        return True
    return node.attr in _MAKE or (callable(found) and any(found is each for each in _functions()))


@lru_cache(maxsize=1)
def _functions() -> tuple[object, ...]:
    return tuple(get_overridable_functions()[torch])


def _is_number(value: ast.expr) -> bool:
    if isinstance(value, ast.UnaryOp):
        value = value.operand
    return isinstance(value, ast.Constant) and isinstance(value.value, bool | int | float | str)
