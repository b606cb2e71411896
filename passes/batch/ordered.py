"""Rows in the order of a sort: experts take tokens expert by expert, and give them back in their own order.

    order = sort(expert_of)          a permutation of the rows
    x[order // k]                    rows in that order: so it is what is computed of them row by row
    offsets = cumsum(histc(…))       where each expert's rows end
    grouped product(x', W, offsets)  rows in that order still: each takes the matrix of its own expert
    y'[inverse of order]             rows

Which row stands where differs between a microbatch and the whole batch; what is computed of a row does not. Ties may
be in any order: the inverse puts every row back.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from autopar.ir.graphs import operands_of
from autopar.passes.batch.site import Site
from autopar.passes.batch.states import Coupled, Order, Rows, State, Terms, Whole

_COPIES = frozenset({"aten._to_copy.default", "aten.to.dtype", "prims.convert_element_type.default"})


def ordered(site: Site, states: Sequence[State]) -> list[State] | None:
    """The states of the results where a sort's order, or rows in it, come in; None: it is for others to say."""
    name, nodes = site.call.name, site.operand_nodes
    if name in ("aten.sort.default", "aten.sort.stable", "aten.argsort.default"):
        return _sorted(site, states)
    if not any(isinstance(state, Order) or (isinstance(state, Rows) and state.order is not None) for state in states):
        return None
    first = states[0]
    if name == "aten.floor_divide.default" and isinstance(first, Order) and len(states) == 1:
        by = site.call.args[1]
        same = site.smaller is None or site.smaller.args[1] == by
        return [replace(first, by=first.by * by)] if isinstance(by, int) and by > 0 and same else None
    if name == "aten.index.Tensor" and len(states) == 2:
        return _indexed(site, states)
    if name == "aten.index_put.default" and _is_inverse(site, states):
        order = states[1]
        assert isinstance(order, Order)
        return [replace(order, inverse=True)]
    if name == "aten.histc.default" and isinstance(first, Rows) and _counts_all(site, nodes[0], first):
        return [Terms()]
    if "grouped_mm" in name and len(states) == 3:
        return _grouped(site, states)
    return None


def _sorted(site: Site, states: Sequence[State]) -> list[State] | None:
    """Values and places of a sort of one dim of whole numbers, one or more a row."""
    (state,) = states
    spec = site.call.operands[0]
    if not isinstance(state, Rows) or state.power or state.outer != 1 or spec.ndim != 1 or spec.dtype.is_floating_point:
        return None
    order = Order(site.node)
    rows: list[State] = [Rows(0, order=site.node), order]
    return rows if len(site.call.results) == 2 else [order]


def _indexed(site: Site, states: Sequence[State]) -> list[State] | None:
    source, order = states
    if not isinstance(order, Order) or not isinstance(source, Rows) or source.dim or source.outer != 1:
        return None
    num_rows, num_places = (spec.shape[0] for spec in site.call.operands[:2])
    if order.inverse:
        fits = source.order is order.node and num_rows == num_places
        return [Rows(0, power=source.power)] if fits else None
    fits = source.order is None and num_rows * order.by == num_places
    return [Rows(0, power=source.power, order=order.node)] if fits else None


def _is_inverse(site: Site, states: Sequence[State]) -> bool:
    """`inverse[order] = arange(len(order))`."""
    if len(states) != 3 or not isinstance(states[1], Order) or states[1].by != 1 or states[1].inverse:
        return False
    numbers, count = site.operand_nodes[2], site.call.operands[0].shape
    if str(numbers.target) != "aten.arange.default" or (len(site.call.args) > 3 and site.call.args[3]):
        return False
    return tuple(count) == (numbers.args[0],) == tuple(site.call.operands[1].shape)


def _counts_all(site: Site, node: fx.Node, state: Rows) -> bool:
    """Whether a histogram counts how many of the sorted numbers are 0, 1, 2, … each."""
    bins, least, most = (site.call.arg(name) for name in ("bins", "min", "max"))
    return _is_of(node, state.order) and (least, most) == (0, bins - 1)


def _plain(node: fx.Node) -> fx.Node:
    """Before casts."""
    while str(node.target) in _COPIES:
        node = operands_of(node)[0]
    return node


def _is_of(node: fx.Node, order: fx.Node | None) -> bool:
    """Whether a value is the sorted numbers themselves."""
    node = _plain(node)
    return node.target is operator.getitem and node.args == (order, 0)


def _grouped(site: Site, states: Sequence[State]) -> list[State] | None:
    """Rows, the matrices of all groups, where the rows of each end."""
    rows, matrices, _ = states
    if not isinstance(rows, Rows) or rows.order is None or rows.dim or matrices != Whole():
        return None
    sums = site.operand_nodes[2]
    if str(sums.target) != "aten.cumsum.default" or site.call.operands[1].ndim != 3:
        return None
    counts = _plain(operands_of(sums)[0])
    groups = site.call.operands[1].shape[0]
    if str(counts.target) != "aten.histc.default" or counts.args[1:] != (groups, 0, groups - 1):
        return None
    return [rows] if _is_of(operands_of(counts)[0], rows.order) else None


def parted(site: Site, states: Sequence[State]) -> Coupled | None:
    """What is wrong where rows in one order meet rows in another, are taken together with those beside them, or an
    order is read as a number.
    """
    if any(isinstance(state, Order) for state in states):
        return site.coupled("reads the places of a sort along all rows of the batch")
    orders = {state.order for state in states if isinstance(state, Rows)}
    if len(orders) > 1:
        return site.coupled("lets rows meet that stand in different orders")
    if not orders - {None}:
        return None
    walked = {dims[state.dim] for dims, state in _rows_of(site, states)}
    (names, *others) = walked
    split = any(set(names) & set(own) and own != names for dims in site.rule.results for own in dims or ())
    return site.coupled("groups rows that stand in the order of a sort") if others or len(names) != 1 or split else None


def _rows_of(site: Site, states: Sequence[State]) -> list[tuple[tuple[tuple[str, ...], ...], Rows]]:
    pairs = zip(site.rule.operands, states, strict=True)
    return [(dims, state) for dims, state in pairs if isinstance(state, Rows)]
