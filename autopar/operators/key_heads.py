"""Key heads as query heads read them: each for several of these.

Shape suffixes: B batch, H query heads, G key/value heads, T keys, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KeyHeads:
    """Which of `total` key heads a run of query heads reads: from `start` on, each for as many as `counts` says."""

    start: int
    counts: tuple[int, ...]
    total: int

    @staticmethod
    def read(num_heads: int, num_kv_heads: int, group: int | None, first: int) -> KeyHeads:
        """Query head i of `num_heads` reads key head (first + i) // group.

        Raises:
            ValueError: a head that is not there, or no group where the heads do not divide.
        """
        if group is None and num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} query heads are no multiple of {num_kv_heads} key heads")
        group = group or num_heads // num_kv_heads
        start, stop = first // group, -(-(first + num_heads) // group)
        if not 0 <= start <= stop <= num_kv_heads:
            raise ValueError(
                f"query heads {first} to {first + num_heads - 1}, {group} for each key head, read beyond "
                f"{num_kv_heads} key heads"
            )
        ends = [min((head + 1) * group, first + num_heads) - max(head * group, first) for head in range(start, stop)]
        return KeyHeads(start, tuple(ends), num_kv_heads)

    def take(self, x: Tensor) -> Tensor:
        """The heads that are read of x[B, G, T, D]: each once where all are read equally often, else once a reader."""
        if len(self.counts) < self.total:
            x = x.narrow(1, self.start, len(self.counts))
        return x if self._is_even() else self.repeat(x)

    def put(self, x: Tensor) -> Tensor:
        """The inverse of `take` for gradients: [B, G, T, D], zeros where nothing was read."""
        if not self._is_even():
            x = self.sum(x)
        if len(self.counts) == self.total:
            return x
        whole = x.new_zeros((x.shape[0], self.total, *x.shape[2:]))
        whole.narrow(1, self.start, len(self.counts)).copy_(x)
        return whole

    def repeat(self, x: Tensor) -> Tensor:
        """Each of the heads that are read, once for each query head."""
        parts = [x[:, i : i + 1].expand(-1, count, -1, -1) for i, count in enumerate(self.counts)]
        return torch.cat(parts, 1) if parts else x[:, :0]

    def sum(self, x: Tensor) -> Tensor:
        """The gradient of `repeat`."""
        parts = x.split(list(self.counts), 1)
        return torch.cat([part.sum(1, keepdim=True) for part in parts], 1) if parts else x

    def _is_even(self) -> bool:
        return len(set(self.counts)) <= 1


def repeat_heads(x: Tensor, group: int, count: int, first: int = 0) -> Tensor:
    """[B, count, T, D] whose head i is head (first + i) // group of x[B, G, T, D]: keys as query heads read them."""
    heads = KeyHeads.read(count, x.shape[1], group, first)
    return heads.repeat(x.narrow(1, heads.start, len(heads.counts)))


def repeat_heads_grad(g: Tensor, num_heads: int, group: int, first: int = 0) -> Tensor:
    """The gradient of `repeat_heads`, from g[B, count, T, D] to [B, num_heads, T, D]."""
    heads = KeyHeads.read(g.shape[1], num_heads, group, first)
    whole = g.new_zeros((g.shape[0], num_heads, *g.shape[2:]))
    whole.narrow(1, heads.start, len(heads.counts)).copy_(heads.sum(g))
    return whole
