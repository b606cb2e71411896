"""Experts exchanged: an axis that splits tokens, and has some experts on each rank. Tokens go where their experts are.

Lepikhin et al., GShard (2006.16668), without its capacity: nothing is dropped. Each token goes once to every rank that
has any of its experts, with the numbers and weights of all of them; there `autopar.operators.experts` adds what the
experts here make of it, and that comes back. First all ranks tell each other how many rows they have for whom: so
messages are as long as they need be. Where a rank would get more than is planned (`rows_at_once`), all take several
rounds, so that memory has a bound whatever the router does.

The gradient goes the same way: with a token goes its gradient, and the token's and its weights' gradients come back.
Those of the experts' parameters are complete where these are: nothing is summed over the axis.

Shape suffixes as in `autopar.operators.experts`, T of this rank; S rows of this rank, R rows that are here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.operators.basic import wide_dtype
from autopar.operators.rules.exchange_cost import ranks_of_token, rounds_of, rows_at_once
from autopar.runtime.communicator import Communicator

_operators = torch.ops.autopar


@dataclass(frozen=True, slots=True)
class Round:
    """What goes over the axis at once. tokens[S]: the rows of this rank, those for the first rank first.

    rows[i][j]: how many rank i has for rank j.
    """

    comm: Communicator
    axis: str
    tokens: Tensor
    rows: tuple[tuple[float, ...], ...]

    def there(self, x: Tensor) -> Tensor:
        """x[S, …] to the ranks of the experts: [R, …]."""
        return self.comm.exchange_rows(x, self.axis, self.rows)

    def back(self, x: Tensor) -> Tensor:
        """x[R, …] to the ranks of the tokens: [S, …]."""
        return self.comm.exchange_rows(x, self.axis, tuple(zip(*self.rows, strict=True)))

    def routing(self, indices_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers and weights of the rows that are here, in one message."""
        numbers = indices_TK[self.tokens].to(torch.int32)
        packed = torch.cat([numbers.view(torch.uint8), weights_TK[self.tokens].view(torch.uint8)], 1)
        found = self.there(packed)
        split = 4 * indices_TK.shape[1]
        return _unpacked(found[:, :split], torch.int32), _unpacked(found[:, split:], weights_TK.dtype)


def _unpacked(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes [R, …] as numbers: copied, because memory of wider numbers must begin where those may."""
    return x.clone(memory_format=torch.contiguous_format).view(dtype)


def rounds(comm: Communicator, axis: str, indices_TK: Tensor, num_experts: int) -> Iterator[Round]:
    """The rounds of one exchange. num_experts: of this rank. Collective; the host waits for how many rows come."""
    (num_tokens, chosen), num_ranks = indices_TK.shape, comm.size(axis)
    at_once = rows_at_once(num_tokens, num_experts * num_ranks, chosen, num_ranks)
    if indices_TK.device.type == "meta":
        comm.all_gather(indices_TK.new_empty((1, num_ranks), dtype=torch.int64), axis, 0)
        pair = num_tokens * ranks_of_token(num_experts * num_ranks, chosen, num_ranks) / num_ranks
        rows = tuple((pair,) * num_ranks for _ in range(num_ranks))
        num_rows = round(pair) * num_ranks
        yield Round(comm, axis, indices_TK.new_empty(num_rows, dtype=torch.int64), rows)
        return
    homes = indices_TK.long().div(num_experts, rounding_mode="floor")
    goes = torch.stack([(homes == rank).any(1) for rank in range(num_ranks)])
    tokens = goes.nonzero()[:, 1]
    table: list[list[int]] = comm.all_gather(goes.sum(1)[None], axis, 0).tolist()
    own, num = table[comm.index(axis)], rounds_of(table, at_once)
    starts = [sum(own[:rank]) for rank in range(num_ranks)]
    for number in range(num):
        parts = [tokens[start + count * number // num : start + count * (number + 1) // num]
                 for start, count in zip(starts, own, strict=True)]  # fmt: skip
        rows = tuple(tuple(n * (number + 1) // num - n * number // num for n in each) for each in table)
        yield Round(comm, axis, tokens if num == 1 else torch.cat(parts), rows)


def exchange_experts(
    comm: Communicator, axis: str, tensors: Sequence[Tensor | None], options: dict[str, Any]
) -> Tensor:
    """See `MeshComm.exchange_experts`. tensors: x, indices, weights, first, second, bias."""
    x, indices, weights, first, second, *rest = tensors
    assert x is not None and indices is not None and weights is not None and first is not None
    if comm.size(axis) == 1:
        made: Tensor = _operators.experts(*tensors, **options)
        return made
    options = options | {"start": options.get("start", 0) + comm.index(axis) * first.shape[0]}
    out = torch.zeros(x.shape, dtype=wide_dtype(x.dtype), device=x.device)
    for part in rounds(comm, axis, indices, first.shape[0]):
        here = part.there(x[part.tokens])
        made = _operators.experts(here, *part.routing(indices, weights), first, second, *rest, **options)
        del here
        out.index_add_(0, part.tokens, part.back(made).to(out.dtype))
    return out.to(x.dtype)


def exchange_experts_grad(
    comm: Communicator, axis: str, tensors: Sequence[Tensor | None], options: dict[str, Any]
) -> tuple[Tensor, ...]:
    """See `MeshComm.exchange_experts_grad`. tensors: g, x, indices, weights, first, second, bias if there is one."""
    g, x, indices, weights, first, second, *rest = tensors
    assert g is not None and x is not None and indices is not None and weights is not None and first is not None
    gradient = _operators.experts_grad_bias if rest else _operators.experts_grad
    if comm.size(axis) == 1:
        alone: tuple[Tensor, ...] = gradient(*tensors, **options)
        return alone
    options = options | {"start": options.get("start", 0) + comm.index(axis) * first.shape[0]}
    wide, of_parameters = wide_dtype(x.dtype), list[Tensor]()
    dx = torch.zeros(x.shape, dtype=wide, device=x.device)
    dweights = torch.zeros_like(weights)
    for part in rounds(comm, axis, indices, first.shape[0]):
        both = part.there(torch.cat([g[part.tokens].to(x.dtype), x[part.tokens]], 1))
        found = gradient(*both.chunk(2, 1), *part.routing(indices, weights), first, second, *rest, **options)
        del both
        dx.index_add_(0, part.tokens, part.back(found[0]).to(wide))
        dweights.index_add_(0, part.tokens, part.back(found[1]))
        for total, more in zip(of_parameters, found[2:], strict=False):
            total += more
        of_parameters = of_parameters or list(found[2:])
    return dx.to(x.dtype), dweights, *of_parameters
