"""Which parts of an attention's queries × keys are computed at all, as the fewest calls of the operator.

Local queries and keys are runs of positions. A run of queries sees a run of keys not at all, wholly, or in part; runs
that are seen wholly and lie side by side become one *tile*, without a mask; those seen in part are tiles of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autopar.operators.attention_options import AttentionOptions
from autopar.operators.visibility import sees_every_key, sees_no_key

Runs = Sequence[tuple[int, int]]
"""(global start, length)."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Local queries `queries` and local keys `keys`, as slices; key_runs: where the latter lie in all keys.

    options: of the call that computes it.
    """

    queries: slice
    keys: slice
    key_runs: Runs
    options: AttentionOptions

    def rows(self, x: Tensor) -> Tensor:
        """The tile's queries in x[B, H, S, …]."""
        return x[:, :, self.queries]

    def columns(self, x: Tensor) -> Tensor:
        """The tile's keys in x[B, G, Tl, …]."""
        return x[:, :, self.keys]

    def bias(self, bias: Tensor) -> Tensor:
        """Its part of a bias[B, H, S, T] of which any dim may be 1."""
        bias = bias if bias.shape[2] == 1 else self.rows(bias)
        return bias if bias.shape[3] == 1 else _pick(bias, self.key_runs)

    def add_to_bias(self, whole: Tensor, grad: Tensor) -> None:
        """Add the gradient of `bias(…)` to that of the whole bias, in place."""
        whole = whole if whole.shape[2] == 1 else self.rows(whole)
        if whole.shape[3] == 1:
            whole += grad
            return
        for (start, length), part in zip(self.key_runs, grad.split([length for _, length in self.key_runs], -1)):
            whole[..., start : start + length] += part


@dataclass(frozen=True, slots=True)
class Extras:
    """bias[B, H, S, T] and keys[B, T], of all keys, in order; the dropout's seed."""

    bias: Tensor | None
    keys: Tensor | None
    seed: Tensor | None

    def of(self, tile: Tile) -> Extras:
        """Those of a tile."""
        bias = None if self.bias is None else tile.bias(self.bias)
        keys = None if self.keys is None else _pick(self.keys, tile.key_runs)
        return Extras(bias, keys, self.seed)


def _pick(x: Tensor, runs: Runs) -> Tensor:
    """Runs of the last dim, joined."""
    parts = [x[..., start : start + length] for start, length in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def tiles_of(options: AttentionOptions, queries: int, key_runs: Runs) -> list[Tile]:
    """The tiles that `queries` local queries (`options.query_starts`) see of the keys in these runs (equal lengths)."""
    query_runs = options.query_runs(queries)
    seen: list[tuple[int, int, int, int]] = []  # first and end of runs of queries, first and end of runs of keys
    partly: list[tuple[int, int, int, int]] = []
    for row, query in enumerate(query_runs):
        wholly = [sees_every_key(options, [query], [key]) for key in key_runs]
        for first, end in _stretches(wholly):
            above = (row, first, end)
            match = next((i for i, tile in enumerate(seen) if tile[1:] == above), None)
            if match is None:
                seen.append((row, row + 1, first, end))
            else:
                seen[match] = (seen[match][0], row + 1, first, end)
        partly += [
            (row, row + 1, column, column + 1)
            for column, key in enumerate(key_runs)
            if not wholly[column] and not sees_no_key(options, [query], [key])
        ]
    return [_tile(options, query_runs, key_runs, place) for place in sorted(seen + partly)]


def _stretches(flags: Sequence[bool]) -> list[tuple[int, int]]:
    """Where runs of True begin and end."""
    edges = [i for i, flag in enumerate((*flags, False)) if flag != (i > 0 and flags[i - 1])]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _tile(options: AttentionOptions, query_runs: Runs, key_runs: Runs, place: tuple[int, int, int, int]) -> Tile:
    queries, keys = query_runs[place[0] : place[1]], key_runs[place[2] : place[3]]
    rows = slice(place[0] * queries[0][1], place[1] * queries[0][1])
    columns = slice(place[2] * keys[0][1], place[3] * keys[0][1])
    said = _options(options, queries, keys, rows)
    if options.documents is not None and options.key_documents is not None:
        own, others = options.documents[:, rows], _pick(options.key_documents, keys)
        said = replace(said, documents=own, key_documents=others)
    return Tile(rows, columns, keys, said)


def _options(options: AttentionOptions, queries: Runs, keys: Runs, rows: slice) -> AttentionOptions:
    """Those of a tile's call: as little of a mask, and of where it lies, as it needs; so that fast kernels fit."""
    first, last = min(start for start, _ in queries), max(start + length for start, length in queries) - 1
    is_left_free = options.left is not None and all(start >= last - options.left for start, _ in keys)
    is_right_free = options.right is not None and all(
        start + length - 1 <= first + options.right for start, length in keys
    )
    left = None if is_left_free else options.left
    right = None if is_right_free else options.right
    if sees_every_key(options, queries, keys):
        left = right = None
    prefix = options.prefix if left is not None or right is not None else 0
    query_starts, key_starts = tuple(start for start, _ in queries), tuple(start for start, _ in keys)
    if options.dropout_p:
        assert options.positions is not None
        batch, heads, places, *_ = options.positions
        positions = (batch, heads, places[rows])
        return replace(
            options, left=left, right=right, prefix=prefix, positions=positions, query_starts=query_starts,
            key_starts=key_starts,
        )  # fmt: skip
    # Only the distances count.
    shift = min(*query_starts, *key_starts)
    query_starts, key_starts = tuple(s - shift for s in query_starts), tuple(s - shift for s in key_starts)
    if (left is None and right is None) or not any((*query_starts, *key_starts)):
        query_starts = key_starts = ()
    return replace(
        options, left=left, right=right, prefix=max(0, prefix - shift), query_starts=query_starts,
        key_starts=key_starts,
    )  # fmt: skip
