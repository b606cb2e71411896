"""Rows that a mask chooses stay where they are, with all others, which count for nothing.

    logits[mask] → 3 of 8 rows; cross_entropy(·, labels[mask])  →  cross_entropy(logits, where(mask, labels, -100))
    y = f(x[mask]); y.mean()                                    →  where(mask, f(x), 0).sum() / mask.sum()
    x[mask] = f(x[mask])                                        →  where(mask, f(x), x)

So the program has sizes that no value says, and rows split as those of the batch do. What is done on the way has to
treat each row alone, as the operators' rules say. Rows that are not chosen hold numbers that every function takes, so
that none of them gives infinity or NaN, whose gradient would be NaN even where it counts for nothing.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.base.errors import AutoparError
from autopar.base.spoken import spoken
from autopar.ir.nodes import drop_dead, map_nodes
from autopar.ir.op_call import OpCall, op_call
from autopar.ir.rule import Rule
from autopar.operators.losses import MEAN, NONE
from autopar.operators.rules.lookup import rule_for
from autopar.passes.chosen_operators import CHOSEN, SPREAD
from autopar.passes.indices import Builder
from autopar.passes.said import Said

_aten = torch.ops.aten
_LABELS = (
    _aten.cross_entropy_loss.default,
    _aten.nll_loss_nd.default,
    _aten.nll_loss.default,
    _aten.nll_loss2d.default,
)
"""Losses that leave out rows by their label."""
_MEANS = (_aten.mean.default, _aten.mean.dim)
_COUNTING: Mapping[Any, float | bool] = {
    **dict.fromkeys(_MEANS, 0),
    _aten.sum.default: 0, _aten.sum.dim_IntList: 0, _aten.linalg_vector_norm.default: 0,
    _aten.norm.Scalar: 0, _aten.norm.ScalarOpt_dim: 0,
    _aten.any.default: False, _aten.any.dim: False, _aten.all.default: True, _aten.all.dim: True,
    _aten.logsumexp.default: -math.inf, _aten.max.default: -math.inf, _aten.amax.default: -math.inf,
    _aten.min.default: math.inf, _aten.amin.default: math.inf,
}  # fmt: skip
"""What reduces, and the number that changes nothing there."""
_SCALED = {_aten.div.Tensor: _aten.div.Tensor, _aten.div.Scalar: _aten.div.Tensor, _aten.mul.Tensor: _aten.mul.Tensor,
           _aten.mul.Scalar: _aten.mul.Tensor}  # fmt: skip
"""What may be given the number of rows; what takes it as a tensor."""
_ALIKE = (_aten.zeros.default, _aten.ones.default, _aten.full.default, _aten.new_zeros.default, _aten.new_ones.default,
          _aten.new_full.default, _aten.expand.default)  # fmt: skip
"""What makes all rows of such a size alike."""
_WRITES = (_aten.scatter_add.default, _aten.scatter_reduce.two, _aten.index_add.default)
"""What puts rows where indices of theirs say."""
_SHARES = (_aten.softmax.int, _aten.log_softmax.int)
"""What gives each row a share among all of them."""
_NEW = (_aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default, _aten.new_empty.default)
"""What reads no more of a tensor than its dtype and device."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Along which dim of a value all rows lie, `each` of its elements a row, and the mask of shape [N] that chooses."""

    mask: fx.Node
    said: int
    dim: int
    each: int = 1

    @property
    def count(self) -> int:
        """All rows."""
        return int(self.mask.meta["val"].numel())


def keep_rows(graph: fx.Graph, origins: dict[str, str]) -> None:
    """Every `CHOSEN` and `SPREAD` of a graph becomes what they stand for.

    Raises:
        AutoparError: what is done with such rows does not treat each alone, or their number is asked for.
    """
    if any(node.target is CHOSEN for node in graph.nodes):
        _Keeper(graph, origins).run()
        drop_dead(graph)


class _Keeper:
    def __init__(self, graph: fx.Graph, origins: dict[str, str]) -> None:
        self.graph, self.origins = graph, origins
        self.said = Said()
        self.rows: dict[fx.Node, _Rows | list[_Rows | None]] = {}
        self.masks: dict[int, dict[int, fx.Node]] = {}
        self.safe: dict[fx.Node, fx.Node] = {}
        self.raw: set[fx.Node] = set()

    def run(self) -> None:
        for node in list(self.graph.nodes):
            self.node, self.build = node, Builder(self.graph, node, self.origins)
            if node.target is CHOSEN:
                self._choose(node)
            elif node.target is SPREAD:
                self._put_back(node)
            elif node.target is operator.getitem and node.args[0] in self.rows:
                source, number = node.args
                found = self.rows[source]
                self._become(node, source.meta["val"][number], found[number] if isinstance(found, list) else None)
            elif node.op == "output":
                if any(each in self.rows for each in node.all_input_nodes):
                    raise self._refused("the model returns rows that a mask chooses: how many, values say")
            elif node.op == "call_function":
                self._follow(node)

    def _refused(self, what: str, remedy: str = "") -> AutoparError:
        return AutoparError(
            spoken(what),
            where=self.origins.get(self.node.name) or None,
            remedy=remedy
            or "work on all rows and mark those that count with a mask (torch.where), or choose them outside of "
            "forward()",
        )

    def _one(self, node: Any) -> _Rows | None:
        found = self.rows.get(node)
        return found if isinstance(found, _Rows) else None

    # ----------------------------------------------------------------------------------------------- there and back

    def _choose(self, node: Any) -> None:
        x, mask, dim, size = node.args
        if x in self.rows or mask in self.rows:
            raise self._refused("a mask chooses among rows that a mask chooses")
        shape, rank, count = x.meta["val"].shape, mask.meta["val"].dim(), mask.meta["val"].numel()
        said, known = self.said(mask), self.masks.setdefault(size, {})
        if any(other.meta["val"].numel() != count for other in known.values()):
            raise self._refused("masks of several sizes choose rows here")
        if said not in known:
            known[said] = mask if rank == 1 else self.build(_aten.reshape.default, mask, [count])
        if rank > 1:
            x = self.build(_aten.reshape.default, x, [*shape[:dim], count, *shape[dim + rank :]])
        else:
            x = self.build(_aten.alias.default, x)
        self.rows[x] = _Rows(known[said], said, dim)
        self.raw.add(x)
        node.replace_all_uses_with(x)
        self.graph.erase_node(node)

    def _put_back(self, node: Any) -> None:
        value, mask = node.args
        rows = self._one(value)
        if rows is None or rows.said != self.said(mask) or rows.dim or rows.each != 1:
            raise self._refused("rows that a mask chooses are written where another one is set")
        shape = [*mask.meta["val"].shape, *value.meta["val"].shape[1:]]
        node.replace_all_uses_with(self.build(_aten.reshape.default, value, shape))
        self.graph.erase_node(node)

    def _taken(self, value: fx.Node) -> fx.Node:
        """A value whose rows that are not chosen hold numbers that any function takes."""
        if value not in self.raw:
            return value
        if value not in self.safe:
            rows, like = self._one(value), value.meta["val"]
            assert rows is not None
            self.safe[value] = found = self._filled(value, rows, like)
            self.rows[found] = rows
        return self.safe[value]

    def _filled(self, value: fx.Node, rows: _Rows, like: torch.Tensor) -> fx.Node:
        if like.dtype == torch.bool:
            return value
        width = like.shape[-1]
        if not like.is_floating_point() or rows.dim == like.dim() - 1:
            return self._with(value, rows, 0.5 if like.dtype.is_floating_point or like.is_complex() else 0)
        counted = self.build(_aten.arange.default, width, dtype=like.dtype, device=like.device)
        usual = self.build(_aten.add.Tensor, self.build(_aten.mul.Tensor, counted, 0.5 / width), 0.25)
        return self.build(_aten.where.self, self._place(rows, like), value, usual)

    def _with(self, value: fx.Node, rows: _Rows, fill: float) -> fx.Node:
        """A value with one number in all rows that are not chosen."""
        others = self.build(_aten.logical_not.default, self._place(rows, value.meta["val"]))
        return self.build(_aten.masked_fill.Scalar, value, others, fill)

    def _place(self, rows: _Rows, like: torch.Tensor) -> fx.Node:
        """The mask, in a shape that it can be seen in beside `like`."""
        mask = rows.mask
        if rows.each > 1:
            column = self.build(_aten.reshape.default, mask, [rows.count, 1])
            wide = self.build(_aten.expand.default, column, [rows.count, rows.each])
            mask = self.build(_aten.reshape.default, wide, [rows.count * rows.each])
        behind = like.dim() - rows.dim - 1
        return self.build(_aten.reshape.default, mask, [rows.count * rows.each, *(1,) * behind]) if behind else mask

    def _number(self, rows: _Rows) -> fx.Node:
        """How many rows are chosen."""
        return self.build(_aten.sum.default, rows.mask)

    # -------------------------------------------------------------------------------------------------- what is between

    def _follow(self, node: Any) -> None:
        given = [each for each in node.all_input_nodes if each in self.rows]
        counted = self._count_given(node)
        args, kwargs = self._sized(node.args), self._sized(node.kwargs)
        sized = (args, kwargs) != (node.args, node.kwargs)
        if not given and not sized:
            return
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            if node.target is _aten.dropout.default and not (node.args[1] and node.args[2]):
                self._drop_nothing(node)
                return
            raise self._refused(
                f"{node.target} draws numbers for rows that a mask chooses",
                "draw for all rows (dropout of x, then x[mask]), or mark the rows that count with a mask (torch.where)",
            )
        if not given and node.target not in _ALIKE:
            raise self._refused(f"{node.target} is given how many rows a mask chooses")
        if counted and sized:
            raise self._refused(f"{node.target} is given how many rows a mask chooses")
        if sized and given and node.target not in _RESHAPING:
            raise self._refused(f"{node.target} is given how many rows a mask chooses")
        before = node.meta["val"]
        node.args, node.kwargs = args, kwargs
        if not given or node.target in _NEW:
            self._become(node, self._value(node), self._made_alike(before) if sized else None)
            return
        call = self._call(node)
        if node.target in _LABELS and call.arg("reduction", MEAN) != NONE and self._leaves_out(node, call):
            return
        if call.arg("reduction", NONE) not in (NONE, None) and isinstance(call.arg("reduction"), int):
            self._apart(node, call)
        elif node.target in _COUNTING:
            self._reduce(node, call)
        elif node.target in _SHARES and call.arg("dim") % len(node.args[0].meta["val"].shape) == self._dim(
            node.args[0]
        ):
            self._share(node)
        elif node.target in _WRITES and self._written(node, call):
            pass
        else:
            node.args, node.kwargs = (map_nodes(each, self._taken) for each in (node.args, node.kwargs))
            self._become(node, self._value(node), self._by_rule(node))

    def _dim(self, value: fx.Node) -> int | None:
        rows = self._one(value)
        return None if rows is None or rows.each > 1 else rows.dim

    def _share(self, node: Any) -> None:
        """Shares among the chosen rows: those of the others, made of the least number that there is, are 0."""
        rows, x = self._one(node.args[0]), node.args[0]
        assert rows is not None
        node.args = (self._with(x, rows, torch.finfo(x.meta["val"].dtype).min), *node.args[1:])
        self._become(node, self._value(node), rows)
        self.raw.add(node)

    def _drop_nothing(self, node: Any) -> None:
        """Dropout that is off, or of probability 0."""
        node.replace_all_uses_with(node.args[0])
        self.graph.erase_node(node)

    def _become(self, node: fx.Node, value: Any, rows: _Rows | list[_Rows | None] | None) -> None:
        node.meta["val"] = value
        if rows is not None and (isinstance(rows, _Rows) or any(rows)):
            self.rows[node] = rows

    def _value(self, node: Any) -> Any:
        args, kwargs = map_nodes((node.args, node.kwargs), lambda each: each.meta["val"])
        try:
            return node.target(*args, **kwargs)
        except (RuntimeError, IndexError) as error:  # topk of more than there are rows at all, for one
            raise self._refused(f"{node.target} cannot be of all rows, where a mask chooses some") from error

    def _call(self, node: Any, output: Any = None) -> OpCall:
        args, kwargs = map_nodes((node.args, node.kwargs), lambda each: each.meta["val"])
        return op_call(node.target, args, kwargs, output)

    def _sized(self, value: Any) -> Any:
        """Arguments with the number of all rows in place of that of those that are chosen."""
        if isinstance(value, Mapping):
            return {name: self._sized(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(self._sized, value))
        size = self._size_in(value)
        return value if size is None else value // size * self._all_rows(size)

    def _size_in(self, value: Any) -> int | None:
        whole = type(value) in (int, float) and value == value and abs(value) != math.inf and value == int(value)
        return next((size for size in self.masks if whole and value and value % size == 0), None)

    def _all_rows(self, size: int) -> int:
        return int(next(iter(self.masks[size].values())).meta["val"].numel())

    def _only(self, size: int) -> _Rows:
        """The one mask that chooses so many rows."""
        if len(self.masks[size]) > 1:
            raise self._refused("several masks choose rows here, and their number is asked for")
        ((said, mask),) = self.masks[size].items()
        return _Rows(mask, said, 0)

    def _count_given(self, node: Any) -> bool:
        """Whether a number of rows that something is divided by, or taken times, has become a value of the program."""
        if node.target not in _SCALED or len(node.args) < 2 or isinstance(node.args[1], fx.Node):
            return False
        size = self._size_in(node.args[1])
        if size is None:
            return False
        number = self._number(self._only(size))
        if node.args[0] in self.rows:  # where none is chosen, nothing is divided: by 0, gradients would be NaN
            number = self.build(_aten.clamp.default, number, 1)
        if node.args[1] != size:
            number = self.build(_aten.mul.Tensor, number, int(node.args[1]) // size)
        node.target, node.args = _SCALED[node.target], (node.args[0], number, *node.args[2:])
        return True

    def _made_alike(self, before: torch.Tensor) -> _Rows | None:
        """Rows of a value that was made in a size that masks say."""
        found = [
            (dim, size, each) for dim, each in enumerate(before.shape) if (size := self._size_in(each)) is not None
        ]
        if len(found) != 1:
            raise self._refused("rows that masks choose lie along several dims")
        ((dim, size, length),) = found
        return replace(self._only(size), dim=dim, each=length // size)

    # ------------------------------------------------------------------------------------------------ what reduces

    def _leaves_out(self, node: Any, call: OpCall) -> bool:
        """A loss whose rows that are not chosen have the label that it leaves out."""
        x, target, *others = node.args
        rows, labels = self._one(x), self._one(target)
        if rows is None or labels is None or target.meta["val"].is_floating_point():
            return False
        if rows.said != labels.said or rows.dim or labels.dim or rows.each != labels.each:
            return False
        if any(isinstance(each, fx.Node) and each in self.rows for each in others):
            return False
        target = self._with(target, labels, call.arg("ignore_index", -100))
        node.args = (x, target, *others)
        self._become(node, self._value(node), None)
        return True

    def _apart(self, node: Any, call: OpCall) -> None:
        """A loss with a reduction: the same without one, and what the chosen rows give of it."""
        wanted = call.arg("reduction")
        args, kwargs = list(map_nodes(node.args, self._taken)), dict(map_nodes(node.kwargs, self._taken))
        (place,) = call.path("reduction")
        if isinstance(place, int):
            args[place] = NONE
        else:
            kwargs[place] = NONE
        rows = self.build(node.target, *args, **kwargs)
        found = self._by_rule(rows)
        if not isinstance(found, _Rows):
            raise self._refused(f"{node.target} puts together rows that a mask chooses")
        total = self.build(_aten.sum.default, self._with(rows, found, 0))
        if wanted == MEAN:
            total = self._mean(total, found, rows.meta["val"].numel() // found.count)
        node.replace_all_uses_with(total)
        self.graph.erase_node(node)

    def _written(self, node: Any, call: OpCall) -> bool:
        """Rows of one mask, which are written where their indices say: those that are not chosen into a row more, which
        goes again.
        """
        x, dim, index, source, *others = node.args
        rows, places = self._one(source), self._one(index)
        along = dim % max(1, x.meta["val"].dim())
        if x in self.rows or rows is None or places is None or rows.said != places.said:
            return False
        same = 0 if node.target is _aten.index_add.default else along
        if (rows.dim, places.dim) != (along, same) or {rows.each, places.each} != {1}:
            return False
        like = x.meta["val"]
        length, shape = like.shape[along], [*like.shape]
        shape[along] = 1
        longer = self.build(_aten.cat.default, [x, self.build(_aten.new_zeros.default, x, shape)], along)
        behind = self._with(index, places, length)
        made = self.build(node.target, longer, dim, behind, self._taken(source), *others, **node.kwargs)
        node.replace_all_uses_with(self.build(_aten.slice.Tensor, made, along, 0, length))
        self.graph.erase_node(node)
        return True

    def _mean(self, total: fx.Node, rows: _Rows, each: int) -> fx.Node:
        number = self._number(rows)
        number = self.build(_aten.mul.Tensor, number, each) if each > 1 else number
        return self.build(_aten.div.Tensor, total, number)

    def _reduce(self, node: Any, call: OpCall) -> None:
        x = node.args[0]
        rows, shape = self._one(x), x.meta["val"].shape
        given = call.arg("dim")
        listed = [given] if isinstance(given, int) else list(given or ())
        dims = [dim % len(shape) for dim in listed] or list(range(len(shape)))
        order = call.arg("ord", call.arg("p", 2))
        numbers = x.meta["val"].is_floating_point() or abs(_COUNTING[node.target]) != math.inf
        if rows is None or not numbers or len(node.all_input_nodes) > 1 or (type(order) in (int, float) and order <= 0):
            raise self._refused(f"{node.target} puts together rows that a mask chooses")
        keeps = bool(call.arg("keepdim", False))
        if rows.dim not in dims:
            node.args = (self._taken(x), *node.args[1:])
            before = 0 if keeps else sum(dim < rows.dim for dim in dims)
            self._become(node, self._value(node), replace(rows, dim=rows.dim - before))
            return
        filled = self._with(x, rows, _COUNTING[node.target])
        if node.target in _MEANS:
            total = self.build(_aten.sum.dim_IntList, filled, dims, keeps, dtype=call.arg("dtype"))
            each = math.prod(shape[dim] for dim in dims) // rows.count
            node.replace_all_uses_with(self._mean(total, rows, each))
            self.graph.erase_node(node)
        else:
            node.args = (filled, *node.args[1:])
            self._become(node, self._value(node), None)

    # ----------------------------------------------------------------------------------------------- what a rule says

    def _by_rule(self, node: Any) -> _Rows | list[_Rows | None] | None:
        """Where rows lie in what an operator gives, as its rule says; where it sums them, it gets zeros for others."""
        output = self._value(node)
        rule = rule_for(self._call(node, output))
        operands: list[fx.Node] = []
        map_nodes((node.args, node.kwargs), operands.append)
        walked = {self._walked(rule, number, each) for number, each in enumerate(operands) if each in self.rows}
        if len(walked) != 1:
            raise self._refused(f"{node.target} puts rows together that several masks choose")
        ((said, factor),) = walked
        known = next(rows for each in operands if (rows := self._one(each)) and rows.said == said)
        if not rule.can_split(factor):
            raise self._refused(f"{node.target} does not treat alone each row that a mask chooses")
        found = [None if dims is None else self._along(rule, dims, factor, known) for dims in rule.results]
        if not all(each is not None for each in found):
            self._sum_chosen(node, rule, operands, factor)
            return None
        return found if isinstance(output, list | tuple) else found[0]

    def _walked(self, rule: Rule, number: int, operand: fx.Node) -> tuple[int, str]:
        """The mask and the factor that an operand's rows walk."""
        rows = self._one(operand)
        dims = rule.operands[number][rows.dim] if rows is not None else ()
        if rows is None or not dims or rule.sizes[dims[0]] % rows.count:
            raise self._refused(f"{self.node.target} does not treat alone each row that a mask chooses")
        return rows.said, dims[0]

    def _along(self, rule: Rule, dims: Sequence[Sequence[str]], factor: str, rows: _Rows) -> _Rows | None:
        for dim, walked in enumerate(dims):
            if factor in walked:
                if walked[0] != factor:
                    raise self._refused(f"{self.node.target} lays rows that a mask chooses side by side")
                length = math.prod(rule.sizes[name] for name in walked)
                return replace(rows, dim=dim, each=length // rows.count)
        return None

    def _sum_chosen(self, node: fx.Node, rule: Rule, operands: Sequence[fx.Node], factor: str) -> None:
        """Rows are summed: those of an operand in which the sum is linear are zero where they are not chosen."""
        linear = [number for number, each in enumerate(operands) if each in self.rows and {number} in rule.linear]
        if rule.factor(factor).reduce != "sum" or not linear or any(factor in d for r in rule.results for d in r or ()):
            raise self._refused(f"{node.target} puts together rows that a mask chooses")
        value = operands[linear[0]]
        rows = self._one(value)
        assert rows is not None
        node.replace_input_with(value, self._with(value, rows, 0))


_RESHAPING = (_aten.view.default, _aten.reshape.default, _aten.expand.default, _aten._unsafe_view.default,
              _aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default, _aten.slice.Tensor)  # fmt: skip
"""What may be told a size that rows are part of."""
