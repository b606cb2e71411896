"""A statement's text computes what its operator computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from autopar import operators as ops
from autopar.ir.tensor_type import TensorType
from autopar.passes.emission.statements import statement

pytestmark = pytest.mark.unit
aten = torch.ops.aten
X, Y = torch.arange(24.0).reshape(4, 6).sin(), torch.arange(24.0).reshape(4, 6).cos()


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        (aten.add.Tensor, (X, Y)),
        (aten.sub.Tensor, (X, Y)),
        (aten.sub.Tensor, (X, 2.0)),
        (aten.mul.Tensor, (X, Y)),
        (aten.div.Tensor, (X, Y)),
        (aten.neg.default, (X,)),
        (aten.sum.dim_IntList, (X, [1])),
        (aten.sum.dim_IntList, (X, [1], False)),
        (aten.sum.dim_IntList, (X, [1], True)),
        (aten.slice.Tensor, (X, 1, 2, 4)),
        (aten.slice.Tensor, (X, 1, 2, 2**63 - 1)),
        (aten.slice.Tensor, (X, 0, 0, 3)),
        (aten.slice.Tensor, (X, 1, -4, -1)),
        (aten.slice.Tensor, (X, 1, 1, 6, 2)),
        (aten.select.int, (X, 0, 0)),
        (aten.select.int, (X, 1, -1)),
        (aten.sort.default, (X, 0, True)),
        (aten.topk.default, (X, 2, 0, False)),
        (aten.argmax.default, (X, 0)),
        (aten.argmax.default, (X, None, True)),
        (aten.cumsum.default, (X, 0)),
        (aten.clamp.default, (X, None, 0)),
        (aten.clamp.default, (X, 0)),
        (aten.constant_pad_nd.default, (X, [1, 2], 3.0)),
        (aten.transpose.int, (X, 0, 1)),
        (aten.permute.default, (X, [1, 0])),
        (aten.unsqueeze.default, (X, 0)),
    ],
    ids=lambda value: str(value).replace("\n", "")[:40] if not isinstance(value, tuple) else str(value[1:]),
)
def test_the_text_computes_what_the_operator_does(target: Any, arguments: tuple[Any, ...]) -> None:
    """Breaks if a sign, a dim, an end or an argument that is 0 or False gets lost on the way into the text."""
    graph, names = fx.Graph(), iter("xy")
    given: dict[str, Tensor] = {}

    def holder(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder(next(names))
        node.meta["type"], given[node.name] = TensorType.of(value), value
        return node

    wanted = target(*arguments)
    node = graph.call_function(target, tuple(map(holder, arguments)))
    if isinstance(wanted, Tensor):
        node.meta["type"] = TensorType.of(wanted)
    text = statement(node, lambda each: each.name)
    found = eval(text, {"torch": torch, "F": F, "ops": ops, "aten": aten}, given)
    many = isinstance(wanted, tuple)
    pairs = zip(wanted if many else (wanted,), found if many else (found,), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs), text
