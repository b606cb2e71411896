"""Which biases are ordinary numbers: none of them, for any input, hides a key."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, fx

from autopar.passes.attention.constants import Constants

LARGE = 1e4
"""A number that an ordinary bias has no part in."""

_OPERATORS = frozenset(
    f"aten.{name}"
    for name in (
        "abs.default", "add.Scalar", "add.Tensor", "cat.default", "clamp.default", "clone.default", "cumsum.default",
        "detach.default", "dropout.default", "embedding.default", "expand.default", "flatten.using_ints",
        "gather.default", "index.Tensor", "index_select.default", "linear.default", "matmul.default", "mul.Scalar",
        "mul.Tensor", "neg.default", "permute.default", "relu.default", "repeat.default", "reshape.default",
        "rsub.Scalar", "select.int", "sigmoid.default", "slice.Tensor", "squeeze.default", "squeeze.dim",
        "stack.default", "sub.Scalar", "sub.Tensor", "t.default", "tanh.default", "to.device", "to.dtype",
        "_to_copy.default", "transpose.int", "type_as.default", "unsqueeze.default", "view.default",
    )
)  # fmt: skip
_NUMBERS = frozenset({"add", "sub", "mul", "rsub", "clamp"})


class Ordinary:
    """`ordinary(node)`: made of parameters, of integers and bools that the model is given, and of small constants, by
    arithmetic that makes nothing large of them. trusted: placeholders of which that is known.
    """

    def __init__(self, constants: Constants, trusted: Collection[fx.Node]) -> None:
        self._constants, self._trusted = constants, trusted
        self._found: dict[fx.Node, bool] = {}

    def __call__(self, node: fx.Node) -> bool:
        stack = [node]
        while stack:
            last = stack[-1]
            missing = [source for source in self._sources(last) if source not in self._found]
            if missing and last not in self._found:
                stack += missing
                continue
            stack.pop()
            if last not in self._found:
                self._found[last] = self._own(last) and all(self._found[source] for source in self._sources(last))
        return self._found[node]

    def _sources(self, node: fx.Node) -> list[fx.Node]:
        return [] if node.op == "placeholder" or self._constants(node) is not None else node.all_input_nodes

    def _own(self, node: fx.Node) -> bool:
        constant = self._constants(node)
        if constant is not None:
            return bool((constant.value.double().abs() < LARGE).all())
        value = node.meta.get("val")
        if node.op == "placeholder":
            return node in self._trusted or (isinstance(value, Tensor) and not value.is_floating_point())
        if str(node.target) not in _OPERATORS:
            return False
        large: list[object] = []
        if str(node.target).split(".")[1] in _NUMBERS:
            large = [arg for arg in (*node.args, *node.kwargs.values()) if _is_large(arg)]
        return not large


def _is_large(value: object) -> bool:
    if isinstance(value, torch.dtype | bool):
        return False
    return isinstance(value, int | float) and not abs(value) < LARGE
