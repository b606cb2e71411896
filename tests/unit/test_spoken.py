"""What is said of a model names operators as its code does."""

from __future__ import annotations

import pytest

from autopar.base.spoken import operator_word, spoken

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("aten.nonzero.default makes a size", "nonzero makes a size"),
        ("aten.isnan is not linear", "isnan is not linear"),
        ("read by aten.softmax.int, aten.type_as.default", "read by softmax, type_as"),
        ("aten._unsafe_index.Tensor of (aten.add_.Tensor)", "x[index] of (add_)"),
        ("patent.pending is no operator", "patent.pending is no operator"),
    ],
)
def test_a_text_has_operators_in_the_words_of_code(text: str, said: str) -> None:
    """Breaks if a message names what nobody has written: overloads, and what torch's graphs call things."""
    assert spoken(text) == said


def test_a_gradient_is_said_to_be_one() -> None:
    """Breaks if an operator of the backward is named as if the model called it."""
    assert operator_word("convolution_backward") == "the gradient of a convolution"
    assert operator_word("_softmax_backward_data") == "the gradient of softmax"
