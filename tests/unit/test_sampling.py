"""Which cases of slow tests a run has (tests/conftest.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest

pytestmark = pytest.mark.unit


class _Item:
    def __init__(self, name: str, **marks: int | None) -> None:
        self.nodeid, self._marks = name, marks

    def get_closest_marker(self, name: str) -> Any:
        if name not in self._marks:
            return None
        return SimpleNamespace(args=() if self._marks[name] is None else (self._marks[name],))


def _kept(*items: _Item) -> list[str]:
    told: list[_Item] = []
    config: Any = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: told.extend(items)))
    left: Any = list(items)
    conftest._sample(config, left)
    assert {id(each) for each in (*left, *told)} == {id(each) for each in items}  # what is left out is said
    return [each.nodeid for each in left]


def _cases(name: str, num: int, **marks: int | None) -> list[_Item]:
    return [_Item(f"{name}[{i}]", **marks) for i in range(num)]


@pytest.mark.parametrize(
    ("num", "marks", "kept"),
    [
        (9, {}, 9),
        (9, {"sampled": 4}, 4),
        (3, {"sampled": 40, "slow": None}, 3),
        (9, {"slow": None}, 3),
        (3, {"moderate": None}, 2),
        (2, {"slow": None}, 2),
        (1, {"dist": None}, 1),
        (4, {"dist": None}, 2),
    ],
)
def test_some_cases_of_what_takes_long_run(num: int, marks: dict[str, int | None], kept: int) -> None:
    """Breaks if a test loses all of its cases, a quick one some, or what is marked has another number of them."""
    assert len(_kept(*_cases("a.py::test", num, **marks))) == kept


def test_cases_are_always_the_same_and_counted_by_test() -> None:
    """Breaks if two tests share a number, or the order of a run says which cases it has."""
    items = [
        *_cases("a.py::test_one", 6, slow=None),
        *_cases("a.py::test_two", 6, slow=None),
        _Item("a.py::test_three"),
    ]
    kept = _kept(*items)
    assert [sum(name in each for each in kept) for name in ("one", "two", "three")] == [2, 2, 1]
    assert kept == [each.nodeid for each in items if each.nodeid in kept]
    assert sorted(_kept(*items[::-1])) == sorted(kept)
