"""The geometry of checkpoints, against arrays that are counted element by element."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.runtime.checkpoint.boxes import Box, covers, intersection, rows_of, whole_of, why_not

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@st.composite
def pieces(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, and its parts after a few cuts; often with one left out, twice there, moved or stretched."""
    shape = draw(shapes)
    found = [whole_of(shape)]
    for _ in range(draw(st.integers(0, 4))):
        box = found.pop(draw(st.integers(0, len(found) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.sizes[dim]))
        for start, size in ((0, at), (at, box.sizes[dim] - at)):
            if size:
                offsets, sizes = list(box.offsets), list(box.sizes)
                offsets[dim] += start
                sizes[dim] = size
                found.append(Box(tuple(offsets), tuple(sizes)))
    at, dim = draw(st.integers(0, len(found) - 1)), draw(st.integers(0, len(shape) - 1))
    box, by = found[at], draw(st.sampled_from((-1, 1)))
    moved = [[*values] for values in box]
    change = draw(st.sampled_from(("none", "left out", "twice", "moved", "stretched")))
    if change == "left out":
        del found[at]
    elif change == "twice":
        found.append(box)
    elif change in ("moved", "stretched"):
        moved[change == "stretched"][dim] += by
        found[at] = Box(tuple(moved[0]), tuple(moved[1]))
    return shape, found


@pytest.mark.moderate
@given(pieces())
@settings(max_examples=400, deadline=None)
def test_pieces_cover_a_tensor_once(case: tuple[tuple[int, ...], list[Box]]) -> None:
    """Breaks if an element that no piece has, or two have, or a piece that reaches beyond the tensor, goes unseen."""
    shape, boxes = case
    room = 8
    counts = np.zeros([size + 2 * room for size in shape], int)
    for box in boxes:
        counts[tuple(slice(s.start + room, s.stop + room) for s in box.slices())] += 1
    expected = np.zeros_like(counts)
    expected[tuple(slice(room, room + size) for size in shape)] = 1
    is_once = bool((counts == expected).all()) and all(size > 0 for box in boxes for size in box.sizes)
    assert covers(boxes, shape) == is_once
    if not is_once:
        assert "piece" in why_not(boxes, shape)


@pytest.mark.moderate
@given(shapes, st.data())
@settings(max_examples=200, deadline=None)
def test_a_range_of_elements_is_boxes_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Breaks if a block of a file is taken for other elements than it holds."""
    numel = math.prod(shape)
    first = data.draw(st.integers(0, numel))
    last = data.draw(st.integers(first, numel))
    elements = np.arange(numel).reshape(shape)
    found = [int(value) for box in rows_of(shape, first, last) for value in elements[box.slices()].reshape(-1)]
    assert found == list(range(first, last))


def test_what_two_boxes_share() -> None:
    """Breaks if boxes that only touch share something, or a corner is read from elsewhere."""
    one, other = Box((0, 4), (4, 4)), Box((2, 6), (8, 1))
    assert intersection(one, other) == Box((2, 6), (2, 1))
    assert intersection(one, Box((4, 4), (1, 1))) is None
    assert str(other) == "[2:10, 6:7]"


def test_boxes_that_would_take_for_ever_are_refused() -> None:
    """Breaks if a manifest can ask for 2 to the 40th corners, or boxes of other dims are compared."""
    with pytest.raises(ValueError, match="split along 20 dims"):
        covers([Box((0,) * 20, (1,) * 20)] * 2, (2,) * 20)
    with pytest.raises(ValueError, match="another number of dims"):
        covers([Box((0,), (4,))], (2, 2))
    assert covers([], (0, 4)) and covers([Box((), ())], ()) and not covers([], ())
