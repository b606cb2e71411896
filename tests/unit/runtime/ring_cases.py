"""Cases of ring attention, for simulated ranks and for processes: whole tensors, and what a rank computes of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar.operators import attention, attention_backward, attention_backward_bias, positions, starts
from autopar.runtime.communicator import Communicator

LENGTH, BATCH, HEADS, SIZE = 16, 2, 4, 8
WAYS = {"contiguous": (1, False), "stripes": (2, False), "zigzag": (2, True), "zigzag of 4": (4, True)}
SEEN: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"right": 0},
    "window": {"left": 3, "right": 0},
    "both sides": {"left": 2, "right": 1},
    "prefix": {"right": 0, "prefix": 5},
    "prefix and window": {"left": 2, "right": 0, "prefix": 3},
    "shifted": {"right": -9},
}


@dataclass
class Case:
    """Whole tensors in float64, or `dtype`."""

    seen: dict[str, Any]
    num_key_heads: int = HEADS
    value_size: int = SIZE
    bias_shape: tuple[int, ...] | None = None
    with_keys: bool = False
    with_documents: bool = False
    with_sinks: bool = False
    dropout_p: float = 0.0
    softcap: float = 0.0
    says_positions: bool = True
    dtype: torch.dtype = torch.float64
    bias: Tensor | None = field(init=False, default=None)
    keys: Tensor | None = field(init=False, default=None)
    sinks: Tensor | None = field(init=False, default=None)
    seed: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(1)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)

        self.q, self.k = random(BATCH, HEADS, LENGTH, SIZE), random(BATCH, self.num_key_heads, LENGTH, SIZE)
        self.v = random(BATCH, self.num_key_heads, LENGTH, self.value_size)
        self.g = random(BATCH, HEADS, LENGTH, self.value_size)
        if self.bias_shape is not None:
            self.bias = random(*self.bias_shape)
        if self.with_keys:
            self.keys = torch.rand((BATCH, LENGTH), generator=generator) > 0.3
            self.keys[0] = torch.arange(LENGTH) >= 6
        if self.with_sinks:
            self.sinks = random(HEADS)
        if self.dropout_p:
            self.seed = torch.tensor(7)
        self.options = {"scale": 0.3, "softcap": self.softcap, "dropout_p": self.dropout_p} | self.seen
        if self.with_documents:
            numbers = torch.stack([torch.arange(LENGTH) >= 5, torch.arange(LENGTH) % 11 >= 3]).long()
            self.options |= {"documents": numbers, "key_documents": numbers}
        if self.dropout_p:
            self.options |= {"salt": 3, "global_shape": (BATCH, HEADS, LENGTH, LENGTH)}

    def whole(self) -> tuple[Tensor, ...]:
        """out, lse and the gradients, computed at once."""
        tensors = (self.q, self.k, self.v, self.bias, self.keys, self.sinks, self.seed)
        out, lse = attention(*tensors, **self.options)
        backward = attention_backward_bias if self.bias is not None else attention_backward
        return out, lse, *backward(self.g, *tensors, out, lse, **self.options)

    def on(self, comm: Communicator, *, outer: int, zigzag: bool, visits: tuple[int, ...] = ()) -> tuple[Tensor, ...]:
        """The same, of one rank of axis cp."""
        split = (comm.index("cp"), comm.size("cp"), outer, zigzag)
        here = positions(LENGTH, split)
        said = self.options | {"query_starts": starts(LENGTH, split)}
        if self.dropout_p and self.says_positions:
            said["positions"] = [torch.arange(BATCH), torch.arange(HEADS), here]
        if self.with_documents:
            said["documents"] = self.options["documents"][:, here]
        ring = {"outer": outer, "zigzag": zigzag, "visits": visits}
        q, k, v, g = (x[:, :, here] for x in (self.q, self.k, self.v, self.g))
        bias = self.bias if self.bias is None or self.bias.shape[2] == 1 else self.bias[:, :, here]
        tensors = (q, k, v, bias, self.keys, self.sinks, self.seed)
        out, lse = comm.ring_attention("cp", *tensors, **said, **ring)
        backward = comm.ring_attention_backward if bias is None else comm.ring_attention_backward_bias
        return out, lse, *backward("cp", g, *tensors, out, lse, **said, **ring)
