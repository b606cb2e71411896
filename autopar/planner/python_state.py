"""What a function reads beside its arguments: numbers that a trace would keep as they were, and parameters.

    def loss(outputs, batch):
        return outputs.loss + schedule.weight * penalty(outputs.logits)     # schedule.weight: 0.1

Followed are what a function closes over, its defaults and globals, what `functools.partial` and methods are bound to,
and of objects the attributes whose names stand in the code: what a function does not name, it does not read.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import nn

DEEPEST = 6
"""Objects within objects that are followed."""
PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)

MOST = 64
"""Elements of a list or a mapping that are looked at; of longer ones their number alone."""
_EMPTY = object()
Seen = set[tuple[int, frozenset[str]]]


def numbers_of(function: Callable[..., Any]) -> dict[str, str]:
    """All that is plain, or a tensor, by how it is reached (`schedule.weight`), as text that tells values apart. Of a
    tensor it is which one and how often it was written to.
    """
    found: dict[str, str] = {}
    for name, value in _reached(function):
        if isinstance(value, torch.Tensor):
            found[name] = f"a tensor of shape {tuple(value.shape)} ({id(value):x}, {value._version} times written)"
        else:
            found[name] = repr(value)
    return found


def parameters_of(function: Callable[..., Any]) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that a function reads, or that modules have which it calls, by how they are reached."""
    for name, value in _reached(function):
        if isinstance(value, nn.Parameter):
            yield name, value


def changed(before: Mapping[str, str], function: Callable[..., Any]) -> tuple[str, str, str] | None:
    """The first thing that is no longer what it was: its name, what it was, and what it is."""
    now = numbers_of(function)
    for name in dict.fromkeys((*before, *now)):
        then, here = before.get(name, "not there"), now.get(name, "not there")
        if then != here:
            return name, then, here
    return None


def _reached(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    seen: Seen = set()
    yield from _of_callable("", function, frozenset(), seen, 0)


def _of_callable(name: str, function: Any, names: frozenset[str], seen: Seen, depth: int) -> Iterator[tuple[str, Any]]:
    """names: of the code that reached it."""
    if depth > DEEPEST or (id(function), names) in seen:
        return
    seen.add((id(function), names))
    if isinstance(function, functools.partial):
        for key, value in (*enumerate(function.args), *function.keywords.items()):
            yield from _of_value(str(key), value, names, seen, depth + 1)
        yield from _of_callable(name, function.func, names, seen, depth + 1)
    elif inspect.ismethod(function):
        own = frozenset(_names(function.__func__.__code__)) if inspect.isfunction(function.__func__) else names
        yield from _of_callable(name, function.__func__, names, seen, depth + 1)
        yield from _of_object(name or "self", function.__self__, own, seen, depth + 1)
    elif inspect.isfunction(function):
        yield from _of_function(function, seen, depth)
    else:
        yield from _of_object(name, function, names, seen, depth)


def _of_function(function: Any, seen: Seen, depth: int) -> Iterator[tuple[str, Any]]:
    function = inspect.unwrap(function)
    if not inspect.isfunction(function) or _is_library(function.__module__):
        return
    code = function.__code__
    names = frozenset(_names(code))
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    held = {key: cell.cell_contents for key, cell in cells if not _is_empty(cell)}
    held |= {key: function.__globals__[key] for key in sorted(names) if key in function.__globals__}
    held |= {str(place): value for place, value in enumerate(function.__defaults__ or ())}
    held |= function.__kwdefaults__ or {}
    for key, value in held.items():
        yield from _of_value(key, value, names, seen, depth + 1)


def _of_value(name: str, value: Any, names: frozenset[str], seen: Seen, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (ModuleType, type)) or depth > DEEPEST:
        return
    if isinstance(value, (torch.Tensor, *PLAIN)):
        yield name, value
    elif isinstance(value, (Mapping, list, tuple, set, frozenset)):
        yield f"len({name})", len(value)
        entries = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, each in entries if len(value) <= MOST else ():
            yield from _of_value(f"{name}[{key!r}]", each, names, seen, depth + 1)
    else:
        yield from _of_callable(name, value, names, seen, depth)


def _of_object(name: str, value: Any, names: frozenset[str], seen: Seen, depth: int) -> Iterator[tuple[str, Any]]:
    """The attributes that code names: that which reached the object, and its own."""
    if depth > DEEPEST or isinstance(value, (ModuleType, type)) or not hasattr(value, "__dict__"):
        return
    held = dict(vars(value))
    start = f"{name}." if name else ""
    if isinstance(value, nn.Module):
        for kept in (value._parameters, value._buffers):
            yield from ((f"{start}{key}", each) for key, each in kept.items() if each is not None)
        for key, module in value._modules.items():
            yield from _of_object(f"{start}{key}", module, names, seen, depth + 1)
        held = {key: each for key, each in held.items() if not key.startswith("_") and key != "training"}
    for method in _methods(type(value), names | {"forward", "__call__"}):
        names = names | frozenset(_names(method.__code__))
        yield from _of_function(method, seen, depth + 1)
    for key in sorted(names & held.keys()):
        yield from _of_value(f"{start}{key}", held[key], names, seen, depth + 1)


def _methods(kind: type, names: frozenset[str]) -> list[Any]:
    """The functions of a class with these names, and those of it that they name."""
    found: dict[str, Any] = {}
    wanted = list(names)
    while wanted:
        key = wanted.pop()
        method = next((vars(base)[key] for base in kind.__mro__ if key in vars(base)), None)
        if key not in found and inspect.isfunction(method) and not _is_library(method.__module__, nn.modules):
            found[key] = method
            wanted.extend(_names(method.__code__))
    return list(found.values())


def _names(code: CodeType) -> Iterator[str]:
    """The names that code reads, in functions within it, too."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)


def _is_library(module: str | None, *but: ModuleType) -> bool:
    """Whether a function is of a package whose functions read no state of a user's."""
    first = (module or "").partition(".")[0]
    return first in ("torch", "numpy", "transformers") and not any((module or "").startswith(m.__name__) for m in but)


def _is_empty(cell: Any) -> bool:
    try:
        return cell.cell_contents is _EMPTY
    except ValueError:
        return True
