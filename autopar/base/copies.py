"""Copies of models, and of what users put in the place of a forward."""

from __future__ import annotations

import copy
import functools
import types
from collections import OrderedDict
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import nn

Module = TypeVar("Module", bound=nn.Module)


def copied(model: Module, memo: dict[int, Any] | None = None) -> Module:
    """As `copy.deepcopy`; functions that modules hold (in the place of a forward, as an attribute, as hooks), which it
    leaves as they are, call the copy's modules where they called the model's.
    """
    memo = {} if memo is None else memo
    for module in model.modules():
        held = [x for x in vars(module).values() if isinstance(x, torch.Tensor) and x.layout is not torch.strided]
        memo.update((id(x), x) for x in held)  # sparse ones, of which torch does not copy all, are only read
    found = copy.deepcopy(model, memo)
    for module in found.modules():
        for name, value in list(vars(module).items()):
            if name not in _OF_TORCH:
                vars(module)[name] = _with_functions(value, memo)
    return found


_OF_TORCH = frozenset({"_parameters", "_buffers", "_modules"})
"""What `copy.deepcopy` copies as it is to be."""


def copied_value(value: Any, memo: dict[int, Any]) -> Any:
    """What a module's copy holds where the module held this."""
    return _with_functions(copy.deepcopy(value, memo), memo)


def _with_functions(value: Any, memo: dict[int, Any]) -> Any:
    """What a module's copy holds, with such functions; lists and dicts of them are changed in place."""
    if isinstance(value, types.FunctionType | functools.partial):
        return _rebound(value, memo)
    if type(value) in (list, dict, OrderedDict):
        for key, each in list(enumerate(value) if type(value) is list else value.items()):
            if isinstance(each, types.FunctionType | functools.partial):
                value[key] = _rebound(each, memo)
    return value


def _rebound(value: Any, memo: dict[int, Any]) -> Any:
    """What a function in the place of a forward holds of a model, of the model's copy.

    forward = module.forward; module.forward = lambda x: 2 * forward(x)    →    the copy's, which calls the copy's
    """
    if isinstance(value, nn.Module | torch.Tensor):
        return memo.get(id(value), value)
    if isinstance(value, types.MethodType):
        return types.MethodType(value.__func__, _rebound(value.__self__, memo))
    if isinstance(value, functools.partial):
        given = [_rebound(each, memo) for each in value.args]
        named = {name: _rebound(each, memo) for name, each in value.keywords.items()}
        return functools.partial(_rebound(value.func, memo), *given, **named)
    if not isinstance(value, types.FunctionType) or not value.__closure__:
        return value
    if id(value) not in memo:
        cells = tuple(types.CellType() for _ in value.__closure__)
        found = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        memo[id(value)] = found
        for cell, own in zip(cells, value.__closure__, strict=True):
            with suppress(ValueError):  # an empty one
                cell.cell_contents = _rebound(own.cell_contents, memo)
        found.__kwdefaults__ = value.__kwdefaults__
        vars(found).update({name: _rebound(each, memo) for name, each in vars(value).items()})
    return memo[id(value)]


def without_own_hooks(model: Module) -> Module:
    """A copy of a compiled model, without the hooks that autopar has put on its modules."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for number in [number for number, hook in hooks.items() if is_own_hook(hook)]:
                del hooks[number]
                module._forward_pre_hooks_with_kwargs.pop(number, None)
                module._forward_hooks_always_called.pop(number, None)
    return model


def is_own_hook(hook: Any) -> bool:
    """Whether autopar has put a hook on a module (`runtime/alone.py`)."""
    return getattr(getattr(hook, "__self__", None), "of_autopar", False) is True
