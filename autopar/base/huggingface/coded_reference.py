"""What a proof compares a plan with codes in its cache with: the eager model, whose keys and values are rounded before
attention sees them, by code that shares nothing with what programs run (`kept.py`).

All numbers that a code can stand for are listed, and the nearest is taken. A number in the middle between two of them
may go either way: sums in another order have other last bits. There, and nowhere else, the code that the program took
is taken here too, if it is one of the two: both are right, and what follows is compared as strictly as ever. How many
these are is counted.

Imports transformers, so it is imported late.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from autopar.base.errors import AutoparError


@dataclass(slots=True)
class Rounding:
    """Rounds keys and values to what codes can say.

    storage: a name of `base/codes.py`. cache: the program's in the end, a cache of ours. within: of its row's largest a
    number may be off, by rounding of sums.
    """

    storage: str
    cache: Any
    within: float
    edges: int = 0
    """How many codes were in the middle, and are the program's."""
    written: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """What came out: by layer; 0 keys, 1 values."""

    across: Rounding | None = None
    """Of what an encoder gave, where that is stored otherwise."""

    def compared(self, mask: Tensor | None = None) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(what it is, as rounded here, as the program has it), of all positions that are written and seen.

        mask: [batch, positions], of the first ones: 0 where a prompt is padded. What is there sees nothing, and is
        whatever attention makes of nothing.
        """
        layers = _layers(self.cache)
        for (number, place), want in sorted(self.written.items()):
            codes, scales = self._stored(number, place)
            have = (numbers_of(self.storage, codes) * scales.double())[:, :, : want.shape[2]]
            if mask is not None and layers[number].layout.kind != "cross":
                hidden = torch.nn.functional.pad(mask == 0, (0, want.shape[2] - mask.shape[1]))[:, None, :, None]
                want, have = want.masked_fill(hidden, 0.0), have.masked_fill(hidden, 0.0)
            yield f"{('keys', 'values')[place]} of layer {number} in the cache", want, have

    def _stored(self, number: int, place: int) -> tuple[Tensor, Tensor]:
        kept = _layers(self.cache)[number].kept[place]
        return kept.stored, kept.scales

    def round(self, number: int, place: int, x: Tensor) -> Tensor:
        """x [batch, heads, positions, dim]: the nearest numbers that codes stand for."""
        theirs = numbers_of(self.storage, self._stored(number, place)[0])[:, :, : x.shape[2]]
        found = self.nearest(x, theirs, 3)
        self.written[number, place] = found
        return found

    def nearest(self, x: Tensor, theirs: Tensor, dim: int) -> Tensor:
        """The nearest numbers that codes stand for. theirs: what the program's say, before scales. dim: of numbers that
        share a scale.
        """
        values = torch.tensor(_NUMBERS[self.storage], dtype=torch.float64)
        top = float(values.max())
        magnitude = x.double().norm(p=math.inf, dim=dim, keepdim=True)
        scale = torch.where(magnitude > 0, magnitude / top, torch.ones_like(magnitude))
        steps = x.double() / scale
        middles = (values[1:] + values[:-1]) / 2
        index = torch.searchsorted(middles, steps.contiguous())
        index = self._settled(theirs, steps, index, values, middles)
        return (values[index] * scale).to(x.dtype)

    def update(self, update: Any, number: int, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        """What attention takes of layer `number` where these are new. update: transformers' own."""
        return update(self.round(number, 0, keys), self.round(number, 1, values), *args, **kwargs)

    def _settled(self, theirs: Tensor, steps: Tensor, index: Tensor, values: Tensor, middles: Tensor) -> Tensor:
        """With the program's choice where a number is in the middle between two."""
        top = float(values.max())
        for lower in (index - 1, index):
            inside = (lower >= 0) & (lower < len(middles))
            middle = middles[lower.clamp(0, len(middles) - 1)]
            # Numbers become float8 by way of float32, whose rounding may put one into the middle.
            room = self.within * top + steps.abs() * 2.0**-23
            either = inside & ((steps - middle).abs() <= room)
            for choice in (lower, lower + 1):
                taken = either & (index != choice) & (values[choice.clamp(0, len(values) - 1)] == theirs)
                self.edges += int(taken.sum())
                index = torch.where(taken, choice, index)
        return index


def numbers_of(storage: str, codes: Tensor) -> Tensor:
    """What codes stand for, before scales, in float64; low nibbles of int4 are the first half of a row."""
    if storage == "int8":
        return codes.double()
    table = torch.tensor(_BYTES[storage], dtype=torch.float64)
    found = table[codes.long()]
    return torch.cat([found[..., 0], found[..., 1]], -1) if storage == "int4" else found


def _e4m3(byte: int) -> float:
    """Eight bits as OCP's 8-bit floating point has them: a sign, four of an exponent (bias 7), three of a fraction."""
    sign, exponent, fraction = byte >> 7, byte >> 3 & 15, byte & 7
    if (exponent, fraction) == (15, 7):
        return math.nan
    size = fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


_BYTES: dict[str, list[Any]] = {
    "fp8": [_e4m3(byte) for byte in range(256)],
    "int4": [(byte % 16 - 8.0, byte // 16 - 8.0) for byte in range(256)],
}
_NUMBERS: dict[str, list[float]] = {
    "fp8": sorted({x for x in _BYTES["fp8"] if not math.isnan(x)}),
    "int8": [float(x) for x in range(-127, 128)],
    "int4": [float(x) for x in range(-7, 8)],
}
"""All that a code can stand for, in order."""


def _layers(cache: Any) -> list[Any]:
    """Of a cache of ours, the decoder's own before those of what an encoder gave."""
    return [layer for each in getattr(cache, "pair", (cache,)) for layer in each.layers]


def rounding_cache(model: nn.Module, rounding: Rounding) -> Any:
    """transformers' own cache for the model, whose layers of keys and values round what they are given.

    Raises:
        AutoparError: it has other layers than the program's.
    """
    config: Any = model.config
    config = config.get_text_config(decoder=True)
    cache: Any = DynamicCache(config=config)
    if hasattr(rounding.cache, "pair"):
        cache = EncoderDecoderCache(cache, DynamicCache(config=config))
        layers = [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    else:
        layers = list(cache.layers)
    ours = _layers(rounding.cache)
    if len(layers) != len(ours):
        raise AutoparError(
            "the model's own cache has other layers than the plan's", values=f"{len(layers)} and {len(ours)}"
        )
    for number, (layer, own) in enumerate(zip(layers, ours, strict=True)):
        if own.layout.storage is not None:
            own_rounding = rounding.across if own.layout.kind == "cross" and rounding.across is not None else rounding
            layer.update = partial(own_rounding.update, layer.update, number)
    return cache
