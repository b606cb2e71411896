"""Experts exchanged: an axis that splits tokens, and has some experts on each rank. Tokens go where their experts are.

Lepikhin et al., GShard (2006.16668), without its capacity: nothing is dropped. Each token goes once to every rank that
has any of its experts, with the numbers and weights of all of them; there `autopar.operators.experts` adds what the
experts here make of it, and that comes back. First all ranks tell each other how many rows they have for whom: so
messages are as long as they need be. Where a rank would get more than is planned (`rows_at_once`), all take several
rounds, so that memory has a bound whatever the router does.

The gradient goes the same way: with a token goes its gradient, and the token's and its weights' gradients come back.
Those of the experts' parameters are complete where these are: nothing is summed over the axis.

Experts may lie in other slots than their numbers say (`expert_layers.py`), and visit other ranks (`visitors.py`): then
tokens choose slots.

A program may let the first round's tokens leave before it is at the experts (`Sent`), and go on while the last round's
rows come home (`Coming`): what it does meanwhile reads neither.

Shape suffixes as in `autopar.operators.experts`, T of this rank; S rows of this rank, R rows that are here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.operators.basic import wide_dtype
from autopar.operators.rules.exchange_cost import ranks_of_token, rounds_of, rows_at_once
from autopar.runtime.communicator import Communicator
from autopar.runtime.expert_layers import ExpertLayer, layer_at
from autopar.runtime.visitors import Visitors

_operators = torch.ops.autopar
Wait = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Round:
    """What goes over the axis at once. tokens[S]: the rows of this rank, those for the first rank first.

    rows[i][j]: how many rank i has for rank j. is_last: of the exchange's rounds.
    """

    comm: Communicator
    axis: str
    tokens: Tensor
    rows: tuple[tuple[float, ...], ...]
    is_last: bool = True

    def there(self, x: Tensor) -> Tensor:
        """x[S, …] to the ranks of the experts: [R, …]."""
        return self.comm.exchange_rows(x, self.axis, self.rows)

    def back(self, x: Tensor) -> Tensor:
        """x[R, …] to the ranks of the tokens: [S, …]."""
        return self.comm.exchange_rows(x, self.axis, self._home)

    def routing(self, indices_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers and weights of the rows that are here, in one message."""
        return self._unpacked(self.there(self._packed(indices_TK, weights_TK)), indices_TK, weights_TK)

    def leave(self, values: Sequence[Tensor], indices_TK: Tensor, weights_TK: Tensor) -> _Arriving:
        """`there` of these values, and `routing`, while the program goes on."""
        rows = self.comm.begin_rows(self.of(values), self.axis, self.rows)
        packed = self.comm.begin_rows(self._packed(indices_TK, weights_TK), self.axis, self.rows)
        return _Arriving(self, rows, lambda: self._unpacked(packed(), indices_TK, weights_TK))

    def begin_back(self, x: Tensor) -> Wait:
        """`back` while the program goes on."""
        return self.comm.begin_rows(x, self.axis, self._home)

    def of(self, values: Sequence[Tensor]) -> Tensor:
        """The rows of these values that go, beside each other in the dtype of the last: [S, …]."""
        rows = [each[self.tokens].to(values[-1].dtype) for each in values]
        return torch.cat(rows, 1) if len(rows) > 1 else rows[0]

    @property
    def _home(self) -> tuple[tuple[float, ...], ...]:
        return tuple(zip(*self.rows, strict=True))

    def _packed(self, indices_TK: Tensor, weights_TK: Tensor) -> Tensor:
        numbers = indices_TK[self.tokens].to(torch.int32)
        return torch.cat([numbers.view(torch.uint8), weights_TK[self.tokens].view(torch.uint8)], 1)

    def _unpacked(self, found: Tensor, indices_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        split = 4 * indices_TK.shape[1]
        return _as_numbers(found[:, :split], torch.int32), _as_numbers(found[:, split:], weights_TK.dtype)


@dataclass(frozen=True, slots=True)
class _Arriving:
    """A round's rows on their way to the experts, and their routing."""

    part: Round
    rows: Wait
    routing: Callable[[], tuple[Tensor, Tensor]]


class Sent:
    """Tokens that have left for their experts, made by `MeshComm.send_tokens`. One `exchange_experts` takes them.

    axis: over which. values: how many tensors go with each token: itself, or its gradient too.
    """

    def __init__(
        self, comm: Communicator, axis: str, tensors: Sequence[Tensor], num_experts: int, width: int | None = None
    ) -> None:
        *values, indices, weights = tensors
        self.axis, self.values = axis, len(values)
        self._rounds = rounds(comm, axis, indices, num_experts, width)
        self._first: _Arriving | None = next(self._rounds).leave(values, indices, weights)

    def take(self, comm: Communicator, axis: str, values: int) -> tuple[_Arriving, Iterator[Round]]:
        """The first round, and those that have not left.

        Raises:
            AutoparError: it went over another axis, or with other values, or was taken before.
        """
        first, self._first = self._first, None
        if first is None or (axis, values) != (self.axis, self.values):
            what = "were taken by another exchange before" if first is None else f"were sent over {self.axis}"
            raise AutoparError(
                f"an exchange over {axis} waits for tokens that {what}", where=comm.where or None,
                remedy="give each comm.exchange_experts… the tokens that a comm.send_tokens of its own has sent",
            )  # fmt: skip
        return first, self._rounds


class Coming:
    """What experts made of tokens, on its way home: `MeshComm.take_tokens` waits for it.

    sums: what the rounds before have brought, of each value; rest: the last one's rows. dtypes: of the results.
    """

    def __init__(self, sums: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> None:
        self.sums, self.dtypes = list(sums), list(dtypes)
        self.tokens: Tensor | None = None
        self.rest: list[Wait] = []
        self._is_taken = False

    def add(self, part: Round, values: Sequence[Tensor], later: bool) -> None:
        """Bring a round home; later: the last one's rows are waited for in `take`."""
        if later and part.is_last:
            self.tokens, self.rest = part.tokens, [part.begin_back(each) for each in values]
            return
        for total, each in zip(self.sums, values, strict=True):
            total.index_add_(0, part.tokens, part.back(each).to(total.dtype))

    def take(self, where: str = "") -> tuple[Tensor, ...]:
        """The sums over all rounds.

        Raises:
            AutoparError: they were taken before.
        """
        if self._is_taken:
            raise AutoparError(
                "what comes home from experts was taken before", where=where or None,
                remedy="call comm.take_tokens once for each exchange",
            )  # fmt: skip
        self._is_taken = True
        for total, wait in zip(self.sums, self.rest, strict=False):
            assert self.tokens is not None
            total.index_add_(0, self.tokens, wait().to(total.dtype))
        sums, self.sums, self.rest = self.sums, [], []
        return tuple(total.to(dtype) for total, dtype in zip(sums, self.dtypes, strict=True))


def _as_numbers(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes [R, …] as numbers: copied, because memory of wider numbers must begin where those may."""
    return x.clone(memory_format=torch.contiguous_format).view(dtype)


def rounds(
    comm: Communicator, axis: str, indices_TK: Tensor, num_experts: int, width: int | None = None
) -> Iterator[Round]:
    """The rounds of one exchange. num_experts: of this rank; width: slots of a rank, if there are others than those.
    Collective; the host waits for how many rows come.
    """
    (num_tokens, chosen), num_ranks = indices_TK.shape, comm.size(axis)
    at_once = rows_at_once(num_tokens, num_experts * num_ranks, chosen, num_ranks)
    if indices_TK.device.type == "meta":
        comm.all_gather(indices_TK.new_empty((1, num_ranks), dtype=torch.int64), axis, 0)
        pair = num_tokens * ranks_of_token(num_experts * num_ranks, chosen, num_ranks) / num_ranks
        rows = tuple((pair,) * num_ranks for _ in range(num_ranks))
        num_rows = round(pair) * num_ranks
        yield Round(comm, axis, indices_TK.new_empty(num_rows, dtype=torch.int64), rows)
        return
    homes = indices_TK.long().div(width or num_experts, rounding_mode="floor")
    goes = torch.stack([(homes == rank).any(1) for rank in range(num_ranks)])
    table: list[list[int]] = comm.all_gather(goes.sum(1)[None], axis, 0).tolist()
    own, num = table[comm.index(axis)], rounds_of(table, at_once)
    tokens = torch.nonzero_static(goes, size=sum(own))[:, 1]  # whose number is known: the host waits once, for all
    del homes, goes
    starts = [sum(own[:rank]) for rank in range(num_ranks)]
    for number in range(num):
        parts = [tokens[start + count * number // num : start + count * (number + 1) // num]
                 for start, count in zip(starts, own, strict=True)]  # fmt: skip
        rows = tuple(tuple(n * (number + 1) // num - n * number // num for n in each) for each in table)
        yield Round(comm, axis, tokens if num == 1 else torch.cat(parts), rows, number == num - 1)


def send_tokens(comm: Communicator, axis: str, tensors: Sequence[Tensor], experts: int) -> Sent | None:
    """See `MeshComm.send_tokens`. tensors: x, indices, weights, with the gradient in front of them."""
    if comm.size(axis) == 1:
        return None
    *values, indices, weights = tensors
    layer, _ = layer_at(comm)
    visitors = Visitors.of(comm, layer)
    width = experts if visitors is None else visitors.width
    return Sent(comm, axis, (*values, _slots(layer, indices), weights), experts, width)


def exchange_experts(
    comm: Communicator, axis: str, tensors: Sequence[Tensor | None], options: dict[str, Any],
    sent: Sent | None = None, later: bool = False,
) -> Tensor | Coming:  # fmt: skip
    """See `MeshComm.exchange_experts`. tensors: x, indices, weights, first, second, bias."""
    x, indices, weights, first, second, *rest = tensors
    assert x is not None and indices is not None and weights is not None and first is not None
    layer, is_forward = layer_at(comm)
    if layer is not None and is_forward:
        layer.count(indices)
    if comm.size(axis) == 1:
        made: Tensor = _operators.experts(*tensors, **options)
        return Coming([made], [made.dtype]) if later else made
    placed = _Placed.of(comm, axis, layer, (first, second, *rest), options)
    coming = Coming([torch.zeros(x.shape, dtype=wide_dtype(x.dtype), device=x.device)], [x.dtype])
    for part, here, routing in _here(comm, axis, (x,), _slots(layer, indices), weights, placed.widths, sent):
        made = _operators.experts(here, *routing, first, second, *rest, **placed.options)
        if placed.guests is not None:
            made += _operators.experts(here, *routing, *placed.guests, **placed.of_guests)
        del here, routing
        coming.add(part, [made], later)
        del made
    return coming if later else coming.take()[0]


def exchange_experts_grad(
    comm: Communicator, axis: str, tensors: Sequence[Tensor | None], options: dict[str, Any],
    sent: Sent | None = None, later: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """See `MeshComm.exchange_experts_grad`. tensors: g, x, indices, weights, first, second, bias if there is one."""
    g, x, indices, weights, first, second, *rest = tensors
    assert g is not None and x is not None and indices is not None and weights is not None and first is not None
    gradient = _operators.experts_grad_bias if rest else _operators.experts_grad
    if comm.size(axis) == 1:
        dx, dweights, *of_parameters = gradient(*tensors, **options)
        first_results = [Coming([dx, dweights], [dx.dtype, dweights.dtype])] if later else [dx, dweights]
        return (*first_results, *of_parameters)
    layer, _ = layer_at(comm)
    placed = _Placed.of(comm, axis, layer, (first, second, *rest), options)
    of_parameters, of_guests = list[Tensor](), list[Tensor]()
    dx = torch.zeros(x.shape, dtype=wide_dtype(x.dtype), device=x.device)
    dweights = torch.zeros_like(weights)
    coming = Coming([dx, dweights], [x.dtype, weights.dtype])
    for part, both, routing in _here(comm, axis, (g, x), _slots(layer, indices), weights, placed.widths, sent):
        found = gradient(*both.chunk(2, 1), *routing, first, second, *rest, **placed.options)
        if placed.guests is not None:
            theirs = gradient(*both.chunk(2, 1), *routing, *placed.guests, **placed.of_guests)
            found = (found[0] + theirs[0], found[1] + theirs[1], *found[2:])
            of_guests = _summed(of_guests, theirs[2:])
            del theirs
        del both, routing
        coming.add(part, found[:2], later)
        of_parameters = _summed(of_parameters, found[2:])
        del found
    if placed.visitors is not None:
        placed.visitors.go(of_guests, of_parameters)
    return (coming, *of_parameters) if later else (*coming.take(), *of_parameters)


@dataclass(frozen=True, slots=True)
class _Placed:
    """Where the experts of an exchange lie. options: of the operator for those of this rank, of_guests for its guests,
    whose parameters are `guests`; None where it has none. widths: experts of a rank, and its slots.
    """

    options: dict[str, Any]
    widths: tuple[int, int]
    visitors: Visitors | None = None
    guests: Sequence[Tensor | None] | None = None
    of_guests: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(
        comm: Communicator, axis: str, layer: ExpertLayer | None, parameters: Sequence[Tensor | None],
        options: dict[str, Any],
    ) -> _Placed:  # fmt: skip
        """Collective where experts visit other ranks: their parameters come. parameters: of this rank's experts."""
        assert parameters[0] is not None
        num, visitors = parameters[0].shape[0], Visitors.of(comm, layer)
        width = num if visitors is None else visitors.width
        start = options.get("start", 0) + comm.index(axis) * width
        own = options | {"start": start}
        if visitors is None:
            return _Placed(own, (num, width))
        guests = visitors.come(parameters)
        return _Placed(own, (num, width), visitors, guests, options | {"start": start + num})


def _summed(totals: list[Tensor], more: Sequence[Tensor]) -> list[Tensor]:
    """Added to the totals in place; these themselves where there are none yet."""
    for total, each in zip(totals, more, strict=False):
        total += each
    return totals or list(more)


def _slots(layer: ExpertLayer | None, indices: Tensor) -> Tensor:
    """Where the experts lie that the tokens chose."""
    return indices if layer is None else layer.numbers(indices)


def _here(
    comm: Communicator, axis: str, values: Sequence[Tensor], indices: Tensor, weights: Tensor, widths: tuple[int, int],
    sent: Sent | None,
) -> Iterator[tuple[Round, Tensor, tuple[Tensor, Tensor]]]:  # fmt: skip
    """Each round, with its rows that are here and their routing. sent: what has left of it."""
    if sent is None:
        left = rounds(comm, axis, indices, *widths)
    else:
        arriving, left = sent.take(comm, axis, len(values))
        waits, part = [arriving.rows, arriving.routing], arriving.part
        del arriving
        yield part, waits.pop(0)(), waits.pop()()  # type: ignore[misc]
    for part in left:
        yield part, part.there(part.of(values)), part.routing(indices, weights)
