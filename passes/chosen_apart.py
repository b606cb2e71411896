"""Rows that a mask chooses, so many in each sequence: a dim of the sequences, and one of their rows.

    h[tokens == eos].view(B, -1, H)        every sequence has as many: its rows, put first, of which a mask of [T]
                                           chooses that many
    h[tokens == image].view(B, 4, H)       every sequence has 4: the first 4
    rows[0], rows[:, -1]                   the row whose number among those of its mask is that one
    torch.unique_consecutive(mask.sum(1))  rows that a mask chooses: those that are not as the one before

What has to be so for that to be right (as many in each, such a row at all) is taken for granted, and guarded
(`usual.py`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.passes.chosen import Choosing


def seen_apart(chosen: Choosing, x: Tensor, *given: Any, **named: Any) -> Any:
    """Rows x[P, …] of a mask [*L, T] in a shape [*L, K, …]; NotImplemented of other rows, and of shapes that rows have
    by themselves.

    Raises:
        AutoparError: a shape that says how many rows there are, of which only values know.
    """
    sizes = tuple(given[0]) if len(given) == 1 and isinstance(given[0], list | tuple) else given
    mask = chosen.within.masks.get(x.shape[0]) if x.dim() and not named and chosen.usual is not None else None
    if mask is None or not all(isinstance(size, int) for size in sizes) or _keeps_rows(x, sizes):
        return NotImplemented
    lead, longest = tuple(mask.shape[:-1]), mask.shape[-1]
    sizes = (*lead, *sizes[1:]) if len(lead) == 1 and sizes[:1] == (-1,) else sizes
    behind = sizes[mask.dim() :]
    if sizes.count(-1) == 1 and -1 in behind:
        others = -math.prod(behind)
        behind = tuple(math.prod(x.shape[1:]) // max(1, others) if size == -1 else size for size in behind)
    each = sizes[len(lead)] if len(sizes) > len(lead) else 0
    is_open = each == -1 or each == x.shape[0] // math.prod(lead)
    known = sizes[: len(lead)] == lead and math.prod(behind) == math.prod(x.shape[1:])
    if not lead or not known or not each or (each > longest and not is_open):
        how = (
            f"where each of {[*lead]} has as many, see them as view({', '.join(map(str, lead))}, -1, "
            "*rows.shape[1:]), or with their number for -1; else "
        )
        raise AutoparError(
            f"forward() sees rows that a mask chooses in the shape {[*sizes]}: how many there are, values say",
            remedy=f"{how if lead else ''}work on all rows and a mask",
        )
    counts = mask.sum(-1)
    most = counts.amax()
    same = counts == (most if is_open else each)
    assert chosen.usual is not None
    chosen.usual.takes_apart(same.all())
    numbered = torch.arange(longest, device=mask.device)
    order = torch.argsort(torch.where(mask, numbered, numbered + longest), -1)
    inner = (*(1,) * (x.dim() - 1),)
    full = torch.where(mask.reshape(*mask.shape, *inner), chosen.within.spread(x, mask), 0).to(x.dtype)
    first = full.gather(mask.dim() - 1, order.reshape(*order.shape, *inner).expand(full.shape))
    if is_open:
        found = chosen.take(first, numbered < most, len(lead))
        return found.reshape(*lead, found.shape[len(lead)], *behind)
    return first.narrow(len(lead), 0, each).reshape(*lead, each, *behind)


def unflattened(chosen: Choosing, x: Tensor, dim: Any, sizes: Any) -> Any:
    """As `seen_apart` of `x.unflatten(0, sizes)`."""
    return seen_apart(chosen, x, *sizes, *x.shape[1:]) if dim in (0, -x.dim()) else NotImplemented


def one_of(chosen: Choosing, x: Tensor, index: Any) -> Any:
    """The row of a number among rows that a mask chooses, `rows[-1]`, `rows[:, 0]`; NotImplemented of other indices."""
    given = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [each for each in given if not isinstance(each, Tensor)]:
        at = next(place for place, each in enumerate(given) if each is Ellipsis)
        given[at : at + 1] = [slice(None)] * (x.dim() - len(given) + 1)
    dim = next((place for place, each in enumerate(given) if each != slice(None)), None) if _plain(given) else None
    if dim is None or dim >= x.dim() or type(given[dim]) is not int or chosen.usual is None:
        return NotImplemented
    mask, number = chosen.within.masks.get(x.shape[dim]), given[dim]
    if mask is None or chosen.loops.now is not None:
        return NotImplemented
    total = mask.sum()
    chosen.usual.takes_row(total > number if number >= 0 else total >= -number)
    place = chosen.within.numbers(x.shape[dim])
    wanted = chosen.within.narrowed(place == (number if number >= 0 else total + number))
    full = chosen.within.of_all(x, place, dim)
    marked = wanted.reshape(*wanted.shape, *(1,) * (x.dim() - dim - 1))
    dims = tuple(range(dim, dim + mask.dim()))
    if x.dtype == torch.bool:
        found = (marked & full).to(torch.int64).sum(dims) != 0
    else:
        found = torch.where(marked, full, 0).sum(dims).to(x.dtype)
    rest = given[dim + 1 :]
    return found if not rest else found[(*(slice(None),) * dim, *rest)]


def runs_of(chosen: Choosing, x: Tensor, *given: Any, **named: Any) -> Any:
    """The values of x that are not as the one before; NotImplemented where more than they are asked for."""
    if given or any(named.values()) or not x.numel() or chosen.usual is None:
        return NotImplemented
    flat = x.flatten()
    differs = torch.cat([torch.ones_like(flat[:1], dtype=torch.bool), flat[1:] != flat[:-1]])
    return chosen.take(flat, differs)


def _keeps_rows(x: Tensor, sizes: tuple[int, ...]) -> bool:
    """Whether rows x[P, …] lie along the first dim in these sizes, too, one after the other."""
    known = math.prod(size for size in sizes if size != -1)
    if sizes.count(-1) == 1 and known:
        sizes = tuple(x.numel() // known if size == -1 else size for size in sizes)
    first = next((size for size in sizes if size != 1), 1)
    return math.prod(sizes) == x.numel() and first % x.shape[0] == 0


def _plain(given: list[Any]) -> bool:
    return all(isinstance(each, int | slice) and type(each) is not bool for each in given)
