"""Batches of one shape whose values decide what the model does, on real gloo processes."""

from __future__ import annotations

import pytest

from tests.dist import by_value
from tests.dist.launch import launch


def test_each_set_of_values_has_its_program_until_there_are_too_many() -> None:
    """Breaks if a batch runs the program of another one's values, or with that one's constants; if values that were
    seen are planned for again; if a program is made for every batch without end.
    """
    for eager, found, programs, said in launch(by_value.losses, 2, timeout_s=120.0):
        assert found == pytest.approx(eager, rel=1e-5)
        assert programs == 2
        assert "the values of grid decide what the model does" in said
