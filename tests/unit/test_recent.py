"""The cache that passes share is bounded."""

from __future__ import annotations

from autopar.base.recent import Recent


def test_the_least_recent_goes_first() -> None:
    """Breaks if more is kept than asked for, or if what is asked for again counts as old."""
    made: list[int] = []

    def get(key: int) -> int:
        return kept.get(key, lambda: made.append(key) or key * 10)  # type: ignore[func-returns-value]

    kept = Recent[int, int](2)
    assert [get(key) for key in (1, 2, 1, 3, 1, 2)] == [10, 20, 10, 30, 10, 20]
    assert made == [1, 2, 3, 2]
