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

COUNTED = ("attention", "indexed", "hybrid")
"""Kinds that know how many positions are written."""


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
    of keys and values, a name of `base/codes.py`; None: as they are. empty: whether it is known that no position of
    them is written: what the first tokens see is then known without a look at the cache.
    """

    kind: str
    parts: tuple[Part, ...] = ()
    storage: str | None = None
    empty: bool = False

    @staticmethod
    def of(data: Any) -> Layout:
        """The inverse of `to_data`."""
        kind, parts, *rest = data
        return Layout(str(kind), tuple(Part(*part) for part in parts), *rest)

    def after(self) -> Layout:
        """Of the layer once a forward went through it."""
        if not self.empty and all(part.written for part in self.parts):
            return self
        parts = tuple(replace(part, written=True) for part in self.parts)
        return replace(self, parts=parts, empty=False)

    def to_data(self) -> list[Any]:
        """As pytrees and plans keep it."""
        data: list[Any] = [self.kind, [[part.window, part.recurs, part.written] for part in self.parts]]
        rest: list[Any] = [self.storage, True] if self.empty else [self.storage]
        return data if rest == [None] else [*data, *rest]
