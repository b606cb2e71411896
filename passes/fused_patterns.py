"""Where a captured graph spells out an RMSNorm, a rotary embedding or a GELU: for `fuse_elementwise`.

A pattern matches where the fused operator computes the same, casts included, and where nothing else reads what lies
between: otherwise that would have to be made beside the fused operator.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar import operators  # noqa: F401 (defines torch.ops.autopar)
from autopar.ir.nodes import argument, shape_of, type_of
from autopar.operators.basic import HALF, wide_dtype

aten = torch.ops.aten
_autopar = torch.ops.autopar

_CASTS = ("aten.to.", "aten.type_as.", "aten._to_copy.")
_MULTIPLICATIONS = (aten.mul.Tensor,)
_ADDITIONS = (aten.add.Tensor, aten.add.Scalar)
_WIDE = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Match:
    """One place where an operator can stand for several.

    target, args, kwargs: the operator and its arguments; a node in a tuple is to be squeezed in dim 1 first. result:
    the node whose value it makes. nodes: those that it replaces, `result` among them. several: the operator's first
    result is the one. weight: the parameter, if it has one.
    """

    target: Any
    args: tuple[Any, ...]
    result: fx.Node
    nodes: frozenset[fx.Node]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    several: bool = False
    weight: fx.Node | None = None


def rms_norms(graph: fx.Graph) -> Iterator[Match]:
    """Every RMSNorm over the last dim: ATen's own call, Llama's form and Gemma's."""
    for node in graph.nodes:
        if node.target is aten.rms_norm.default:
            found = _called_rms_norm(node)
        elif node.target is aten.rsqrt.default:
            found = _written_rms_norm(node)
        else:
            continue
        if found is not None:
            yield found


def rotaries(graph: fx.Graph) -> Iterator[Match]:
    """Every x * cos + rotate_half(x) * sin of x[B, H, S, D]."""
    for node in graph.nodes:
        if node.target is aten.add.Tensor and not node.kwargs:
            found = _rotary(node)
            if found is not None:
                yield found


def gelus(graph: fx.Graph) -> Iterator[Match]:
    """Every x/2 · (1 + tanh(sqrt(2/π) · (x + 0.044715 x³))), GELU's approximation (Hendrycks and Gimpel, 1606.08415).

    Not of half types: ATen's operator rounds once where the model's rounds every step.
    """
    for node in graph.nodes:
        if node.target is aten.tanh.default and _dtype(node) in _WIDE:
            found = _gelu(node)
            if found is not None:
                yield found


# ------------------------------------------------------------------------------------------------------------- RMSNorm


def _called_rms_norm(node: fx.Node) -> Match | None:
    """`rms_norm(x, [N], weight, eps)`: the weight before the cast back; without eps, that of the dtype computed in."""
    x, shape = _args(node)[:2]
    w, eps = argument(node, 2, "weight"), argument(node, 3, "eps")
    if len(shape) != 1 or _dtype(x) not in (*HALF, *_WIDE) or (w is not None and not _is_weight(w, x)):
        return None
    if eps is None:
        eps = torch.finfo(wide_dtype(_dtype(x))).eps
    return Match(_autopar.rms_norm.default, (x, w, eps), node, frozenset({node}), several=True, weight=w)


def _written_rms_norm(rsqrt: fx.Node) -> Match | None:
    """From the rsqrt of mean(x²) + eps, back to x and forth to the last operator of the norm."""
    add = _only_operand(rsqrt)
    if add is None or add.target not in _ADDITIONS or add.kwargs or not isinstance(_args(add)[1], float):
        return None
    mean = _only_operand(add)
    if mean is None or not _is_row_mean(mean):
        return None
    square = _only_operand(mean)
    wide_x = None if square is None else _squared(square)
    if square is None or wide_x is None or _dtype(wide_x) not in _WIDE:
        return None
    x = _uncast(wide_x)
    if _dtype(x) not in HALF and _dtype(x) != _dtype(wide_x):
        return None  # a float64 model that computes in float32: rounded where the operator would not
    normal = _only_user(rsqrt)
    if normal is None or normal.target not in _MULTIPLICATIONS or _other(normal, rsqrt) not in (x, wide_x):
        return None
    tail = _scaled(normal, x)
    if tail is None:
        return None
    result, w, kwargs, after = tail
    nodes = frozenset({rsqrt, add, mean, square, normal, *after})
    if not _is_closed(nodes, result):
        return None
    if wide_x is not x and nodes.issuperset(wide_x.users):
        nodes |= {wide_x}
    args = (x, w, _args(add)[1])
    return Match(_autopar.rms_norm.default, args, result, nodes, kwargs, several=True, weight=w)


def _scaled(normal: fx.Node, x: fx.Node) -> tuple[fx.Node, fx.Node | None, dict[str, Any], tuple[fx.Node, ...]] | None:
    """What becomes of the normalized rows: (result, weight, options, nodes behind `normal`).

    Of half types: cast back, then the weight (Llama); or weight or 1 + weight, then cast back (Gemma, ATen).
    """
    half = _dtype(x) in HALF
    rounded = _cast_to(normal, _dtype(x)) if half else None
    current = rounded or normal
    after: list[fx.Node] = [rounded] if rounded else []
    product = _only_user(current)
    w = None
    options: dict[str, Any] = {"round_first": True} if rounded else {}
    if product is not None and product.target in _MULTIPLICATIONS:
        scale = _other(product, current)
        read = None if scale is None else _weight_of(scale, x, product, plain=rounded is not None)
        if read is not None:
            w, offset, between = read
            options |= {"offset": offset} if offset else {}
            after += [product, *between]
            current = product
    if half and rounded is None:
        last = _cast_to(current, _dtype(x))
        if last is None:
            return None
        after.append(last)
        current = last
    expected = _dtype(x) if w is None or not rounded else torch.promote_types(_dtype(x), _dtype(w))
    return (current, w, options, tuple(after)) if _dtype(current) == expected else None


def _weight_of(
    scale: fx.Node, x: fx.Node, product: fx.Node, *, plain: bool
) -> tuple[fx.Node, float, tuple[fx.Node, ...]] | None:
    """(w, offset, nodes between) where `scale` is w or w + offset, in the dtype that the product is computed in."""
    between: list[fx.Node] = []
    offset = 0.0
    if scale.target in _ADDITIONS and not scale.kwargs and isinstance(_args(scale)[1], (int, float)):
        if plain or _only_user(scale) is not product or _dtype(scale) not in _WIDE:
            return None
        offset = float(_args(scale)[1])
        between.append(scale)
        scale = _args(scale)[0]
    source = _uncast(scale)
    if source is not scale and not plain:
        between += [scale] if len(scale.users) == 1 else []
        scale = source
    return (scale, offset, tuple(between)) if _is_weight(scale, x) else None


def _is_weight(w: fx.Node, x: fx.Node) -> bool:
    return shape_of(w) == shape_of(x)[-1:] and _dtype(w) in (*HALF, *_WIDE)


def _is_row_mean(node: fx.Node) -> bool:
    if node.target is not aten.mean.dim or node.kwargs or len(_args(node)) != 3 or _args(node)[2] is not True:
        return False
    dims, last = _args(node)[1], len(shape_of(node)) - 1
    return isinstance(dims, (list, tuple)) and [int(d) % (last + 1) for d in dims] == [last]


def _squared(node: fx.Node) -> fx.Node | None:
    """x where the node is its square."""
    source = _args(node)[0] if _args(node) else None
    squares = (
        (node.target is aten.pow.Tensor_Scalar and _args(node)[1] == 2)
        or node.target is aten.square.default
        or (node.target is aten.mul.Tensor and _args(node)[1] is source)
    )
    return source if squares and isinstance(source, fx.Node) else None


# -------------------------------------------------------------------------------------------------------------- rotary


def _rotary(add: fx.Node) -> Match | None:
    pair = [arg for arg in _args(add) if isinstance(arg, fx.Node) and arg.target in _MULTIPLICATIONS]
    for plain, turned in (pair, pair[::-1]) if len(pair) == 2 and pair[0] is not pair[1] else ():
        for turned_x in turned.all_input_nodes:
            halves = _rotated_half(turned_x)
            if halves is None or (x := halves[0]) not in plain.all_input_nodes:
                continue
            cos, sin = _other(plain, x), _other(turned, turned_x)
            tables = [None if table is None else _table(table, x) for table in (cos, sin)]
            nodes = frozenset({add, plain, turned, turned_x, *halves[1]})
            if tables[0] is None or tables[1] is None or not _is_closed(nodes, add) or type_of(add) != type_of(x):
                continue
            return Match(_autopar.rotary.default, (x, *tables), add, nodes)
    return None


def _rotated_half(node: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]] | None:
    """x[B, H, S, D], and the nodes between, where the node is its second half negated, then its first."""
    if node.target is not aten.cat.default or len(shape_of(node)) != 4:
        return None
    parts = _args(node)[0]
    if argument(node, 1, "dim", 0) not in (-1, 3) or len(parts) != 2 or parts[0].target is not aten.neg.default:
        return None
    negated, first, second = parts[0], parts[1], _args(parts[0])[0]
    left, right = _half(first), _half(second)
    if left is None or right is None or left[0] is not right[0] or (left[1], right[1]) != (0, 1):
        return None
    return left[0], (negated, first, second, *left[2], *right[2])


def _half(node: fx.Node) -> tuple[fx.Node, int, tuple[fx.Node, ...]] | None:
    """(x, which half, nodes between) where the node is half of the last dim of x: a slice, or one of two chunks."""
    if node.target is aten.slice.Tensor:
        x, start, stop = _args(node)[0], argument(node, 2, "start") or 0, argument(node, 3, "end")
        last, size = len(shape_of(x)) - 1, shape_of(x)[-1]
        if argument(node, 1, "dim", 0) not in (-1, last) or argument(node, 4, "step", 1) != 1 or size % 2:
            return None
        cut = (start, size if stop is None else min(stop, size))
        return next(((x, i, ()) for i in (0, 1) if cut == (i * size // 2, (i + 1) * size // 2)), None)
    chunks = _args(node)[0] if node.target is operator.getitem else None
    if chunks is not None and chunks.target is aten.chunk.default:
        x, parts = _args(chunks)[:2]
        last = len(shape_of(x)) - 1
        if parts == 2 and argument(chunks, 2, "dim", 0) in (-1, last) and shape_of(x)[-1] % 2 == 0:
            return x, _args(node)[1], (chunks,)
    return None


def _table(table: fx.Node, x: fx.Node) -> fx.Node | tuple[fx.Node] | None:
    """A table [B|1, S, D] before it got a dim for the heads; in a tuple: one that has it, to be squeezed."""
    batch, _, positions, size = shape_of(x)
    if _dtype(table) != _dtype(x) or shape_of(table) not in ((batch, 1, positions, size), (1, 1, positions, size)):
        return None
    if table.target is aten.unsqueeze.default and _args(table)[1] in (1, -3) and isinstance(_args(table)[0], fx.Node):
        return _args(table)[0]
    return (table,)


# ---------------------------------------------------------------------------------------------------------------- GELU


def _gelu(tanh: fx.Node) -> Match | None:
    """From the tanh back to x, and forth to the last operator: behind 1 + tanh come x and 1/2, in any order."""
    inner = _gelu_operand(tanh)
    current = _only_user(tanh)
    if inner is None or current is None or current.target not in _ADDITIONS or current.kwargs:
        return None
    x, nodes = inner
    if _args(current)[1] != 1:
        return None
    nodes |= {tanh, current}
    wanted: set[object] = {x, 0.5}
    while wanted:
        product = _only_user(current)
        if product is None or product.target not in _MULTIPLICATIONS:
            return None
        other = _args(product)[1] if _args(product)[0] is current else _args(product)[0]
        halved = _times_constant(other, 0.5) if isinstance(other, fx.Node) else None
        factors = {x, 0.5} if halved is x else {other}
        if not factors <= wanted:
            return None
        wanted -= factors
        nodes |= {product, other} if halved is x else {product}
        current = product
    if not _is_closed(nodes, current) or type_of(current) != type_of(x):
        return None
    return Match(aten.gelu.default, (x,), current, nodes, {"approximate": "tanh"})


def _gelu_operand(tanh: fx.Node) -> tuple[fx.Node, frozenset[fx.Node]] | None:
    """x where the operand of the tanh is sqrt(2/π) · (x + 0.044715 x³), and the nodes between."""
    scaled = _only_operand(tanh)
    total = None if scaled is None else _times_constant(scaled, math.sqrt(2 / math.pi))
    if scaled is None or total is None or total.target is not aten.add.Tensor or total.kwargs:
        return None
    for x, term in (_args(total), _args(total)[::-1]):
        cube = _times_constant(term, 0.044715) if isinstance(term, fx.Node) else None
        if cube is not None and cube.target is aten.pow.Tensor_Scalar and _args(cube) == (x, 3):
            return x, frozenset({scaled, total, term, cube})
    return None


def _times_constant(node: fx.Node, constant: float) -> fx.Node | None:
    """What the node multiplies by this number."""
    if node.target not in _MULTIPLICATIONS or not isinstance(_args(node)[1], (int, float)):
        return None
    return _only_operand(node) if math.isclose(_args(node)[1], constant, rel_tol=1e-9) else None


# --------------------------------------------------------------------------------------------------------------- nodes


def _args(node: fx.Node) -> tuple[Any, ...]:
    """A node's arguments, of which a pattern knows what they are once it knows the operator."""
    return node.args


def _is_closed(nodes: frozenset[fx.Node], result: fx.Node) -> bool:
    """Whether only the result is read from outside."""
    return all(user in nodes for node in nodes if node is not result for user in node.users)


def _uncast(node: fx.Node) -> fx.Node:
    """What a cast casts; the node itself where it is none. A cast to half loses what was there, and is none."""
    source: Any = _args(node)[0] if _args(node) else None
    is_cast = str(node.target).startswith(_CASTS) and isinstance(source, fx.Node)
    return source if is_cast and _dtype(node) in _WIDE and _widens(source, node) else node


def _widens(source: Any, node: fx.Node) -> bool:
    return _dtype(source) in HALF or _dtype(source) == _dtype(node)


def _cast_to(node: fx.Node, dtype: torch.dtype | None) -> fx.Node | None:
    """The cast to this dtype that alone reads a node."""
    user = _only_user(node)
    is_cast = user is not None and str(user.target).startswith(_CASTS) and _args(user)[0] is node
    return user if is_cast and _dtype(user) == dtype else None


def _only_operand(node: fx.Node) -> fx.Node | None:
    source = _args(node)[0] if _args(node) else None
    return source if isinstance(source, fx.Node) else None


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _other(node: fx.Node, operand: fx.Node) -> fx.Node | None:
    """The other of two operands."""
    left, right = _args(node)[:2]
    found = right if left is operand else left
    return found if isinstance(found, fx.Node) and operand in (left, right) else None


def _dtype(node: object) -> Any:
    type_ = type_of(node)
    return type_.dtype if type_ else None
