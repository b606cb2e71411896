"""Tables of embeddings whose gradient was asked for as a sparse tensor (`sparse=True`): it is dense here, with the same
numbers, as parts of it are summed and cut.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from autopar.base.torch_compat import tracing as compat


def make_gradients_dense(graph: fx.Graph, origins: Mapping[str, str]) -> tuple[str, ...]:
    """Have no operator of a captured graph make a sparse gradient. Returns what the user is told, once a line."""
    told = dict[str, None]()
    for node in graph.nodes:
        if not isinstance(node.target, compat.OpOverload):
            continue
        for place, each in enumerate(node.target._schema.arguments):
            if each.name != "sparse" or str(each.type) != "bool":
                continue
            if place < len(node.args) and node.args[place]:
                node.args = (*node.args[:place], False, *node.args[place + 1 :])
            elif node.kwargs.get("sparse"):
                node.kwargs = {**node.kwargs, "sparse": False}
            else:
                continue
            told[f"sparse=True of {origins.get(node.name) or node.target.__name__}: the gradient is dense, with the "
                 "same numbers; SparseAdam takes none, Adam and SGD do"] = None  # fmt: skip
    return tuple(told)
