"""What a block keeps in a cache: the layers that it is given of one, and those that another like it would be given.

A block says by a number of its own which layer it means (`base/watched.py`). As long as it only hands this on to the
cache, another block that says another number does the same with another layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from autopar.base.huggingface import caches
from autopar.base.torch_compat import tracing as compat
from autopar.passes.blocks.hollow import NotRepeated
from autopar.passes.blocks.recording import Place

TensorKind = tuple[object, ...]


def flatten(arguments: Any) -> tuple[list[Any], Any]:
    """The leaves of a block's arguments, caches whole, and their structure."""
    leaves, spec = compat.tree_flatten(arguments, is_leaf=caches.of_blocks)
    return leaves, spec


def cache_among(leaves: Iterable[Any]) -> Any:
    """The cache of a call; None where there is none.

    Raises:
        NotRepeated: there are several.
    """
    found = {id(leaf): leaf for leaf in leaves if caches.of_blocks(leaf)}
    if len(found) > 1:
        raise NotRepeated("a block is given several caches")
    return next(iter(found.values()), None)


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer before and after: what it keeps beside its tensors, and what these are. after: None: it was not used."""

    before: Any
    tensors: tuple[TensorKind, ...]
    after: Any


@dataclass(frozen=True, slots=True)
class Kept:
    """Of a block that was traced. layers: those that it was given, by number. places: where it read the numbers of
    those that it used.
    """

    layers: Mapping[int, _Layer]
    places: Mapping[Place, int]

    def of(self, cache: Any, block: nn.Module) -> dict[int, int] | None:
        """For each used layer's number that of another block; None where this would not do the same with its layers."""
        modules = dict(block.named_modules())
        found: dict[int, int] = {}
        for (path, name), number in self.places.items():
            own = vars(modules[path]).get(name)
            if type(own) is not int or not 0 <= own < len(cache.layers) or found.setdefault(number, own) != own:
                return None
        if len(set(found.values())) != len(found):
            return None
        for number, own in found.items():
            layer, known = cache.layers[own], self.layers[number]
            if layer.layout != known.before or tuple(map(_kind, layer.tensors())) != known.tensors:
                return None
        return found

    def given(self, cache: Any, numbers: Mapping[int, int], instead: Tensor) -> list[Tensor]:
        """What another block is given of the cache. instead: of what is not used."""
        found: list[Tensor] = []
        for number, layer in self.layers.items():
            own = cache.layers[numbers[number]].tensors() if number in numbers else [instead] * len(layer.tensors)
            found += own
        return found

    def put(self, cache: Any, numbers: Mapping[int, int], tensors: Sequence[Tensor]) -> None:
        """Hand the cache what came of the layers' tensors, all of them in turn."""
        rest = iter(tensors)
        for number, layer in self.layers.items():
            own = [next(rest) for _ in layer.tensors]
            if number in numbers:
                cache.layers[numbers[number]] = caches.layer_of(layer.after, own)


def _kind(tensor: Tensor) -> TensorKind:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


class Lent:
    """The layers of a cache that a block is given while it is traced."""

    def __init__(self, cache: Any, numbers: Iterable[int]) -> None:
        self._cache = cache
        self._numbers = sorted({number for number in numbers if 0 <= number < len(cache.layers)})
        self._before = {number: cache.layers[number] for number in self._numbers}
        self._inside: dict[int, Any] = {}
        self._seen: Any = None

    def tensors(self) -> list[Tensor]:
        """All of them in turn."""
        return [tensor for layer in self._before.values() for tensor in layer.tensors()]

    def seen(self, tensors: Iterable[Tensor]) -> Any:
        """What the block gets in the cache's place; of these tensors."""
        rest = iter(tensors)
        for number, layer in self._before.items():
            self._inside[number] = caches.layer_of(layer.layout, [next(rest) for _ in layer.tensors()])
        self._seen = caches.seen_by_block(self._inside)
        return self._seen

    def is_it(self, value: Any) -> bool:
        """Whether it is what the block got."""
        return value is self._seen

    def results(self) -> list[Tensor]:
        """The tensors after the block's forward."""
        return [tensor for layer in self._inside.values() for tensor in layer.tensors()]

    def kept(self) -> Kept:
        """What another block is held against.

        Raises:
            NotRepeated: the block handed its layers what a cache does not hold.
        """
        places = dict(self._seen.used)
        layers: dict[int, _Layer] = {}
        for number, before in self._before.items():
            kinds, inside = tuple(map(_kind, before.tensors())), self._inside[number]
            if not all(isinstance(tensor, Tensor) for tensor in inside.tensors()):
                raise NotRepeated(f"layer {number} of a cache lacks a state")
            layers[number] = _Layer(before.layout, kinds, inside.layout)
        return Kept(layers, places)
