"""An attention as it was found in a graph, before it is one operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import fx

from autopar.passes.attention.masks import Step

Form = Literal["sdpa", "eager"]


@dataclass(frozen=True, slots=True)
class Found:
    """out = softmax(scale <q, k>, soft-capped, then `steps`) v, in nodes of four dims.

    node: what the operator replaces. q [B, H, S, D], k [B, G, T, D], v [B, G, T, E]; head i of q reads head i // (H/G).
    dims: how the result [B, H, S, E] is permuted before it gets the node's shape; None: not at all. sinks: [H].
    scaled: nodes that only multiply q or k by a number, which is in `scale`: their operands stand for them.
    """

    form: Form
    node: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    scale: float
    steps: tuple[Step, ...] = ()
    is_causal: bool = False
    softcap: float = 0.0
    dropout_p: float = 0.0
    sinks: fx.Node | None = None
    dims: tuple[int, ...] | None = None
    scaled: Mapping[fx.Node, fx.Node] | None = None
