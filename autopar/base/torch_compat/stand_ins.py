"""What stands for tensors while a model is captured: of a shape and a dtype, without data, as if on the CPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch

# What torch.export sets while it makes its mode.
import torch._functorch.config as functorch_config
from torch import fx

# capture: tensors without data that torch.export traces on.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree


def fake_mode() -> FakeTensorMode:
    """A mode whose tensors have a shape and a dtype, no data, and say that they are on the CPU: such a one as
    `torch.export` makes.

    What a model makes of Python's own numbers while it is traced keeps its values, which it does not on meta.
    """
    with functorch_config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
        shapes = ShapeEnv(tracked_fakes=[], trace_asserts=True)
        return FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True, export=True)


@contextlib.contextmanager
def traced_in(mode: FakeTensorMode) -> Iterator[None]:
    """While this lasts, `torch.export` traces in this mode where this thread calls it. It makes one of its own
    otherwise, and in it another stand-in for each of a model's parameters and buffers.
    """
    # capture: where torch.export makes a mode of its own, whatever tensors it is given. This loads Triton, for
    # which programs on CPUs have no use.
    from torch._export import non_strict_utils

    made, own = non_strict_utils.FakeTensorMode, threading.get_ident()

    def of_its_thread(*args: Any, **kwargs: Any) -> FakeTensorMode:
        return mode if threading.get_ident() == own else made(*args, **kwargs)

    non_strict_utils.FakeTensorMode = of_its_thread  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        non_strict_utils.FakeTensorMode = made  # type: ignore[misc]


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """While this lasts, code that asks `torch.compiler.is_compiling()` or `is_exporting()` does as in eager."""
    flags = ("_is_compiling_flag", "_is_exporting_flag")
    were = {flag: getattr(torch.compiler, flag) for flag in flags}
    try:
        for flag in flags:
            setattr(torch.compiler, flag, False)
        yield
    finally:
        for flag, was in were.items():
            setattr(torch.compiler, flag, was)


def stand_in(value: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """What stands for a tensor on meta in a mode, and says that it is on the CPU: made without torch's dispatcher."""
    return FakeTensor(mode, value, torch.device("cpu"))


_RUNS: ContextVar[bool] = ContextVar("runs", default=False)


@contextlib.contextmanager
def model_running() -> Iterator[None]:
    """`model_runs()` inside."""
    token = _RUNS.set(True)
    try:
        yield
    finally:
        _RUNS.reset(token)


def model_runs() -> bool:
    """Whether this thread runs the model that it traces, or its hooks; what is asked of tensors else, torch asks."""
    return _RUNS.get()


def another(value: torch.Tensor) -> torch.Tensor:
    """A tensor that lies as a stand-in does, or one on meta, and has no gradient."""
    empty = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return FakeTensor(value.fake_mode, empty, value.fake_device) if isinstance(value, FakeTensor) else empty


def parameter(value: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """A parameter that lies as a tensor that nobody else has."""
    if not isinstance(value, FakeTensor):
        return torch.nn.Parameter(value, requires_grad=requires_grad)
    # As torch.nn.Parameter marks a copy of a tensor of such a class, which it makes with the dispatcher.
    value.requires_grad = requires_grad
    value._is_param = True
    return value


def traced_itself(value: torch.Tensor, mode: FakeTensorMode) -> None:
    """A parameter or a buffer of a mode stands for itself in `torch.export`, which would make another one of it."""
    mode.fake_tensor_converter.set_tensor_memo(value, value)  # type: ignore[arg-type]


def on_meta(graph: fx.Graph) -> None:
    """Values and operators of a graph that was traced on fake tensors, on the meta device; in place."""

    def moved(value: Any) -> Any:
        return torch.device("meta") if isinstance(value, torch.device) else value

    def emptied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return value

    for node in graph.nodes:
        if _has_device(node.args):
            node.args = pytree.tree_map(moved, node.args)
        if _has_device(node.kwargs):
            node.kwargs = pytree.tree_map(moved, node.kwargs)
        if "val" in node.meta:
            value = node.meta["val"]
            node.meta["val"] = emptied(value) if isinstance(value, torch.Tensor) else pytree.tree_map(emptied, value)


def _has_device(value: Any) -> bool:
    if isinstance(value, list | tuple | dict):
        return any(map(_has_device, value.values() if isinstance(value, dict) else value))
    return isinstance(value, torch.device)
