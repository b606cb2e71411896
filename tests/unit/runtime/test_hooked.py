"""What hooks look at, as text and again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.ir.hooked import Look, Unsaid, looks, place_of
from autopar.ir.told import Carried


def test_what_hooks_are_given_is_put_together() -> None:
    """Breaks if what a hook is given is another tree behind a plan file, or calls run into each other."""
    look, again = Look("a.b", "_forward_hooks", "keep", 1, 0), Look("a.b", "_forward_hooks", "keep", 1, 1)
    first, second, third = (torch.full((2,), float(number)) for number in range(3))
    given = ((first, None, [1, True]), {"x": second, "y": ("word", 0.5)}, third)
    carried = [*look.carried(given), *again.carried([first])]
    written = [Carried.of_data(each.data()) for each, _ in carried]
    assert written == [each for each, _ in carried] and place_of(written[1]) == (look, 1)
    (one, found), (two, rest) = looks(written, [x for _, x in carried])
    assert (one, two) == (look, again) and rest[0] is first
    (a, none, plain), named, last = found
    assert a is first and none is None and plain == [1, True] and type(plain[1]) is bool
    assert named["x"] is second and named["y"] == ("word", 0.5) and last is third


@pytest.mark.parametrize("given", [[nn.Linear(1, 1)], [{1: torch.ones(1)}], [1, None]])
def test_what_cannot_be_written_down_is_not_left(given: list[object]) -> None:
    """Breaks if a plan holds what no plan file can."""
    with pytest.raises(Unsaid):
        Look("", "_forward_hooks", "keep", 0, 0).carried(given)
