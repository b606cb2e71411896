"""Ring attention: queries stay where they are, blocks of keys and values visit the ranks of an axis in turn.

Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context" (2310.01889). Each rank
holds a block of the keys: runs of positions, as `Shard(dim, outer, zigzag)` deals them. While a rank works on one
block, the next is on its way to it. What a block gives is merged by log-sum-exp; of a block only those runs are
computed that the rank's queries see (runtime/tiles.py). Backward, the blocks go round again, and the gradients of keys
and values follow them, one visit behind, and come home in the end.

Shape suffixes: B batch, H query heads, G key heads, S local queries, T keys (Tl of one block), D, E head sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autopar.operators import merge_attention, starts
from autopar.operators.attention_options import AttentionOptions
from autopar.operators.basic import wide_dtype
from autopar.operators.scaled_dot_product import add_sinks
from autopar.operators.visibility import positions_of
from autopar.runtime.communicator import Communicator
from autopar.runtime.event import Pending
from autopar.runtime.tiles import Extras, Tile, tiles_of

_operators = torch.ops.autopar


@dataclass(frozen=True, slots=True)
class Ring:
    """The way of the blocks over `axis`.

    keys: the length of one block. outer, zigzag: the stripes of which it consists (`Shard`). visits: how many places
    from home a block is at each step, ascending from 0.
    """

    comm: Communicator
    axis: str
    keys: int
    outer: int
    zigzag: bool
    visits: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of ranks, and of blocks."""
        return self.comm.size(self.axis)

    def home(self, step: int) -> int:
        """The place whose block is here at a step."""
        return (self.comm.index(self.axis) - self.visits[step]) % self.size

    def runs(self, place: int) -> list[tuple[int, int]]:
        """The runs of keys in the block of a place: (global start, length)."""
        found = starts(self.keys * self.size, (place, self.size, self.outer, self.zigzag))
        return [(start, self.keys // len(found)) for start in found]

    def move(self, tensors: dict[str, Tensor], step: int) -> Pending:
        """Start to send what belongs to this step's block to where it is at the next one; after the last, home.

        What comes instead is alike, and belongs to the next step's block: of the last step, to this rank's own.
        """
        here, num = self.comm.index(self.axis), self.size
        after = self.visits[step + 1] if step + 1 < len(self.visits) else num
        shift = after - self.visits[step]
        mine, theirs = self.home(step), (here - after) % num
        sends = [((here + shift) % num, x, f"{name} of block {mine}") for name, x in tensors.items()]
        receives = [
            ((here - shift) % num, tuple(x.shape), x.dtype, f"{name} of block {theirs}") for name, x in tensors.items()
        ]
        return self.comm.exchange(self.axis, sends, receives, together=True)

    def blocks(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The steps, each with the block that is here then; the next one is already on its way."""
        for step in range(len(self.visits)):
            on_the_way = self.move({"keys": k, "values": v}, step) if step + 1 < len(self.visits) else None
            yield step, k, v
            if on_the_way is not None:
                k, v = on_the_way.wait()


def ring_attention(
    comm: Communicator, axis: str, tensors: Sequence[Tensor | None], options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """See `MeshComm.ring_attention`. tensors: q, k, v, bias, keys, sinks, seed."""
    q, k, v, bias, keys, sinks, seed = tensors
    assert q is not None and k is not None and v is not None
    ring, said = _read(comm, axis, q, k, options)
    if ring.size == 1:
        return _operators.attention(*tensors, **said.kwargs())
    extras, total = Extras(bias, keys, seed), _Softmax(q, v)
    for step, key, value in ring.blocks(k, v):
        for tile in tiles_of(said, q.shape[2], ring.runs(ring.home(step))):
            part = extras.of(tile)
            found = _operators.attention(
                tile.rows(q), tile.columns(key), tile.columns(value), part.bias, part.keys, None, part.seed,
                **tile.options.kwargs(),
            )  # fmt: skip
            total.add(tile, *found)
    return total.finish(sinks)


def ring_attention_backward(
    comm: Communicator, axis: str, tensors: Sequence[Tensor | None], options: dict[str, Any], *, with_bias: bool
) -> tuple[Tensor, ...]:
    """See `MeshComm.ring_attention_backward`. tensors: g, q, k, v, bias, keys, sinks, seed, out, lse."""
    g, q, k, v, bias, keys, _, seed, out, lse = tensors
    assert g is not None and q is not None and k is not None and v is not None
    assert out is not None and lse is not None
    backward = _operators.attention_backward_bias if with_bias else _operators.attention_backward
    ring, said = _read(comm, axis, q, k, options)
    if ring.size == 1:
        return backward(*tensors, **said.kwargs())
    extras, total = Extras(bias, keys, seed), _Gradients(q, bias if with_bias else None)
    behind: Pending | None = None
    grads: list[Tensor] = []
    for step, key, value in ring.blocks(k, v):
        grads = [_zeros(key), _zeros(value)]
        for tile in tiles_of(said, q.shape[2], ring.runs(ring.home(step))):
            part = extras.of(tile)
            # The sinks' part is in lse.
            dq, dk, dv, *rest = backward(
                tile.rows(g), tile.rows(q), tile.columns(key), tile.columns(value), part.bias, part.keys, None,
                part.seed, tile.rows(out), tile.rows(lse), **tile.options.kwargs(),
            )  # fmt: skip
            total.add(tile, dq, *rest)
            tile.columns(grads[0]).add_(dk)
            tile.columns(grads[1]).add_(dv)
        if behind is not None:
            for grad, before in zip(grads, behind.wait(), strict=True):
                grad += before
        if ring.visits[-1]:
            behind = ring.move(dict(zip(("gradients of keys", "gradients of values"), grads, strict=True)), step)
    dk, dv = grads if behind is None else behind.wait()
    dq, *rest = total.finish()
    return dq, dk.to(k.dtype), dv.to(v.dtype), *rest


def _read(
    comm: Communicator, axis: str, q: Tensor, k: Tensor, options: dict[str, Any]
) -> tuple[Ring, AttentionOptions]:
    own = {"outer": 1, "zigzag": False, "visits": ()}
    outer, zigzag, visits = (options.get(name, default) for name, default in own.items())
    said = AttentionOptions(**{name: value for name, value in options.items() if name not in own})
    ring = Ring(comm, axis, k.shape[2], outer, zigzag, tuple(visits) or tuple(range(comm.size(axis))))
    if said.dropout_p and said.positions is None and ring.size > 1:
        here = positions_of(said.query_runs(q.shape[2]), q.device)
        rows, heads = (torch.arange(size, device=q.device) for size in q.shape[:2])
        said = replace(said, positions=(rows, heads, here))
    return ring, said


def _zeros(x: Tensor) -> Tensor:
    """Like x, in the dtype in which its terms are added."""
    return torch.zeros(x.shape, dtype=wide_dtype(x.dtype), device=x.device)


class _Softmax:
    """Attention over the keys so far, and its log-sum-exp; in float32, or float64."""

    def __init__(self, q: Tensor, v: Tensor) -> None:
        batch, heads, queries, _ = q.shape
        self._dtype, wide = q.dtype, wide_dtype(q.dtype)
        # Heads inside, as attention's result is laid out.
        self.out = torch.zeros((batch, queries, heads, v.shape[3]), dtype=wide, device=q.device).transpose(1, 2)
        self.lse = torch.full((batch, heads, queries), -torch.inf, dtype=wide, device=q.device)

    def add(self, tile: Tile, out: Tensor, lse: Tensor) -> None:
        """What the tile's keys give to its queries."""
        whole = (tile.rows(self.out), tile.rows(self.lse))
        merged = merge_attention(*whole, out.to(self.out.dtype), lse)
        for old, new in zip(whole, merged, strict=True):
            old.copy_(new)

    def finish(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """The result, with the sinks of all keys' softmax."""
        out, lse = (self.out, self.lse) if sinks is None else add_sinks(self.out, self.lse, sinks)
        return out.to(self._dtype), lse


class _Gradients:
    """The sums over all blocks: the gradients of this rank's queries, and of the bias to them."""

    def __init__(self, q: Tensor, bias: Tensor | None) -> None:
        self._like = [x for x in (q, bias) if x is not None]
        self._sums = [_zeros(x) for x in self._like]

    def add(self, tile: Tile, dq: Tensor, bias_grad: Tensor | None = None) -> None:
        tile.rows(self._sums[0]).add_(dq)
        if bias_grad is not None:
            tile.add_to_bias(self._sums[1], bias_grad)

    def finish(self) -> list[Tensor]:
        return [total.to(x.dtype) for total, x in zip(self._sums, self._like, strict=True)]
