"""Counts of numbers (`torch.bincount`): as many as their largest says, or `minlength` where none is larger.

Of numbers that nobody knows here only the second can be a program. Places that a `topk`, an `argmax` or a `sort` found
along a dim lie below its size, as tokens' experts do; that others do is taken for granted (`usual.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from autopar.base.torch_compat import tracing as compat

COUNTS = (torch.bincount, Tensor.bincount)
_aten = torch.ops.aten
_PLACES: Mapping[Any, int | None] = {
    _aten.topk.default: 1, _aten.sort.default: 1, _aten.sort.stable: 1, _aten.max.dim: 1, _aten.min.dim: 1,
    _aten.argmax.default: None, _aten.argmin.default: None, _aten.argsort.default: None, _aten.argsort.stable: None,
}  # fmt: skip
"""What finds places along a dim: which of its results they are, None where there is one."""
_DIM_AT: Mapping[Any, int] = {_aten.topk.default: 2, _aten.sort.stable: 2, _aten.argsort.stable: 2}
"""Where `dim` stands among the arguments; else it is the second."""
_SAME = frozenset(
    {"view", "reshape", "flatten", "_to_copy", "to", "expand", "clone", "detach", "slice", "select", "transpose", "t"}
    | {"permute", "squeeze", "unsqueeze", "contiguous", "alias", "_unsafe_view", "lift_fresh_copy", "cat", "unbind"}
    | {"split", "chunk", "index_select", "masked_select"}
)
"""Operators whose results are numbers that they were given."""


MOST_COMPARED = 2**28
"""Bytes of a table of numbers by counts: where it would take more, counts are added up one by one, of all rows."""


def counted(input: Tensor, weights: Tensor | None, minlength: int) -> Tensor:
    """As `torch.bincount` where no number of input[N] is `minlength` or larger: [minlength].

    By comparing, whose sums over parts of the rows add up.
    """
    places = torch.arange(minlength, device=input.device)
    if weights is not None:
        weights = weights.to(torch.float32 if weights.dtype == torch.float32 else torch.float64)
    if input.numel() * minlength > MOST_COMPARED:
        added = torch.ones_like(input, dtype=torch.int64) if weights is None else weights
        return added.new_zeros(minlength).index_add(0, input.to(torch.int64), added)
    found = input[:, None] == places
    return found.sum(0) if weights is None else torch.where(found, weights[:, None], 0).sum(0)


def lie_below(numbers: Tensor, end: int) -> bool:
    """Whether all are places along a dim of at most this size, as far as the trace tells."""
    return _below(compat.node_of(numbers), end)


def _below(node: Any, end: int) -> bool:
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    target = node.target
    if target is operator.getitem and isinstance(node.args[0], fx.Node):
        source = node.args[0]
        if _PLACES.get(source.target) == node.args[1] and source.target in _PLACES:
            return _size(source) <= end
        return _name(source) in _SAME and _below_all(source, end)
    if target in _PLACES and _PLACES[target] is None:
        return _size(node) <= end
    return _name(node) in _SAME and _below_all(node, end)


def _below_all(node: fx.Node, end: int) -> bool:
    """Whether what the numbers of an operator are taken from lies below: its first operand, or all of a list."""
    given = node.args[0]
    return all(_below(each, end) for each in (given if isinstance(given, list | tuple) else (given,)))


def _size(node: fx.Node) -> int:
    """Of the dim along which places are found; of all elements where none is named."""
    shape = node.args[0].meta["val"].shape if isinstance(node.args[0], fx.Node) else ()
    at = _DIM_AT.get(node.target, 1)
    dim = node.args[at] if len(node.args) > at else node.kwargs.get("dim", None if "arg" in _name(node) else -1)
    if not isinstance(dim, int):
        dim = None if "sort" not in _name(node) and dim is None else -1
    return int(torch.Size(shape).numel() if dim is None or not shape else shape[dim])


def _name(node: fx.Node) -> str:
    return getattr(getattr(node.target, "_schema", None), "name", "").removeprefix("aten::")
