"""Rules found by running: for an operator that has none, split small random operands and see what becomes of the
results.

A factor is found when splitting some dims of the operands makes every result come in pieces of one of its dims, or as
terms of a sum or maximum. What this cannot find (arguments that depend on the local size, factors inside a dim) stays
blocked, which is safe.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from autopar.ir.choices import Choice
from autopar.ir.op_call import OpCall, TensorSpec, is_float, map_tensors, op_call
from autopar.ir.rule import Rule, with_fields
from autopar.operators.rules.registry import make_rule
from autopar.operators.rules.verify import check_choices, run, same, tensors_of, verify_rule

_OVERLOAD = type(torch.ops.aten.mm.default)
_MAX_ELEMENTS = 1 << 14
_MAX_CANDIDATES = 64
_NUM_SAMPLES = 3
_Sample = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Found:
    """A factor: per operand, the dim that walks it, if any; per result, the dim, or None for terms of `reduce`."""

    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    reduce: str | None


@dataclass(frozen=True, slots=True)
class _Trial:
    """A sample call and its results."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    whole: list[Tensor]


def discover(call: OpCall) -> Rule | None:
    """The rule of a call, found by execution on small tensors; None where nothing splits, or it cannot be tried."""
    target = call.target
    if not isinstance(target, _OVERLOAD) or target._schema.is_mutable or not call.operands:
        return None
    if torch.Tag.nondeterministic_seeded in target.tags or any(result is None for result in call.results):
        return None
    found = _discover(target, _frozen(call.args), _frozen(sorted(call.kwargs.items())), call.operands, call.results)
    if found is None:
        return None
    factors, groups = found
    return _build(call, factors, groups)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


@lru_cache(maxsize=1024)
def _discover(
    target: Any,
    args: tuple[Any, ...],
    kwargs: tuple[tuple[str, Any], ...],
    operands: tuple[TensorSpec, ...],
    results: tuple[TensorSpec, ...],
) -> tuple[tuple[_Found, ...], tuple[frozenset[int], ...]] | None:
    for small, large in itertools.product((True, False), (True, False)):
        samples = [
            _sample(args, dict(kwargs), operands, results, seed=seed, small_ints=small, shrink_args=large)
            for seed in range(_NUM_SAMPLES)
        ]
        wholes = [_whole(target, sample, results) for sample in samples]
        if all(whole is not None for whole in wholes):
            trials = [_Trial(target, *sample, whole) for sample, whole in zip(samples, wholes) if sample and whole]
            return _search(trials)
    return None


def _whole(target: Any, sample: _Sample | None, results: Sequence[TensorSpec]) -> list[Tensor] | None:
    """The results of a sample call; None where it fails, or does not fit, or is not the same when run again."""
    if sample is None:
        return None
    try:
        whole, again = _all(run(target, *sample)), _all(run(target, *sample))
    except Exception:  # whatever an unknown operator raises on arguments made up here
        return None
    fits = len(whole) == len(results) and all(t.ndim == len(spec.shape) for t, spec in zip(whole, results))
    return whole if fits and all(same(a, b) for a, b in zip(whole, again)) else None


def _all(values: Sequence[Tensor | None]) -> list[Tensor]:
    return [value for value in values if value is not None]


def _sample(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    operands: tuple[TensorSpec, ...],
    results: tuple[TensorSpec, ...],
    *,
    seed: int,
    small_ints: bool,
    shrink_args: bool,
) -> _Sample | None:
    """The call on random tensors: of its own shapes when they are small, else with each larger size replaced by a small
    one.

    small_ints: whether integer tensors hold anything below the smallest dim (they may be indices), or only 0 and 1.
    shrink_args: whether int arguments that equal a replaced size are replaced, too. None where the tensors are still
    large.
    """
    generator = torch.Generator().manual_seed(seed)
    specs = (*operands, *results)
    replaced: dict[int, int] = {}
    if sum(spec.numel for spec in specs) > _MAX_ELEMENTS:
        large = sorted({size for spec in specs for size in spec.shape if size > 8})
        replaced = {size: 12 + 4 * i for i, size in enumerate(large)}
        if sum(math.prod(replaced.get(s, s) for s in spec.shape) for spec in specs) > 16 * _MAX_ELEMENTS:
            return None
    indexable = [
        replaced.get(size, size) for spec in operands if is_float(spec.dtype) for size in spec.shape if size > 1
    ]
    bound = max(2, min(indexable, default=2)) if small_ints else 2

    def tensor(spec: TensorSpec) -> Tensor:
        shape = tuple(replaced.get(size, size) for size in spec.shape)
        if spec.dtype == torch.bool:
            return torch.rand(shape, generator=generator) > 0.5
        if is_float(spec.dtype):
            dtype = torch.complex128 if spec.dtype.is_complex else torch.float64
            return torch.randn(shape, generator=generator, dtype=dtype)
        return torch.randint(0, bound, shape, generator=generator, dtype=spec.dtype)

    def thaw(value: Any) -> Any:
        if isinstance(value, tuple):
            return [thaw(item) for item in value]
        return replaced.get(value, value) if shrink_args and type(value) is int else value

    new_args = tuple(map_tensors(thaw(value), tensor) for value in args)
    return new_args, {name: map_tensors(thaw(value), tensor) for name, value in kwargs.items()}


def _search(trials: Sequence[_Trial]) -> tuple[tuple[_Found, ...], tuple[frozenset[int], ...]] | None:
    """All factors and linear groups that hold in every trial."""
    first = trials[0]
    operands = tensors_of(first.args, first.kwargs)
    factors: list[_Found] = []
    for index, operand in enumerate(operands):
        for dim in range(operand.ndim):
            if any(factor.operands[index] == dim for factor in factors) or operand.shape[dim] < 2:
                continue
            for candidate in _candidates(operands, index, dim, factors):
                found = _try(first, candidate)
                if found is not None and all(_try(trial, candidate) == found for trial in trials[1:]):
                    factors.append(found)
                    break
    call = op_call(first.target, first.args, first.kwargs, list(first.whole))
    plain = _build(call, tuple(factors), ())
    if plain is None or any(verify_rule(t.target, t.args, t.kwargs, plain, seed=1) for t in trials):
        return None
    groups = tuple(group for group in _linear_groups(first) if all(_is_linear(t, plain, group) for t in trials))
    return (tuple(factors), groups) if factors or groups else None


def _candidates(
    operands: Sequence[Tensor], index: int, dim: int, taken: Sequence[_Found]
) -> Iterator[tuple[int | None, ...]]:
    """Which dim of each operand to split along with this one: of those of its size that are free, all combinations."""
    size = operands[index].shape[dim]
    options: list[list[int | None]] = []
    for other, operand in enumerate(operands):
        if other == index:
            options.append([dim])
            continue
        free = [
            d for d in range(operand.ndim) if operand.shape[d] == size and all(f.operands[other] != d for f in taken)
        ]
        options.append([*sorted(free, key=lambda d: d != dim), None])
    return itertools.islice(itertools.product(*options), _MAX_CANDIDATES)


def _try(trial: _Trial, candidate: tuple[int | None, ...]) -> _Found | None:
    """The factor that splitting these dims shows, if the pieces of the results make the whole."""
    operands = tensors_of(trial.args, trial.kwargs)
    size = next(operand.shape[dim] for operand, dim in zip(operands, candidate) if dim is not None)
    num_pieces = next(p for p in range(2, size + 1) if size % p == 0)
    pieces = []
    for i in range(num_pieces):
        own = iter([x if d is None else x.chunk(num_pieces, d)[i].contiguous() for x, d in zip(operands, candidate)])
        try:
            pieces.append(_all(run(trial.target, *_with_tensors(trial.args, trial.kwargs, own))))
        except Exception:  # as above
            return None
    results: list[int | None] = []
    reduces = set()
    for expected, parts in zip(trial.whole, zip(*pieces)):
        how = _joined(expected, parts)
        if how is None:
            return None
        results.append(how if isinstance(how, int) else None)
        reduces |= {how} if isinstance(how, str) else set()
    if len(reduces) > 1:
        return None
    return _Found(candidate, tuple(results), next(iter(reduces), None))


def _with_tensors(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], own: Iterator[Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    new_args = map_tensors(args, lambda _: next(own))
    return new_args, {name: map_tensors(value, lambda _: next(own)) for name, value in kwargs.items()}


def _joined(whole: Tensor, parts: Sequence[Tensor]) -> int | str | None:
    """How the parts make the whole: along a dim, or by a reduction; None where they do not."""
    if any(part.shape != parts[0].shape or part.ndim != whole.ndim for part in parts):
        return None
    for dim in range(whole.ndim):
        if parts[0].shape[dim] * len(parts) == whole.shape[dim] and same(torch.cat(list(parts), dim), whole):
            return dim
    if parts[0].shape == whole.shape and whole.numel():
        if is_float(whole.dtype) and same(torch.stack(list(parts)).sum(0), whole):
            return "sum"
        if whole.dtype.is_floating_point and same(torch.stack(list(parts)).amax(0), whole):
            return "max" if not all(same(part, whole) for part in parts) else None
    return None


def _linear_groups(trial: _Trial) -> list[frozenset[int]]:
    """The groups worth trying: each float operand alone, and all of them together."""
    floats = [i for i, operand in enumerate(tensors_of(trial.args, trial.kwargs)) if is_float(operand.dtype)]
    if not all(is_float(result.dtype) for result in trial.whole):
        return []
    return [frozenset({i}) for i in floats] + ([frozenset(floats)] if len(floats) > 1 else [])


def _is_linear(trial: _Trial, plain: Rule, group: frozenset[int]) -> bool:
    tried = with_fields(plain, linear=(group,))
    generator = torch.Generator().manual_seed(2)
    choices = (Choice("linear", group=0),)
    return not check_choices(trial.target, trial.args, trial.kwargs, tried, choices, (2,), trial.whole, generator)


def _build(call: OpCall, factors: tuple[_Found, ...], groups: tuple[frozenset[int], ...]) -> Rule | None:
    """The rule in the call's own sizes; a factor whose dims do not agree there is blocked."""
    operands = [[f"x{i}_{d}" for d in range(spec.ndim)] for i, spec in enumerate(call.operands)]
    results = [[f"y{i}_{d}" for d in range(spec.ndim)] if spec else [] for i, spec in enumerate(call.results)]
    shapes = {name: size for dims, spec in zip(operands, call.operands) for name, size in zip(dims, spec.shape)}
    shapes |= {n: size for dims, spec in zip(results, call.results) if spec for n, size in zip(dims, spec.shape)}
    reduce: dict[str, str] = {}
    free: set[str] = set()
    for number, factor in enumerate(factors):
        places = [
            (dims, d) for dims, d in zip((*operands, *results), (*factor.operands, *factor.results)) if d is not None
        ]
        sizes = {shapes[dims[d]] for dims, d in places}
        taken = any(dims[d] in free for dims, d in places)
        if len(sizes) != 1 or taken:
            continue
        name = f"d{number}"
        shapes[name] = sizes.pop()
        free.add(name)
        for dims, d in places:
            dims[d] = name
        if factor.reduce:
            reduce[name] = factor.reduce
    blocked = {name for name in shapes if name not in free}
    try:
        return make_rule(call, operands, results, shapes, blocked=blocked, reduce=reduce, linear=groups)
    except AssertionError:
        return None
