"""What is put in the place of a value that was traced before."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, set_proxy_slot

from autopar.base.torch_compat.tracing import node_of


def put_behind(value: torch.Tensor, make: Callable[[], torch.Tensor]) -> None:
    """Have what is made of a traced value stand in its place, for whoever read it before and for all who will: behind
    what was put there before.
    """
    mode, now, last = get_proxy_mode(), node_of(value), vars(value).get("_autopar_made")
    assert mode is not None and now is not None
    slot = get_proxy_slot(value, mode.tracer)
    again = last is not None and last[0] is now
    if again and last is not None:
        set_proxy_slot(value, mode.tracer, last[1])
    first, before = node_of(value), get_proxy_slot(value, mode.tracer)
    made = make()
    end = node_of(made)
    assert first is not None and end is not None
    between, waiting = set[fx.Node](), [end]
    while waiting:
        node = waiting.pop()
        if node is not first and node not in between:
            between.add(node)
            waiting += node.all_input_nodes
    at = first
    for node in [each for each in first.graph.nodes if each in between]:
        at.append(node)
        at = node
    for user in [each for each in first.users if each not in between]:
        user.replace_input_with(first, end)
    set_proxy_slot(value, mode.tracer, slot if again else get_proxy_slot(made, mode.tracer))
    vars(value)["_autopar_made"] = (node_of(value), before)
