"""The `golden` fixture, and the small model after every pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.passes import small

MAX_LINES = 40


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """`golden(text)`: the text equals golden/<test's name>.txt; `--update-golden` writes it instead."""
    name = request.node.name.removeprefix("test_").replace("[", "_").removesuffix("]")
    path = Path(__file__).parent / "golden" / f"{name}.txt"

    def check(text: str) -> None:
        text = text.rstrip("\n") + "\n"
        assert text.count("\n") <= MAX_LINES, "a golden text that nobody can take in at once"
        if request.config.getoption("--update-golden"):
            path.write_text(text)
        assert path.exists(), f"no {path.name} yet: run with --update-golden and read what it writes"
        assert text == path.read_text(), f"{path.name} differs: if that is meant, run with --update-golden"

    return check


@pytest.fixture(scope="session")
def case() -> small.Case:
    """The small model, placed as dp=zero3, tp=tensor."""
    return small.placed(small.make())
