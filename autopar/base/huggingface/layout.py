"""What a layer of a cache keeps, in words: its kind, and how it stores keys and values. Imports nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

KINDS = {
    "DynamicLayer": "attention",
    "DynamicSlidingWindowLayer": "attention",  # as long as the others: the mask knows the window
    "DynamicIndexedLayer": "indexed",
    "LinearAttentionLayer": "linear",
    "LinearAttentionAndFullAttentionLayer": "hybrid",
    "LinearAttentionAndSlidingWindowAttentionLayer": "hybrid",
    "DummyLayer": "none",
    "StaticLayer": "attention",
    "StaticSlidingWindowLayer": "attention",
    "StaticIndexedLayer": "indexed",
    "LinearAttentionAndStaticFullAttentionLayer": "hybrid",
    "LinearAttentionAndStaticSlidingWindowAttentionLayer": "hybrid",
}
"""transformers' layers of caches that grow and of those that do not -> the kind of ours (`states.py`)."""
STORED = ("attention", "indexed", "hybrid", "cross")
"""Kinds that keep keys and values."""


@dataclass(frozen=True, slots=True)
class Part:
    """One of the states of a linear layer. window: of its convolution; None: it has none. recurs: whether it has a
    recurrent state. written: whether a forward went through it.
    """

    window: int | None
    recurs: bool
    written: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """What a layer keeps beside its tensors. kind: see `states.py`. parts: of a linear or hybrid layer. storage:
    of keys and values, a name of `base/codes.py`; None: as they are.
    """

    kind: str
    parts: tuple[Part, ...] = ()
    storage: str | None = None

    @staticmethod
    def of(data: Any) -> Layout:
        """The inverse of `to_data`."""
        kind, parts, *storage = data
        return Layout(str(kind), tuple(Part(*part) for part in parts), *storage)

    def after(self) -> Layout:
        """Of the layer once a forward went through it."""
        return replace(self, parts=tuple(replace(part, written=True) for part in self.parts))

    def to_data(self) -> list[Any]:
        """As pytrees and plans keep it."""
        data: list[Any] = [self.kind, [[part.window, part.recurs, part.written] for part in self.parts]]
        return data if self.storage is None else [*data, self.storage]
