"""The values of nodes that depend on no input, no parameter and no buffer, worked out on the CPU.

A value is kept small: dims along which it does not change have size 1 (`Constant`), and what is too large even so, but
depends on t - s alone, is one vector over t - s (`Diagonal`). A causal mask of 128 Ki tokens is 256 Ki numbers.

    arange(T) <= arange(S)[:, None]  →  Constant of [S, T], or Diagonal of [-(S - 1), …, T - 1]
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.base.torch_compat import tracing
from autopar.ir.nodes import argument, map_nodes, operand_of, shape_of

aten = torch.ops.aten

MAX_ELEMENTS = 1 << 22
"""Values with more elements, after dims that say nothing are left out, are kept as diagonals or not at all."""

_FILLED = frozenset({"aten.full.default", "aten.ones.default", "aten.zeros.default", "aten.scalar_tensor.default"})
_FILLED_LIKE = frozenset(
    f"aten.{name}.default"
    for name in ("full_like", "ones_like", "zeros_like", "new_full", "new_ones", "new_zeros")
)  # fmt: skip
_POINTWISE = frozenset(
    f"aten.{name}"
    for name in (
        "__and__.Tensor", "__or__.Tensor", "__xor__.Tensor", "where.ScalarOther", "where.ScalarSelf", "where.Scalar",
        "masked_fill.Tensor", "min.other", "max.other",
    )
)  # fmt: skip
_CASTS = frozenset(
    f"aten.{name}" for name in ("to.dtype", "to.dtype_layout", "to.device", "to.other", "_to_copy.default",
                                "type_as.default")
)  # fmt: skip
_DIFFERENCES = frozenset(f"aten.{name}.Tensor" for name in ("le", "lt", "ge", "gt", "eq", "ne", "sub"))
_SAME = frozenset({aten.slice.Tensor, aten.detach.default, aten.view.default, aten.reshape.default})
_LEADING = frozenset({aten.expand.default, aten.unsqueeze.default, aten.view.default, aten.reshape.default})
_UNKNOWN = frozenset({"aten.empty.memory_format", "aten.new_empty.default", "aten.empty_like.default"})


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A value of `shape`; `value` has the same rank, and size 1 along dims where the value does not change."""

    value: Tensor
    shape: tuple[int, ...]

    @property
    def whole(self) -> Tensor:
        """The value in its shape, expanded."""
        return self.value.expand(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Diagonal:
    """A value of `shape`, [..., S, T], that depends on t - s alone: `value` is over t - s from -(S - 1) to T - 1."""

    value: Tensor
    shape: tuple[int, ...]


Value = Constant | Diagonal


class Constants:
    """The values of one graph's nodes, each worked out once. known: of placeholders."""

    def __init__(self, known: Mapping[fx.Node, Tensor]) -> None:
        self._known: dict[fx.Node, Value | None] = {
            node: _reduced(value.detach().cpu()) if value.numel() <= MAX_ELEMENTS else None
            for node, value in known.items()
        }
        self._found = dict(self._known)

    def __call__(self, node: object) -> Value | None:
        """The value of a node; None where it depends on more than constants, or is too large."""
        if not isinstance(node, fx.Node):
            return None
        if node not in self._found:
            self._found[node] = self._compute(node)
        return self._found[node]

    def knowing(self, values: Mapping[fx.Node, Value]) -> Constants:
        """The same graph, with these values for these nodes."""
        found = Constants({})
        found._known = {**self._known, **values}
        found._found = dict(found._known)
        return found

    def scalar(self, value: object) -> float | None:
        """A Python number, or a constant of one element (or of equal ones), as a number."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        found = self(value)
        return float(found.value) if isinstance(found, Constant) and found.value.numel() == 1 else None

    def _compute(self, node: fx.Node) -> Value | None:
        target, meta = node.target, node.meta.get("val")
        if target is operator.getitem or node.op != "call_function" or not isinstance(meta, Tensor):
            return None
        name = str(target)
        if not isinstance(target, tracing.OpOverload) or name in _UNKNOWN:
            return None
        if torch.Tag.nondeterministic_seeded in target.tags or tracing.is_mutable(node):
            return None
        if name in _FILLED | _FILLED_LIKE:
            return self._filled(node, meta)
        operands = {source: self(source) for source in node.all_input_nodes}
        if any(found is None for found in operands.values()):
            return None
        known: dict[fx.Node, Value] = {source: found for source, found in operands.items() if found is not None}
        if torch.Tag.pointwise in target.tags or name in _POINTWISE:
            return _pointwise(node, known)
        if name in _CASTS:
            found = known[operand_of(node)]
            return type(found)(found.value.to(meta.dtype), found.shape)
        return _viewed(node, known) or _computed(node, known)

    def _filled(self, node: fx.Node, meta: Tensor) -> Value | None:
        """A tensor full of one number, of which an operand, if any, says no more than shape and dtype."""
        name = str(node.target)
        fill: Any = 1 if "ones" in name else 0
        if "full" in name or "scalar_tensor" in name:
            position = {"aten.full_like.default": 1, "aten.scalar_tensor.default": 0}.get(name, -1)
            fill = node.args[position] if node.args[1:] or position == 0 else node.kwargs.get("fill_value")
            fill = node.kwargs.get("fill_value", fill)
        if not isinstance(fill, int | float):
            return None
        return Constant(torch.full((1,) * meta.dim(), fill, dtype=meta.dtype), tuple(meta.shape))


def _run(node: fx.Node, values: Mapping[fx.Node, Tensor]) -> Tensor:
    """The node's operator on real tensors, on the CPU."""
    args, kwargs = map_nodes((node.args, node.kwargs), lambda n: values[n])
    args = tuple(torch.device("cpu") if isinstance(arg, torch.device) else arg for arg in args)
    kwargs = {key: torch.device("cpu") if key == "device" else value for key, value in kwargs.items()}
    target: Any = aten.reshape.default if node.target is aten.view.default else node.target
    result: Tensor = target(*args, **kwargs)
    return result


def _reduced(value: Tensor) -> Constant:
    """Without the dims along which all elements are equal."""
    shape = tuple(value.shape)
    for dim, size in enumerate(shape):
        if size > 1:
            first = value.narrow(dim, 0, 1)
            value = first if value.stride(dim) == 0 or bool((value == first).all()) else value
    return Constant(value, shape)


def _pointwise(node: fx.Node, known: Mapping[fx.Node, Value]) -> Value | None:
    """Elementwise, on operands without the dims that say nothing."""
    shape = shape_of(node)
    reduced = [found.value.shape for found in known.values() if isinstance(found, Constant)]
    size = torch.broadcast_shapes(*reduced)
    if all(isinstance(found, Constant) for found in known.values()) and size.numel() <= MAX_ELEMENTS:
        value = _run(node, {source: found.value for source, found in known.items()})
        return Constant(_reduced(value.reshape((1,) * (len(shape) - value.dim()) + tuple(value.shape))).value, shape)
    vectors = _vectors(node, known, shape)
    return None if vectors is None else Diagonal(_run(node, vectors), shape)


def _vectors(node: fx.Node, known: Mapping[fx.Node, Value], shape: tuple[int, ...]) -> dict[fx.Node, Tensor] | None:
    """The operands over t - s: numbers, other diagonals, or a count along s compared with one along t."""
    queries, keys = shape[-2:]
    counts: dict[fx.Node, Tensor] = {}
    vectors: dict[fx.Node, Tensor] = {}
    for source, found in known.items():
        if isinstance(found, Diagonal):
            if found.shape[-2:] != shape[-2:]:
                return None
            vectors[source] = found.value
        elif found.value.numel() == 1:
            vectors[source] = found.value.reshape(1)
        else:
            counts[source] = found.value
    if counts and (len(counts) != 2 or vectors or str(node.target) not in _DIFFERENCES or node.kwargs):
        return None
    for source, value in counts.items():
        line, steps = value.flatten(), torch.arange(value.numel())
        along = [dim - value.dim() for dim, size in enumerate(value.shape) if size > 1]
        if value.dtype.is_floating_point or len(along) != 1 or along[0] not in (-1, -2):
            return None
        if not torch.equal(line, line[0] + steps):
            return None
        vectors[source] = line[0] + torch.arange(1 - queries, keys) if along[0] == -1 else line[:1]
    return vectors if not counts or len({value.numel() for value in vectors.values()}) == 2 else None


def _viewed(node: fx.Node, known: Mapping[fx.Node, Value]) -> Value | None:
    """Views that leave the last two dims in their places, of values however large; None for others."""
    found = known.get(node.args[0]) if isinstance(node.args[0], fx.Node) else None
    if found is None or len(known) > 1:
        return None
    shape, rank = shape_of(node), len(found.shape)
    if node.target is aten.expand.default and isinstance(found, Constant):
        return Constant(found.value.reshape((1,) * (len(shape) - rank) + tuple(found.value.shape)), shape)
    if node.target is aten.unsqueeze.default and isinstance(found, Constant):
        return Constant(_run(node, {operand_of(node): found.value}), shape)
    if node.target in (aten.tril.default, aten.triu.default) and found.value.numel() == 1:
        if shape[-2] * shape[-1] <= MAX_ELEMENTS:
            return None
        offset, edge = torch.arange(1 - shape[-2], shape[-1]), int(argument(node, 1, "diagonal", 0))
        keep = offset <= edge if node.target is aten.tril.default else offset >= edge
        return Diagonal(torch.where(keep, found.value.flatten(), torch.zeros_like(found.value).flatten()), shape)
    if shape == found.shape and node.target in _SAME:
        return found
    same_plane = isinstance(found, Diagonal) and shape[-2:] == found.shape[-2:]
    return Diagonal(found.value, shape) if same_plane and node.target in _LEADING else None


def _computed(node: fx.Node, known: Mapping[fx.Node, Value]) -> Value | None:
    """Any other operator, on whole values, where they are small enough."""
    sizes = [torch.Size(found.shape).numel() for found in known.values()]
    if max([*sizes, torch.Size(shape_of(node)).numel()]) > MAX_ELEMENTS:
        return None
    if any(isinstance(found, Diagonal) for found in known.values()):
        return None
    return _reduced(_run(node, {source: found.whole for source, found in known.items() if isinstance(found, Constant)}))
