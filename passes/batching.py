"""batching: how the outputs of a program depend on the rows of its batch, so that microbatches can be put together.

Requires: phase `captured`.
Ensures: nothing is changed. The analysis says along which dim microbatches cut each input, and how the outputs that
    they give become those of the whole batch; or an error names the line of the model that couples the batch.

    loss = cross_entropy(model(x), labels)  →  x, labels: dim 0; loss: weighted by (labels != -100).sum()

Microbatching is data parallelism in time: rows walk the factors of the sharding rules (`batch/transfer.py`), and what
the model makes of them is a sum, a mean, or an average weighted by a count (`batch/states.py`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar.base.errors import AutoparError
from autopar.ir.batching import Batching, OutputBatching
from autopar.ir.graphs import op_call, operands_of
from autopar.ir.nodes import is_float
from autopar.ir.op_call import OpCall, TensorSpec
from autopar.ir.program import Program
from autopar.ir.region import Region
from autopar.ir.tensor_type import TensorType
from autopar.passes.batch.compare import power_of
from autopar.passes.batch.composites import CREATIONS, flatten, law_of
from autopar.passes.batch.site import Site, make_site
from autopar.passes.batch.states import Coupled, Rows, State, Terms, Whole, factor_of, place_of
from autopar.passes.batch.transfer import transfer
from autopar.passes.batch.values import Values, ancestors, is_zero
from autopar.passes.emission.literals import quoted
from autopar.passes.emission.statements import identifier, statement

_REMEDY = "microbatches=1"


class RowsTogether(AutoparError):
    """What the model computes of a batch does not follow from what it computes of parts of it."""


def analyse(program: Program, num_microbatches: int = 2, other: Program | None = None) -> Batching:
    """How microbatches of a captured program are put together.

    Args:
        program: captured, for one microbatch's shapes (or, without `other`, for any number of rows).
        num_microbatches: with 1, nothing is cut and nothing refused.
        other: the same model captured for another number of rows, best for that of the whole batch. Only a second
            capture tells what Python made of the number of rows (the 128 of `loss.sum() / 128`, of `zeros(128)`) from
            constants of the model; without it, every number is taken for a constant.

    Raises:
        RowsTogether: an output that microbatches do not give exactly: names what couples the rows, and where.
    """
    assert program.phase == "captured" and len(program.regions) == 1, "batching wants a captured program"
    if num_microbatches == 1:
        same = OutputBatching("same")
        whole = dict.fromkeys((port.name for port in program.inputs), None)
        return Batching(whole, (same,) * len(program.outputs), updates={name: same for name, _ in program.updates})
    analysis = _Analysis(program, other)
    states = analysis.run()
    outputs: list[OutputBatching] = []
    counts: dict[str, fx.Node] = {}
    for name, ref in zip(program.output_names, program.outputs, strict=True):
        state = states[ref.index]
        if program.branches and ref == program.outputs[-1]:
            _require_same_ways(program, state)
        outputs.append(_combination(name, state, analysis.where(ref.index)))
        if isinstance(state, Terms) and state.count is not None:
            counts[name] = state.count
    updates: dict[str, OutputBatching] = {}
    for name, ref in program.updates:
        state = states[ref.index]
        updates[name] = _of_buffer(name, state, analysis.where(ref.index))
        if isinstance(state, Terms) and state.count is not None:
            counts[name] = state.count
    _require_one_count(counts, analysis)
    weight = _weight_source(program, analysis, next(iter(counts.values()))) if counts else ""
    return Batching(analysis.batch_dims, tuple(outputs), weight, updates)


IGNORED = -100
"""The label that torch's cross entropy leaves out, unless it is told another."""
_KEEPS = (
    "view",
    "reshape",
    "flatten",
    "unsqueeze",
    "squeeze",
    "transpose",
    "_unsafe_view",
    "slice",
    "contiguous",
    "clone",
    "_to_copy",
    "to",
    "alias",
    "detach",
    "select",
)
"""Names of operators that hand labels on as they are, perhaps in another order."""
_LABELLED = ("cross_entropy_loss", "nll_loss", "nll_loss2d", "nll_loss_nd")
"""Losses in which a row that is labelled so counts nowhere, smoothed or not."""


def rows_to_add(program: Program, other: Program) -> tuple[tuple[OutputBatching, ...], dict[str, int]]:
    """How the outputs of a captured program depend on rows that are added to its batch, and the inputs (labels) that
    say of a row that it has no part in a loss, with what they then have.

    An output is by rows, the same for all, or a sum or average of terms, each of which is a cross entropy that leaves
    out what is labelled so; it is not where anything else of an added row would be in it.

    Args:
        other: captured for twice as many rows.

    Raises:
        AutoparError: an output that added rows would change: names what has them, and where.
    """
    analysis = _Analysis(program, other)
    states = analysis.run()
    fill: dict[str, int] = {}
    outputs = []
    for name, ref in zip(program.output_names, program.outputs, strict=True):
        state = states[ref.index]
        how = _combination(name, state, analysis.where(ref.index))
        if isinstance(state, Terms):
            for node in _sources_of_terms(analysis, analysis.results[ref.index]):
                fill.update(_labels_of(analysis, node, name))
        outputs.append(how)
    return tuple(outputs), fill


def _sources_of_terms(analysis: _Analysis, result: fx.Node) -> list[fx.Node]:
    """The operators that make sums over rows of what is by rows."""
    found, seen, stack = [], set(), [result]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        above = [source for source in operands_of(node) if isinstance(analysis.states[source][0], Terms)]
        stack += above
        if any(isinstance(analysis.states[source][0], Rows) for source in operands_of(node)) or not above:
            found.append(node)
    return found


def _labels_of(analysis: _Analysis, node: fx.Node, output: str) -> dict[str, int]:
    """The input that says of each row whether it has a part in what this operator makes."""
    where = analysis.origins.get(node.name)
    target: Any = node.args[1] if len(node.args) > 1 else None
    if node.target is torch.ops.aten.sum.default or node.target is torch.ops.aten.sum.dim_IntList:
        target = _counted(operands_of(node)[0])
    elif _name_of(node) in _LABELLED:
        call = op_call(node)
        if call.arg("ignore_index") not in (None, IGNORED) or call.arg("weight") is not None:
            target = None
    else:
        target = None
    source = _operand(target)
    while source is not None and source.op != "placeholder":
        if _name_of(source) not in _KEEPS and not _pads_with_ignored(source):
            source = None
            break
        source = _operand(source.args[0])
    if source is None or source not in analysis.holders or is_float(source):
        raise _refusal(output, "rows that were added would be in it, as nothing says that they do not count", where)
    return {analysis.holders[source].name: IGNORED}


def _counted(summed: fx.Node) -> Any:
    """The labels for which what is summed up is 0 where they are ignored: `labels != -100`, or something times that,
    `found & (labels != -100)`, `where(labels != -100, x, 0)`.
    """
    told: fx.Node | None = summed
    while told is not None and _name_of(told) in _KEEPS:
        told = _operand(told.args[0])
    if told is None:
        return None
    name = _name_of(told)
    if name == "mul" or (name in ("bitwise_and", "logical_and") and _is_bool(told)):
        return next((found for each in operands_of(told) if (found := _counted(each)) is not None), None)
    if name == "where" and _is_nothing(told.args[2]):
        return None if (mask := _operand(told.args[0])) is None else _counted(mask)
    if name == "masked_fill" and _is_nothing(told.args[2]):
        return _compared(told.args[1], "eq", "ne")
    return _compared(told, "ne", "eq")


def _compared(told: Any, by: str, opposite: str) -> Any:
    """The labels of `labels != -100`, or of what says the same by `not`."""
    if not isinstance(told, fx.Node):
        return None
    if _name_of(told) in ("bitwise_not", "logical_not") and _is_bool(told):
        return _compared(told.args[0], opposite, by)
    compared = list(told.args) if _name_of(told) == by else []
    return compared[0] if len(compared) == 2 and compared[1] == IGNORED else None


def _is_bool(node: fx.Node) -> bool:
    return all(each.meta["val"].dtype == torch.bool for each in (node, *operands_of(node)))


def _is_nothing(value: Any) -> bool:
    return is_zero(value) if isinstance(value, fx.Node) else type(value) in (int, float, bool) and value == 0


def _operand(value: Any) -> fx.Node | None:
    return value if isinstance(value, fx.Node) else None


def _name_of(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.").removeprefix("autopar.").split(".")[0]


def _pads_with_ignored(node: fx.Node) -> bool:
    value = node.args[2] if len(node.args) > 2 else node.kwargs.get("value")
    if _name_of(node) == "pad":
        value = node.args[3] if len(node.args) > 3 else node.kwargs.get("value")
    return _name_of(node) in ("constant_pad_nd", "pad") and isinstance(value, int | float) and value == IGNORED


def _combination(name: str, state: State, where: str, kind: str = "output") -> OutputBatching:
    if isinstance(state, Whole) and not state.power:
        return OutputBatching("same")
    if isinstance(state, Rows) and not state.power and state.outer == 1 and state.order is None:
        return OutputBatching("concat", state.dim)
    if isinstance(state, Terms) and state.count is not None and not state.power:
        return OutputBatching("weighted")
    if isinstance(state, Terms) and state.count is None and state.power in (0, -1):
        return OutputBatching("mean" if state.power else "sum")
    if isinstance(state, Coupled):
        raise _refusal(name, state.why, state.where, kind)
    why = "in stripes" if isinstance(state, Rows) and state.outer > 1 else "scaled by a power of their number"
    raise _refusal(name, f"it is {state}, {why}", where, kind)


def _of_buffer(name: str, state: State, where: str) -> OutputBatching:
    """How a buffer's new value follows from what each microbatch makes of the old one."""
    if isinstance(state, Rows) and not state.power:
        raise _refusal(name, "forward() keeps rows of the batch in a buffer", where, "new value of the buffer")
    return _combination(name, state, where, "new value of the buffer")


def _require_same_ways(program: Program, state: State) -> None:
    """Raises RowsTogether where what is asked at a branch is a matter of the batch's rows."""
    if isinstance(state, Whole) and not state.power:
        return
    lines = tuple(dict.fromkeys(line for _, line in program.branches))
    of_state = state.where if isinstance(state, Coupled) else ""
    raise RowsTogether(
        "forward() chooses what to do by the value of a tensor that is of the whole batch: no microbatch has it",
        where=next((line for line in lines if line in of_state), ", ".join(lines)),
        remedy=f"{_REMEDY}, or compute both and choose by torch.where",
    )


def _refusal(name: str, why: str, where: str | None, kind: str = "output") -> RowsTogether:
    return RowsTogether(
        f"the {kind} {name!r} of the whole batch does not follow from those of its microbatches: {why}",
        where=_plain(where),
        remedy=_REMEDY,
    )


def _plain(where: str | None) -> str | None:
    """`layers.0 (model.py:7)`; a line without a module has no parentheses of its own."""
    if where and where.startswith("("):
        return where.removeprefix("(").removesuffix(")")
    return where or None


def _require_one_count(counts: Mapping[str, fx.Node], analysis: _Analysis) -> None:
    names = list(counts)
    for name in names[1:]:
        if not analysis.values.same_count(counts[names[0]], counts[name]):
            what = f"{names[0]!r} and {name!r} are averages weighted by different counts, and a program has one"
            raise _refusal(name, what, analysis.origins.get(counts[name].name))


class _Analysis:
    """One capture, or two compared: everything is said of the one with more rows."""

    def __init__(self, program: Program, other: Program | None) -> None:
        self.graph, self.origins = _flat(program)
        self.own_nodes = list(self.graph.nodes)
        self.own = {node: node for node in self.own_nodes}
        larger, smaller = program, other
        self.pairs: dict[fx.Node, fx.Node] = {}
        if other is not None:
            graph, origins = _flat(other)
            if _num_elements(other) > _num_elements(program):
                larger, smaller, self.graph, self.origins, graph = other, program, graph, origins, self.graph
            self.pairs = _pairs(self.graph, graph, self.origins)
            self.own = self.pairs if smaller is program else self.own
        self.larger, self.smaller = larger, smaller
        self.batch_dims, self.rows, self.ratio = _batch_dims(larger, smaller)
        region = larger.regions[0]
        holders = [node for node in self.graph.nodes if node.op == "placeholder"]
        slots = dict(zip(holders, region.slots, strict=False))
        constants = {n: larger.constants[s.name] for n, s in slots.items() if s.name in larger.constants}
        self.slots, self.holders = slots, dict(zip(holders[len(slots) :], region.inputs, strict=True))
        self.values = Values(frozenset(self.holders), constants, self.pairs)
        output = next(node for node in self.graph.nodes if node.op == "output")
        self.results: Sequence[fx.Node] = output.args[0]
        self.states: dict[fx.Node, list[State]] = {}

    def run(self) -> list[State]:
        """The states of the results, in order."""
        wanted = {node for result in self.results for node in ancestors(result)}
        for node in self.graph.nodes:
            if node in wanted or "count" in node.meta:
                self.states[node] = self._states_of(node)
        return [self.states[result][0] for result in self.results]

    def where(self, index: int) -> str:
        """Module and line of a result."""
        return self.origins.get(self.results[index].name, "")

    def _states_of(self, node: fx.Node) -> list[State]:
        if node.op == "placeholder":
            return [self._placeholder(node)]
        if node.target is operator.getitem:
            source, index = node.args
            return [self.states[source][index]]  # type: ignore[index]
        site = self._site(node)
        states = [self.states[source][0] for source in operands_of(node)]
        return transfer(*self.values.numbered(site, states))

    def _placeholder(self, node: fx.Node) -> State:
        if node in self.holders:
            dim = self.batch_dims[self.holders[node].name]
            return Whole() if dim is None else Rows(dim)
        name = self.slots[node].name
        if self.smaller is None or name not in self.larger.constants:
            return Whole()
        value, less = self.larger.constants[name], self.smaller.constants.get(name)
        if less is not None and torch.equal(value, less):
            return Whole()
        if less is not None and value.numel() == less.numel() == 1:
            power = power_of(value.item(), less.item(), self.ratio)
            if power is not None:
                return Whole(power)
        users = [self.origins.get(user.name, "") for user in node.users]
        return Coupled("a constant of the model changes with the number of rows", next(iter(users), ""))

    def _site(self, node: fx.Node) -> Site:
        nodes = tuple(operands_of(node))
        return make_site(
            node,
            op_call(node),
            self.rows,
            self.origins.get(node.name, ""),
            smaller=self._smaller_call(node),
            ratio=self.ratio,
            as_rows=lambda index, state: not self.pairs and self._has_rows(nodes[index], state),
            same_count=self.values.same,
            count_kind=self.values.count_kind,
            is_zero=lambda index: is_zero(nodes[index]),
            operand_nodes=nodes,
        )

    def _smaller_call(self, node: fx.Node) -> OpCall | None:
        """The same operator in the smaller capture; where that left an expansion out, one that changes nothing."""
        if not self.pairs:
            return None
        pair, sources = self.pairs[node], operands_of(node)
        if not sources or pair is not self.pairs[sources[0]]:
            return op_call(pair)
        spec = TensorSpec(tuple(pair.meta["val"].shape), pair.meta["val"].dtype)
        return OpCall(node.target, (spec, list(spec.shape)), {}, (spec,), (spec,))

    def _has_rows(self, node: fx.Node, state: Rows) -> bool:
        """Whether a whole value may be read as rows: a constant made as many times as there are rows, each alike."""
        if node.op != "call_function" or self.states[node][0] != Whole():
            return False
        source, index = node.args if node.target is operator.getitem else (node, 0)
        assert isinstance(source, fx.Node) and isinstance(index, int)
        call = op_call(source)
        rule = law_of(call).rule
        dims = rule.results[index]
        factor = None if dims is None else factor_of(rule, dims, state, self.rows)
        if factor is None or not rule.factor(factor[0]).split:
            return False
        if call.name in CREATIONS:
            return True
        places = [place_of(rule, own, *factor) for own in rule.operands]
        sources = operands_of(source)
        return all(place is None or self._has_rows(own, place) for own, place in zip(sources, places, strict=True))


def _flat(program: Program) -> tuple[fx.Graph, dict[str, str]]:
    region: Region = program.regions[0]
    return flatten(region.graph, region.origins)


def _num_elements(program: Program) -> int:
    return sum(port.type.num_elements for port in program.inputs)


def _pairs(larger: fx.Graph, smaller: fx.Graph, origins: Mapping[str, str]) -> dict[fx.Node, fx.Node]:
    """The node of the smaller capture for each of the larger: the same operators in order, of the same operands.

    An expansion to as many rows as there are already, one, is not in the smaller graph: its pair is its operand's.
    """
    pairs: dict[fx.Node, fx.Node] = {}
    rest = list(smaller.nodes)
    for node in larger.nodes:
        reads = [pairs[source] for source in operands_of(node)]
        pair = rest[0] if rest else None
        alike = pair is not None and pair.op == node.op and (node.op != "call_function" or pair.target is node.target)
        if alike and pair is not None and operands_of(pair) == reads:
            pairs[node] = rest.pop(0)
        elif node.target is torch.ops.aten.expand.default:
            pairs[node] = reads[0]
        else:
            values = f"{node.target} in one, {pair.target if pair is not None else 'nothing'} in the other"
            raise _changed(values, origins.get(node.name))
    if rest:
        raise _changed(f"{rest[0].target} in one, nothing in the other", origins.get(rest[0].name))
    return pairs


def _changed(values: str, where: str | None) -> RowsTogether:
    return RowsTogether(
        "the model computes something else when the batch has another number of rows, so microbatches cannot be put "
        "together",
        where=_plain(where),
        values=values,
        remedy=_REMEDY,
    )


def _batch_dims(larger: Program, smaller: Program | None) -> tuple[dict[str, int | None], int, int]:
    """The dim of each input that has rows of the batch, how many there are, and how many times the smaller's."""
    if smaller is None:
        sizes = [port.type.shape[0] for port in larger.inputs if port.type.shape]
        rows = max(sizes, key=sizes.count, default=1)
        dims = {p.name: 0 if p.type.shape[:1] == (rows,) else None for p in larger.inputs}
        return dims, _at_least_two(rows), 1
    found: dict[str, int | None] = {}
    pairs: list[tuple[int, int]] = []
    for ours, theirs in zip(larger.inputs, smaller.inputs, strict=True):
        shapes = (ours.type.shape, theirs.type.shape)
        grown = [dim for dim, (a, b) in enumerate(zip(*shapes)) if a != b]
        if len(grown) > 1 or len(shapes[0]) != len(shapes[1]):
            raise _changed(f"input {ours.name}: {list(shapes[0])} in one capture, {list(shapes[1])} in the other", None)
        found[ours.name] = grown[0] if grown else None
        pairs += [(shapes[0][dim], shapes[1][dim]) for dim in grown]
    ratios = {a // b if b and a % b == 0 else 0 for a, b in pairs}
    if len(ratios) != 1 or 0 in ratios:
        raise _changed(f"rows of the inputs: {', '.join(f'{a} and {b}' for a, b in pairs) or 'alike'}", None)
    return found, _at_least_two(math.gcd(*(a for a, _ in pairs))), ratios.pop()


def _at_least_two(rows: int) -> int:
    if rows < 2:
        raise AutoparError("a batch of one row cannot be cut into microbatches", remedy=f"give more rows, or {_REMEDY}")
    return rows


# ---------------------------------------------------------------------------------------------------------- the weight


def _weight_source(program: Program, analysis: _Analysis, count: fx.Node) -> str:
    """`loss_weight(inputs)`: the nodes that the count is made of, one line each, as captured for one microbatch."""
    own = analysis.own
    needed = {own[node] for node in ancestors(count)}
    ports = {own[node]: port for node, port in analysis.holders.items()}
    slots = {own[node]: slot for node, slot in analysis.slots.items()}
    lines: list[str] = []
    names: dict[fx.Node, str] = {}
    device = next(
        f"inputs[{quoted(ports[node].name)}].device" for node in analysis.own_nodes if node in needed & ports.keys()
    )
    for node in analysis.own_nodes:
        if node not in needed:
            continue
        names[node] = identifier(node.name)
        if node in ports:
            text = f"inputs[{quoted(ports[node].name)}]"
        elif node in slots:
            text = _literal(program.constants[slots[node].name], device)
        else:
            text = statement(node, lambda n: names[n]).replace("comm.device", device)
        value = node.meta["val"]
        comment = f"  # {TensorType.of(value)}" if isinstance(value, torch.Tensor) else ""
        lines.append(f"    {names[node]} = {text}{comment}")
    name = names[own[count]]
    lines.append(f'    return {name}.to(torch.float64 if {name}.device.type == "cpu" else torch.float32).reshape(())')
    return "\n".join(["def loss_weight(inputs):", '    """The weight of one microbatch."""', *lines]) + "\n"


def _literal(value: torch.Tensor, device: str) -> str:
    return f"torch.tensor({value.tolist()!r}, dtype={value.dtype}, device={device})"
