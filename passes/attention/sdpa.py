"""Calls of `F.scaled_dot_product_attention`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from autopar.ir.nodes import argument, dtype_of, is_float, shape_of
from autopar.passes.attention.build import Builder, Place
from autopar.passes.attention.found import Found
from autopar.passes.attention.heads import key_heads
from autopar.passes.attention.masks import Add, Fill, Step, Unfit

aten = torch.ops.aten


def read_sdpa(node: fx.Node, build: Builder) -> Found:
    """The call, its operands with four dims.

    Raises:
        Unfit: operands that are no [B, H, S, D].
    """
    place = Place(node, node)
    q, k, v = (operand for operand in node.args[:3] if isinstance(operand, fx.Node))
    mask = argument(node, 3, "attn_mask")
    scale: Any = node.kwargs.get("scale")
    scale = 1 / math.sqrt(shape_of(q)[-1]) if scale is None else float(scale)
    if all(len(shape_of(x)) == 3 for x in (q, k, v)):
        q, k, v = (build.make(place, aten.unsqueeze.default, x, 1) for x in (q, k, v))
        if isinstance(mask, fx.Node) and len(shape_of(mask)) == 3:
            mask = build.make(build.after([mask]), aten.unsqueeze.default, mask, 1)
    if any(len(shape_of(x)) != 4 for x in (q, k, v)):
        raise Unfit(f"its queries have {len(shape_of(q))} dims, its keys {len(shape_of(k))}")
    k, v = key_heads(q, k, v)
    step = () if mask is None else (_step(mask),)
    dropout_p, causal = float(argument(node, 4, "dropout_p", 0.0)), bool(argument(node, 5, "is_causal", False))
    return Found("sdpa", node, q, k, v, scale, step, causal, dropout_p=dropout_p)


def _step(mask: fx.Node) -> Step:
    if dtype_of(mask) == torch.bool:
        return Fill(mask, True, -math.inf)
    if not is_float(mask):
        raise Unfit(f"its mask is of {dtype_of(mask)}")
    return Add(mask)
