"""Columns: the layouts of a tensor under each choice are numbered once, for all problems that are built of them."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.ir.sharding import PARTIAL, REPLICATE, Shard, num_pieces
from autopar.passes.placement.columns import Column

SIZES = (2, 4)
LAYOUTS = [(Shard(0), REPLICATE), (REPLICATE, PARTIAL), (Shard(0), REPLICATE), (Shard(0), Shard(1))]


def test_a_column_numbers_layouts_as_they_come() -> None:
    """Breaks if an edge reads the cost of another layout, or memory counts pieces of another."""
    column = Column(LAYOUTS)
    assert [column.distinct[number] for number in column.number] == LAYOUTS
    assert column.distinct == tuple(dict.fromkeys(LAYOUTS))
    assert column.pieces(SIZES).tolist() == [num_pieces(each, SIZES) for each in LAYOUTS] == [2, 1, 2, 8]
    assert column.pieces((3, 4)).tolist() == [3, 1, 3, 12]


def test_what_problems_share_cannot_be_written_to() -> None:
    """Breaks if a solver that changes one problem changes all that are built of the same options."""
    with pytest.raises(ValueError, match="read-only"):
        Column(LAYOUTS).number += np.int64(1)
