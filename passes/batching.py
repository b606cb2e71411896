"""batching: how the outputs of a program depend on the rows of its batch, so that microbatches can be put together.

Requires: phase `captured`.
Ensures: nothing is changed. The analysis says along which dim microbatches cut each input, and how the outputs that
    they give become those of the whole batch; or an error names the line of the model that couples the batch.

    loss = cross_entropy(model(x), labels)  →  x, labels: dim 0; loss: weighted by (labels != -100).sum()

Microbatching is data parallelism in time: rows walk the factors of the sharding rules (`batch/transfer.py`), and what
the model makes of them is a sum, a mean, or an average weighted by a count (`batch/states.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.ir.batching import Batching, OutputBatching
from autopar.ir.graphs import op_call, operands_of
from autopar.ir.nodes import is_float
from autopar.ir.program import Program
from autopar.ir.tensor_type import TensorType
from autopar.ir.values import Port, Slot
from autopar.passes.batch.analysis import REMEDY, Analysis, RowsTogether, plain_line
from autopar.passes.batch.of_batch import edited, name_of_value, unknown
from autopar.passes.batch.states import Coupled, Rows, State, Terms, Whole
from autopar.passes.batch.values import ancestors, is_zero
from autopar.passes.emission.literals import quoted
from autopar.passes.emission.statements import identifier, statement

__all__ = ["RowsTogether", "analyse", "in_microbatches", "rows_to_add"]


def in_microbatches(program: Program, num_microbatches: int, whole: Program, *, several: bool = False) -> Program:
    """A program of one microbatch, with how a step's microbatches are put together. Where they cannot be as they are,
    and can be where they read what is known of the whole batch, they read that (`batch/of_batch.py`).

    Args:
        program: captured, for one microbatch. whole: for the whole batch.
        several: gradients come for several outputs. A microbatch that has no part in an average then has one in
            another, and what it computes as 0 / 0 is no number: it reads the whole batch's count where that is known.

    Raises:
        RowsTogether: as `analyse`.
    """
    found = replace(program, microbatches=num_microbatches)
    try:
        batching = analyse(program, num_microbatches, other=whole)
    except RowsTogether:
        if (other := _reading_the_batch(found, whole)) is None:
            raise
        return other
    other = _reading_the_batch(found, whole) if batching.weight and several else None
    return replace(found, batching=batching) if other is None else other


def _reading_the_batch(program: Program, whole: Program) -> Program | None:
    """The program with what it reads of the whole batch, and without weights; None where that does not help."""
    analysis = Analysis(program, whole, edits=True)
    analysis.run()
    edits = analysis.edits
    assert edits is not None
    if analysis.larger is not whole or not (edits.values or edits.scaled):
        return None
    part = edited(program, edits, microbatches=analysis.ratio, smaller=True)
    try:
        batching = analyse(part, program.microbatches, other=edited(whole, edits, microbatches=1, smaller=False))
    except RowsTogether:
        return None
    if batching.weight:
        return None
    if not (values := edits.values):
        return replace(part, batching=batching)
    named = {name_of_value(number): value for number, value in enumerate(values)}
    constants = {name: unknown(TensorType.of(value.meta["val"])) for name, value in named.items()}
    text, told_by = _of_batch_source(whole, analysis, named)
    batching = replace(batching, of_batch=text, told_by=told_by)
    return replace(part, constants={**part.constants, **constants}, batching=batching)


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
    analysis = Analysis(program, other)
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
    told_by = {node for count in counts.values() for node in ancestors(count)} & analysis.holders.keys()
    names = frozenset(analysis.holders[node].name for node in told_by)
    return Batching(analysis.batch_dims, tuple(outputs), weight, updates, told_by=names)


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
    analysis = Analysis(program, other)
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


def _sources_of_terms(analysis: Analysis, result: fx.Node) -> list[fx.Node]:
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


def _labels_of(analysis: Analysis, node: fx.Node, output: str) -> dict[str, int]:
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
        remedy=f"{REMEDY}, or compute both and choose by torch.where",
    )


def _refusal(name: str, why: str, where: str | None, kind: str = "output") -> RowsTogether:
    return RowsTogether(
        f"the {kind} {name!r} of the whole batch does not follow from those of its microbatches: {why}",
        where=plain_line(where),
        remedy=REMEDY,
    )


def _require_one_count(counts: Mapping[str, fx.Node], analysis: Analysis) -> None:
    names = list(counts)
    for name in names[1:]:
        if not analysis.values.same_count(counts[names[0]], counts[name]):
            what = f"{names[0]!r} and {name!r} are averages weighted by different counts, and a program has one"
            raise _refusal(name, what, analysis.origins.get(counts[name].name))


# ---------------------------------------------------------------------------------------------------------- the weight


def _weight_source(program: Program, analysis: Analysis, count: fx.Node) -> str:
    """`loss_weight(inputs)`: the nodes that the count is made of, one line each, as captured for one microbatch."""
    own = analysis.own
    ports = {own[node]: port for node, port in analysis.holders.items()}
    slots = {own[node]: slot for node, slot in analysis.slots.items()}
    needed = {own[node] for node in ancestors(count)}
    lines, names = _lines(program, analysis.own_nodes, needed, ports, slots)
    name = names[own[count]]
    lines.append(f'    return {name}.to(torch.float64 if {name}.device.type == "cpu" else torch.float32).reshape(())')
    return "\n".join(["def loss_weight(inputs):", '    """The weight of one microbatch."""', *lines]) + "\n"


def _of_batch_source(program: Program, analysis: Analysis, values: Mapping[str, fx.Node]) -> tuple[str, frozenset[str]]:
    """`of_batch(inputs, state)`: likewise, as captured for the whole batch; and the inputs that it reads."""
    needed = {each for value in values.values() for each in ancestors(value)}
    nodes = list(analysis.graph.nodes)
    lines, names = _lines(program, nodes, needed, analysis.holders, analysis.slots)
    lines.append(f"    return {{{', '.join(f'{quoted(name)}: {names[value]}' for name, value in values.items())}}}")
    inputs = frozenset(port.name for node, port in analysis.holders.items() if node in needed)
    head = ["def of_batch(inputs, state):", '    """What microbatches read of the whole batch."""']
    return "\n".join([*head, *lines]) + "\n", inputs


def _lines(
    program: Program,
    nodes: Sequence[fx.Node],
    needed: Collection[fx.Node],
    ports: Mapping[fx.Node, Port],
    slots: Mapping[fx.Node, Slot],
) -> tuple[list[str], dict[fx.Node, str]]:
    """A line for each node, of inputs, constants and buffers; and the names that the lines give to nodes."""
    lines: list[str] = []
    names: dict[fx.Node, str] = {}
    device = next(f"inputs[{quoted(ports[node].name)}].device" for node in nodes if node in needed and node in ports)
    for node in nodes:
        if node not in needed:
            continue
        names[node] = identifier(node.name)
        if node in ports:
            text = f"inputs[{quoted(ports[node].name)}]"
        elif node in slots and slots[node].name in program.constants:
            text = _literal(program.constants[slots[node].name], device)
        elif node in slots:
            text = f"state[{quoted(slots[node].name)}].to({device})"
        else:
            text = statement(node, lambda n: names[n]).replace("comm.device", device)
        value = node.meta["val"]
        comment = f"  # {TensorType.of(value)}" if isinstance(value, torch.Tensor) else ""
        lines.append(f"    {names[node]} = {text}{comment}")
    return lines, names


def _literal(value: torch.Tensor, device: str) -> str:
    return f"torch.tensor({value.tolist()!r}, dtype={value.dtype}, device={device})"
