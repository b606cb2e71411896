"""Scripts that write into parameters and gradients themselves do on pieces what they do in one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist import writes
from tests.dist.launch import launch

MESHES: list[tuple[tuple[str, ...], tuple[int, ...], Any]] = [
    (("dp",), (2,), "zero3"),
    (("dp", "tp"), (2, 2), {"dp": "zero3", "tp": "tensor"}),
    (("dp",), (2,), "ddp"),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("axes", "sizes", "strategy"), MESHES)
def test_what_a_script_writes_is_there(axes: tuple[str, ...], sizes: tuple[int, ...], strategy: Any) -> None:
    """Breaks if `p.data = x` changes nothing, as DTensors have it, if a write to rows that another rank holds is lost
    in a copy of them, if a mask is cut otherwise than the parameter, or if a piece becomes as large as the whole; if
    ranks draw the same numbers for their pieces (`randn_like(p)`), which one process draws for the whole; if a function
    that gets a plain tensor beside a parameter, or that torch cannot do in pieces, or does wrong, is not what it is.
    """
    num = 1
    for size in sizes:
        num *= size
    for pairs in launch(writes.on_ranks, num, axes, sizes, strategy, timeout_s=200.0):
        for script, (expected, found) in zip(writes.SCRIPTS, pairs, strict=True):
            assert found == pytest.approx(expected, rel=1e-9, abs=1e-12), script.__name__


def test_parameters_that_are_replaced_are_told() -> None:
    """Breaks if a program runs with a parameter that lies otherwise than it was planned, or a piece gets other data; if
    weights that are tied behind `compile` are refused, or trained as two.
    """
    for pruned_early, early, pruned, tied, plain, short, narrow in launch(writes.refused, 2, timeout_s=120.0):
        assert early == tied == "True"
        for text in (pruned_early, pruned):
            assert "0.weight was replaced in a Sequential that is compiled already" in text
            assert "no parameter stands there now" in text and "before autopar.compile" in text
        assert "0.bias was replaced" in plain and "a plain tensor" in plain
        assert "another shape or dtype" in short and "(31,)" in short
        assert "torch.float32 for (32,) torch.float64" in narrow


def test_functions_that_write_into_a_copy_are_told() -> None:
    """Breaks if what a function writes into a part is lost without a word, or if a method's write is taken for one."""
    for *lost, kept in launch(writes.by_functions, 2, timeout_s=120.0):
        for text in lost:
            assert "a function wrote into a part" in text and "(writes.py:" in text and "[3].fill_(x)" in text
        assert kept == "no error"


def test_a_model_that_changes_behind_compile_is_told() -> None:
    """Breaks if another vocabulary ends in an operator that DTensors lack, or another attention changes nothing."""
    for text in launch(writes.resized, 2, timeout_s=120.0):
        assert "resize_token_embeddings first" in text and "set_attn_implementation first" in text
