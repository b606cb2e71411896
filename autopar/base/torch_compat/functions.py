"""torch's private parts that functions with gradients of their own (`torch.autograd.Function`) need."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._functorch.autograd_function import AutogradFunctionApply
from torch.autograd.function import _SingleLevelFunction
from torch.autograd.graph import _engine_run_backward


def has_setup_context(kind: Any) -> bool:
    """Whether what backward needs is put away by a method of its own, and forward has no `ctx`."""
    return kind.setup_context is not _SingleLevelFunction.setup_context


def backward_of(kind: Any) -> Callable[..., Any]:
    """A function's backward, by either of its names."""
    found: Callable[..., Any] = kind.vjp if kind.backward is _SingleLevelFunction.backward else kind.backward
    return found


def set_grad_enabled(mode: bool) -> None:
    """As torch.set_grad_enabled, but a trace does not see it: as where torch itself does it, around a forward."""
    with torch._C.DisableTorchFunction():
        torch._C._set_grad_enabled(mode)


def overload_called(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The overload of an operator that a call with these arguments is of."""
    return getattr(packet, torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs))


Recorder = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def dynamo_calls(record: Recorder) -> Iterator[None]:
    """Inside, in this thread, `record(forward, backward, args, options)` is run in the place of Dynamo's operator."""
    owner, before = threading.get_ident(), AutogradFunctionApply.__call__

    def call(self: Any, forward: Any, backward: Any, *args: Any, **options: Any) -> Any:
        if threading.get_ident() != owner:
            return before(self, forward, backward, *args, **options)
        return record(forward, backward, args, options)

    AutogradFunctionApply.__call__ = call  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        AutogradFunctionApply.__call__ = before  # type: ignore[method-assign]


def dynamo_forward(forward: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...], int]:
    """What Dynamo's graph of a forward gives, what it saves, and how many of its first arguments have gradients."""
    mask = options.get("args_tensor_mask")
    if mask is None:
        found, saved = torch.fx.Interpreter(forward).run(*args)
        return found, tuple(saved), len(args)
    found, saved = forward(None, *args)  # torch 2.11
    return found, tuple(saved), sum(mask)


def dynamo_backward(backward: Any, grads: tuple[Any, ...], saved: tuple[Any, ...]) -> Any:
    """What Dynamo's graph of a backward gives."""
    holders = sum(node.op == "placeholder" for node in backward.graph.nodes)
    first = (None,) * (holders - len(grads) - len(saved))  # torch 2.11 hands in a ctx that nobody reads
    return torch.fx.Interpreter(backward).run(*first, *grads, *saved)


def run_backward(values: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
    """As torch.autograd.backward, but function modes are on in what a checkpoint runs again, too."""
    if values:
        _engine_run_backward(
            tuple(values), tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True
        )  # fmt: skip
