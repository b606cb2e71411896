"""Every operator of torch on DTensors: beside plain tensors, and where torch has no way to do it in pieces.

    torch.where(mask, p, x)            a plain tensor counts as one that every rank has whole
    torch.linalg.svd(p), p.unique()    no way in pieces: somebody else's answer (runtime/any_operator.py)
    x.add_(p), torch.mul(p, 2, out=x)  a plain tensor that is written to gets the whole; a DTensor stays where it lies

Needs of torch 2.11 to 2.13: what its C++ dispatch calls of `DTensor._op_dispatcher`, and its flag for plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import return_and_correct_aliasing

Act = Callable[[Any, Any, Any], Any]
_NEEDED = (
    "_propagate_op_sharding_dispatch_slow_path", "_dispatch_fast_path_python_tail", "unwrap_to_op_info", "wrap",
    "_dispatch_get_local_results_slow_path", "_allow_implicit_replication",
)  # fmt: skip


def is_known() -> bool:
    """Whether this torch has all that is replaced or called here: another one's DTensors stay as they are."""
    return all(hasattr(DTensor._op_dispatcher, name) for name in _NEEDED)


def take_plain(is_taken: bool) -> None:
    """Whether a plain tensor beside DTensors counts as one that every rank has whole; else torch raises."""
    dispatcher: Any = DTensor._op_dispatcher
    dispatcher._allow_implicit_replication = is_taken


def answer_operators(act: Act) -> None:
    """Have `act(operator, args, kwargs)` answer where torch has no way on pieces; it may raise. Call it once."""
    dispatcher: Any = DTensor._op_dispatcher
    propagate, tail = dispatcher._propagate_op_sharding_dispatch_slow_path, dispatcher._dispatch_fast_path_python_tail
    # Before torch looks for the latter, which it does once, at the first operator that writes.
    dispatcher._propagate_op_sharding_dispatch_slow_path = _or_else(propagate, act)
    dispatcher._dispatch_fast_path_python_tail = _written(tail)


def in_pieces(operator: Any, args: Any, kwargs: Any) -> Any:
    """What torch does itself, for who answers an operator in its place; not of those that write, or give views."""
    dispatcher: Any = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(operator, args, kwargs)
    sharding = dispatcher._propagate_op_sharding_dispatch_slow_path(operator, args, kwargs, info, True)
    if not hasattr(sharding, "output_spec"):
        return sharding
    info.output_sharding = sharding
    return dispatcher.wrap(dispatcher._dispatch_get_local_results_slow_path(operator, args, info), sharding.output_spec)


def _or_else(propagate: Callable[..., Any], act: Act) -> Callable[..., Any]:
    @wraps(propagate)
    def found(operator: Any, args: Any, kwargs: Any, info: Any, try_cache: bool) -> Any:
        try:
            return propagate(operator, args, kwargs, info, try_cache)
        except (NotImplementedError, RuntimeError):
            pass  # a mistake of the caller's is told by the operator, on whole tensors
        return act(operator, args, kwargs)

    return found


def _written(tail: Callable[..., Any]) -> Callable[..., Any]:
    """What torch does behind an operator that writes. It takes what was written to for a DTensor, and has it lie as the
    result does: where that is another way, the result was computed in a copy.
    """

    @wraps(tail)
    def end(operator: Any, args: Any, kwargs: Any, mesh: Any, sharding: Any, found: Any, *how: bool) -> Any:
        _, is_in_place, is_out = how
        spec = sharding.output_spec
        specs = spec if isinstance(spec, tuple | list) else (spec,)
        outs = args[:1] if is_in_place else [kwargs[each.name] for each in operator._schema.arguments if each.is_out]
        if is_in_place and torch.Tag.inplace_view in operator.tags and isinstance(args[0], DTensor):
            args[0]._spec = spec  # 2.13 does so, and leaves the tensor's own shape, where the placements are the same
            return return_and_correct_aliasing(operator, args, kwargs, args[0])
        if not (is_in_place or is_out) or spec is None or len(outs) != len(specs):
            return tail(operator, args, kwargs, mesh, sharding, found, *how)
        if not any(isinstance(x, torch.Tensor) and _is_elsewhere(x, each) for x, each in zip(outs, specs, strict=True)):
            return tail(operator, args, kwargs, mesh, sharding, found, *how)
        values = found if isinstance(found, tuple | list) else (found,)
        for x, value, each in zip(outs, values, specs, strict=True):
            _put(x, value, each)
        return tuple(outs) if len(outs) > 1 else outs[0]

    return end


def _is_elsewhere(x: Any, spec: Any) -> bool:
    return not isinstance(x, DTensor) or (x.shape == spec.shape and tuple(x.placements) != tuple(spec.placements))


def _put(x: Any, found: torch.Tensor, spec: Any) -> None:
    """Write a result that lies as `spec` says into what lies otherwise."""
    made: Any = DTensor(found.detach().clone(), spec, requires_grad=False)  # pyright: ignore
    if isinstance(x, DTensor) and any(each.is_partial() for each in x.placements):
        x._local_tensor, x._spec = made._local_tensor, spec
    elif isinstance(x, DTensor):
        piece = made.redistribute(placements=x.placements)._local_tensor
        x._local_tensor.resize_(piece.shape).copy_(piece)
    else:
        whole = made.redistribute(placements=[Replicate()] * spec.mesh.ndim)._local_tensor
        x.resize_(whole.shape).copy_(whole)
