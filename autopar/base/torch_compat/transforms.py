"""torch's private parts that `torch.func.grad`, `vjp`, `jacrev` and `vmap` in a forward need."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._C._functorch as _functorch
from torch._functorch import eager_transforms
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

_PUSHED = threading.local()


def pushes() -> int:
    """How many derivatives this thread has pushed forward (`jvp`, `jacfwd`, `hessian`) inside of `by_autograd`."""
    return getattr(_PUSHED, "count", 0)


@contextmanager
def by_autograd() -> Iterator[None]:
    """Inside, in this thread, gradients of `torch.func` are those that `torch.autograd.grad` gives of the same values:
    what a transform wraps has no place in a trace.
    """
    owner = threading.get_ident()
    replaced: dict[str, Callable[..., Any]] = {
        "grad_and_value_impl": _grad_and_value, "_vjp_with_argnums": _vjp, "_jvp_with_argnums": _jvp,
    }  # fmt: skip
    before = {name: getattr(eager_transforms, name) for name in replaced}

    def of_this_thread(name: str, instead: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (
            instead if threading.get_ident() == owner else before[name]
        )(*args, **kwargs)  # fmt: skip

    _PUSHED.count = 0
    for name, instead in replaced.items():
        setattr(eager_transforms, name, of_this_thread(name, instead))
    try:
        with restored():
            yield
    finally:
        for name, function in before.items():
            setattr(eager_transforms, name, function)


@contextmanager
def restored() -> Iterator[None]:
    """Behind it transforms are as deep in one another as before, also where what they call raises."""
    depth, nesting = _functorch.get_dynamic_layer_stack_depth(), eager_transforms.JVP_NESTING
    level = forward_ad._current_level
    try:
        yield
    finally:
        while forward_ad._current_level > level:
            forward_ad.exit_dual_level()
        if _functorch.get_dynamic_layer_stack_depth() > depth:
            _functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        eager_transforms.JVP_NESTING = nesting


def _apart(args: tuple[Any, ...], argnums: int | tuple[int, ...] | None) -> tuple[list[Any], Any]:
    """The arguments, those that are differentiated for as values of their own; and these."""
    places = range(len(args)) if argnums is None else (argnums,) if isinstance(argnums, int) else argnums
    found = list(args)
    for place in places:
        found[place] = pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, found[place])
    chosen = tuple(found[place] for place in places)
    return found, chosen[0] if isinstance(argnums, int) else chosen


def _grad_and_value(
    func: Callable[..., Any], argnums: int | tuple[int, ...], has_aux: bool, args: tuple[Any, ...], kwargs: Any
) -> tuple[Any, Any]:
    given, chosen = _apart(args, argnums)
    found = func(*given, **kwargs)
    output = found[0] if has_aux else found
    leaves, spec = pytree.tree_flatten(chosen)
    grads = torch.autograd.grad(output, leaves, create_graph=True, allow_unused=True, materialize_grads=True)
    return pytree.tree_unflatten(list(grads), spec), found


def _vjp(
    func: Callable[..., Any], *primals: Any, argnums: int | tuple[int, ...] | None = None, has_aux: bool = False
) -> tuple[Any, ...]:
    given, chosen = _apart(primals, argnums)
    found = func(*given)
    outputs, *aux = found if has_aux else (found,)
    ends = pytree.tree_leaves(outputs)
    leaves, spec = pytree.tree_flatten(chosen)

    def pulled_back(cotangents: Any, retain_graph: bool = True, create_graph: bool | None = None) -> Any:
        grads = torch.autograd.grad(
            ends, leaves, pytree.tree_leaves(cotangents), create_graph=True, allow_unused=True, materialize_grads=True
        )
        return pytree.tree_unflatten(list(grads), spec)

    return (outputs, pulled_back, *aux)


def _jvp(
    func: Callable[..., Any],
    primals: tuple[Any, ...],
    tangents: Any,
    argnums: int | tuple[int, ...] | None,
    *,
    strict: bool = False,
    has_aux: bool,
) -> tuple[Any, ...]:
    """What is pulled back is linear in what it is pulled back from: the gradient for that is what is pushed forward."""
    given, chosen = _apart(primals, argnums)
    found = func(*given)
    outputs, *aux = found if has_aux else (found,)
    ends, spec = pytree.tree_flatten(outputs)
    options: dict[str, Any] = {"create_graph": True, "allow_unused": True, "materialize_grads": True}
    at = [torch.zeros_like(end) for end in ends]
    _PUSHED.count = pushes() + 1
    pulled = torch.autograd.grad(ends, pytree.tree_leaves(chosen), at, **options)
    pushed = torch.autograd.grad(pulled, at, pytree.tree_leaves(tangents), **options)
    return (outputs, pytree.tree_unflatten(list(pushed), spec), *aux)
