"""Functions that say their gradient themselves (`torch.autograd.Function`), kept while a model is traced.

A trace records the operators of `forward`; what `backward` says would be lost, and what those operators have for a
gradient be taken for it (of a rounding: none). So each call becomes

    outputs = autopar::own_gradient(outputs, inputs, saved, "mylib.Round")

the same values, in whose place differentiation runs the function's own backward on what its forward saved.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import CheckpointFunction

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.functions import (
    backward_of,
    dynamo_backward,
    dynamo_calls,
    dynamo_forward,
    has_setup_context,
    set_grad_enabled,
)
from autopar.base.torch_compat.tracing import tree_flatten, tree_unflatten
from autopar.operators import registration  # noqa: F401 (defines torch.ops.autopar)

_OTHERS = ("torch._", "autopar.")
"""Modules whose functions are run by tracing alone."""
_OWN = ("needs_input_grad", "to_save", "not_differentiable", "materializes")


class Context:
    """What `forward` and `backward` are handed as `ctx`."""

    def __init__(self, needs_input_grad: Sequence[bool]) -> None:
        self.needs_input_grad = tuple(needs_input_grad)
        self.to_save: tuple[Any, ...] = ()
        self.not_differentiable: tuple[Tensor, ...] = ()
        self.materializes = True

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """See torch.autograd.function.FunctionCtx."""
        self.to_save = tensors

    def save_for_forward(self, *tensors: Tensor | None) -> None:
        """Of derivatives that go forward: there are none."""

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """What was saved."""
        return self.to_save

    def mark_non_differentiable(self, *outputs: Tensor) -> None:
        """No gradient comes for these."""
        self.not_differentiable = outputs

    def mark_dirty(self, *inputs: Tensor) -> None:
        """Refused: what is written would be differentiated twice, as an operator and by the function."""
        raise AutoparError(
            "an autograd.Function writes into its input (mark_dirty), which a trace cannot tell from a new value",
            remedy="return a new tensor",
        )

    def set_materialize_grads(self, value: bool) -> None:
        """Whether a gradient that nobody has is zeros, or None."""
        self.materializes = value

    def state(self) -> dict[str, Any]:
        """All that `backward` may read."""
        return {"": self.to_save, **{key: value for key, value in vars(self).items() if key not in _OWN}}

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self.to_save = state[""]
        vars(self).update({key: value for key, value in state.items() if key})


@dataclass(frozen=True)
class _Call:
    """One call of a function, but for its tensors.

    kept: what forward left in `ctx`, with None where tensors were, those at `tensors`. arguments: the positions of
    floating-point tensors among `num_arguments`; outputs: among `num_outputs`, those that have a gradient.
    """

    kind: Any
    kept: tuple[Any, ...]
    spec: Any
    tensors: tuple[int, ...]
    arguments: tuple[int, ...]
    num_arguments: int
    outputs: tuple[int, ...]
    num_outputs: int
    materializes: bool

    def context(self, saved: Sequence[Tensor], needs: Sequence[bool]) -> Context:
        """As forward left it, with these tensors."""
        of_argument = dict(zip(self.arguments, needs, strict=True))
        found = Context([of_argument.get(i, False) for i in range(self.num_arguments)])
        leaves = list(self.kept)
        for at, tensor in zip(self.tensors, saved, strict=True):
            leaves[at] = tensor
        found.restore(tree_unflatten(leaves, self.spec))
        return found

    def grads(self, context: Context, received: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of its floating-point arguments. received: of `outputs`."""
        given: list[Tensor | None] = [None] * self.num_outputs
        for at, grad in zip(self.outputs, received, strict=True):
            given[at] = grad
        found = backward_of(self.kind)(context, *given)
        each = found if isinstance(found, tuple | list) else (found,)
        return [each[at] if at < len(each) else None for at in self.arguments]

    def __str__(self) -> str:
        if isinstance(self.kind, _Hook):
            return "a hook on a gradient, which may read that and numbers of Python alone,"
        kind = type(self.kind) if isinstance(self.kind, _Traced) else self.kind
        return f"{kind.__module__}.{kind.__qualname__}"


_CALLS: dict[str, _Call] = {}
"""By key; of the same kind with the same constants one."""


@dataclass(frozen=True, eq=False)
class _Traced:
    """The backward of a function that Dynamo traced before."""

    graph: Any

    def backward(self, context: Context, *grads: Tensor | None) -> Any:
        """Of what forward saved."""
        return dynamo_backward(self.graph, grads, context.saved_tensors)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Traced) and other.graph is self.graph

    def __hash__(self) -> int:
        return id(self.graph)


@dataclass(frozen=True, eq=False)
class _Hook:
    """What a forward has a tensor's gradient go through."""

    hook: Any

    def backward(self, context: Context, grad: Tensor) -> Tensor:
        """The gradient that goes on."""
        found = self.hook(grad)
        return grad if found is None else found

    def _parts(self) -> tuple[Any, ...]:
        function = getattr(self.hook, "__func__", self.hook)
        cells = tuple(each.cell_contents for each in getattr(function, "__closure__", None) or ())
        numbers = all(each is None or isinstance(each, bool | int | float | str) for each in cells)
        plain = (function.__code__, cells) if numbers and hasattr(function, "__code__") else (id(self.hook),)
        return *plain, getattr(function, "__defaults__", None), id(getattr(self.hook, "__self__", None))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hook) and other._parts() == self._parts()

    def __hash__(self) -> int:
        return hash(_Hook)


def hooked(x: Tensor, hook: Callable[[Tensor], Any]) -> Tensor:
    """x, whose gradient goes through a hook."""
    found: Tensor = _with_gradient(_Hook(hook), Context([True]), [x], [True], x)
    return found


def _key_of(call: _Call) -> str:
    said = repr((call.kept, call.spec, call.tensors, call.arguments, call.outputs, call.materializes))
    number = 0
    while (key := f"{call}:{number}") in _CALLS:
        other = _CALLS[key]
        same = (other.kept, other.spec, other.tensors, other.arguments, other.outputs, other.materializes)
        if other.kind == call.kind and repr(same) == said:
            return key
        number += 1
    _CALLS[key] = call
    return key


@contextmanager
def kept(inputs_are_wanted: bool = False) -> Iterator[None]:
    """Inside, what this thread calls of functions with their own gradients is recorded with them.

    inputs_are_wanted: whether gradients of the batch are, too, which a trace's tensors do not say.
    """
    owner = threading.get_ident()
    changed: dict[Any, Any] = {}
    apply = vars(Function)["apply"]

    def take(kind: Any) -> None:
        changed[kind] = vars(kind).get("forward")
        kind.forward = staticmethod(_recorded(kind, kind.forward, owner, inputs_are_wanted))

    def applied(kind: Any, *args: Any, **kwargs: Any) -> Any:
        if kind not in changed and threading.get_ident() == owner and _is_users(kind):  # defined, or imported, inside
            take(kind)
        return apply.__get__(None, kind)(*args, **kwargs)

    for kind in _functions():
        take(kind)
    Function.apply = classmethod(applied)  # type: ignore[assignment, method-assign]

    def traced(forward: Any, backward: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        found, saved, num = dynamo_forward(forward, args, options)
        given = args[:num]
        context = Context([isinstance(x, Tensor) and x.is_floating_point() for x in given])
        results = found if isinstance(found, tuple | list) else (found,)
        if options.get("dirty_idx"):
            context.mark_dirty()
        context.mark_non_differentiable(*(results[i] for i in options.get("non_differentiable_idx", ())))
        context.save_for_backward(*saved)
        return _with_gradient(_Traced(backward), context, given, context.needs_input_grad, found)

    try:
        with dynamo_calls(traced):
            yield
    finally:
        Function.apply = apply  # type: ignore[method-assign]
        for kind, forward in changed.items():
            if forward is None:
                del kind.forward
            else:
                kind.forward = forward


def _functions() -> Iterator[Any]:
    waiting = list(Function.__subclasses__())
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if _is_users(kind):
            yield kind


def _is_users(kind: Any) -> bool:
    return not f"{kind.__module__}.".startswith(_OTHERS)


def _line_of(kind: Any) -> str | None:
    try:
        kind = kind.hook if isinstance(kind, _Hook) else kind
        return f"{(inspect.getsourcefile(kind) or '').rpartition('/')[2]}:{inspect.getsourcelines(kind)[1]}"
    except (OSError, TypeError):
        return None


def _recorded(kind: Any, forward: Callable[..., Any], owner: int, inputs_are_wanted: bool) -> Callable[..., Any]:
    has_setup = has_setup_context(kind)

    @functools.wraps(forward)
    def run(*args: Any) -> Any:
        if threading.get_ident() != owner:
            return forward(*args)
        if kind is CheckpointFunction:  # what it runs again has the gradient of its operators
            again = _checkpointed(*args)
            if any(args[0].needs_input_grad):
                return again
            # As in eager: what it runs gets no gradient where none of what it is given wants one.
            return _as_views(again) if inputs_are_wanted else _without_gradient(again)
        given = args if has_setup else args[1:]
        floating = [isinstance(x, Tensor) and x.is_floating_point() for x in given]
        context = Context(floating)
        # torch runs forward without gradients, which a trace does not see; what forward itself switches off and on
        # again, it does.
        set_grad_enabled(True)
        try:
            found = forward(*given) if has_setup else forward(context, *given)
            if has_setup:
                kind.setup_context(context, given, found)
        finally:
            set_grad_enabled(False)
        return _with_gradient(kind, context, given, floating, found)

    return run


def _checkpointed(ctx: Any, function: Callable[..., Any], preserves: bool, *args: Any) -> Any:
    """`torch.utils.checkpoint(use_reentrant=True)`, without being done twice."""
    set_grad_enabled(True)
    try:
        return function(*args)
    finally:
        set_grad_enabled(False)


def _as_views(found: Any) -> Any:
    """What a checkpoint gives, where a trace's tensors do not say that it was given what wants a gradient: torch
    detaches the results then in place, but for views.
    """
    leaves, spec = tree_flatten(found)
    set_grad_enabled(True)
    try:
        return tree_unflatten([x.view_as(x) if isinstance(x, Tensor) else x for x in leaves], spec)
    finally:
        set_grad_enabled(False)


def _without_gradient(found: Any) -> Any:
    leaves, spec = tree_flatten(found)
    return tree_unflatten([x.detach() if isinstance(x, Tensor) else x for x in leaves], spec)


def _with_gradient(kind: Any, context: Context, given: Sequence[Any], floating: Sequence[bool], found: Any) -> Any:
    results = list(found) if isinstance(found, tuple | list) else [found]
    constant = {id(x) for x in context.not_differentiable}
    outputs = tuple(
        i for i, x in enumerate(results)
        if isinstance(x, Tensor) and x.is_floating_point() and id(x) not in constant
    )  # fmt: skip
    arguments = tuple(i for i, each in enumerate(floating) if each)
    if not outputs or not arguments:
        return found
    leaves, spec = tree_flatten(context.state())
    tensors = tuple(i for i, x in enumerate(leaves) if isinstance(x, Tensor))
    constants = tuple(None if isinstance(x, Tensor) else x for x in leaves)
    call = _Call(
        kind, constants, spec, tensors, arguments, len(given), outputs, len(results), context.materializes
    )  # fmt: skip
    made = torch.ops.autopar.own_gradient(
        [results[i] for i in outputs], [given[i] for i in arguments], [leaves[i] for i in tensors], _key_of(call)
    )
    for i, x in zip(outputs, made, strict=True):
        results[i] = x
    return tuple(results) if isinstance(found, tuple | list) else results[0]


class _OwnGradient(Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, num: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs, saved = tensors[:num], tensors[num + len(call.arguments) :]
        ctx.call, ctx.num = call, num
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(call.materializes)
        return tuple(x.detach() for x in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        call, first = ctx.call, 2 + ctx.num
        needs = ctx.needs_input_grad[first : first + len(call.arguments)]
        try:
            found = call.grads(call.context(ctx.saved_tensors, needs), grads)
        except AutoparError:
            raise
        except Exception as error:
            raise AutoparError(
                f"the backward of {call} cannot be traced",
                where=_line_of(call.kind),
                values=str(error).splitlines()[0] if str(error) else type(error).__name__,
                remedy="write it with operators of torch, on shapes alone",
            ) from error
        wanted = [x if need else None for x, need in zip(found, needs, strict=True)]
        return (None, None, *[None] * ctx.num, *wanted, *[None] * len(ctx.saved_tensors))


def trace_own_gradient(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], saved: Sequence[Tensor], function: str
) -> list[Tensor]:
    """`autopar::own_gradient`, differentiated by the function's own backward."""
    return list(_OwnGradient.apply(_CALLS[function], len(outputs), *outputs, *inputs, *saved))


AUTOGRAD: dict[Any, Callable[..., Any]] = {torch.ops.autopar.own_gradient.default: trace_own_gradient}
