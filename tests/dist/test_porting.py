"""docs/porting.md says what is so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist import porting
from tests.dist.launch import launch


def test_every_row_of_the_page(tmp_path: Path) -> None:
    """Breaks if a line of the page does not run, gives other numbers than in one process, or is told otherwise."""
    first, second, third = porting.tables()
    assert min(len(first), len(second), len(third)) > 3
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    expected = porting.in_one_process(str(tmp_path / "one"))
    rows = [row[0] for row in (*first, *second)]
    for rank, (found, texts) in enumerate(launch(porting.on_ranks, 2, str(tmp_path / "two"), timeout_s=300.0)):
        for code, (value, loss, gradients), (own_value, own_loss, own_gradients) in zip(
            rows, found, expected, strict=True
        ):
            if value is not None and own_value is not None:
                assert value == pytest.approx(own_value, rel=1e-5), code
            assert (value is None) == (own_value is None) or rank, code
            assert (loss, gradients) == pytest.approx((own_loss, own_gradients), rel=1e-5), code
        for (code, words), text in zip(third, texts, strict=True):
            assert words in text, (code, text)
