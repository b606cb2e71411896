"""Attention written out: product, scale, soft-cap, masks, softmax, dropout, product.

Followed from the softmax up to the product of queries and keys, and down to the product with the values. Whatever is
not on the list, or is read by anybody else, leaves the attention as it was written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from autopar.base.spoken import spoken
from autopar.ir.nodes import argument, dtype_of, is_float, operand_of, shape_of
from autopar.passes.attention.build import Builder, Place
from autopar.passes.attention.constants import Constants
from autopar.passes.attention.found import Found
from autopar.passes.attention.heads import key_heads
from autopar.passes.attention.masks import Add, Fill, Step, Unfit, read_fill
from autopar.passes.attention.products import Product, four_dims, read_product, untransposed

aten = torch.ops.aten

SOFTMAX = frozenset({aten.softmax.int, aten._softmax.default, aten._safe_softmax.default})
_CASTS = frozenset({"aten.to.dtype", "aten._to_copy.default", "aten.type_as.default"})
_VIEWS = frozenset({"aten.view.default", "aten.reshape.default"})
_PRODUCTS = frozenset({"aten.matmul.default", "aten.bmm.default", "aten.baddbmm.default", "aten.einsum.default"})
_READERS = frozenset(
    {"aten.softmax.int", "aten._softmax.default", "aten.sub.Tensor", "aten.max.dim", "aten.amax.default"}
)
_BETWEEN = frozenset(
    {aten.dropout.default, aten.slice.Tensor, aten.expand.default, aten.masked_fill.Scalar, aten.masked_fill.Tensor}
)
"""What may stand between probabilities and their product with the values, some of it to be told as the reason."""
_MAX_STEPS = 16


@dataclass(slots=True)
class _Scores:
    """Scores as they are made of a product: scale, soft-cap, and what is added and filled, with the dims it is of."""

    product: Product
    scale: float = 1.0
    softcap: float = 0.0
    steps: list[tuple[Step, tuple[int, ...]]] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)


@dataclass(slots=True)
class _Sink:
    """The last column of a softmax, which is one number a head: node [B, H, S, 1] or what broadcasts to it."""

    node: fx.Node | None = None


def is_candidate(node: fx.Node) -> bool:
    """Whether a node is the softmax of an attention: between a product of its scores and one with values."""
    if node.target not in SOFTMAX or _softmax_dim(node) != len(shape_of(node)) - 1:
        return False
    return _final_product(node) is not None and _has_product_above(node)


def read_eager(softmax: fx.Node, build: Builder, constants: Constants) -> Found:
    """The attention around a softmax.

    Raises:
        Unfit: what cannot be read, or is read elsewhere.
    """
    return _Reader(build, constants).read(softmax)


class _Reader:
    def __init__(self, build: Builder, constants: Constants) -> None:
        self._build, self._constants = build, constants
        self._why = ""

    def read(self, softmax: fx.Node) -> Found:
        source, sink = self._without_maximum(softmax), _Sink()
        if source.target is aten.cat.default:
            source, sink = self._without_sink(source)
        scores = self._scores(source, 0)
        if scores is None:
            raise Unfit(self._why or "its scores are no product of queries and keys")
        probabilities, product, dropout_p, shapes = _down(softmax, sink)
        final = read_product(product, left=probabilities)
        if final is None:
            raise Unfit("its product with the values has other dims")
        return self._found(scores, final, shape_of(source), sink, dropout_p, [*scores.shapes, *shapes])

    def _found(
        self,
        scores: _Scores,
        final: Product,
        shape: tuple[int, ...],
        sink: _Sink,
        dropout_p: float,
        shapes: Sequence[tuple[int, ...]],
    ) -> Found:
        node = final.node
        place = Place(node, node)
        one_head = len(shape) == 3 and (final.is_einsum or scores.product.is_einsum)
        batch, heads = (shape[0], 1) if one_head else _batch_and_heads(shape, shapes, scores.product)
        scaled, scale = dict[fx.Node, fx.Node](), scores.scale
        for operand in (scores.product.left, scores.product.right):
            scale *= _peeled(operand, scaled)
        q = four_dims(self._build, place, scores.product.left, scores.product.left_dims, batch, heads)
        k = four_dims(self._build, place, scores.product.right, scores.product.right_dims, batch, heads)
        v = four_dims(self._build, place, final.right, final.right_dims, batch, heads)
        k = k if scores.product.is_einsum else untransposed(self._build, place, k)
        k, v = key_heads(q, k, v)
        queries, keys = shape[-2:]
        if shape_of(q)[:3] != (batch, heads, queries) or shape_of(k)[2] != keys or dtype_of(node) != dtype_of(q):
            raise Unfit(f"its queries are {list(shape_of(q))}, its keys {list(shape_of(k))}, its scores {list(shape)}")
        steps = tuple(self._step(step, own, batch, heads) for step, own in scores.steps)
        sinks = None if sink.node is None else self._per_head(sink.node, heads, place)
        return Found(
            "eager", node, q, k, v, scale, steps, False, scores.softcap, dropout_p, sinks, final.result_dims, scaled
        )

    # -- up ------------------------------------------------------------------------------------------------------------

    def _without_maximum(self, softmax: fx.Node) -> fx.Node:
        """The operand of a softmax, without the subtraction of each row's largest, which changes nothing."""
        source = operand_of(softmax)
        if set(source.users) != {softmax}:
            raise Unfit(_elsewhere("scores", source))
        if source.target is not aten.sub.Tensor or source.kwargs:
            return source
        scores, largest = source.args
        picked: object = largest
        if isinstance(largest, fx.Node) and "getitem" in str(largest.target) and largest.args[1] == 0:
            picked = largest.args[0]
        if not all(isinstance(each, fx.Node) for each in (picked, largest, scores)):
            return source
        assert isinstance(picked, fx.Node) and isinstance(largest, fx.Node) and isinstance(scores, fx.Node)
        rank = len(shape_of(scores))
        is_largest = str(picked.target) in ("aten.max.dim", "aten.amax.default") and picked.args[0] is scores
        is_row = argument(picked, 1, "dim") in (-1, [-1], rank - 1, [rank - 1]) and argument(
            picked, 2, "keepdim", False
        )
        private = set(scores.users) == {picked, source} and set(largest.users) == {source} and len(picked.users) == 1
        return scores if is_largest and is_row and private else source

    def _without_sink(self, source: fx.Node) -> tuple[fx.Node, _Sink]:
        """Scores and the column that is put behind them."""
        parts, dim = source.args[0], argument(source, 1, "dim", 0)
        assert isinstance(parts, list | tuple)
        shape = shape_of(source)
        if any(str(user.target) not in _READERS for user in source.users):
            raise Unfit(_elsewhere("scores", source))
        if len(parts) != 2 or dim not in (-1, len(shape) - 1) or len(shape) != 4:
            raise Unfit("its scores are put together of several")
        scores, sink = parts
        if not isinstance(scores, fx.Node) or not isinstance(sink, fx.Node) or shape_of(sink)[-1] != 1:
            raise Unfit("its scores are put together of several")
        if len(scores.users) != 1:
            raise Unfit(_elsewhere("scores", scores))
        return scores, _Sink(sink)

    def _scores(self, node: object, depth: int) -> _Scores | None:
        """How a node is made of a product; None, and `_why`, where it is not."""
        if not isinstance(node, fx.Node) or depth > _MAX_STEPS or not is_float(node):
            return None
        if depth and len(node.users) > 1:
            self._why = _elsewhere("scores", node)
            return None
        found = self._own_scores(node, depth)
        if found is not None:
            found.shapes.append(shape_of(node))
        elif not self._why and depth < _MAX_STEPS and self._constants(node) is None:
            self._why = f"its scores are made by {spoken(str(node.target))}"
        return found

    def _own_scores(self, node: fx.Node, depth: int) -> _Scores | None:
        name, args = str(node.target), node.args
        if name in _PRODUCTS:
            return self._of_product(node)
        if name in _CASTS or _keeps_planes(node) or (node.target is aten.dropout.default and not _dropped(node)):
            return self._scores(args[0], depth + 1)
        if name in ("aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor", "aten.div.Scalar"):
            return self._scaled(node, depth)
        if name == "aten.tanh.default":
            return self._capped(node, depth)
        if name in ("aten.add.Tensor", "aten.sub.Tensor") and not node.kwargs:
            return self._added(node, depth)
        if (fill := read_fill(node, self._constants)) is not None:
            found = self._scores(fill[1], depth + 1)
            if found is not None:
                found.steps.append((fill[0], shape_of(node)))
            return found
        return None

    def _of_product(self, node: fx.Node) -> _Scores | None:
        product = read_product(node)
        if product is None:
            return None
        found = _Scores(product)
        if node.target is aten.baddbmm.default:
            beta, found.scale = float(argument(node, 3, "beta", 1)), float(argument(node, 4, "alpha", 1))
            bias = operand_of(node)
            if beta not in (0.0, 1.0):
                bias = self._build.make(self._build.after([bias]), aten.mul.Tensor, bias, beta)
            if beta:
                found.steps.append((Add(bias), shape_of(node)))
        return found

    def _scaled(self, node: fx.Node, depth: int) -> _Scores | None:
        """Scores times or by a number: before a soft-cap its argument, behind it the cap."""
        divides = "div" in str(node.target)
        for scores, factor in ((0, 1),) if divides else ((0, 1), (1, 0)):
            number = self._constants.scalar(node.args[factor])
            if number is None or (divides and number == 0):
                continue
            found = self._scores(node.args[scores], depth + 1)
            if found is None:
                return None
            number = 1 / number if divides else number
            if not number > 0:
                self._why = f"its scores are scaled by {number:g}"
                return None
            found.scale, found.softcap = found.scale * number, found.softcap * number
            found.steps = [(self._times(step, number), shape) for step, shape in found.steps]
            return found
        return None

    def _times(self, step: Step, number: float) -> Step:
        """A step whose scores are then multiplied by a number."""
        if isinstance(step, Fill):
            return Fill(step.node, step.shows, step.value * number, step.dtype)
        return Add(self._build.make(self._build.after([step.node]), aten.mul.Tensor, step.node, number))

    def _capped(self, node: fx.Node, depth: int) -> _Scores | None:
        found = self._scores(node.args[0], depth + 1)
        if found is None or found.softcap or found.steps:
            self._why = self._why or "its scores are capped behind a mask or bias"
            return None
        found.softcap = 1.0
        return found

    def _added(self, node: fx.Node, depth: int) -> _Scores | None:
        subtracts, whys = node.target is aten.sub.Tensor, list[str]()
        for scores, other in ((0, 1),) if subtracts else ((0, 1), (1, 0)):
            bias = node.args[other]
            if not isinstance(bias, fx.Node) or not is_float(bias):
                continue
            self._why = ""
            found = self._scores(node.args[scores], depth + 1)
            if found is None:
                whys.append(self._why)
                continue
            if subtracts:
                bias = self._build.make(self._build.after([bias]), aten.neg.default, bias)
            found.steps.append((Add(bias), shape_of(node)))
            return found
        self._why = next((why for why in whys if why), "")
        return None

    # -- dims ----------------------------------------------------------------------------------------------------------

    def _step(self, step: Step, shape: tuple[int, ...], batch: int, heads: int) -> Step:
        """The step on scores [B, H, S, T]."""
        if len(shape) == 4:
            return step
        own = shape_of(step.node)
        if len(own) < 3:
            return step
        lead = (batch, heads) if own[0] == batch * heads else (1, 1)
        node = self._build.reshaped(self._build.after([step.node]), step.node, (*lead, *own[1:]))
        return Add(node) if isinstance(step, Add) else Fill(node, step.shows, step.value, step.dtype)

    def _per_head(self, node: fx.Node, heads: int, place: Place) -> fx.Node:
        """One number a head, [H], that a tensor repeats for all rows and queries."""
        while node.target is aten.expand.default:
            node = operand_of(node)
        shape = shape_of(node)
        if (1,) * (4 - len(shape)) + shape != (1, heads, 1, 1):
            raise Unfit("its sinks are not one number a head")
        while str(node.target) in _VIEWS and shape_of(node) != (heads,):
            node = operand_of(node)
        return self._build.reshaped(place, node, (heads,))


def _down(softmax: fx.Node, sink: _Sink) -> tuple[fx.Node, fx.Node, float, list[tuple[int, ...]]]:
    """The probabilities, their product with the values, how many are dropped, and the shapes on the way."""
    node, dropout_p, shapes = softmax, 0.0, list[tuple[int, ...]]()
    is_cut = sink.node is None
    while True:
        if len(node.users) != 1:
            raise Unfit(_elsewhere("probabilities", node))
        (user,) = node.users
        if str(user.target) in _PRODUCTS:
            if not is_cut:
                raise Unfit("its sink has a value of its own")
            return node, user, dropout_p, shapes
        if user.target is aten.dropout.default:
            active = _dropped(user)
            if dropout_p and active:
                raise Unfit("its probabilities are dropped twice")
            dropout_p = dropout_p or active
        elif user.target is aten.slice.Tensor and not is_cut:
            is_cut = _drops_last_column(user)
            if not is_cut or dropout_p:
                raise Unfit("its probabilities are cut otherwise than by a sink")
        elif str(user.target) not in _CASTS and not _keeps_planes(user):
            raise Unfit(_elsewhere("probabilities", node))
        node = user
        if is_cut:
            shapes.append(shape_of(node))


def _elsewhere(what: str, node: fx.Node) -> str:
    if any(user.op == "output" for user in node.users):
        return f"its {what} are an output of the model"
    names = [spoken(str(user.target)) for user in node.users]
    return f"its {what} are read by {', '.join(dict.fromkeys(names)) or 'nobody'}"


def _batch_and_heads(shape: tuple[int, ...], shapes: Sequence[tuple[int, ...]], product: Product) -> tuple[int, int]:
    """How the leading dims of scores are batch and heads: as seen on the way, or as the queries were before."""
    for each in (shape, *shapes):
        if len(each) == 4:
            return each[0], each[1]
    if len(shape) != 3:
        raise Unfit(f"its scores have {len(shape)} dims")
    source: fx.Node = product.left
    while str(source.target) in _VIEWS | {"aten.expand.default", "aten.mul.Tensor"}:
        inner = source.args[0]
        if not isinstance(inner, fx.Node):
            break
        source, own = inner, shape_of(inner)
        if len(own) == 4 and own[0] * own[1] == shape[0] and own[2:] == shape_of(product.left)[1:]:
            return own[0], own[1]
        if len(own) < 3:
            break
    return shape[0], 1


def _peeled(node: fx.Node, scaled: dict[fx.Node, fx.Node]) -> float:
    """The number that an operand of the product is multiplied by, beyond views that nobody else reads; the products
    are noted in `scaled`.
    """
    factor = 1.0
    while len(node.users) == 1:
        name, source = str(node.target), node.args[0] if node.args else None
        if name in ("aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor", "aten.div.Scalar"):
            other = node.args[1]
            if isinstance(source, int | float):
                source, other = other, source
            if isinstance(other, bool) or not isinstance(other, int | float) or not isinstance(source, fx.Node):
                return factor
            if dtype_of(source) != dtype_of(node) or not other or ("div" in name and other is node.args[0]):
                return factor
            scaled[node] = source
            factor = factor / other if "div" in name else factor * other
        elif name not in _VIEWS | {"aten.transpose.int", "aten.mT.default", "aten.permute.default"}:
            return factor
        if not isinstance(source, fx.Node):
            return factor
        node = source
    return factor


def _softmax_dim(node: fx.Node) -> int:
    dim = argument(node, 1, "dim")
    return int(dim) % max(1, len(shape_of(node)))


def _dropped(node: fx.Node) -> float:
    """How many a call of dropout drops: 0 outside training."""
    return float(argument(node, 1, "p")) if argument(node, 2, "train") else 0.0


def _keeps_planes(node: fx.Node) -> bool:
    """Whether a node is a view that leaves the last two dims as they are, and repeats nothing."""
    source = node.args[0] if node.args else None
    if node.target in (aten.expand.default, aten.slice.Tensor):
        return shape_of(source) == shape_of(node)
    return str(node.target) in _VIEWS and shape_of(source)[-2:] == shape_of(node)[-2:]


def _drops_last_column(node: fx.Node) -> bool:
    source = node.args[0]
    before, after = shape_of(source), shape_of(node)
    dim, start = argument(node, 1, "dim", 0), argument(node, 2, "start", None)
    step = argument(node, 4, "step", 1)
    return dim in (-1, len(before) - 1) and start in (None, 0) and step == 1 and after == (*before[:-1], before[-1] - 1)


def _final_product(node: fx.Node) -> fx.Node | None:
    """The product that a softmax weighs the rows of, if it weighs any."""
    stack, seen = [node], 0
    while stack and seen < _MAX_STEPS:
        last, seen = stack.pop(), seen + 1
        for user in last.users:
            name = str(user.target)
            if name in _PRODUCTS and read_product(user, left=last) is not None:
                return user
            if name in _CASTS | _VIEWS or user.target in _BETWEEN:
                stack.append(user)
    return None


def _has_product_above(node: fx.Node) -> bool:
    """Whether a product is among what scores, of at least two dims, are made of elementwise."""
    return any(str(source.target) in _PRODUCTS for source in _above(node))


def _above(node: fx.Node) -> Iterator[fx.Node]:
    stack, seen = [(node, 0)], set[fx.Node]()
    while stack:
        last, depth = stack.pop()
        for source in last.all_input_nodes:
            same = shape_of(source)[-2:-1] == shape_of(node)[-2:-1] and len(shape_of(source)) > 2
            if source not in seen and depth < _MAX_STEPS and same:
                seen.add(source)
                stack.append((source, depth + 1))
                yield source
