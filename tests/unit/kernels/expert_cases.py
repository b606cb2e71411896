"""Calls of experts, and what they come to: experts computed densely, with autograd's gradients, in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar.operators.activations import activate

GATED = "mul(silu(gate), up)"
CLAMPED = "mul(add(clamp(up, -0.7, 0.7), 1), mul(clamp(gate, None, 0.7), sigmoid(mul(clamp(gate, None, 0.7), 1.702))))"
ROUTINGS = {
    "balanced": [[0, 1], [2, 0], [1, 2], [2, 1], [0, 2]] * 4,
    "hot": [[1, 1]] * 18 + [[1, 0]] * 2,
    "empty": [[2, 2], [2, 2], [3, 2]] * 6,
    "elsewhere": [[-1, 3], [7, 1], [3, 3]] * 6,
    "nowhere": [[5, 9]] * 4,
}
"""Of three experts, of which numbers from 3 on are none. Groups of 16 rows and more, and less, are tiles of 16."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes that tiles of 16 do not divide."""

    routing: list[list[int]] = field(default_factory=lambda: ROUTINGS["balanced"])
    D: int = 20
    F: int = 18
    E: int = 3
    act: str = GATED
    gated: bool = True
    interleaved: bool = False
    transposed: bool = False
    biased: bool = False
    start: int = 0
    dtype: torch.dtype = torch.float32

    def tensors(self) -> list[Tensor]:
        """g, x, indices, weights, first, second and perhaps bias."""
        generator = torch.Generator().manual_seed(len(self.routing) + self.D)

        def r(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=generator, dtype=torch.float64) / 2).to(self.dtype)

        indices = torch.tensor(self.routing) + self.start
        columns = self.F * (2 if self.gated else 1)
        first, second = r(self.E, columns, self.D), r(self.E, self.D, self.F)
        if self.transposed:
            first, second = (each.transpose(1, 2).contiguous() for each in (first, second))
        bias = [r(self.E, columns)] if self.biased else []
        tokens = len(self.routing)
        return [r(tokens, self.D), r(tokens, self.D), indices, r(*indices.shape), first, second, *bias]

    def options(self) -> dict[str, Any]:
        names = ("act", "gated", "interleaved", "transposed", "start")
        return {name: getattr(self, name) for name in names}

    def dense(self, given: list[Tensor]) -> list[Tensor]:
        """y, then the gradients to x, weights, first, second and bias."""
        g, x, indices, *parameters = (each.double() if each.is_floating_point() else each for each in given)
        leaves = [each.requires_grad_() for each in (x, *parameters)]
        x, weights, first, second, *rest = leaves
        here = (indices >= self.start) & (indices < self.start + self.E)
        chosen = torch.where(here, indices - self.start, 0)
        inward = (lambda m: m) if self.transposed else (lambda m: m.transpose(-1, -2))
        product = torch.einsum("td,tkdc->tkc", x, inward(first)[chosen])
        product = product + rest[0][chosen] if rest else product
        parts: tuple[Tensor, ...] = (product,)
        if self.gated:
            parts = (product[..., ::2], product[..., 1::2]) if self.interleaved else product.chunk(2, -1)
        made = torch.einsum("tkf,tkfd->tkd", activate(self.act, *parts), inward(second)[chosen])
        y = (made * (weights * here)[..., None]).sum(1)
        return [y.detach(), *torch.autograd.grad(y, leaves, g, materialize_grads=True)]
