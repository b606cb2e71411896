"""What one expert of a mixture is, read off a graph: a product, a nonlinearity, a product.

    linear(silu(linear(x, w1)) * linear(x, w3), w2)   →   act "mul(silu(gate), up)", first w1 and w3, second w2

Shape suffixes: S rows, D their width, F an expert's width. Matrices are [out, in], or [in, out] if `transposed`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autopar.base.errors import AutoparError
from autopar.operators.activations import parsed
from autopar.operators.basic import wide_dtype
from autopar.passes.indices import Builder
from autopar.passes.said import Said, shape_of

_aten = torch.ops.aten
_CASTS = (_aten.to.dtype, _aten._to_copy.default)
_SAME = (_aten.clone.default, _aten.alias.default, _aten.contiguous.default, _aten.detach.default)
_VIEWS = (
    _aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.unsqueeze.default,
    _aten.squeeze.dim, _aten.squeeze.default, _aten.squeeze.dims, _aten.flatten.using_ints,
)  # fmt: skip
_SWAPS = (_aten.permute.default, _aten.transpose.int, _aten.t.default)
_PRODUCTS = (_aten.matmul.default, _aten.mm.default, _aten.bmm.default)


@dataclass(frozen=True, slots=True)
class Product:
    """x times a matrix, and a bias: [S, in] to [S, out], or so for each expert at once, with that dim in front."""

    x: fx.Node
    matrix: fx.Node
    transposed: bool
    bias: fx.Node | None = None


@dataclass(frozen=True, slots=True)
class Expert:
    """One expert. first: its products of x, one or, of gate and up apart, two; of one, `halves` are gate and up."""

    x: fx.Node
    first: tuple[Product, ...]
    second: Product
    act: str
    gated: bool
    interleaved: bool

    @property
    def form(self) -> tuple[Any, ...]:
        """What experts have in common that one operator multiplies: all but which parameters they have."""
        products = tuple(
            (each.transposed, shape_of(each.matrix), each.matrix.meta["val"].dtype, each.bias is not None)
            for each in (*self.first, self.second)
        )
        return self.act, self.gated, self.interleaved, products


def is_cast(node: Any) -> bool:
    """Whether a node is its operand in another dtype."""
    return node.target in _CASTS and set(node.kwargs) <= {"dtype"}


def stripped(node: Any, *, views: bool = False) -> Any:
    """What a node copies; through views that add or drop dims of size 1, or lay them together, too."""
    while isinstance(node, fx.Node):
        same = node.target in _SAME or (node.target is _aten.dropout.default and not (node.args[1] and node.args[2]))
        if not same and is_cast(node):
            source: Any = node.args[0]
            same = node.meta["val"].dtype == source.meta["val"].dtype
        if not same and views and node.target in _VIEWS:
            before, after = shape_of(node.args[0]), shape_of(node)
            same = [size for size in before if size != 1] == [size for size in after if size != 1]
        if not same:
            break
        node = node.args[0]
    return node


def swapped(node: Any) -> fx.Node | None:
    """What a node has with its last two dims swapped; None of others."""
    if node.target not in _SWAPS:
        return None
    source: Any = node.args[0]
    rank = len(shape_of(source))
    order = list(range(rank))
    if node.target is _aten.permute.default:
        order = [dim % rank for dim in node.args[1]]
    elif rank >= 2:
        first, second = node.args[1:] if node.target is _aten.transpose.int else (0, 1)
        order[first], order[second] = order[second], order[first]
    return source if rank >= 2 and order == [*range(rank - 2), rank - 1, rank - 2] else None


def product_of(node: Any) -> Product | None:
    """The product that a node is, with its bias; None of others."""
    node = stripped(node, views=True)
    if getattr(node, "op", None) != "call_function":
        return None
    if node.target is _aten.linear.default:
        x, matrix, *rest = node.args
        return Product(x, matrix, False, rest[0] if rest else None)
    if node.target is _aten.addmm.default and not node.kwargs:
        bias, x, matrix = node.args
        found = _times(x, matrix)
        return None if found is None or len(shape_of(bias)) != 1 else replace(found, bias=bias)
    if node.target is _aten.add.Tensor and len(node.args) == 2 and not node.kwargs:
        for one, other in (node.args, node.args[::-1]):
            found = product_of(one)
            if found is not None and found.bias is None and isinstance(other, fx.Node) and _is_bias(other, found):
                return replace(found, bias=stripped(other, views=True))
        return None
    return _times(*node.args) if node.target in _PRODUCTS else None


def _is_bias(node: Any, product: Product) -> bool:
    """[out], or for each expert [E, 1, out]."""
    out = shape_of(product.matrix)[-1 if product.transposed else -2]
    experts = shape_of(product.matrix)[:-2]
    shape = shape_of(node)
    return shape == (out,) if not experts else shape == (*experts, 1, out)


def _times(x: Any, matrix: Any) -> Product | None:
    if not all(isinstance(each, fx.Node) for each in (x, matrix)) or len(shape_of(matrix)) not in (2, 3):
        return None
    if len(shape_of(matrix)) == 3 and len(shape_of(x)) not in (2, 3):
        return None
    inner = swapped(matrix)
    return Product(x, matrix, True) if inner is None else Product(x, inner, False)


def read_expert(
    second: Product | None,
    is_row: Callable[[fx.Node], bool],
    said: Said,
    known: Mapping[fx.Node, Product] | None = None,
) -> Expert | None:
    """The expert whose second product this is; None where it is something else. is_row: whether a node is made of what
    an expert is given, so that it is no parameter. known: nodes that are products, beside those that say so themselves.
    """
    if second is None or is_row(second.matrix) or (second.bias is not None and is_row(second.bias)):
        return None
    dtype = second.x.meta["val"].dtype
    reader = _Reader(dtype, known or {})
    text = reader.text(second.x)
    first = tuple(reader.products)
    if text is None or not first or any(is_row(each.matrix) for each in first):
        return None
    if any(each.bias is not None and is_row(each.bias) for each in first):
        return None
    sources = [stripped(each.x, views=True) for each in first]
    dtypes = {each.meta["val"].dtype for p in (*first, second) for each in (p.x, p.matrix)}
    width = shape_of(second.matrix)[-2 if second.transposed else -1]
    widths = {shape_of(each.matrix)[-1 if each.transposed else -2] for each in first}
    gated = len(first) == 2 or reader.halves is not None
    # Products of gate and up have biases both or neither; one that is read whole has no halves.
    alike = len({(each.transposed, each.bias is None, shape_of(each.matrix)) for each in first}) == 1
    whole = width * 2 if reader.halves is not None else width
    if len(set(map(said, sources))) != 1 or len(dtypes) != 1 or not alike or widths != {whole}:
        return None
    try:
        parsed(text)
    except AutoparError:
        return None
    return Expert(sources[0], first, second, text, gated, reader.halves == "columns")


@dataclass(slots=True)
class _Reader:
    """Text of what is done to products, in the words of `operators.activations`."""

    dtype: torch.dtype
    known: Mapping[fx.Node, Product]
    products: list[Product] = field(default_factory=list)
    halves: str | None = None
    _texts: dict[fx.Node, str | None] = field(default_factory=dict)

    def text(self, node: Any) -> str | None:
        if not isinstance(node, fx.Node):
            return repr(node) if node is None or type(node) in (int, float, bool, str) else None
        node = stripped(node, views=True)
        if node not in self._texts:
            self._texts[node] = None
            self._texts[node] = self._read(node)
        return self._texts[node]

    def _product(self, node: Any) -> Product | None:
        known = self.known.get(stripped(node, views=True))
        return product_of(node) if known is None else known

    def _read(self, node: Any) -> str | None:
        if (half := _half_of(node)) is not None:
            place, form, source = half
            product = self._product(source)
            if product is None or self.halves not in (None, form) or self.products not in ([], [product]):
                return None
            self.products, self.halves = [product], form
            return ("gate", "up")[place]
        if (product := self._product(node)) is not None:
            if self.halves is not None or len(self.products) == 2:
                return None
            self.products.append(product)
            return ("gate", "up")[len(self.products) - 1]
        if is_cast(node):
            of = self.text(node.args[0])
            word = {wide_dtype(self.dtype): "wide", self.dtype: "narrow"}.get(node.meta["val"].dtype)
            return None if of is None or word is None else f"{word}({of})"
        if node.op != "call_function" or torch.Tag.pointwise not in getattr(node.target, "tags", ()):
            return None
        target: Any = node.target
        if target._schema.is_mutable:
            return None
        words = [*map(self.text, node.args)]
        named = [(key, self.text(value)) for key, value in node.kwargs.items()]
        if None in words or any(text is None for _, text in named):
            return None
        listed = [*(word for word in words if word is not None), *(f"{key}={text}" for key, text in named)]
        return f"{target.overloadpacket.__name__}({', '.join(listed)})"


def _half_of(node: Any) -> tuple[int, str, fx.Node] | None:
    """Which half of a product's columns a node is, 0 or 1, whether `halves` or every second of the `columns`, and of
    which; None of others.
    """
    if node.target is operator.getitem:
        parts: Any = node.args[0]
        place: Any = node.args[1]
        if parts.target in (_aten.chunk.default, _aten.split.Tensor):
            source, size = parts.args[:2]
            width, dim = shape_of(source)[-1], parts.args[2] if len(parts.args) > 2 else 0
            twice = size == 2 if parts.target is _aten.chunk.default else size == width / 2
            if twice and width % 2 == 0 and dim in (-1, len(shape_of(source)) - 1):
                return int(place), "halves", source
    if node.target is _aten.slice.Tensor:
        given: list[Any] = [*node.args, *(0, None, None, 1)[len(node.args) - 1 :]]
        source, dim, start, end, step = given
        width = shape_of(source)[-1]
        start, end = start or 0, width if end is None else min(end, width)
        if dim not in (-1, len(shape_of(source)) - 1) or width % 2:
            return None
        if step == 2 and start in (0, 1) and end == width:
            return start, "columns", source
        if step == 1 and (start, end) in ((0, width // 2), (width // 2, width)):
            return int(start > 0), "halves", source
    return None


# ------------------------------------------------------------------------------------------------------- as operands


@dataclass(frozen=True, slots=True)
class Parameters:
    """What `autopar::experts` is given of all experts. second_bias: [E, D], which it does not take."""

    first: fx.Node
    second: fx.Node
    bias: fx.Node | None
    second_bias: fx.Node | None
    interleaved: bool
    transposed: bool


def parameters_of(
    build: Builder, experts: Sequence[Expert], together: Callable[[list[fx.Node]], fx.Node]
) -> Parameters:
    """The parameters of experts of one form. together: what has those of all of them in front: [E, …].

    Gate and up that are apart become columns that alternate, so that an axis may split F.
    """
    shape = experts[0]
    transposed, apart = shape.first[0].transposed, len(shape.first) == 2
    firsts = [together([each.first[i].matrix for each in experts]) for i in range(len(shape.first))]
    second = together([each.second.matrix for each in experts])
    if shape.second.transposed != transposed:
        second = build(_aten.transpose.int, second, 1, 2)
    bias = second_bias = None
    if shape.first[0].bias is not None:
        biases = [together([_some(each.first[i].bias) for each in experts]) for i in range(len(shape.first))]
        bias = _alternating(build, biases, 1) if apart else biases[0]
    if shape.second.bias is not None:
        second_bias = together([_some(each.second.bias) for each in experts])
    first = _alternating(build, firsts, 2 if transposed else 1) if apart else firsts[0]
    return Parameters(first, second, bias, second_bias, shape.interleaved or apart, transposed)


def _some(node: Any | None) -> fx.Node:
    assert node is not None
    return node


def _alternating(build: Builder, parts: list[fx.Node], dim: int) -> fx.Node:
    """Two tensors [.., F, ..] as one [.., 2F, ..] whose rows along a dim are the one's and the other's in turn."""
    shape = list(shape_of(parts[0]))
    shape[dim] *= 2
    return build(_aten.reshape.default, build(_aten.stack.default, parts, dim + 1), shape)


def experts_of(
    build: Builder, x: Any, indices: Any, weights: fx.Node, parameters: Parameters, expert: Expert
) -> fx.Node:
    """The operator. x[T, D]; indices[T, K], of which those below 0 and from E on are none; weights[T, K]."""
    operands = [x, indices, weights, parameters.first, parameters.second]
    operands += [] if parameters.bias is None else [parameters.bias]
    made = build(
        torch.ops.autopar.experts.default, *operands, act=expert.act, gated=expert.gated,
        interleaved=parameters.interleaved, transposed=parameters.transposed,
    )  # fmt: skip
    if parameters.second_bias is None:
        return made
    return build(_aten.add.Tensor, made, _of_each(build, x, indices, weights, parameters.second_bias))


def _of_each(build: Builder, x: Any, indices: Any, weights: fx.Node, bias_ED: fx.Node) -> fx.Node:
    """What the biases of the second products add: apart, so that they count once where F is split."""
    tokens, experts = shape_of(x)[0], shape_of(bias_ED)[0]
    beside = build(_aten.new_zeros.default, weights, [tokens, experts + 1])
    inside = build(
        _aten.logical_and.default, build(_aten.ge.Scalar, indices, 0), build(_aten.lt.Scalar, indices, experts)
    )
    number = build(_aten.masked_fill.Scalar, indices, build(_aten.logical_not.default, inside), experts)
    shares = build(_aten.scatter_add.default, beside, 1, number, weights)
    shares = build(_aten.slice.Tensor, shares, 1, 0, experts)
    dtype = bias_ED.meta["val"].dtype
    if shares.meta["val"].dtype != dtype:
        shares = build(_aten.to.dtype, shares, dtype)
    return build(_aten.matmul.default, shares, bias_ED)
