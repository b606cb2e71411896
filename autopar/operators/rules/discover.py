"""Rules found by running: for an operator that has none, split small random operands and see what becomes of the
results.

A factor is found when splitting some dims of the operands makes every result come in pieces of one of its dims, or as
terms of a sum or maximum. What this cannot find (arguments that depend on the local size, factors inside a dim) stays
blocked, which is safe.

A claim has to hold in every *trial*: at the call's own sizes where these are small, at other sizes where what looks
like a pattern at one of them falls apart, and for numbers of several kinds. A trial that tells nothing (results that
are empty, mostly not finite, or too small to be told from nothing) does not count; an operator of which some result is
the same in all trials has no rule; where results take few values, so that right ones come about by chance, there are
many more trials.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from autopar.base.forked import run_forked
from autopar.base.recent import Recent
from autopar.ir.choices import Choice
from autopar.ir.op_call import OpCall, TensorSpec, flatten_results, is_float, map_tensors, op_call
from autopar.ir.rule import Rule, with_fields
from autopar.operators.rules.registry import make_rule
from autopar.operators.rules.verify import check_choices, run, same, tensors_of, verify_rule

_OVERLOAD = type(torch.ops.aten.mm.default)
_MAX_ELEMENTS = 1 << 14
_MAX_CANDIDATES = 64
_OTHER_SIZES = ((6, 12, 18, 24, 30, 36, 42), (10, 4, 14, 22, 26, 8, 34), (4, 6, 8, 10, 12, 14, 16))
"""What the sizes of a call become, in order: ones that 2 and 3 divide; ones whose halves are odd; small ones."""
_MAX_KEPT = 16
"""How many ways are tried to leave some sizes as they are, which the operator may want."""
_MOST_OTHERS = 2
_MANY_TRIALS, _FEW_VALUES = 8, 16
"""Trials of each kind of numbers where a result could be right by chance: where it has so few different values."""
_LIMIT_S = 60.0
_PAIRS = 6
_SMALLEST = 1e-3
_UNTRIED = frozenset(
    {torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
)
Numbers = Literal["normal", "positive", "coarse", "gaps"]
_NUMBERS: tuple[Numbers, ...] = ("normal", "positive", "coarse", "gaps", "positive")
"""Coarse ones are small whole numbers: zeros, and many that are equal. Gaps: some are not a number. What takes positive
numbers alone has two trials, too.
"""


@dataclass(frozen=True, slots=True)
class _Found:
    """A factor: per operand, the dim that walks it, if any; per result, the dim, or None for terms of `reduce`."""

    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    reduce: str | None


_Answer = tuple[tuple[_Found, ...], tuple[frozenset[int], ...]] | None
"""The factors and the linear groups, if there are any."""
_Key = tuple[Any, str, tuple[TensorSpec, ...], tuple[TensorSpec | None, ...]]
_KNOWN: Recent[_Key, tuple[_Answer]] = Recent(1024)
"""What was found, by operator, arguments (as text, which tells 1 from True), operands and results."""


@dataclass(frozen=True, slots=True)
class _Trial:
    """A sample call, the sizes `replaced` in it, and its results."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    replaced: Mapping[int, int]
    whole: list[Tensor]

    def call(self) -> OpCall:
        """Its shapes."""
        return op_call(self.target, self.args, self.kwargs, list(self.whole))


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes sample calls: the call, with some sizes `replaced` by others.

    small_ints: whether integer tensors hold anything below the smallest dim (they may be indices), or only 0 and 1.
    shrink_args: whether int arguments that equal a replaced size are replaced, too.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    operands: tuple[TensorSpec, ...]
    results: tuple[TensorSpec, ...]
    replaced: Mapping[int, int]
    small_ints: bool
    shrink_args: bool

    def trial(self, seed: int, numbers: Numbers) -> _Trial | None:
        """A sample with its results; None where it fails, does not fit, tells nothing, or is not the same again."""
        args, kwargs = self._sample(torch.Generator().manual_seed(seed), numbers)
        try:
            found, again = run(self.target, args, kwargs), self._again(args, kwargs, numbers)
        except Exception:  # whatever an unknown operator raises on arguments made up here
            return None
        whole = [value for value in found if value is not None]
        if len(whole) != len(self.results) or any(t.layout != torch.strided or t.is_quantized for t in whole):
            return None
        shapes = [spec.shape for spec in self.results]
        if any(len(shape) != t.ndim or (not self.replaced and shape != t.shape) for shape, t in zip(shapes, whole)):
            return None
        if not all(b is not None and same(a, b) and _tells(a) for a, b in zip(whole, again)):
            return None
        return _Trial(self.target, args, kwargs, self.replaced, whole)

    def _again(self, args: tuple[Any, ...], kwargs: dict[str, Any], numbers: Numbers) -> list[Tensor | None]:
        """The results once more; of what is not a number for operands that lie apart in memory: some kernels make
        other things of it at the end of a row of vectors (the gradient of hardshrink), so that pieces tell nothing.
        """
        if numbers == "gaps":
            apart = iter([torch.stack([x, x], -1)[..., 0] for x in tensors_of(args, kwargs)])
            with suppress(Exception):  # it may want its operands in one piece
                args_apart, kwargs_apart = _with_tensors(args, kwargs, apart)
                found = flatten_results(self.target(*args_apart, **kwargs_apart))
                return [value if isinstance(value, Tensor) else None for value in found]
        return run(self.target, args, kwargs)

    def _sample(self, generator: torch.Generator, numbers: Numbers) -> tuple[tuple[Any, ...], dict[str, Any]]:
        replaced = self.replaced
        floats = [spec for spec in self.operands if is_float(spec.dtype)]
        indexable = [replaced.get(size, size) for spec in floats for size in spec.shape if size > 1]
        bound = max(2, min(indexable, default=2)) if self.small_ints else 2

        def tensor(spec: TensorSpec) -> Tensor:
            shape = tuple(replaced.get(size, size) for size in spec.shape)
            if spec.dtype == torch.bool:
                return torch.rand(shape, generator=generator) > 0.5
            if is_float(spec.dtype):
                return _random(shape, numbers, spec.dtype.is_complex, generator)
            return torch.randint(0, bound, shape, generator=generator, dtype=spec.dtype)

        def thaw(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [thaw(item) for item in value]
            if isinstance(value, torch.device):
                return torch.device("cpu")  # captured operators name meta, where there are no numbers
            return replaced.get(value, value) if self.shrink_args and type(value) is int else value

        args = tuple(map_tensors(thaw(value), tensor) for value in self.args)
        return args, {name: map_tensors(thaw(value), tensor) for name, value in self.kwargs.items()}


def _random(shape: tuple[int, ...], numbers: Numbers, is_complex: bool, generator: torch.Generator) -> Tensor:
    dtype = torch.complex128 if is_complex else torch.float64
    if numbers == "normal":
        return torch.randn(shape, generator=generator, dtype=dtype)
    if numbers == "gaps":
        is_gap = torch.rand(shape, generator=generator) < 0.2
        return torch.randn(shape, generator=generator, dtype=dtype).masked_fill(is_gap, math.nan)
    if numbers == "positive":
        return (torch.rand(shape, generator=generator, dtype=torch.float64) + 0.1).to(dtype)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


def _tells(result: Tensor) -> bool:
    """Whether claims about a result can be told right from wrong."""
    if not result.numel() or not is_float(result.dtype):
        return bool(result.numel())
    finite = result[result.isfinite()]
    return 2 * finite.numel() > result.numel() and float(finite.abs().max()) > _SMALLEST


def discover(call: OpCall) -> Rule | None:
    """The rule of a call, found by execution on small tensors; None where nothing splits, or it cannot be tried."""
    return discover_all([call])[0]


def discover_all(calls: Sequence[OpCall]) -> list[Rule | None]:
    """The rule of each, as `discover` says; all that is not known yet is tried at once.

    It is tried in a copy of the process: kernels that trust their indices, or that sizes go together, write where they
    must not.
    """
    keys = [_key(call) for call in calls]
    todo = {key: call for key, call in zip(keys, calls) if _can_be_tried(call) and _KNOWN.peek(key) is None}
    tried = _tried_apart(todo, others=True)
    died = {key: call for key, call in todo.items() if key not in tried}
    tried |= _tried_apart(died, others=False)
    for key in todo:
        _KNOWN.put(key, (tried.get(key),))
    answers = [(_KNOWN.peek(key) or (tried.get(key),))[0] for key in keys]
    return [None if answer is None else _build(call, *answer) for call, answer in zip(calls, answers, strict=True)]


def _tried_apart(calls: Mapping[_Key, OpCall], *, others: bool) -> dict[_Key, _Answer]:
    """What comes of each that does not take the process down."""
    answers = run_forked([partial(_tried, call, others) for call in calls.values()], _LIMIT_S)
    return {key: answer[0] for key, answer in zip(calls, answers, strict=True) if answer is not None}


def _key(call: OpCall) -> _Key:
    return call.target, repr((call.args, sorted(call.kwargs.items()))), call.operands, call.results


def _can_be_tried(call: OpCall) -> bool:
    target = call.target
    if not isinstance(target, _OVERLOAD) or target._schema.is_mutable or not call.operands:
        return False
    if not _UNTRIED.isdisjoint(target.tags) or "empty" in call.name:
        return False
    return all(spec is not None and spec.numel for spec in (*call.operands, *call.results))


def _tried(call: OpCall, others: bool) -> tuple[_Answer]:
    """The answer; others: with trials in other sizes, too."""
    results = tuple(result for result in call.results if result is not None)
    for small, large in itertools.product((True, False), (True, False)):
        own = _Maker(call.target, call.args, call.kwargs, call.operands, results, {}, small, large)
        trials = _all_trials(own, others)
        if trials:
            return (_search(trials, own),)
    return (None,)


def _all_trials(own: _Maker, others: bool) -> list[list[_Trial]]:
    """Those in other sizes, chosen in two ways, and those in the call's own, which a small call has to have."""
    specs = (*own.operands, *own.results)
    is_small = sum(spec.numel for spec in specs) <= _MAX_ELEMENTS
    in_own = _trials(own, _NUMBERS) if is_small else []
    if is_small and not in_own:
        return []
    found: list[list[_Trial]] = []
    for replaced in _other_sizes(specs, 1 if is_small else 8) if others else ():
        other = replace(own, replaced=replaced)
        fits = sum(math.prod(replaced.get(s, s) for s in spec.shape) for spec in specs) <= 2 * _MAX_ELEMENTS
        trials = _trials(other, _NUMBERS) if fits else []
        found += [trials] * bool(trials)
        if len(found) == _MOST_OTHERS:
            break
    return [*found, in_own] if is_small else found


def _other_sizes(specs: Sequence[TensorSpec], largest_kept: int) -> Iterator[dict[int, int]]:
    """What sizes become: all those that are larger, then all but one, but two, which the operator may want as they
    are. Sizes that differ go on to differ.
    """
    every = {size for spec in specs for size in spec.shape}
    sizes = sorted(size for size in every if size > largest_kept)
    all_kept = itertools.chain.from_iterable(itertools.combinations(sizes, count) for count in range(3))
    for kept in itertools.islice(all_kept, _MAX_KEPT):
        changed = [size for size in sizes if size not in kept]
        for others in _OTHER_SIZES:
            new = [size for size in others if size not in every.difference(changed)]
            if changed and len(changed) <= len(new):
                yield dict(zip(changed, new))


def _search(per_sizes: Sequence[Sequence[_Trial]], own: _Maker) -> _Answer:
    """All factors and linear groups that hold in every trial; more are made as the `own` ones."""
    firsts = [trials[0] for trials in per_sizes]
    trials = [trial for each in per_sizes for trial in each]
    if all(_has_gaps(trial) for trial in trials):
        return None  # what is not a number makes the same of much
    if all(_has_few_values(trial) for trial in trials):
        trials += _trials(replace(own, replaced=firsts[-1].replaced), _NUMBERS * _MANY_TRIALS)
    if any(_is_constant([trial.whole[i] for trial in trials]) for i in range(len(firsts[0].whole))):
        return None
    factors = tuple(_factors(trials))
    for number, trial in enumerate(firsts):
        plain = _build(trial.call(), factors, ())
        pairs = 0 if number else _PAIRS
        if plain is None or verify_rule(trial.target, trial.args, trial.kwargs, plain, num_pairs=pairs, seed=1):
            return None
    groups = tuple(group for group in _linear_groups(firsts[0]) if all(_is_linear(trial, group) for trial in trials))
    return (factors, groups) if factors or groups else None


def _trials(maker: _Maker, kinds: Sequence[Numbers]) -> list[_Trial]:
    """Those that tell something, of numbers of these kinds."""
    found = (maker.trial(seed, numbers) for seed, numbers in enumerate(kinds))
    return [trial for trial in found if trial is not None]


def _is_constant(results: Sequence[Tensor]) -> bool:
    """Whether results of one shape are always the same."""
    of_shape: dict[torch.Size, Tensor] = {}
    return all(same(result, of_shape.setdefault(result.shape, result)) for result in results)


def _has_gaps(trial: _Trial) -> bool:
    """Whether some of the numbers that went in are none."""
    return any(is_float(x.dtype) and bool(x.isnan().any()) for x in tensors_of(trial.args, trial.kwargs))


def _has_few_values(trial: _Trial) -> bool:
    """Whether a result could be right by chance."""
    for result in trial.whole:
        values = torch.view_as_real(result) if result.is_complex() else result
        if values.isfinite().all() and values.unique().numel() < _FEW_VALUES:
            return True
    return False


def _factors(trials: Sequence[_Trial]) -> list[_Found]:
    first = trials[0]
    operands = tensors_of(first.args, first.kwargs)
    factors: list[_Found] = []
    for index, operand in enumerate(operands):
        for dim in range(operand.ndim):
            if any(factor.operands[index] == dim for factor in factors) or operand.shape[dim] < 2:
                continue
            for candidate in _candidates(operands, index, dim, factors):
                found = _try(first, candidate)
                if found is not None and all(_holds(trial, found) for trial in trials):
                    factors.append(found)
                    break
    return factors


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
    num_pieces = _piece_counts(trial, candidate)[0]
    pieces = _pieces(trial, candidate, num_pieces)
    if pieces is None:
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


def _holds(trial: _Trial, factor: _Found) -> bool:
    """Whether the results are what the factor says they are, in all numbers of pieces."""
    for num_pieces in _piece_counts(trial, factor.operands):
        pieces = _pieces(trial, factor.operands, num_pieces)
        if pieces is None:
            return False
        for expected, parts, dim in zip(trial.whole, zip(*pieces), factor.results, strict=True):
            if any(part.shape != parts[0].shape or part.ndim != expected.ndim for part in parts):
                return False
            if dim is not None:
                have = torch.cat(list(parts), dim)
            elif factor.reduce == "sum":
                have = torch.stack(list(parts)).sum(0)
            else:
                have = torch.stack(list(parts)).amax(0)
            if not same(have, expected):
                return False
    return True


def _piece_counts(trial: _Trial, candidate: tuple[int | None, ...]) -> list[int]:
    """In how many pieces the dims are cut: 2, 3, and, of few, each element for itself."""
    operands = tensors_of(trial.args, trial.kwargs)
    size = next(operand.shape[dim] for operand, dim in zip(operands, candidate) if dim is not None)
    counts = [count for count in (2, 3) if size % count == 0]
    return counts if size in counts or (counts and size > 8) else [*counts, size]


def _pieces(trial: _Trial, candidate: tuple[int | None, ...], num_pieces: int) -> list[list[Tensor]] | None:
    """The results on each piece of these dims; None where some piece does not run."""
    operands = tensors_of(trial.args, trial.kwargs)
    if any(d is not None and x.shape[d] % num_pieces for x, d in zip(operands, candidate)):
        return None
    pieces = []
    for i in range(num_pieces):
        own = iter([x if d is None else x.chunk(num_pieces, d)[i].contiguous() for x, d in zip(operands, candidate)])
        try:
            found = run(trial.target, *_with_tensors(trial.args, trial.kwargs, own))
        except Exception:  # whatever an unknown operator raises
            return None
        pieces.append([value for value in found if value is not None])
    return pieces if all(len(each) == len(trial.whole) for each in pieces) else None


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


def _is_linear(trial: _Trial, group: frozenset[int]) -> bool:
    plain = _build(trial.call(), (), ())
    assert plain is not None, "no factor contradicts nothing"
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
