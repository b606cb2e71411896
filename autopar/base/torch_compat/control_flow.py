"""torch's operators of control flow (`torch.cond`, `while_loop`, `scan`, `map`) as what they do in eager: Python's own.

Eager compiles them and runs what comes of it; a trace meets a branch, or a loop, like any other. The reference of a
proof runs torch's own code of them (the kernels that its operators have for plain tensors), so that nothing of ours
says there which way a branch goes, or how often a loop goes round.

The gradient that torch 2.11's own scan has is wrong; 2.13's is that of the loop, as is that of the kernels.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch._higher_order_ops.cond import CondOp, cond_op_dense
from torch._higher_order_ops.map import MapImpl, map_dense
from torch._higher_order_ops.scan import ScanOp, generic_scan, scan_op_dense
from torch._higher_order_ops.while_loop import WhileLoopOp, while_loop_dense
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_structure, tree_unflatten


def _mentions(code: Any, name: str) -> bool:
    return name in code.co_names or any(_mentions(each, name) for each in code.co_consts if inspect.iscode(each))


_BEGINS_FOR_SHAPES = _mentions(generic_scan.__code__, "first_slice_copy")
"""Whether torch's kernel of a scan, as 2.11's, runs one more round at first."""


def control_flow_as_python() -> AbstractContextManager[None]:
    """Inside, in this thread, these operators run what they are given: one way of a branch, each round of a loop."""
    return _instead({CondOp: _cond, WhileLoopOp: _while, ScanOp: _scan, MapImpl: _map})


def control_flow_by_torch() -> AbstractContextManager[None]:
    """Inside, in this thread, these operators run torch's own code for plain tensors, whatever modes are on: what they
    are given runs in these.
    """
    cond, mapped = (functools.partial(_without_modes, kernel) for kernel in (cond_op_dense, map_dense))
    return _instead({CondOp: cond, WhileLoopOp: _while_by_torch, ScanOp: _scan_by_torch, MapImpl: mapped})


@contextmanager
def _instead(instead: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Inside, in this thread, operators of these kinds are these functions."""
    owner, compiling = threading.get_ident(), torch.compiler.is_dynamo_compiling
    before = {kind: kind.__call__ for kind in instead}

    def is_compiling() -> bool:
        """Yes to these operators' own files, which compile themselves otherwise."""
        asking = sys._getframe(1).f_globals.get("__name__", "")
        return compiling() or (threading.get_ident() == owner and asking.startswith("torch._higher_order_ops."))

    def called(kind: Any, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **options: Any) -> Any:
            if threading.get_ident() != owner:
                return before[kind](self, *args, **options)
            return run(*args, **options)

        return call

    for kind, run in instead.items():
        kind.__call__ = called(kind, run)
    torch.compiler.is_dynamo_compiling = is_compiling
    try:
        yield
    finally:
        torch.compiler.is_dynamo_compiling = compiling
        for kind, run in before.items():
            kind.__call__ = run


def _without_modes(kernel: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What a kernel gives, which runs under no mode; functions that it is given run under those that are on."""
    with _disable_current_modes() as modes:

        def under(run: Any) -> Any:
            def call(*given: Any) -> Any:
                with ExitStack() as stack:
                    for mode in reversed(modes):
                        stack.enter_context(cast("Any", mode))
                    return run(*given)

            return call if callable(run) and not isinstance(run, torch.Tensor) else run

        return kernel(*map(under, args), **options)


def _while_by_torch(goes_on: Any, body: Any, carried: Sequence[Any], additional: Sequence[Any] = (), **_: Any) -> Any:
    """As `_while`: torch's kernel takes and gives leaves."""

    def flat(*given: Any) -> tuple[Any, ...]:
        return tuple(tree_leaves(body(*given)))

    found = _without_modes(while_loop_dense, goes_on, flat, tuple(carried), tuple(additional))
    return _as_carried(body, found)


def _scan_by_torch(combine: Any, init: Sequence[Any], xs: Sequence[Any], additional_inputs: Sequence[Any] = ()) -> Any:
    """As `_scan`: torch's kernel gives leaves. The round that it begins with for shapes alone draws nothing handed."""
    trees: list[Any] = []
    for_shapes = deque([_disable_current_modes()] if _BEGINS_FOR_SHAPES else [])

    def noted(*given: Any) -> Any:
        with for_shapes.popleft() if for_shapes else nullcontext():
            trees.append(tree_structure(found := combine(*given)))
            return found

    leaves = _without_modes(scan_op_dense, noted, init, xs, tuple(additional_inputs))
    return tree_unflatten(list(leaves), trees[-1])


def _cond(pred: Any, true_fn: Any, false_fn: Any, operands: Sequence[Any] = ()) -> Any:
    return true_fn(*operands) if pred else false_fn(*operands)


def _while(goes_on: Any, body: Any, carried: Sequence[Any], additional: Sequence[Any] = (), **_: Any) -> Any:
    """body: of leaves, in the trees that the model carries."""
    found = tuple(carried)
    while goes_on(*found, *additional):
        found = tuple(tree_leaves(body(*found, *additional)))
    return _as_carried(body, found)


def _as_carried(body: Any, leaves: Sequence[Any]) -> Any:
    """What is carried, in the trees that the model carries: torch's `while_loop` hands on leaves."""
    spec = inspect.getclosurevars(body).nonlocals.get("in_spec")
    return tuple(leaves) if spec is None else tree_unflatten(list(leaves), spec)[0]


def _scan(combine: Any, init: Sequence[Any], xs: Sequence[Any], additional_inputs: Sequence[Any] = ()) -> Any:
    """combine: (carry, y) of leaves of carry and of a round."""
    carry, rounds, spec = list(init), list[list[Any]](), None
    tree: Any = init
    for number in range(xs[0].shape[0]):
        tree, y = combine(*carry, *(x[number] for x in xs), *additional_inputs)
        leaves, spec = tree_flatten(y)
        carry = tree_leaves(tree)
        rounds.append(leaves)
    stacked = [torch.stack(each) for each in zip(*rounds, strict=True)]
    assert spec is not None
    return tree, tree_unflatten(stacked, spec)


def _map(f: Any, xs: Sequence[Any], args: Sequence[Any] = ()) -> Any:
    found = [f(*(x[number] for x in xs), *args) for number in range(xs[0].shape[0])]
    return tree_map(lambda *each: torch.stack(each), *found)
