"""What a proof compares a plan with whose keys have a scale a channel (`windows.py`): the eager model, call by call,
whose attention sees keys and values as such a cache has them by then, rounded by other code (`coded_reference.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar.base.codes import codes_of
from autopar.base.huggingface.coded_reference import Rounding, numbers_of

GROUP, WINDOW = 32, 128


@dataclass(slots=True)
class WindowedRounding(Rounding):
    """`storage` is of `CACHES`, by channel; what is seen depends on how many tokens were there before a call."""

    seen: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """What came in, as it is: by layer; 0 keys, 1 values."""
    name: str = ""

    @staticmethod
    def of(storage: str, cache: Any, within: float) -> WindowedRounding:
        """A reference for what is stored so."""
        kind = codes_of(storage).name
        return WindowedRounding(kind, cache, within, across=Rounding(kind, cache, within), name=storage)

    def update(self, update: Any, number: int, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        """See `Rounding.update`."""
        own = update(keys, values, *args, **kwargs)
        found = []
        for place, (new, whole) in enumerate(zip((keys, values), own, strict=True)):
            before = self.seen.get((number, place))
            every = new if before is None else torch.cat([before, new], 2)
            self.seen[number, place] = every
            as_codes = self._rounded(number, place, 0 if before is None else before.shape[2])
            mixed = torch.cat([as_codes, every[:, :, as_codes.shape[2] :]], 2)
            found.append(mixed[:, :, mixed.shape[2] - whole.shape[2] :])  # a window of attention keeps its own alone
        return tuple(found)

    def compared(self, mask: Tensor | None = None) -> Iterator[tuple[str, Tensor, Tensor]]:
        """See `Rounding.compared`: of all tokens that are codes by now. None of the prompt is padding."""
        for (number, place), every in sorted(self.seen.items()):
            count = every.shape[2] // WINDOW * WINDOW if place == 0 else every.shape[2]
            if not count:
                continue
            codes, scales = self._stored(number, place)
            numbers = numbers_of(self.storage, codes)[:, :, :count]
            if place == 0:
                scales = scales[:, :, : count // GROUP].repeat_interleave(GROUP, 2)
            have = numbers * scales.double()[:, :, :count]
            yield f"{('keys', 'values')[place]} of layer {number} in the cache", self._codes(number, place, count), have
        assert self.across is not None
        yield from self.across.compared()

    def _rounded(self, number: int, place: int, before: int) -> Tensor:
        """What of the tokens before a call it finds as codes."""
        return self._codes(number, place, before // WINDOW * WINDOW if place == 0 else max(0, before - WINDOW))

    def _codes(self, number: int, place: int, count: int) -> Tensor:
        """The first tokens of a layer as codes."""
        x = self.seen[number, place][:, :, :count]
        theirs = numbers_of(self.storage, self._stored(number, place)[0])[:, :, :count]
        if place == 1 or not count:
            return self.nearest(x, theirs, 3)
        groups = [each.unflatten(2, (-1, GROUP)) for each in (x, theirs)]
        return self.nearest(groups[0], groups[1], 3).flatten(2, 3)
