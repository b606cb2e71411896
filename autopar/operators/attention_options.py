"""What attention is told beside its tensors: scale, which keys a query sees, soft-cap, dropout, where things lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionOptions:
    """The keyword arguments of `torch.ops.autopar.attention`, under the same names (scaled_dot_product.py).

    scale: of the products of queries and keys. left, right: query s sees the keys from s - left to s + right (None: all
    on that side). prefix: the keys before it are seen by all. softcap: scores x become softcap * tanh(x / softcap); 0
    for none. dropout_p, salt: of the probabilities; positions: the global index of each local batch row, query head and
    query (int64; None: all are here), global_shape: [B, H, S, T] of the whole. group, first: query head i reads key
    head (first + i) // group. query_starts, key_starts: where the equal runs begin of which the local queries, and
    keys, consist (empty: one run from 0). documents[B, S], key_documents[B, T]: integers; a query sees the keys of its
    own number alone.
    """

    scale: float
    left: int | None = None
    right: int | None = None
    prefix: int = 0
    softcap: float = 0.0
    dropout_p: float = 0.0
    salt: int = 0
    positions: Sequence[Tensor] | None = None
    global_shape: Sequence[int] = ()
    group: int | None = None
    first: int = 0
    query_starts: Sequence[int] = ()
    key_starts: Sequence[int] = ()
    documents: Tensor | None = None
    key_documents: Tensor | None = None

    def kwargs(self) -> dict[str, Any]:
        """Those that differ from their defaults, as keyword arguments."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        plain = {field.name: field.default for field in fields(self) if field.name != "scale"}
        return {name: value for name, value in given.items() if name == "scale" or not _same(value, plain[name])}

    @property
    def sees_all(self) -> bool:
        """Whether every query sees every key, padding, documents and masks apart."""
        return self.left is None and self.right is None

    def query_runs(self, queries: int) -> list[tuple[int, int]]:
        """The runs of `queries` local queries: (global start, length)."""
        return _runs(self.query_starts, queries)

    def key_runs(self, keys: int) -> list[tuple[int, int]]:
        """The runs of `keys` local keys: (global start, length)."""
        return _runs(self.key_starts, keys)


def _runs(starts: Sequence[int], length: int) -> list[tuple[int, int]]:
    starts = tuple(starts) or (0,)
    if length % len(starts):
        raise ValueError(f"{length} elements are not {len(starts)} equal runs")
    return [(start, length // len(starts)) for start in starts]


def _same(value: object, default: object) -> bool:
    if isinstance(value, Sequence) and isinstance(default, Sequence):
        return len(value) == 0 == len(default)
    return value is default or value == default
