"""Caches that are made fit for another call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autopar.base.errors import AutoparError
from autopar.base.huggingface import reuse
from autopar.base.huggingface.states import Layout, Part, StateCache, StatePairCache


def _cache(rows: int = 2, length: int = 3) -> StateCache:
    """A layer of each kind that has states, all of whose elements differ."""
    layouts = [
        Layout("attention"), Layout("hybrid", (Part(2, True, True), Part(2, False, True))), Layout("indexed"),
        Layout("none"),
    ]  # fmt: skip
    keys, window, recurrent, indexed = (rows, 2, length, 4), (rows, 5, 2), (rows, 5, 3), (rows, length, 4)
    shapes: list[tuple[int, ...]] = [
        keys,
        keys,
        (),
        window,
        recurrent,
        window,
        keys,
        keys,
        (),
        keys,
        keys,
        (),
        indexed,
        (),
    ]
    return StateCache(layouts, [torch.rand(shape) if shape else torch.tensor(3) for shape in shapes])


def test_rows_and_positions_are_added() -> None:
    """Breaks if a row is another one's, what is written is lost or moved, or the cache that was handed in changes."""
    cache = _cache()
    before = [x.clone() for x in cache.states()]
    found = reuse.fitting(cache, 4, 5)
    for was, x, dim in zip(before, found.states(), reuse.position_dims(cache), strict=True):
        if not was.dim():
            assert x == 3
            continue
        assert x.shape[0] == 4
        for row in range(4):
            if dim is None:
                assert torch.equal(x[row], was[row // 2])
                continue
            assert x.shape[dim] == 5
            assert torch.equal(x[row].narrow(dim - 1, 0, 3), was[row // 2])
            assert not x[row].narrow(dim - 1, 3, 2).any()
    assert found.layouts() == cache.layouts()
    assert all(map(torch.equal, before, cache.states()))


def test_what_fits_is_left_alone() -> None:
    """Breaks if a cache with room is copied: its program would be another one."""
    cache = _cache()
    assert reuse.fitting(cache, 2, 2) is cache
    with pytest.raises(AutoparError, match=r"cache of 2 rows was handed in for 3(.|\n)*batch_select_indices"):
        reuse.fitting(cache, 3, 3)


def test_what_an_encoder_gave_does_not_grow() -> None:
    """Breaks if a decoder's cache is as long as its encoder's words, or those get zeros behind them."""
    own, crossing = [torch.rand(1, 2, 3, 4), torch.rand(1, 2, 3, 4), torch.tensor(3)], [torch.rand(1, 2, 9, 4)] * 2
    pair = StatePairCache.of([Layout("attention"), Layout("cross", (Part(None, False, True),))], [*own, *crossing])
    found: Any = reuse.fitting(pair, 2, 7)
    assert [tuple(x.shape) for x in found.states()] == [(2, 2, 7, 4)] * 2 + [()] + [(2, 2, 9, 4)] * 2
    assert reuse.places(pair, 1) == 3


def test_how_much_a_call_needs() -> None:
    """Breaks if a call that hands in what is new alone gets no room for what the cache has."""
    mask = torch.ones(2, 12)
    marked, config = reuse.num_marked(None, mask), SimpleNamespace(_mask_length=12)
    assert marked == reuse.num_marked(config, None) == 12
    assert reuse.needed(marked, 2 + 3 - 1, 3, 10) == 12 + 3 - 1
    assert reuse.needed(marked, 12 + 3 - 1, 3, 10) == 12 + 3 - 1
    assert reuse.num_marked(config, mask[:, None, None]) is reuse.num_marked(SimpleNamespace(), None) is None
    assert reuse.needed(None, 7, 3, 0) == 7
    assert reuse.needed(None, 7, 3, 10) == 17  # nothing says that what is handed in begins with what is written
