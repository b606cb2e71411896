"""Numbers that say where along a dim something is, as a router's choices: tried, to see what is made of them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from autopar.ir.nodes import map_nodes
from autopar.ir.op_call import op_call
from autopar.passes.said import shape_of

_aten = torch.ops.aten


def limit_of(root: fx.Node) -> int | None:
    """Below what the numbers lie that a `topk` or an `argmax` along a dim gives; None of others."""
    choice = _choice_of(root)
    if choice is None:
        return None
    dim, shape = _dim_of(choice), shape_of(choice.args[0])
    return None if dim is None else shape[dim]


MOST_LEFT_OUT = 16
"""Numbers of which each is left out by itself."""


def places_tried(root: fx.Node) -> list[Tensor]:
    """What such numbers may be, several times: any, and of some alone, so that each number is there and is not."""
    choice = _choice_of(root)
    assert choice is not None
    dim, shape = _dim_of(choice), shape_of(choice.args[0])
    assert dim is not None
    dim %= len(shape)
    limit = shape[dim]
    args, kwargs = map_nodes((choice.args[1:], choice.kwargs), lambda node: node.meta["val"])
    halves = [(number >> bit & 1) == side for bit in range((limit - 1).bit_length()) for side in (0, 1)
              for number in range(limit)]  # fmt: skip
    liked = torch.tensor(halves, dtype=torch.float32).reshape(-1, limit)
    others = 1 - torch.eye(limit) if limit <= MOST_LEFT_OUT else torch.zeros(0, limit)
    generator = torch.Generator().manual_seed(0)
    found = []
    for more in torch.cat([torch.zeros(1, limit), liked, others]).unbind(0):
        scores = torch.rand(shape, generator=generator) + more.reshape(-1, *(1,) * (len(shape) - dim - 1))
        made: Any = choice.target(scores, *args, **kwargs)  # type: ignore[operator]
        found.append(made if choice is root else made[1])
    return found


def _choice_of(root: fx.Node) -> fx.Node | None:
    if root.target is operator.getitem and root.args[1] == 1:
        chosen: Any = root.args[0]
        return chosen if chosen.target is _aten.topk.default else None
    return root if root.target is _aten.argmax.default else None


def _dim_of(choice: fx.Node) -> int | None:
    args, kwargs = map_nodes((choice.args, choice.kwargs), lambda node: node.meta["val"])
    dim: int | None = op_call(choice.target, args, kwargs, None).arg(
        "dim", -1 if choice.target is _aten.topk.default else None
    )
    return dim
