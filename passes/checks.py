"""Checks of values that a forward makes before it raises: a trace has no values, so it takes them as passed.

    if torch.any(var < 0):
        raise ValueError("var has negative entry/entries")

What the test has to give for nothing to be raised is read off the source (`passing`); that it is so is computed in each
step (`passes/usual.py`). What a forward makes of Python's own numbers alone (positions of a sequence) is known, and so
is a branch on it, or a slice between two of them. So is what a draw between 0 and 1 is always, or never: less than a
probability of 0, with which layers are left out. Every other branch on values is refused.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar.base.errors import AutoparError
from autopar.base.torch_compat import tracing as compat
from autopar.base.torch_compat.behind import put_behind
from autopar.operators import own_gradients
from autopar.passes.rebound import Rebound
from autopar.passes.source import Span, places_asked, source_of, span
from autopar.passes.substitutes import FUNCTIONS

_READING: Mapping[Callable[..., Any], Callable[[Any], Any]] = {
    torch.Tensor.__bool__: bool, torch.Tensor.__int__: int, torch.Tensor.__float__: float,
    torch.Tensor.__index__: int, torch.Tensor.item: lambda value: value,
}  # fmt: skip
"""What makes a tensor a number of Python's."""
_SLICING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
_aten = torch.ops.aten
_DRAWS = (_aten.rand.default, _aten.rand_like.default)
"""Draws from [0, 1)."""
_BELOW = {_aten.lt.Scalar: True, _aten.le.Scalar: True, _aten.ge.Scalar: False, _aten.gt.Scalar: False}
"""What a comparison with a number that lies above all draws says; below all of them, the opposite."""
_HOOKS = frozenset({torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook})
_GET_DATA, _SET_DATA = torch.Tensor.data.__get__, torch.Tensor.data.__set__  # type: ignore[attr-defined]
LIBRARIES = tuple(str(Path(str(library.__file__)).parent) for library in (torch.nn, torch.distributions))
"""Folders of torch whose code checks what models hand in, as a model's own may."""
_CHECKING = frozenset(
    {"_check", "_check_with", "_check_value", "_check_index", "_check_type", "_check_tensor_all", "_assert"}
)
"""Functions of torch that raise where what they are given first is not so."""
_LIKE_CHECKS = re.compile("check|assert|require|ensure|validate", re.IGNORECASE)
"""Names of functions that do so, by all likelihood, where nothing else comes of them."""
_MOST_FRAMES = 64


class ChecksPass(TorchFunctionMode):
    """While a model is traced: numbers that are known are read, functions that do not trace have others instead."""

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        modules = [] if model is None else model.modules()
        named: list[dict[str, Any]] = [own for module in modules for own in (module._parameters, module._buffers)]
        self._held = [(own, name) for own in named for name, x in own.items() if x is not None]
        self._rebound = Rebound()

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READING and args[0].numel() == 1:
            value = compat.known_value(args[0])
            if value is not None:
                return _READING[func](_only(value))
        if func in (torch.Tensor.__bool__, torch.Tensor.item) and (said := _said_of_a_draw(args[0])) is not None:
            return said
        if func in _SLICING:
            args = (args[0], _with_known_ends(args[1]), *args[2:])
        if func == _GET_DATA:  # of which torch's own passes know nothing
            return args[0].detach()
        if func == _SET_DATA:
            held = [x for own, name in self._held if (x := own.get(name)) is not None]
            return self._rebound.set(args[0], args[1], held, _line)
        self._rebound.look_at(func, args, kwargs, _line)
        if func in _HOOKS:
            if func is not torch.Tensor.register_hook or not _is_hooked(*args, **kwargs):
                raise _hooks_gradients(args[0])
            return Handle()
        func = FUNCTIONS.get(func, func)
        if _leaves_alone(func, args, kwargs):
            return compat.called_beside_gradients(func, args, kwargs)
        found = func(*args, **kwargs)
        if torch.is_grad_enabled() and isinstance(found, torch.Tensor) and found.requires_grad:
            for each in (*args, *kwargs.values()):
                if isinstance(each, torch.Tensor) and each.requires_grad and compat.has_numbers(each):
                    raise _is_not_trained(each)
        return found


def _leaves_alone(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function is called under `no_grad` with something that has a gradient, and does not write into it."""
    if torch.is_grad_enabled() or not args or not isinstance(args[0], torch.Tensor) or not args[0].requires_grad:
        return False
    return not getattr(func, "__name__", "_").endswith("_") and kwargs.get("out") is None


def _said_of_a_draw(asked: torch.Tensor) -> bool | None:
    """What a comparison of a draw from [0, 1) with a number gives, whatever is drawn; None of all else."""
    node: Any = compat.node_of(asked) if asked.dtype == torch.bool and asked.numel() == 1 else None
    if node is None or node.target not in _BELOW or node.args[0].target not in _DRAWS:
        return None
    number = node.args[1]
    if number >= 1:
        return _BELOW[node.target]
    none_equal = node.target in (_aten.lt.Scalar, _aten.ge.Scalar)
    return not _BELOW[node.target] if number < 0 or (number == 0 and none_equal) else None


def _with_known_ends(index: Any) -> Any:
    """An index whose slices begin and end at numbers where tensors that are known said so."""
    if isinstance(index, tuple):
        return tuple(map(_with_known_ends, index))
    if not isinstance(index, slice):
        return index
    return slice(*map(_known_end, (index.start, index.stop, index.step)))


def _known_end(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or value.dtype not in (torch.int32, torch.int64):
        return value
    known = compat.known_value(value)
    return value if known is None else _only(known)


class Handle:
    """Of a hook that is in the program."""

    def remove(self) -> None:
        """Refused: the program calls it."""
        raise AutoparError(
            "forward() takes a hook on a tensor's gradient away, which its program calls in each backward",
            where=_line(),
            remedy="leave it there: a tensor of a forward is gone with it",
        )


def _is_hooked(x: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> bool:
    """Whether a program calls a hook that gives another gradient; not of one that keeps what it sees, nor of a
    parameter or an input, whose gradients come from elsewhere, too.
    """
    node = compat.node_of(x)
    if node is None or node.op != "call_function" or not x.requires_grad:
        return False
    with torch.no_grad():
        gives = hook(torch.zeros_like(x, requires_grad=False))
    if not isinstance(gives, torch.Tensor):
        return False
    put_behind(x, lambda: own_gradients.hooked(x, hook))
    return True


def _hooks_gradients(x: torch.Tensor) -> AutoparError:
    return AutoparError(
        "a forward registers a hook on a tensor's gradient, which no program calls: the gradient would be another one",
        where=_line(),
        values=f"a tensor of shape {tuple(x.shape)}",
        remedy="scale or clip the gradient in the backward of a torch.autograd.Function that forward calls, or "
        "register the hook outside of forward, on an output or a parameter of the compiled model",
    )


def _is_not_trained(x: torch.Tensor) -> AutoparError:
    return AutoparError(
        "forward() uses a tensor with requires_grad that is no parameter of the model: it would not be trained",
        where=_line(),
        values=f"a tensor of shape {tuple(x.shape)}",
        remedy="make it a parameter, or what holds it a submodule, of the model that is compiled; detach() it, or "
        "requires_grad_(False), if it is to stay as it is",
    )


def _line() -> str | None:
    """The model's line that is run."""
    frame = frame_of_model(sys._getframe(1), own=True)
    return None if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _only(value: Any) -> Any:
    """The one number in nested lists."""
    return _only(value[0]) if isinstance(value, list) else value


def frame_of_model(frame: FrameType | None, own: bool = False) -> FrameType | None:
    """The innermost frame of the model's code; if not its `own` alone, also of torch's libraries of layers."""
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return None
        name = frame.f_code.co_filename
        of_library = name.startswith(LIBRARIES)
        if (of_library and not own) or not (of_library or compat.is_tracer_file(name) or name == __file__):
            return frame
        frame = frame.f_back
    return None


def passing(frame: FrameType, by_name: bool = False) -> bool | None:
    """What the test that a frame is at has to give for a check to pass; None where it does not decide on a `raise`.

    by_name: whether a function with a name like a check's is taken for one.
    """
    source = source_of(frame.f_code)
    if source is None:
        return None
    first, both = places_asked(frame, source)
    for node, places in ((node, places) for places in (first, both) for node in ast.walk(source.tree)):
        found = None
        if isinstance(node, ast.Assert):
            found = wanted_of(node.test, True, places)
        elif isinstance(node, ast.If) and (_raises(node.body) or _raises(node.orelse)):
            found = wanted_of(node.test, not _raises(node.body), places)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.value.args:
            called = _name(node.value.func)
            if called in _CHECKING or (by_name and _LIKE_CHECKS.search(called)):
                found = True if span(node.value) in places else wanted_of(node.value.args[0], True, places)
        if found is not None:
            return found
    return None


def wanted_of(node: ast.expr, wanted: bool, places: set[Span]) -> bool | None:
    """What the part of a test that stands at one of some places has to give for all of it to be what is wanted."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return wanted_of(node.operand, not wanted, places)
    parts = node.values if isinstance(node, ast.BoolOp) else []
    if isinstance(node, ast.Call) and _name(node.func) == "bool":
        parts = node.args
    found = [each for part in parts if (each := wanted_of(part, wanted, places)) is not None]
    return wanted if span(node) in places else next(iter(found), None)


def _raises(body: Sequence[ast.stmt]) -> bool:
    """Whether nothing is done but to raise, with what it takes to say why."""
    return bool(body) and isinstance(body[-1], ast.Raise) and all(isinstance(x, ast.Assign) for x in body[:-1])


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
