"""How an expert's parameters lie, and what lies between its two products."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from autopar.operators.activations import activate


@dataclass(frozen=True, slots=True)
class Layout:
    """How an expert's parameters lie.

    gated: columns of the first product are gate and up, which alternate if `interleaved`, else one after the other.
    transposed: parameters are [E, in, out], not [E, out, in].
    """

    act: str
    gated: bool
    interleaved: bool
    transposed: bool

    def inward(self, matrix: Tensor) -> Tensor:
        """A parameter [.., ..], of one expert or of all, as what a row is multiplied by: [in, out]."""
        return matrix if self.transposed else matrix.transpose(-1, -2)

    def activated(self, product: Tensor) -> Tensor:
        """[S, F] of a product [S, G F]."""
        if not self.gated:
            return activate(self.act, product)
        gate, up = (product[:, ::2], product[:, 1::2]) if self.interleaved else product.chunk(2, -1)
        return activate(self.act, gate, up)
