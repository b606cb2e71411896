"""Operators that send while they compute: their keys and values go round a ring, or their tokens to the experts."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

NAMES = {
    "autopar.attention.default": "ring_attention",
    "autopar.attention_backward.default": "ring_attention_backward",
    "autopar.attention_backward_bias.default": "ring_attention_backward_bias",
}
"""The operators that have a ring, and the communicator's methods that run them."""

EXCHANGES = {
    "autopar.experts.default": "exchange_experts",
    "autopar.experts_grad.default": "exchange_experts_grad",
    "autopar.experts_grad_bias.default": "exchange_experts_grad_bias",
}
"""The operators whose rows may go to the ranks of what they need, and the communicator's methods that run them."""

METHODS: Mapping[str, str] = {method: name for name, method in (NAMES | EXCHANGES).items()}
"""The methods, and the operators that they run."""


def sends_inside(node: fx.Node) -> bool:
    """Whether a node of a lowered graph is an operator that sends: a call on `comm`, the axis first."""
    return node.op == "call_method" and node.target in METHODS


def is_exchange(node: fx.Node) -> bool:
    """Whether it is an exchange of rows."""
    return node.op == "call_method" and node.target in EXCHANGES.values()


def num_results(node: fx.Node) -> int:
    """How many tensors a ring, or an exchange, gives."""
    counts = {
        "ring_attention": 2, "ring_attention_backward": 3, "ring_attention_backward_bias": 4, "exchange_experts": 1,
        "exchange_experts_grad": 4, "exchange_experts_grad_bias": 5,
    }  # fmt: skip
    return counts[str(node.target)]
