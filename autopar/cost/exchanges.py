"""What an exchange of a program takes: rows that go to their experts and come back, the busiest rank, buffers.

How many rows go where is known only when they go. Bytes are planned as if every choice of experts were as likely;
seconds are those of the busiest rank, for which all wait (`Hardware.expert_imbalance`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from autopar.cost import expert_kernels, grouped_products
from autopar.cost.roofline import collective_time_s
from autopar.ir.choices import Choice, local_sizes
from autopar.ir.op_call import OpCall, TensorSpec
from autopar.ir.region import NodeStrategy
from autopar.ir.rule import Rule
from autopar.machine.hardware import Hardware
from autopar.machine.mesh import Mesh
from autopar.operators.basic import wide_dtype
from autopar.operators.rules.exchange_cost import ranks_of_token, rows_at_once
from autopar.operators.rules.experts import expert_width

Way = Literal["there", "back"]
Holds = Callable[[OpCall, int, int, int, int], int]
"""Bytes beside operands and results: of a call, for so many tokens, D, F and G F of an expert here."""

_COUNT = 8
_NUMBER = 4
"""Bytes of how many rows a rank has for another, and of the number of an expert on its way."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """An exchange of one operator, as planned.

    axis: its number. size: of the axis. away: the rows that a rank sends to others. there, back: bytes of a row,
    message by message, to the experts and home.
    """

    axis: int
    size: int
    away: float
    there: tuple[int, ...]
    back: tuple[int, ...]

    @property
    def counts_bytes(self) -> int:
        """What each rank tells the others first."""
        return (self.size - 1) * self.size * _COUNT

    @property
    def bytes_sent(self) -> float:
        """By each rank, in one call."""
        return self.away * (sum(self.there) + sum(self.back)) + self.counts_bytes

    def bytes_routed(self, rows: Sequence[Sequence[int]], rank: int) -> int:
        """What a rank sends in one call for the routing at hand. rows[i][j]: tokens of rank i with experts of j."""
        others = [each for each in range(self.size) if each != rank]
        there, back = sum(rows[rank][each] for each in others), sum(rows[each][rank] for each in others)
        return there * sum(self.there) + back * sum(self.back) + self.counts_bytes


def exchange_axis(choices: Sequence[Choice]) -> int | None:
    """The axis over which a node exchanges; None where none does."""
    return next((axis for axis, choice in enumerate(choices) if choice.kind == "exchange"), None)


def exchange_of(call: OpCall, rule: Rule, strategy: NodeStrategy, sizes: Sequence[int]) -> Exchange | None:
    """The exchange of an operator of experts under these choices, if there is one."""
    axis = exchange_axis(strategy.choices)
    if axis is None or rule.exchange is None:
        return None
    size, tokens = sizes[axis], local_sizes(rule, strategy.choices, sizes)[rule.exchange.query]
    is_grad, (x, weights) = _tokens_of(call)
    chosen = weights.shape[-1]
    away = tokens * ranks_of_token(_experts(rule), chosen, size) * (size - 1) / size
    row, routing = x.shape[-1] * x.dtype.itemsize, chosen * (_NUMBER + weights.dtype.itemsize)
    if is_grad:
        return Exchange(axis, size, away, (2 * row, routing), (row, chosen * weights.dtype.itemsize))
    return Exchange(axis, size, away, (row, routing), (row,))


class Ways(NamedTuple):
    """Seconds of an exchange: ranks tell each other how many rows they have for whom, then rows go there, and back."""

    counts_s: float
    there_s: float
    back_s: float


def ways_of(call: OpCall, rule: Rule, strategy: NodeStrategy, mesh: Mesh, imbalance: float) -> Ways:
    """Of the rank that has most rows; nothing without an exchange."""
    found = exchange_of(call, rule, strategy, mesh.sizes)
    if found is None:
        return Ways(0.0, 0.0, 0.0)
    link, launch = mesh.link(mesh.axis_names[found.axis]), mesh.hardware.collective_launch_s
    rows = imbalance * found.away * found.size / (found.size - 1)
    counts_s = collective_time_s("all_gather", found.size * found.size * _COUNT, found.size, link, launch)
    there_s, back_s = (
        sum(collective_time_s("all_to_all", rows * row, found.size, link, launch) for row in way)
        for way in (found.there, found.back)
    )
    return Ways(counts_s, there_s, back_s)


def exposed_s(call: OpCall, rule: Rule, strategy: NodeStrategy, mesh: Mesh, imbalance: float) -> float:
    """Seconds of the exchange where nothing runs beside it."""
    return sum(ways_of(call, rule, strategy, mesh, imbalance))


def under_way_bytes(way: Way, call: OpCall, rule: Rule, strategy: NodeStrategy, sizes: Sequence[int]) -> int:
    """The most that an exchange holds while something else runs: beside its operands the rows of a round that are on
    their way, where they leave and where they come, and on the way home what earlier rounds have brought.

    way: `there` or `back`.
    """
    found = exchange_of(call, rule, strategy, sizes)
    if found is None:
        return 0
    local = local_sizes(rule, strategy.choices, sizes)
    _, (x, weights) = _tokens_of(call)
    tokens, chosen = local["t"], weights.shape[-1]
    rows = _most_rows(rule, chosen, tokens, found.size) + _most_own(rule, chosen, tokens, found.size)
    held = rows * sum(getattr(found, way)) + 16 * tokens * min(chosen, found.size)
    if way == "back":
        brought = local["d"] * wide_dtype(x.dtype).itemsize
        held += tokens * (brought + (chosen * weights.dtype.itemsize if len(found.back) > 1 else 0))
    return math.ceil(held)


def sending_bytes(call: OpCall, rule: Rule, strategy: NodeStrategy, sizes: Sequence[int]) -> int:
    """The most that `send_tokens` holds: what is under way then, and which token goes where."""
    found = exchange_of(call, rule, strategy, sizes)
    if found is None:
        return 0
    _, (_, weights) = _tokens_of(call)
    tokens, chosen = local_sizes(rule, strategy.choices, sizes)["t"], weights.shape[-1]
    places = tokens * (found.size + chosen * 16 + 16 * min(chosen, found.size))
    # Rows of several tensors are put together; numbers and weights are packed.
    rows = math.ceil(_most_own(rule, chosen, tokens, found.size) * sum(found.there))
    return under_way_bytes("there", call, rule, strategy, sizes) + rows + places


def taking_bytes(call: OpCall, rule: Rule, strategy: NodeStrategy, sizes: Sequence[int]) -> int:
    """The most that `take_tokens` holds beside its result: what was under way, its rows as what they are added to."""
    found = exchange_of(call, rule, strategy, sizes)
    if found is None:
        return 0
    local = local_sizes(rule, strategy.choices, sizes)
    _, (x, weights) = _tokens_of(call)
    wide = _most_own(rule, weights.shape[-1], local["t"], found.size) * local["d"] * wide_dtype(x.dtype).itemsize
    return under_way_bytes("back", call, rule, strategy, sizes) + math.ceil(wide)


def buffer_bytes(
    call: OpCall, rule: Rule, strategy: NodeStrategy, sizes: Sequence[int], *, holds: Holds | None = None
) -> int:
    """The most that experts hold beside their operands and results, whatever the router does.

    Of an exchange the rows of a round, here and on their way, what one expert makes of all of them, sums; and in a
    second round a second gradient. holds: where experts are grouped products (`grouped_holds`), what these hold, of
    an exchange if that is more than one expert's; of others, whose tokens go nowhere, nothing else is counted.
    """
    found, local = exchange_of(call, rule, strategy, sizes), local_sizes(rule, strategy.choices, sizes)
    if found is None:
        return 0 if holds is None or rule.exchange is None else _held(holds, call, rule, strategy, sizes, local["t"])
    is_grad, (x, weights) = _tokens_of(call)
    tokens, chosen, dtype = local["t"], weights.shape[-1], x.dtype.itemsize
    wide, rows = wide_dtype(x.dtype).itemsize, _most_rows(rule, chosen, tokens, found.size)
    hidden, width = local["d"], local["f"] * expert_width(call, rule) // rule.sizes["f"]
    columns = width * local.get("g", 1)
    places = chosen * (8 + 8 + 8 + 1)  # numbers of experts, their order, and whose they are
    routing = chosen * (2 * (_NUMBER + weights.dtype.itemsize) + weights.dtype.itemsize) + places
    sums = tokens * (hidden * wide + found.size + 8 * min(chosen, found.size) + chosen * 8)
    travels = hidden * (8 if is_grad else 4) * dtype + hidden * wide
    kernels = 0 if holds is None else rows * travels + _held(holds, call, rule, strategy, sizes, rows)
    if not is_grad:
        row = max(hidden * (4 * dtype + 2 * wide) + (columns + 3 * width) * max(dtype, 4), kernels / rows)
        decoded = 2 * hidden * columns * dtype if call.arg("storage") else 0  # an expert's, before scales and behind
        return math.ceil(rows * (row + routing) + sums + decoded)
    row = hidden * (7 * dtype + 3 * wide) + (2 * columns + 6 * width) * max(dtype, 4) + chosen * 3 * wide
    row = max(row, kernels / rows)
    again = sum(spec.numel * spec.dtype.itemsize for spec in _parameters(call)) / _parts_of_parameters(strategy, sizes)
    return math.ceil(rows * (row + routing) + sums + (again if _may_repeat(rule, chosen, tokens, found.size) else 0))


def guest_bytes(call: OpCall, rule: Rule, strategy: NodeStrategy, sizes: Sequence[int], guests: int = 1) -> int:
    """The most that so many experts of other ranks take on one that they visit, beside `buffer_bytes`: parameters, in
    the backward gradients, in a second round twice, and what they make of a round's rows before it is added.
    """
    found, local = exchange_of(call, rule, strategy, sizes), local_sizes(rule, strategy.choices, sizes)
    if found is None or rule.exchange is None or not guests:
        return 0
    is_grad, (x, weights) = _tokens_of(call)
    chosen, wide = weights.shape[-1], wide_dtype(x.dtype).itemsize
    parameters = call.operands[4 if is_grad else 3 :]
    held = sum(spec.numel * spec.dtype.itemsize for spec in parameters) / _parts_of_parameters(strategy, sizes)
    times = 1 + is_grad * (1 + _may_repeat(rule, chosen, local["t"], found.size))
    made = _most_rows(rule, chosen, local["t"], found.size) * (local["d"] + is_grad * chosen) * wide
    return math.ceil(guests * times * held / local[rule.exchange.key] + made)


def grouped_holds(call: OpCall, hardware: Hardware) -> Holds | None:
    """What says how much grouped products of experts hold there: autopar's kernels, or PyTorch's grouped product; None
    where experts are computed one by one.
    """
    for each in (expert_kernels, grouped_products):
        if each.serves(call, hardware):
            return each.held_bytes
    return None


def _held(holds: Holds, call: OpCall, rule: Rule, strategy: NodeStrategy, sizes: Sequence[int], tokens: int) -> int:
    """Of grouped products of so many tokens."""
    local = local_sizes(rule, strategy.choices, sizes)
    width = local["f"]
    return holds(call, tokens, local["d"], width, width * local.get("g", 1))


def _most_rows(rule: Rule, chosen: int, tokens: int, size: int) -> int:
    """In one round, with one more of each rank where these do not divide into rounds."""
    at_once = rows_at_once(tokens, _experts(rule), chosen, size)
    return at_once + (size if _may_repeat(rule, chosen, tokens, size) else 0)


def _most_own(rule: Rule, chosen: int, tokens: int, size: int) -> int:
    """The most rows of its own tokens that a rank has in one round."""
    return min(_most_rows(rule, chosen, tokens, size), tokens * min(chosen, size))


def _may_repeat(rule: Rule, chosen: int, tokens: int, size: int) -> bool:
    return rows_at_once(tokens, _experts(rule), chosen, size) < size * tokens


def _experts(rule: Rule) -> int:
    assert rule.exchange is not None
    return rule.sizes[rule.exchange.key]


def _tokens_of(call: OpCall) -> tuple[bool, tuple[TensorSpec, TensorSpec]]:
    """Whether it is a gradient, and its tokens and weights."""
    at = 0 if call.name == "autopar.experts.default" else 1
    return at == 1, (call.operands[at], call.operands[at + 2])


def _parameters(call: OpCall) -> Sequence[TensorSpec]:
    return call.operands[4:]


def _parts_of_parameters(strategy: NodeStrategy, sizes: Sequence[int]) -> int:
    split = zip(strategy.choices, sizes, strict=True)
    return math.prod(size for choice, size in split if choice.kind == "exchange" or choice.factor == "f")
