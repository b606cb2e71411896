"""What a compiled model knows of the caches that its forward takes, and who calls it with them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from autopar.base.huggingface import caches
from autopar.base.huggingface.masks_of_generate import spelled_out

Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]


class Caches:
    """device: on which they are. run: one forward of the model (args, kwargs).

    maker: (rows, length, device, encoded) -> a cache; .length(length): one that can be cut; .model: on meta.
    chunk: tokens of a prompt in one call, where generate() does not say it. generating: what lives as long as calls
    follow one another in which nobody else has the cache: the latest generate(), or the cache that a script hands in.
    """

    def __init__(self, device: torch.device, run: Run) -> None:
        self.device, self.run = device, run
        self.maker: Any = None
        self.chunk: int | None = None
        self.generating: weakref.ref[Any] | None = None
        self._num_drivers = 0

    def new_cache(self, batch: int, length: int, encoded: Any) -> Any:
        """An empty cache, whole until a program has said how it lies. encoded: by an encoder."""
        assert self.maker is not None
        return self.maker(batch, length, self.device, encoded)

    def whole_length(self, length: int) -> int:
        """The least length of a cache from `length` on that may be cut."""
        return int(self.maker.length(length))

    def gives_cache(self) -> bool:
        """Whether the model gives a cache that it is not handed, where its configuration says so."""
        return self.maker is not None and caches.gives_cache(self.maker.model)

    def counts_positions(self) -> bool:
        """Whether the model counts positions that it is not handed from behind those of a cache."""
        return self.maker is None or caches.counts_positions(self.maker.model)

    def is_driven(self) -> bool:
        """Whether `generate()` or `serve()` calls forward, which hand over all that a program takes."""
        return self._num_drivers > 0

    @contextmanager
    def driving(self) -> Iterator[None]:
        """Inside, it is one of these that calls."""
        self._num_drivers += 1
        try:
            yield
        finally:
            self._num_drivers -= 1

    def run_over(self, cache: Any, kwargs: dict[str, Any]) -> Any:
        """One forward of a script that goes on with a cache."""
        self.generating = weakref.ref(cache)
        return self.run((), kwargs)

    def like(self, other: Caches) -> None:
        """Know what another one knows."""
        self.maker, self.chunk = other.maker, other.chunk


def of_generate(original: Any) -> dict[str, Any]:
    """What a compiled class has of `generate()` in the place of its original's."""

    def make(self: Any, batch: int, length: int, encoded: Any) -> Any:
        return self.autopar.caches.new_cache(batch, length, encoded)

    def chunk(self: Any) -> int | None:
        found: int | None = self.autopar.caches.chunk
        return found

    def whole(self: Any, length: int) -> int:
        return int(self.autopar.caches.whole_length(length))

    def begun(self: Any, call: Any) -> None:
        self.autopar.caches.generating = weakref.ref(call)

    @wraps(original.generate)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.autopar.caches.driving():
            return original.generate(self, *args, **kwargs)

    prepare = original._prepare_cache_for_generation
    return {
        "_prepare_cache_for_generation": caches.generating(prepare, make, chunk, whole, begun),
        "_prepare_generated_length": caches.counting_tokens(original._prepare_generated_length),
        "create_masks_for_generate": spelled_out(original),
        "generate": generate,
    }
