"""Masks, understood: what is added to scores, or fills them, as limits, keys, and a bias.

    causal & padding[:, None, None, :]                →  right=0, keys=padding
    causal & (document[:, :, None] == document[:, None, :])  →  right=0, documents=document
    where(t > s - 4096 and t <= s, 0, finfo.min)      →  left=4095, right=0
    position_bias + where(t <= s, 0, finfo.min)       →  right=0, bias=position_bias

What depends on no input is worked out and recognized by its values; what depends on inputs and not on the query becomes
`keys`; what compares the numbers of query and key becomes `documents`; what is left stays a tensor. Hiding a key by a
large negative number is not the same as leaving it out: a query whose keys are all hidden attends to all of them
equally. So such a mask becomes limits only where each query keeps a key that nothing else can hide (of its document:
itself), and stays a float bias where it depends on inputs otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from autopar.ir.nodes import argument, dtype_of, is_float, operand_of, shape_of
from autopar.passes.attention.bands import Band, all_rows_see, read_band, sees_itself
from autopar.passes.attention.build import Builder, Place
from autopar.passes.attention.constants import Constant, Constants, Diagonal, Value
from autopar.passes.attention.documents import Documents
from autopar.passes.attention.ordinary import Ordinary
from autopar.passes.attention.shrink import Shrink

aten = torch.ops.aten

HIDES = -1e9
"""Added to a score, or in its place, this hides a key: no score of a model that can be trained comes near."""


class Unfit(Exception):
    """Why an attention cannot be fused; for the plan."""


@dataclass(frozen=True, slots=True)
class Add:
    """A float tensor is added to the scores."""

    node: fx.Node


@dataclass(frozen=True, slots=True)
class Fill:
    """Scores of `dtype` get `value` where `node` (bool) is false, or, unless it `shows`, where it is true."""

    node: fx.Node
    shows: bool
    value: float
    dtype: torch.dtype = torch.float32

    @property
    def hides(self) -> bool:
        """Whether a key whose score is the value is out, as long as the query sees another one."""
        return self.value <= HIDES or self.value == torch.finfo(self.dtype).min


Step = Add | Fill


_ALL = Band()


@dataclass(frozen=True, slots=True)
class Mask:
    """What the operator is told: limits, bool keys [B, T], documents [B, S], a bias, bool or float, of four dims."""

    band: Band = _ALL
    keys: fx.Node | None = None
    documents: fx.Node | None = None
    bias: fx.Node | None = None


@dataclass(frozen=True, slots=True)
class _Fixed:
    """A constant that says which keys are visible. finite: it hides them by a number, not by -inf."""

    node: fx.Node
    shows: bool
    visible: Value
    finite: bool
    step: Step


@dataclass(frozen=True, slots=True)
class _Hidden:
    """A bool tensor that depends on inputs and says which keys are visible (or, unless it `shows`, hidden)."""

    node: fx.Node
    shows: bool
    value: float


@dataclass(slots=True)
class _Parts:
    """The steps, taken apart. documents: those of `hidden` that compare numbers, and the numbers."""

    fixed: list[_Fixed]
    hidden: list[_Hidden]
    floats: list[fx.Node]
    documents: list[tuple[_Hidden, fx.Node]] = field(default_factory=list)

    def __add__(self, other: _Parts) -> _Parts:
        return _Parts(
            self.fixed + other.fixed, self.hidden + other.hidden, self.floats + other.floats,
            self.documents + other.documents,
        )  # fmt: skip


class MaskReader:
    """Reads the masks of one graph, each once: layers that share a mask share what is made of it."""

    def __init__(self, builder: Builder, constants: Constants, ordinary: Ordinary) -> None:
        self._build, self._constants, self._ordinary = builder, constants, ordinary
        self._shrink, self._documents = Shrink(builder, constants), Documents(builder, constants)
        self._parts: dict[Step, _Parts] = {}
        self._bands: dict[tuple[object, ...], Band | None] = {}
        self._made: dict[tuple[object, ...], fx.Node] = {}

    def read(self, steps: Sequence[Step], shape: tuple[int, int, int, int], place: Place) -> Mask:
        """What the steps, in order, do to scores of `shape` [B, H, S, T]. New nodes that belong to one attention go to
        `place`, those that layers share to where their operands are.

        Raises:
            Unfit: what cannot be said to the operator.
        """
        steps = tuple(steps)
        for step in steps:
            if isinstance(step, Fill) and not step.hides:
                raise Unfit(f"its scores are filled with {step.value:g}, which hides no key for sure")
        parts = _Parts([], [], [])
        for step in steps:
            if step not in self._parts:
                self._parts[step] = self._taken_apart(step)
            parts = parts + self._parts[step]
        parts = self._with_documents(parts, shape)
        if self._is_exact(parts, shape):
            return self._exact(parts, shape, place)
        return Mask(bias=self._in_order(steps, place))

    # -- taking apart --------------------------------------------------------------------------------------------------

    def _taken_apart(self, step: Step) -> _Parts:
        return self._of_fill(step) if isinstance(step, Fill) else self._of_add(step)

    def _of_fill(self, step: Fill) -> _Parts:
        parts = _Parts([], [], [])
        for node, shows in self._conjuncts(step.node, step.shows):
            value = self._constants(node)
            if value is None:
                parts.hidden.append(_Hidden(node, shows, step.value))
                continue
            visible = value.value if shows else ~value.value
            part = replace(step, node=node, shows=shows)
            parts.fixed.append(_Fixed(node, shows, type(value)(visible, value.shape), step.value > -math.inf, part))
        return parts

    def _conjuncts(self, node: fx.Node, shows: bool) -> Iterator[tuple[fx.Node, bool]]:
        """Bool tensors that must all be true (or false, unless they `show`) for a key to be visible."""
        name, operands = str(node.target), node.all_input_nodes
        bools = all(dtype_of(operand) == torch.bool for operand in operands) if operands else False
        known = self._constants(node) is not None
        if not bools:
            yield node, shows
        elif name in _SAME:
            yield from self._conjuncts(operands[0], shows)
        elif name in _NOT:
            yield from self._conjuncts(operands[0], not shows)
        elif name in (_AND if shows else _OR) and len(node.args) == 2 and len(operands) == 2:
            for operand in operands:
                yield from self._conjuncts(operand, shows)
        elif (
            not known and (source := _behind_ones(node)) is not node and str(source.target) in (_AND if shows else _OR)
        ):
            for operand in self._lifted(node, source):
                yield from self._conjuncts(operand, shows)
        else:
            yield node, shows

    def _lifted(self, node: fx.Node, source: fx.Node) -> Iterator[fx.Node]:
        """`unsqueeze(a & b)` as `unsqueeze(a) & unsqueeze(b)`: the operands."""
        whole = shape_of(source)
        for operand in source.all_input_nodes:
            own = (1,) * (len(whole) - len(shape_of(operand))) + shape_of(operand)
            sizes = iter(size for size, among in zip(own, whole, strict=True) if among > 1)
            shape = [1 if size == 1 else next(sizes) for size in shape_of(node)]
            yield self._once("lift", [operand], aten.reshape.default, operand, shape)

    def _of_add(self, step: Add) -> _Parts:
        node = step.node
        value = self._constants(node)
        if value is not None and (parts := self._of_constant(step, value)) is not None:
            return parts
        if node.target is aten.expand.default:
            return self._of_add(Add(operand_of(node)))
        if node.target is aten.add.Tensor and not node.kwargs and (pair := _floats(node)):
            return self._of_add(Add(pair[0])) + self._of_add(Add(pair[1]))
        if (found := self._filled(node)) is not None:
            fill, rest = found
            if fill.value == -math.inf or self._constants(fill.node) is not None:
                if self._constants.scalar(rest) == 0:
                    return self._of_fill(fill)
                if isinstance(rest, fx.Node) and is_float(rest):
                    return self._of_fill(fill) + self._of_add(Add(rest))
        return _Parts([], [], [node])

    def _of_constant(self, step: Add, value: Value) -> _Parts | None:
        """Zeros add nothing; zeros and what hides are a mask; other numbers are a bias; None for a bias that hides."""
        numbers = value.value
        hides = (numbers <= HIDES) | (numbers == torch.finfo(dtype_of(step.node)).min)
        if not bool(((numbers == 0) | hides).all()):
            return None if bool(hides.any()) else _Parts([], [], [step.node])
        if not bool(hides.any()):
            return _Parts([], [], [])
        finite = bool((hides & (numbers > -math.inf)).any())
        return _Parts([_Fixed(step.node, True, type(value)(~hides, value.shape), finite, step)], [], [])

    def _filled(self, node: fx.Node) -> tuple[Fill, object] | None:
        """`where(visible, x, value)` or `masked_fill(x, hidden, value)` as the fill and x."""
        found = read_fill(node, self._constants)
        return found if found is not None and found[0].hides else None

    # -- documents -----------------------------------------------------------------------------------------------------

    def _with_documents(self, parts: _Parts, shape: tuple[int, int, int, int]) -> _Parts:
        """The parts with what compares numbers of query and key among `documents`, and what depends on the distance
        within a document alone among `fixed`. Floats that hide by a number are taken apart where that is all they do.
        """
        found = self._compared(_Parts(parts.fixed, parts.hidden, []), shape)
        for node in parts.floats:
            fill = self._filled(node)
            rest = None if fill is None else fill[1]
            own = None
            if fill is not None and (
                self._constants.scalar(rest) == 0 or (isinstance(rest, fx.Node) and is_float(rest))
            ):
                own = self._compared(self._of_fill(fill[0]), shape)
            if own is None or own.hidden or not own.documents:
                found.floats.append(node)
                continue
            found = found + own
            if isinstance(rest, fx.Node) and self._constants.scalar(rest) != 0:
                found.floats.append(rest)
        return found

    def _compared(self, parts: _Parts, shape: tuple[int, int, int, int]) -> _Parts:
        hidden: list[_Hidden] = []
        made = _Parts(list(parts.fixed), [], list(parts.floats))
        for part in parts.hidden:
            numbers = self._documents.numbers(self._shrink(part.node), shape, shows=part.shows)
            if numbers is None:
                hidden.append(part)
            else:
                made.documents.append((part, numbers))
        counted = [self._documents.starts_anew(numbers) for _, numbers in made.documents]
        for part in hidden:
            known = (self._documents.in_places(part.node, positions) for positions in counted if positions is not None)
            value = next((value for value in known if value is not None), None)
            if value is None:
                made.hidden.append(part)
                continue
            visible = type(value)(value.value if part.shows else ~value.value, value.shape)
            fill = Fill(part.node, part.shows, part.value)
            made.fixed.append(_Fixed(part.node, part.shows, visible, part.value > -math.inf, fill))
        return made

    # -- putting together ----------------------------------------------------------------------------------------------

    def _is_exact(self, parts: _Parts, shape: tuple[int, int, int, int]) -> bool:
        """Whether leaving hidden keys out changes no number."""
        if any(part.value > -math.inf for part in parts.hidden):
            return False
        if not any(part.finite for part in parts.fixed) and all(p.value == -math.inf for p, _ in parts.documents):
            return True
        if parts.hidden or not all(self._ordinary(node) for node in parts.floats):
            return False
        seen = self._visible(parts.fixed, shape)
        if seen is None:
            return False
        return sees_itself(seen, *shape[2:]) if parts.documents else all_rows_see(seen, *shape[2:])

    def _visible(self, fixed: Sequence[_Fixed], shape: tuple[int, int, int, int]) -> Value | None:
        """What all constants together show."""
        values = [part.visible for part in fixed]
        if all(isinstance(value, Constant) for value in values):
            whole = torch.ones((1, 1, 1, 1), dtype=torch.bool)
            for value in values:
                whole = whole & value.value
            return Constant(whole, shape)
        vectors = [value.value.flatten() for value in values if isinstance(value, Diagonal) or value.value.numel() == 1]
        if len(vectors) < len(values):
            return None
        return Diagonal(torch.stack(torch.broadcast_tensors(*vectors)).all(0), shape)

    def _exact(self, parts: _Parts, shape: tuple[int, int, int, int], place: Place) -> Mask:
        """Limits for constants, keys for what does not depend on the query, documents, a bias for the rest."""
        band, fixed = self._band(parts.fixed, shape)
        keys: list[fx.Node] = []
        rest: list[fx.Node] = []
        floats = list(parts.floats)
        documents = [(numbers, each.node, each.shows) for each, numbers in parts.documents]
        for part in fixed:
            if isinstance(part.step, Add):
                floats.append(part.node)
            elif (own := self._documents.numbers(part.node, shape, shows=part.shows)) is not None:
                documents.append((own, part.node, part.shows))
            else:
                rest.append(self._shown(part.node, part.shows))
        numbers = documents[0][0] if documents else None
        rest += [self._shown(node, shows) for other, node, shows in documents if other is not numbers]
        for hidden in parts.hidden:
            found = self._shrink.keys(hidden.node, shape)
            shown = self._shown(self._shrink(hidden.node) if found is None else found, hidden.shows)
            (rest if found is None else keys).append(shown)
        visible = self._all(rest)
        bias = visible
        if floats:
            bias = self._sum(floats, place)
            if visible is not None:
                bias = self._build.make(place, aten.where.ScalarOther, visible, bias, -math.inf)
        four = None if bias is None else self._four(bias, place if floats else None)
        return Mask(band, self._all(keys), numbers, four)

    def _band(self, fixed: Sequence[_Fixed], shape: tuple[int, int, int, int]) -> tuple[Band, Sequence[_Fixed]]:
        """The limits that constants stand for, and those among them that are no limits."""
        if not fixed:
            return Band(), fixed
        whole = self._one_band(fixed, shape)
        if whole is not None:
            return whole, ()
        band, rest = Band(), []
        for part in fixed:
            own = self._one_band([part], shape)
            both = None if own is None else band.intersection(own)
            band = band if both is None else both
            rest += [part] if both is None else []
        return band, rest

    def _one_band(self, fixed: Sequence[_Fixed], shape: tuple[int, int, int, int]) -> Band | None:
        key = (*((part.node, part.shows) for part in fixed), shape)
        if key not in self._bands:
            seen = self._visible(fixed, shape)
            self._bands[key] = None if seen is None else read_band(seen, *shape[2:])
        return self._bands[key]

    def _in_order(self, steps: Sequence[Step], place: Place) -> fx.Node:
        """The steps as one float tensor that is added.

        A score that is filled with a number has no gradient, one to which the number is added has: where all keys of a
        query may be hidden, one cannot stand for the other.
        """
        total: fx.Node | None = None
        for step in steps:
            node = self._shrink(step.node)
            if isinstance(step, Add):
                total = node if total is None else self._build.make(place, aten.add.Tensor, total, node)
                continue
            if step.value > -math.inf:
                raise Unfit(f"its mask, which may hide all keys of a query, fills scores with {step.value:g}")
            if not step.shows:
                node = self._build.make(place, aten.logical_not.default, node)
            if total is None:
                meta = torch.device("meta")
                total = self._build.make(place, aten.zeros.default, [], dtype=step.dtype, device=meta)
            total = self._build.make(place, aten.where.ScalarOther, node, total, -math.inf)
        assert total is not None
        return self._four(total, None if len(steps) == 1 else place)

    def _sum(self, floats: Sequence[fx.Node], place: Place) -> fx.Node:
        total = self._shrink(floats[0])
        for node in floats[1:]:
            total = self._build.make(place, aten.add.Tensor, total, self._shrink(node))
        return total

    def _four(self, node: fx.Node, place: Place | None) -> fx.Node:
        """Four dims, made at `place`, or once for all that share the node."""
        if place is not None:
            return self._build.rank_four(place, node)
        shape = shape_of(node)
        if len(shape) == 4:
            return node
        return self._once("four", [node], aten.reshape.default, node, [*(1,) * (4 - len(shape)), *shape])

    def _shown(self, node: fx.Node, shows: bool) -> fx.Node:
        return node if shows else self._once("not", [node], aten.logical_not.default, node)

    def _all(self, nodes: Sequence[fx.Node]) -> fx.Node | None:
        """True where all are."""
        total: fx.Node | None = None
        for node in dict.fromkeys(nodes):
            total = node if total is None else self._once("and", [total, node], aten.logical_and.default, total, node)
        return total

    def _once(self, what: str, nodes: Sequence[fx.Node], target: object, *args: object) -> fx.Node:
        """A node made of shared ones, right behind them."""
        key = (what, *nodes, repr(args))
        if key not in self._made:
            self._made[key] = self._build.make(self._build.after(nodes), target, *args)
        return self._made[key]


def read_fill(node: fx.Node, constants: Constants) -> tuple[Fill, object] | None:
    """`where(mask, x, number)`, `where(mask, number, x)` or `masked_fill(x, mask, number)`: the fill, and x, which is a
    node, or a number where nothing but numbers are chosen.
    """
    name = str(node.target)
    if name in ("aten.masked_fill.Scalar", "aten.masked_fill.Tensor"):
        (x, mask), value, shows = node.args[:2], constants.scalar(argument(node, 2, "value")), False
    elif name in ("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar"):
        mask, x, other = node.args
        value, shows = constants.scalar(other), True
        if value is None or (constants.scalar(x) is not None and value == 0):
            x, value, shows = other, constants.scalar(x), False
    else:
        return None
    if value is None or not isinstance(mask, fx.Node) or dtype_of(mask) != torch.bool or not is_float(node):
        return None
    return Fill(mask, shows, value, dtype_of(node)), x


def _behind_ones(node: fx.Node) -> fx.Node:
    """What of bools is looked at with dims of size 1 more, or fewer, or elsewhere; another node as it is."""
    while node.target in _ONES and (source := operand_of(node)) and dtype_of(source) == torch.bool:
        own, other = ([size for size in shape_of(each) if size > 1] for each in (node, source))
        if own != other:
            break
        node = source
    return node


def _floats(node: fx.Node) -> tuple[fx.Node, ...]:
    """Both operands of a sum, if both are float tensors."""
    operands = tuple(arg for arg in node.args if isinstance(arg, fx.Node) and is_float(arg))
    return operands if len(operands) == 2 else ()


_ONES = frozenset({aten.unsqueeze.default, aten.view.default, aten.reshape.default})
_AND = frozenset({"aten.__and__.Tensor", "aten.bitwise_and.Tensor", "aten.logical_and.default", "aten.mul.Tensor"})
_OR = frozenset({"aten.__or__.Tensor", "aten.bitwise_or.Tensor", "aten.logical_or.default"})
_NOT = frozenset({"aten.logical_not.default", "aten.bitwise_not.default"})
_SAME = frozenset(
    {"aten.expand.default", "aten.detach.default", "aten.to.dtype", "aten.to.device", "aten._to_copy.default"}
)
