"""Which cases of a test run in the first tier."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_slow(cases: Iterable[Any], *first: Any) -> list[Any]:
    """Cases for `parametrize`, tuples where it has several names, marked slow but for `first`."""
    listed = list(cases)
    assert set(first) <= set(listed), f"no such cases: {set(first).difference(listed)}"
    slow = pytest.mark.slow
    return [
        case if case in first else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=slow)
        for case in listed
    ]
