"""The cache as one block of a model sees it while it is traced for all that are alike: its own layers of it alone.

Which layers these are, the block says by numbers of its own (`base/watched.py`), which another block has others of.
Whatever else it asks of the cache, it would ask of the whole: then the blocks are traced one by one.

Imports transformers, so it is imported late.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from autopar.base.huggingface.states import StateCache
from autopar.base.watched import is_watched


class AsksMoreError(Exception):
    """A block asks a cache for more than what is its own."""


class BlockCache(StateCache):
    """Some layers of a cache. numbers: of each in the whole cache."""

    def __init__(self, layers: Mapping[int, Any]) -> None:
        self._own = layers
        self.used: dict[tuple[str, str], int] = {}
        """Where numbers were read that said a layer, and which."""

    @property
    def layers(self) -> Any:
        """Picked by number, not to be counted or listed."""
        return _Picked(self._layer)

    def _layer(self, number: Any) -> Any:
        if not is_watched(number):
            raise AsksMoreError(f"layer {number!r} of a cache, whichever block asks")
        value = number.unseen()
        if value not in self._own:
            raise AsksMoreError(f"layer {value} of a cache")
        self.used[number.place] = value
        return self._own[value]

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_") or name in _KNOWN:
            return super().__getattribute__(name)
        found = inspect.getattr_static(type(self), name, None)
        if not (inspect.isfunction(found) and "layer_idx" in inspect.signature(found).parameters):
            raise AsksMoreError(f"{name} of a cache")
        return _of_one_layer(self, found)

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        raise AsksMoreError("how many layers a cache has")

    def __iter__(self) -> Any:
        raise AsksMoreError("all layers of a cache")


_KNOWN = frozenset({"layers", "used"})


class _Picked:
    """Layers that are picked by number."""

    def __init__(self, pick: Callable[[Any], Any]) -> None:
        self._pick = pick

    def __getitem__(self, number: Any) -> Any:
        return self._pick(number)

    def __getattr__(self, name: str) -> Any:
        raise AsksMoreError(f"{name} of the layers of a cache")


def _of_one_layer(cache: BlockCache, method: Any) -> Callable[..., Any]:
    """A method of a cache on the one layer that it is asked of."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(cache, *args, **kwargs)
        layer = cache._layer(bound.arguments.get("layer_idx"))
        bound.arguments["layer_idx"] = 0
        bound.arguments["self"] = _alone(layer)
        return method(*bound.args, **bound.kwargs)

    return run


def _alone(layer: Any) -> StateCache:
    """A cache of one layer."""
    cache = StateCache((), ())
    cache.layers = [layer]
    return cache
