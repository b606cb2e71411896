"""Keys and values as their own heads, without the copies that a model makes for each of their query heads."""

from __future__ import annotations

import torch
from torch import fx

from autopar.ir.nodes import dtype_of, shape_of
from autopar.passes.attention.masks import Unfit
from autopar.passes.group_heads import repeated

aten = torch.ops.aten


def key_heads(q: fx.Node, k: fx.Node, v: fx.Node) -> tuple[fx.Node, fx.Node]:
    """k [B, G, T, D] and v [B, G, T, E] such that query head i of q [B, H, S, D] reads key head i // (H/G).

    Raises:
        Unfit: operands that do not belong together.
    """
    if shape_of(q)[1] == shape_of(k)[1] == shape_of(v)[1]:
        one, other = _source(k), _source(v)
        if one is not None and other is not None and shape_of(one)[1] == shape_of(other)[1]:
            k, v = one, other
    (batch, heads, _, size), keys, values = shape_of(q), shape_of(k), shape_of(v)
    if keys[0] != batch or values[:3] != keys[:3] or keys[3] != size or not keys[1] or heads % keys[1]:
        raise Unfit(f"its queries are {list(shape_of(q))}, its keys {list(keys)}, its values {list(values)}")
    if len({dtype_of(x) for x in (q, k, v)}) > 1:
        raise Unfit(f"its queries, keys and values are of {', '.join(str(dtype_of(x)) for x in (q, k, v))}")
    return k, v


def _source(node: fx.Node) -> fx.Node | None:
    """The heads that a tensor repeats, each as often in a row."""
    if (found := repeated(node)) is not None:
        return found[0]
    source = node.args[0] if node.target is aten.expand.default else None
    if isinstance(source, fx.Node) and len(shape_of(source)) == 4:
        batch, heads, *rest = shape_of(source)
        if heads == 1 and (batch, *rest) == (shape_of(node)[0], *shape_of(node)[2:]):
            return source
    return None
