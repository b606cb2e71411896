"""Experts whose matrices are codes with scales (`base/codes.py`), cut as `base/stored_weights.py` has it.

Shape suffixes as in `autopar.operators.experts`; S = T K places, each a token's choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.base.codes import STORAGES_OF_WEIGHTS, decoded
from autopar.operators.basic import wide_dtype
from autopar.operators.expert_layout import Layout

MOST_FEW = 16
"""Choices of which each has its expert's matrices decoded for itself on CUDA, so that the host waits for no counts."""


@dataclass(frozen=True, slots=True)
class Held:
    """One parameter of experts. storage: of `STORAGES_OF_WEIGHTS`, "" where it is the matrices themselves.

    held: [E, …], scales and zeros: [E, …] of codes.
    """

    storage: str
    held: Tensor
    scales: Tensor | None
    zeros: Tensor | None

    def of(self, expert: int, inputs: int) -> Tensor:
        """The matrix of one expert; of codes [out, inputs]."""
        return self._decoded(expert, (-1, inputs)) if self.storage else self.held[expert]

    def of_each(self, experts_S: Tensor, inputs: int) -> Tensor:
        """[S, out, inputs] of codes, for each place that of its expert."""
        return self._decoded(experts_S, (experts_S.shape[0], -1, inputs))

    def _decoded(self, at: int | Tensor, shape: tuple[int, ...]) -> Tensor:
        assert self.scales is not None, "codes without scales"
        zeros = None if self.zeros is None else self.zeros[at]
        return decoded(self.storage, self.held[at], self.scales[at], zeros).view(shape)


def of_few(
    x: Tensor, indices: Tensor, weights: Tensor, first: Held, second: Held, bias: Tensor | None, layout: Layout,
    start: int,
) -> Tensor:  # fmt: skip
    """`experts.experts` of a few tokens: every place by itself, all in one product."""
    numbers = indices.reshape(-1).long() - start
    here = (numbers >= 0) & (numbers < first.held.shape[0])
    chosen = numbers.where(here, 0)
    rows = x.repeat_interleave(indices.shape[-1], 0)
    product = _times(rows, first.of_each(chosen, x.shape[1]))
    activated = layout.activated(product if bias is None else product + bias[chosen])
    made = _times(activated, second.of_each(chosen, activated.shape[1]))
    weighted = (made * weights.reshape(-1, 1)).to(x.dtype).masked_fill(~here[:, None], 0)
    wide = weighted.unflatten(0, (-1, indices.shape[-1])).sum(1, dtype=wide_dtype(x.dtype))
    return wide.to(x.dtype)


def _times(rows: Tensor, matrices: Tensor) -> Tensor:
    """Each row [in] times its own matrix [out, in]."""
    return torch.bmm(matrices, rows[..., None])[..., 0]


@dataclass(frozen=True, slots=True)
class Cut:
    """How codes of experts are cut.

    width: of an expert, F. unit: the features of it that stay together, because they share scales of the second
    matrix, or rows of a block of the first. first, second: (rows, columns) of what shares a scale, in numbers; rows of
    0 where a matrix is not cut in blocks, columns of 0 where a row is not cut.
    """

    width: int
    unit: int
    first: tuple[int, int]
    second: tuple[int, int]

    @staticmethod
    def of(storage: str, first: Sequence[int], second: Sequence[int], size: int, gated: bool) -> Cut | None:
        """Of codes of these shapes, for tokens of this size; None where features that stay together would be gate and
        up, or where dims are no rows, groups and blocks.
        """
        per_byte = STORAGES_OF_WEIGHTS[storage].per_byte
        width = math.prod(second[1:]) * per_byte // size
        whole = math.prod(first[1:]) * per_byte // size
        cuts = [_cut(shape, inputs) for shape, inputs in ((first, size), (second, width))]
        unit = math.lcm(max(1, cuts[0][0]), max(1, cuts[1][1]))
        is_even = width % unit == 0 and whole == width * (2 if gated else 1)
        is_even = is_even and (_rows(first), _rows(second)) == (whole, size)
        return Cut(width, unit, cuts[0], cuts[1]) if is_even else None


def _rows(shape: Sequence[int]) -> int:
    """The outputs of codes of this shape, [experts, out, …] or [experts, out/b, b, …]."""
    return math.prod(shape[1 : -2 if len(shape) > 4 else 2])


def _cut(shape: Sequence[int], inputs: int) -> tuple[int, int]:
    """The rows and columns of what shares a scale, of codes of this shape."""
    if len(shape) == 3:
        return 0, 0
    return (0, inputs // shape[2]) if len(shape) == 4 else (shape[2], inputs // shape[3])
