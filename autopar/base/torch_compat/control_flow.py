"""torch's operators of control flow (`torch.cond`, `while_loop`, `scan`, `map`) as what they do in eager: Python's own.

Eager compiles them and runs what comes of it; a trace meets a branch, or a loop, like any other.

The gradient that torch 2.11's own scan has is wrong; 2.13's is that of the loop.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._higher_order_ops.cond import CondOp
from torch._higher_order_ops.map import MapImpl
from torch._higher_order_ops.scan import ScanOp
from torch._higher_order_ops.while_loop import WhileLoopOp
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten


@contextmanager
def control_flow_as_python() -> Iterator[None]:
    """Inside, in this thread, these operators run what they are given: one way of a branch, each round of a loop."""
    owner, compiling = threading.get_ident(), torch.compiler.is_dynamo_compiling
    instead: dict[Any, Callable[..., Any]] = {CondOp: _cond, WhileLoopOp: _while, ScanOp: _scan, MapImpl: _map}
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


def _cond(pred: Any, true_fn: Any, false_fn: Any, operands: Sequence[Any] = ()) -> Any:
    return true_fn(*operands) if pred else false_fn(*operands)


def _while(goes_on: Any, body: Any, carried: Sequence[Any], additional: Sequence[Any] = (), **_: Any) -> Any:
    found = tuple(carried)
    while goes_on(*found, *additional):
        found = tuple(body(*found, *additional))
    return found


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
