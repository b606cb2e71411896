"""`torch.autograd.grad` in a forward, while it is traced: one operator, which `inner_gradients` writes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar.base.errors import AutoparError
from autopar.base.torch_compat import tracing as compat
from autopar.base.torch_compat.transforms import pushes

STOPS = (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)
"""What gradients do not go through."""


def _gradient(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad` of traced tensors, as one operator."""
    del retain_graph, only_inputs
    ends, starts = _tensors(outputs), _tensors(inputs)
    nodes, sources = list(map(compat.node_of, ends)), list(map(compat.node_of, starts))
    if is_grads_batched:
        raise AutoparError(
            "forward() calls torch.autograd.grad with is_grads_batched=True, which a program does not have",
            remedy="take the gradients one by one, each with its grad_outputs",
        )
    if None in nodes or None in sources:
        raise AutoparError(
            "forward() calls torch.autograd.grad of tensors that do not depend on what it is given",
            remedy="take gradients of what forward computes of its inputs and parameters",
        )
    given: list[Any] = list(_tensors(grad_outputs)) if grad_outputs is not None else [None] * len(ends)
    for place, (end, each) in enumerate(zip(ends, given, strict=True)):
        if each is None and end.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        given[place] = torch.ones_like(end) if each is None else each
    reached = _reached(nodes, sources)
    if not all(reached) and not (allow_unused or materialize_grads):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if "
            "this is the desired behavior."
        )
    wanted = [start for start, is_reached in zip(starts, reached, strict=True) if is_reached]
    made = iter(
        torch.ops.autopar.inner_gradient(list(ends), wanted, given, materialize_grads, pushes() > 0) if wanted else ()
    )
    found: list[Tensor | None] = []
    for start, is_reached in zip(starts, reached, strict=True):
        grad = next(made) if is_reached else torch.zeros_like(start) if materialize_grads else None
        found.append(grad if grad is None or create_graph else grad.detach())
    return tuple(found)


def _backward(*_: Any, **__: Any) -> Any:
    raise AutoparError(
        "forward() calls backward(), whose gradients a program has no place for",
        remedy="take them with torch.autograd.grad(outputs, inputs, create_graph=True), which gives them back",
    )


FUNCTIONS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.autograd.grad: _gradient,
    torch.autograd.backward: _backward,
    Tensor.backward: _backward,
}
"""What is called in the place of functions of torch while a model is traced."""


def _tensors(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)


def _reached(ends: Sequence[fx.Node | None], starts: Sequence[fx.Node | None]) -> list[bool]:
    """Which of the starts some end is computed of, by operators that have gradients."""
    seen: set[fx.Node] = set()
    waiting = [node for node in ends if node is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.target not in STOPS and not _is_whole_number(node):
            waiting += node.all_input_nodes
    return [start in seen for start in starts]


def _is_whole_number(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
