"""simplify: what is taken for the same operator, and for none, gives what it gave."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autopar.base.torch_compat import tracing
from autopar.passes.differentiate import simplify

INTS, FLOATS = torch.arange(6).reshape(2, 3), torch.tensor([[1e5, -2.5, 0.1], [3.0, 70_000.0, 1 / 3]])
CASES: dict[str, tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]], int]] = {
    "options": (FLOATS, lambda x: (x.to(torch.float16), x.to(torch.bfloat16), x.to(torch.float16)), 2),
    "kinds of numbers": (INTS, lambda x: (x * 2, x * 2.0, x * 2), 2),
    "one and true": (INTS, lambda x: (x - 1, x - 1.0, x.clamp(1), x.clamp(True), x == 1, x == True), 6),  # noqa: E712
    "what is added": (INTS, lambda x: (x + 0, x + 1, x * 1, x * 3, x**1, x**2), 3),
    "floats and zero": (-FLOATS * 0, lambda x: (x + 0, x * 1), 1),
    "casts": (INTS, lambda x: (x.to(torch.int32), x.to(torch.int64), x.float()), 2),
    "dims": (FLOATS, lambda x: (x.sum(0), x.sum(1), x.sum(0, keepdim=True), x.sum(0)), 3),
}


@pytest.mark.parametrize("name", CASES)
def test_it_gives_what_it_gave(name: str) -> None:
    """Breaks if operators that differ in an option or in a number's kind are taken for one, or one for nothing."""
    x, function, most = CASES[name]
    module = tracing.make_fx(lambda x: function(x), {}, [x])
    expected = function(x)
    simplify(module.graph)
    module.recompile()
    for found, wanted in zip(module(x), expected, strict=True):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)
        assert torch.equal(found.double().reciprocal(), wanted.double().reciprocal())  # 0.0 and -0.0 are two
    assert sum(node.op == "call_function" for node in module.graph.nodes) <= most
