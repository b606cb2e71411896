"""Proof of a rule by execution: split the operands, run the operator on every rank, combine, compare with the whole."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ir.choices import Choice, Offset, Positions, Starts, axis_choices, is_home, localize, shardings
from autopar.ir.op_call import flatten_results, map_tensors
from autopar.ir.rule import Rule
from autopar.ir.sharding import Partial, Placement, Shard, Sharding

_TOLERANCE = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 1e-4, torch.complex64: 1e-4}
Coordinates = tuple[int, ...]


def verify_rule(
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rule: Rule,
    size: int = 2,
    *,
    outers: Mapping[str, Collection[int]] | None = None,
    zigzags: Mapping[str, Collection[int]] | None = None,
    num_pairs: int = 16,
    seed: int = 0,
) -> list[str]:
    """What is wrong with a rule, as one line each: nothing, when it holds.

    Runs every strategy of one axis of `size` ranks, and `num_pairs` random ones of two such axes, on these (concrete,
    small, preferably float64) arguments. Random operators, and those that leave memory unset, are compared by shape.
    """
    generator = torch.Generator().manual_seed(seed)
    whole = run(target, args, kwargs)
    failures = _misfits(rule, args, kwargs, whole)
    if failures:
        return failures
    by_shape = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()) or "empty" in str(target)
    one = axis_choices(rule, size, outers or {}, zigzags or {})
    pairs = list(itertools.product(one, one))
    random.Random(seed).shuffle(pairs)
    strategies: list[tuple[Choice, ...]] = [(c,) for c in one if shardings(rule, (c,), (size,)) is not None]
    strategies += [pair for pair in pairs if shardings(rule, pair, (size, size)) is not None][:num_pairs]
    for choices in strategies:
        sizes = (size,) * len(choices)
        problem = check_choices(target, args, kwargs, rule, choices, sizes, whole, generator, by_shape=by_shape)
        if problem:
            failures.append(f"{rule} under {', '.join(map(str, choices))}: {problem}")
    return failures


def run(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor | None]:
    """The results of a call, which may write to its operands: they are copied first."""
    copies = map_tensors(tuple(args), torch.clone), {name: map_tensors(v, torch.clone) for name, v in kwargs.items()}
    return [value if isinstance(value, Tensor) else None for value in flatten_results(target(*copies[0], **copies[1]))]


def tensors_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The operands of a call, in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(tuple(args), note)
    map_tensors(tuple(kwargs.values()), note)
    return found


def _misfits(rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any], whole: Sequence[Tensor | None]) -> list[str]:
    operands = tensors_of(args, kwargs)
    failures = []
    if len(operands) != len(rule.operands) or len(whole) != len(rule.results):
        return [f"{rule} is for another number of operands or results than {len(operands)} and {len(whole)}"]
    for what, dims, tensor in [
        *(("operand", d, t) for d, t in zip(rule.operands, operands)),
        *(("result", d, t) for d, t in zip(rule.results, whole)),
    ]:
        if (dims is None) != (tensor is None):
            failures.append(f"{rule}: a {what} is {'not ' if tensor is None else ''}a tensor")
        elif dims is not None and tensor is not None and rule.shape_of(dims) != tuple(tensor.shape):
            failures.append(f"{rule}: a {what} has shape {tuple(tensor.shape)}, not {rule.shape_of(dims)}")
    return failures


def check_choices(
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rule: Rule,
    choices: Sequence[Choice],
    sizes: Sequence[int],
    whole: Sequence[Tensor | None],
    generator: torch.Generator,
    *,
    by_shape: bool = False,
) -> str:
    """What is wrong with one strategy; empty when its combined results are the whole ones."""
    found = shardings(rule, choices, sizes)
    if found is None:
        return "the choices clash"
    operand_shardings, result_shardings = found
    local_args, local_kwargs = localize(rule, args, kwargs, choices, sizes)
    operands = [
        shatter(operand, sharding, sizes, generator)
        for operand, sharding in zip(tensors_of(args, kwargs), operand_shardings)
    ]
    ring = next((axis for axis, choice in enumerate(choices) if choice.splits_two), None)
    if ring is not None:
        _go_round(rule, operands, operand_shardings, ring)
    pieces: dict[Coordinates, list[Tensor | None]] = {}
    for rank in itertools.product(*map(range, sizes)):
        rank_args, rank_kwargs = _at(local_args, local_kwargs, rank, [operand[rank] for operand in operands])
        try:
            pieces[rank] = run(target, rank_args, rank_kwargs)
        except Exception as error:  # whatever an operator raises
            return f"fails on rank {rank}: {(str(error) or type(error).__name__).splitlines()[0]}"
    if ring is not None:
        _come_home(rule, pieces, result_shardings, ring, sizes[ring])
    for index, (expected, sharding) in enumerate(zip(whole, result_shardings)):
        if expected is None or sharding is None:
            continue
        tolerance = _tolerance([*tensors_of(args, kwargs), expected])
        try:
            have = assemble(
                {rank: _tensor(results[index]) for rank, results in pieces.items()}, sharding, sizes, tolerance
            )
        except ValueError as error:
            if by_shape and "differs" in str(error):
                continue
            return f"result {index}: {error}"
        if have.shape != expected.shape:
            return f"result {index} has shape {tuple(have.shape)}, not {tuple(expected.shape)}"
        if not by_shape and not same(have, expected, tolerance):
            return f"result {index} differs"
    return ""


def _go_round(rule: Rule, operands: Sequence[dict[Coordinates, Tensor]], placed: Sequence[Sharding], axis: int) -> None:
    """A ring shows every rank all pieces of what travels, one after the other, an exchange those that it needs: here,
    all at once.
    """
    assert rule.pair is not None
    for index in rule.pair.travelling:
        placement, pieces = placed[index][axis], operands[index]
        assert isinstance(placement, Shard)
        num = 1 + max(rank[axis] for rank in pieces)
        whole = {
            rank: join_pieces([pieces[_at_place(rank, axis, i)] for i in range(num)], placement) for rank in pieces
        }
        pieces.update(whole)


def _come_home(
    rule: Rule, pieces: dict[Coordinates, list[Tensor | None]], placed: Sequence[Sharding | None], axis: int, num: int
) -> None:
    """What travelled with them ends as sums over the ranks, of which each has its own piece."""
    for index, (dims, sharding) in enumerate(zip(rule.results, placed, strict=True)):
        if dims is None or sharding is None or not is_home(rule, dims):
            continue
        placement = sharding[axis]
        assert isinstance(placement, Shard)
        sums = {
            rank: torch.stack([_tensor(pieces[_at_place(rank, axis, i)][index]) for i in range(num)]).sum(0)
            for rank in pieces
        }
        for rank, total in sums.items():
            pieces[rank][index] = take_piece(total, placement, num, rank[axis])


def _at_place(rank: Coordinates, axis: int, place: int) -> Coordinates:
    return (*rank[:axis], place, *rank[axis + 1 :])


def _tensor(value: Tensor | None) -> Tensor:
    assert value is not None
    return value


def _at(
    args: Sequence[Any], kwargs: Mapping[str, Any], rank: Coordinates, operands: Sequence[Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of one rank: its operands, and `Offset`s and `Positions` as what they are there."""
    own: Iterator[Tensor] = iter(operands)

    def fill(value: Any) -> Any:
        if isinstance(value, Offset):
            return value.value(rank)
        if isinstance(value, Starts):
            return value.value(rank)
        if isinstance(value, Positions):
            return index_of(value, rank)
        if isinstance(value, Tensor):
            return next(own)
        return [fill(item) for item in value] if isinstance(value, list | tuple) else value

    return tuple(fill(value) for value in args), {name: fill(value) for name, value in kwargs.items()}


def index_of(positions: Positions, rank: Coordinates) -> Tensor:
    """The global indices that `Positions` mean on a rank, computed from the placements alone."""
    index = torch.arange(positions.size)
    for axis, size, outer, zigzag in positions.splits:
        index = take_piece(index, Shard(0, outer, zigzag), size, rank[axis])
    return index


# ------------------------------------------------------------------------------ tensors to pieces, pieces to tensors


def take_piece(x: Tensor, placement: Shard, size: int, coordinate: int) -> Tensor:
    """What the rank at `coordinate` of an axis of `size` holds of x."""
    stripes = []
    for number, stripe in enumerate(x.chunk(placement.outer, placement.dim)):
        at = size - 1 - coordinate if placement.zigzag and number % 2 else coordinate
        length = stripe.shape[placement.dim] // size
        stripes.append(stripe.narrow(placement.dim, at * length, length))
    return torch.cat(stripes, placement.dim)


def join_pieces(pieces: Sequence[Tensor], placement: Shard) -> Tensor:
    """The inverse of `take_piece`."""
    dim = placement.dim
    if any(piece.ndim <= dim or piece.shape[dim] % placement.outer for piece in pieces):
        raise ValueError(f"pieces of shape {tuple(pieces[0].shape)} are not {placement}")
    stripes = [piece.chunk(placement.outer, dim) for piece in pieces]
    whole: list[Tensor] = []
    for number in range(placement.outer):
        along = [stripe[number] for stripe in stripes]
        whole += reversed(along) if placement.zigzag and number % 2 else along
    return torch.cat(whole, dim)


def shatter(
    x: Tensor, sharding: Sharding, sizes: Sequence[int], generator: torch.Generator
) -> dict[Coordinates, Tensor]:
    """What each rank holds of x; terms of a sum are random."""
    pieces: dict[Coordinates, Tensor] = {(): x}
    for placement, size in zip(sharding, sizes):
        pieces = {
            (*rank, i): part
            for rank, piece in pieces.items()
            for i, part in enumerate(_parts(piece, placement, size, generator))
        }
    return pieces


def _parts(x: Tensor, placement: Placement, size: int, generator: torch.Generator) -> list[Tensor]:
    if isinstance(placement, Shard):
        return [take_piece(x, placement, size, i) for i in range(size)]
    if isinstance(placement, Partial):
        assert placement.op == "sum"
        dtype = x.dtype if x.dtype.is_floating_point or x.dtype.is_complex else torch.float32
        terms = [torch.randn(x.shape, generator=generator, dtype=dtype).to(x.dtype) for _ in range(size - 1)]
        return [*terms, x - sum(terms)]
    return [x] * size


def assemble(
    pieces: Mapping[Coordinates, Tensor], sharding: Sharding, sizes: Sequence[int], tolerance: float | None = None
) -> Tensor:
    """The whole of which the ranks hold these pieces.

    Raises:
        ValueError: pieces that should be alike and are not, or that do not fit together.
    """
    for axis in reversed(range(len(sizes))):
        placement = sharding[axis]
        joined: dict[Coordinates, Tensor] = {}
        for rank in itertools.product(*map(range, sizes[:axis])):
            parts = [pieces[(*rank, i)] for i in range(sizes[axis])]
            if any(part.shape != parts[0].shape for part in parts):
                raise ValueError(f"the ranks of axis {axis} hold unequal shapes")
            if isinstance(placement, Shard):
                joined[rank] = join_pieces(parts, placement)
            elif isinstance(placement, Partial):
                stacked = torch.stack(parts)
                joined[rank] = stacked.sum(0, dtype=parts[0].dtype) if placement.op == "sum" else stacked.amax(0)
            elif all(same(part, parts[0], tolerance) for part in parts):
                joined[rank] = parts[0]
            else:
                raise ValueError(f"a replicated result differs over axis {axis}")
        pieces = joined
    return pieces[()]


def _tolerance(tensors: Sequence[Tensor]) -> float:
    """That of the least precise of the tensors that took part."""
    inexact = [t.dtype for t in tensors if t.dtype.is_floating_point or t.dtype.is_complex]
    return max((_TOLERANCE.get(dtype, 2e-2) for dtype in inexact), default=0.0)


def same(a: Tensor, b: Tensor, tolerance: float | None = None) -> bool:
    """Whether two tensors are equal up to rounding."""
    if a.shape != b.shape:
        return False
    if not (a.dtype.is_floating_point or a.dtype.is_complex):
        return bool(torch.equal(a, b))
    tolerance = _tolerance([a]) if tolerance is None else tolerance
    return torch.allclose(a, b.to(a.dtype), rtol=tolerance, atol=tolerance, equal_nan=True)
