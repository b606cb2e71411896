"""Whether two values of a trace are the same: numbers for what their nodes say."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from autopar.base.torch_compat import tracing as compat

_aten = torch.ops.aten
_CASTS = (_aten.to.dtype, _aten.to.device, _aten.to.dtype_layout, _aten.to.other, _aten._to_copy.default)
COPIES = (_aten.clone.default, _aten.alias.default, _aten.detach.default, _aten.contiguous.default, *_CASTS)
"""What has the elements of its operand, in another memory or type."""


class Said:
    """Numbers for what nodes of a graph say: equal for those that compute the same of the same.

    A mask that is repeated along dims behind its own says what it says without them.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._of: dict[fx.Node, int] = {}

    def __call__(self, node: fx.Node) -> int:
        waiting = [node]
        while waiting:
            last = waiting[-1]
            missing = [] if last in self._of or not _is_plain(last) else self._missing(last)
            if missing:
                waiting += missing
                continue
            if last not in self._of:
                self._of[last] = self._number(last)
            waiting.pop()
        return self._of[node]

    def _missing(self, node: fx.Node) -> list[fx.Node]:
        return [each for each in node.all_input_nodes if each not in self._of]

    def _number(self, node: fx.Node) -> int:
        if not _is_plain(node):
            return self._numbers.setdefault(node, len(self._numbers))
        operands = node.all_input_nodes
        if _repeats_behind(node) or (node.target in COPIES and _dtype(node) == _dtype(operands[0])):
            return self._of[operands[0]]
        alone = len(operands) == 1 and torch.Tag.pointwise in getattr(node.target, "tags", ())

        def said(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return "value", self._of[value], () if alone else shape_of(value)
            if isinstance(value, list | tuple):
                return tuple(map(said, value))
            return type(value), value

        key = (node.target, said(node.args), tuple((name, said(value)) for name, value in node.kwargs.items()))
        try:
            return self._numbers.setdefault(key, len(self._numbers))
        except TypeError:  # an argument that cannot be looked up
            return self._numbers.setdefault(node, len(self._numbers))


def _is_plain(node: fx.Node) -> bool:
    """Whether a node gives the same for the same, and writes nothing."""
    tags = getattr(node.target, "tags", ())
    return node.op == "call_function" and torch.Tag.nondeterministic_seeded not in tags and not compat.is_mutable(node)


def _repeats_behind(node: fx.Node) -> bool:
    """Whether a node has its operand's elements, each as often as dims say that come behind all others."""
    if node.target is _aten.unsqueeze.default:
        return node.args[1] in (-1, len(shape_of(node.args[0])))
    if node.target in (_aten.expand.default, _aten.expand_as.default):
        before, after = shape_of(node.args[0]), shape_of(node)
        kept = next((place for place, (a, b) in enumerate(zip(before, after)) if a != b), len(before))
        return len(before) == len(after) and all(size == 1 for size in before[kept:])
    return False


def shape_of(node: Any) -> tuple[int, ...]:
    """Of what a node gives; of anything else that of a number."""
    return tuple(getattr(node.meta.get("val"), "shape", ()))


def _dtype(node: fx.Node) -> Any:
    return getattr(node.meta.get("val"), "dtype", None)
