"""Operators that send while they compute: their keys and values go round a ring, or their tokens to the experts."""

from __future__ import annotations

import operator
from collections.abc import Mapping

from torch import fx

from autopar.ir.region import LoweredFunction

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

SEND, TAKE = "send_tokens", "take_tokens"
"""Lets an exchange's tokens leave before the exchange (`sent=`), and waits for what comes home of it (`later=True`):
what stands between them and the exchange runs beside it.
"""

NO_COLLECTIVES = frozenset({"slice", "index", "positions", "starts", SEND, TAKE})
"""Calls on `comm` that send nothing, or whose bytes are the exchange's."""

METHODS: Mapping[str, str] = {method: name for name, method in (NAMES | EXCHANGES).items()}
"""The methods, and the operators that they run."""


def sends_inside(node: fx.Node) -> bool:
    """Whether a node of a lowered graph is an operator that sends: a call on `comm`, the axis first."""
    return node.op == "call_method" and node.target in METHODS


def is_exchange(node: fx.Node) -> bool:
    """Whether it is an exchange of rows."""
    return node.op == "call_method" and node.target in EXCHANGES.values()


def is_under_way(node: fx.Node) -> bool:
    """Whether it is an exchange beside which something else runs."""
    return is_exchange(node) and ("sent" in node.kwargs or "later" in node.kwargs)


def is_beside(lowered: LoweredFunction) -> bool:
    """Whether some exchange of a lowered function is."""
    return any(map(is_under_way, lowered.graph.nodes))


def taken_at(exchange: fx.Node) -> fx.Node | None:
    """The node that waits for what comes home of an exchange; None where the exchange does."""
    if "later" not in exchange.kwargs:
        return None
    coming = exchange if num_results(exchange) == 1 else _picked(exchange, 0)
    return next(user for user in coming.users if user.target == TAKE)


def _picked(node: fx.Node, index: int) -> fx.Node:
    return next(user for user in node.users if user.target is operator.getitem and user.args[1] == index)


def num_results(node: fx.Node) -> int:
    """How many results a ring, or an exchange, gives; of one with later=True what comes home is one."""
    counts = {
        "ring_attention": 2, "ring_attention_backward": 3, "ring_attention_backward_bias": 4, "exchange_experts": 1,
        "exchange_experts_grad": 4, "exchange_experts_grad_bias": 5,
    }  # fmt: skip
    number = counts[str(node.target)]
    return max(1, number - 1) if "later" in node.kwargs else number
