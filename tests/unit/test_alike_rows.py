"""Examples of large inputs are kept in the memory of one row where rows are alike."""

from __future__ import annotations

import pytest
import torch

from autopar.base.alike_rows import LARGE, with_alike_rows

pytestmark = pytest.mark.unit
ROWS = 8


def test_one_row_stands_for_all() -> None:
    """Breaks if what is kept says something else, has another shape, or takes the memory of all rows."""
    mask = torch.arange(LARGE // ROWS).remainder(3).eq(0).expand(ROWS, -1).clone()
    given = {"mask": {"full": mask}, "ids": mask[:, :4].clone(), "count": 3}
    kept = with_alike_rows(given)
    assert torch.equal(kept["mask"]["full"], mask) and kept["count"] == 3 and kept["ids"] is given["ids"]
    assert kept["mask"]["full"].untyped_storage().nbytes() == mask.untyped_storage().nbytes() // ROWS


def test_other_rows_stay() -> None:
    """Breaks if a row that differs is taken for the first one."""
    mask = torch.ones(ROWS, LARGE // ROWS, dtype=torch.bool)
    mask[-1, 5] = False
    assert with_alike_rows(mask) is mask
