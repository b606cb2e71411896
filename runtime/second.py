"""Gradients of a compiled model that somebody differentiates again: programs have none of the second order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import dtensor_like, local_tensor


def once(gradients: Sequence[Tensor | None], sources: Iterable[Tensor | None]) -> Sequence[Tensor | None]:
    """What a backward gives: where a graph of it is made (create_graph=True), whoever differentiates that is told.

    sources: what the gradients were computed of (parameters, inputs, gradients that came), in the user's graph: asked
    for by name (`torch.autograd.grad(g.sum(), x)`), torch looks at what leads there alone, and would say that x was not
    used.
    """
    if not torch.is_grad_enabled():
        return gradients
    asked = [each for each in sources if each is not None and each.requires_grad]
    anchor = _Anchor.apply(torch.zeros((), requires_grad=True), *asked)
    return [None if gradient is None else _Once.apply(anchor, gradient) for gradient in gradients]


class _Anchor(torch.autograd.Function):
    """One number that is said to come of all of them."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, *others: Tensor) -> Tensor:
        return first.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise AssertionError("a gradient went past the one that refuses it")


class _Once(torch.autograd.Function):
    """A gradient that has no derivative: a program computes none of the second order.

    Raises:
        AutoparError: where it is differentiated.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, gradient: Tensor) -> Tensor:
        if isinstance(gradient, DTensor):
            return dtensor_like(gradient, local_tensor(gradient))
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise AutoparError(
            "a gradient of a compiled model is differentiated again (create_graph=True), and programs have no second "
            "derivatives",
            remedy="Compute what needs them inside the model's forward, with torch.func, or with the eager model",
        )
