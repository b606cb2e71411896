"""The operators whose keys and values go round a ring."""

from __future__ import annotations

from torch import fx

NAMES = {
    "autopar.attention.default": "ring_attention",
    "autopar.attention_backward.default": "ring_attention_backward",
    "autopar.attention_backward_bias.default": "ring_attention_backward_bias",
}
"""The operators that have a ring, and the communicator's methods that run them."""


def is_ring(node: fx.Node) -> bool:
    """Whether a node of a lowered graph is a ring: a call on `comm`, the axis first."""
    return node.op == "call_method" and node.target in NAMES.values()


def num_results(node: fx.Node) -> int:
    """How many tensors a ring gives."""
    return {"ring_attention": 2, "ring_attention_backward": 3}.get(str(node.target), 4)
