"""What is known of nodes without running the model: constants, row numbers, equal counts, what counts depend on."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.base.torch_compat import tracing
from autopar.ir.nodes import map_nodes
from autopar.operators.rules.lookup import rule_for
from autopar.passes.batch.site import CountKind, Site
from autopar.passes.batch.states import Rows, State, Whole

_ZEROS = frozenset({"aten.zeros.default", "aten.new_zeros.default", "aten.zeros_like.default"})
_MAX_ELEMENTS = 1 << 20
_ASKING = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "logical_not", "bitwise_not"})
"""Operators that ask something of each element of a tensor."""
_SEEN_OTHERWISE = frozenset(
    {"view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze", "contiguous", "clone", "alias"}
    | {"transpose", "permute", "t", "detach"}
)
"""Operators whose result has the elements of their operand, perhaps in another order."""
_CASTS = frozenset({"to", "_to_copy"})


def _name_of(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.").split(".")[0]


def _holds_counts(node: fx.Node) -> bool:
    """Whether a cast is to a dtype in which numbers of rows are exact."""
    return bool(node.meta["val"].dtype.itemsize >= torch.float32.itemsize)


def _is_answer(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool


def is_zero(node: fx.Node) -> bool:
    """Whether a node is a tensor filled with zeros."""
    name = str(node.target)
    if name in ("aten.full.default", "aten.new_full.default", "aten.scalar_tensor.default"):
        return isinstance(node.args[-1], int | float) and node.args[-1] == 0
    return name in _ZEROS


class Values:
    """Facts about the nodes of one graph, each found once.

    inputs, constants: the placeholders that are the program's inputs, and those whose values are known. pairs: the
    nodes of a capture for fewer rows, if there is one.
    """

    def __init__(
        self, inputs: frozenset[fx.Node], constants: Mapping[fx.Node, torch.Tensor], pairs: Mapping[fx.Node, fx.Node]
    ) -> None:
        self._inputs, self._constants, self._pairs = inputs, constants, pairs
        self._keys: dict[fx.Node, Any] = {}
        self._numbers: dict[Any, int] = {}
        self._computed: dict[fx.Node, torch.Tensor | None] = {}

    def same(self, a: fx.Node | None, b: fx.Node | None) -> bool:
        """Whether two nodes are computed alike from the same values."""
        return a is b or (a is not None and b is not None and self._key(a) == self._key(b))

    def same_count(self, a: fx.Node, b: fx.Node) -> bool:
        """Whether two counts are of the same elements, in whichever shapes these are seen and asked."""
        return self.same(a, b) or ((of_a := self._counted(a)) is not None and of_a == self._counted(b))

    def _counted(self, count: fx.Node) -> tuple[object, ...] | None:
        """What a sum of all elements is of: a tensor, and what is asked of each of its elements, last first."""
        while _name_of(count) in _SEEN_OTHERWISE or (_name_of(count) in _CASTS and _holds_counts(count)):
            (count,) = count.all_input_nodes
        if count.target is not torch.ops.aten.sum.default:
            return None
        asked: list[object] = []
        node = count.args[0]
        while isinstance(node, fx.Node) and node.op == "call_function" and len(node.all_input_nodes) == 1:
            name, (operand,) = _name_of(node), node.all_input_nodes
            if name in _ASKING:
                asked.append((str(node.target), repr(node.args[1:])))
            elif name not in _SEEN_OTHERWISE and not (name in _CASTS and _is_answer(operand)):
                break
            node = operand
        return (*asked, self._key(node)) if isinstance(node, fx.Node) else None

    def _key(self, node: fx.Node) -> int:
        if node not in self._keys:
            if node.op == "call_function":
                args, kwargs = map_nodes((node.args, node.kwargs), lambda n: ("%", self._key(n)))
                text = repr((str(node.target), args, sorted(kwargs.items())))
            else:
                text = node.name
            self._keys[node] = self._numbers.setdefault(text, len(self._numbers))
        return self._keys[node]

    def count_kind(self, count: fx.Node) -> CountKind:
        """What a count depends on."""
        kind: CountKind = "constant"
        for node in ancestors(count):
            if node.op == "placeholder" and node not in self._constants:
                if node not in self._inputs:
                    return "model"
                kind = "inputs"
            elif node.op == "call_function" and not _is_plain(node):
                return "model"
        return kind

    def is_known(self, node: fx.Node, buffers: frozenset[fx.Node]) -> bool:
        """Whether a node follows from inputs, constants, and these buffers alone."""
        return all(
            _is_plain(each)
            if each.op == "call_function"
            else each in self._inputs or each in buffers or each in self._constants
            for each in ancestors(node)
        )

    def constant(self, node: fx.Node) -> torch.Tensor | None:
        """The value of a node that depends on no input and no parameter; None for others, and for large ones."""
        if node not in self._computed:
            self._computed[node] = self._compute(node)
        return self._computed[node]

    def _compute(self, node: fx.Node) -> torch.Tensor | None:
        if node in self._constants:
            return self._constants[node]
        value = node.meta.get("val")
        if node.op != "call_function" or not _is_plain(node) or not isinstance(value, torch.Tensor):
            return None
        operands = {source: self.constant(source) for source in node.all_input_nodes}
        if value.numel() > _MAX_ELEMENTS or any(found is None for found in operands.values()):
            return None
        args, kwargs = map_nodes((node.args, node.kwargs), lambda n: operands[n])
        kwargs = {key: torch.device("cpu") if key == "device" else item for key, item in kwargs.items()}
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def numbered(self, site: Site, states: list[State]) -> tuple[Site, list[State]]:
        """x[arange(B), j] with x by rows: each row is indexed with its own number, so the result is by rows, too.

        The site is given back with a rule in which the rows of x are those of the indices.
        """
        if site.call.name != "aten.index.Tensor" or not isinstance(states[0], Rows) or states[0].outer != 1:
            return site, states
        dim, size = states[0].dim, site.call.operands[0].shape[states[0].dim]
        indices: Any = site.node.args[1]
        number = indices[dim] if dim < len(indices) else None
        if not isinstance(number, fx.Node) or number.meta["val"].numel() != size or not self._counts_rows(number):
            return site, states
        operand = 1 + sum(index is not None for index in indices[:dim])
        rule = rule_for(site.call)
        walked = [own[0] for own in rule.operands[operand] if own]
        if len(walked) != 1:
            return site, states
        x = tuple(tuple(walked) if index == dim else own for index, own in enumerate(rule.operands[0]))
        operands = [x, *rule.operands[1:]]
        operands[operand] = ()
        shaped = replace(rule, operands=tuple(operands), linear=())
        return replace(site, law=replace(site.law, rule=shaped)), [
            Whole() if index == operand else state for index, state in enumerate(states)
        ]

    def _counts_rows(self, number: fx.Node) -> bool:
        """Whether a constant counts 0, 1, …, in both captures."""
        both = [number, self._pairs[number]] if self._pairs else [number]
        found = [self.constant(node) for node in both]
        return all(value is not None and torch.equal(value.flatten(), torch.arange(value.numel())) for value in found)


def _is_plain(node: fx.Node) -> bool:
    """Whether a node computes the same whenever it is asked."""
    if node.target is operator.getitem:
        return True
    seeded = torch.Tag.nondeterministic_seeded
    return isinstance(node.target, tracing.OpOverload) and seeded not in node.target.tags


def ancestors(node: fx.Node) -> list[fx.Node]:
    """A node and all that it is computed from."""
    found: dict[fx.Node, None] = {}
    stack = [node]
    while stack:
        last = stack.pop()
        if last not in found:
            found[last] = None
            stack += last.all_input_nodes
    return list(found)
