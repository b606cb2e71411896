"""draws: seeds from torch's generator, and which programs need one."""

from __future__ import annotations

import pytest
import torch

from autopar.runtime import draws


def test_the_number_that_comes_next() -> None:
    """Breaks if looking at a seed takes it, or taking it gives another one."""
    torch.manual_seed(3)
    first = draws.peek()
    assert draws.peek() == first and 0 <= first < draws.RANGE
    draws.take()
    assert draws.peek() != first
    torch.manual_seed(3)
    assert draws.peek() == first


def test_a_default_device_has_no_say() -> None:
    """Breaks if the number is drawn where tensors have no values, or from another generator."""
    seen = draws.peek()
    with torch.device("meta"):
        assert draws.peek() == seen


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("def forward(comm, inputs, seed):\n    return inputs", False),
        ("def forward(comm, inputs, seed):\n    return first_forward(inputs, seed + 1)", True),
        ("def forward(comm, inputs, number):\n    return first_forward(inputs, number)", True),
        (
            "def first_forward(x, seed):\n    return x * seed\n\ndef forward(comm, inputs, seed):\n    return inputs",
            False,
        ),
        ("seed = 3", False),
    ],
)
def test_which_programs_need_a_seed(text: str, wanted: bool) -> None:
    """Breaks if a step that draws goes without a seed, or one that does not takes numbers from the user's generator."""
    assert draws.reads_seed(text, ("forward",)) is wanted
