"""From one rule to the strategies of a node: what each axis may do, the shardings that follow, the local arguments.

Choosing a factor for an axis splits every operand and result dim that walks it; operands without it are whole, results
without it are terms to be combined. Choosing a linear group makes its operands and all results terms of a sum.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from autopar.ir.positions import starts
from autopar.ir.rule import ArgPath, Dims, Rule, joint_name
from autopar.ir.sharding import PARTIAL, REPLICATE, Partial, Placement, Shard, Sharding, splits_of

Kind = Literal["none", "factor", "linear", "ring", "exchange"]
_NO_OUTERS: Mapping[str, Collection[int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, order=True)
class Choice:
    """What one axis does to a node.

    - "none": nothing; everything is whole.
    - "factor": it splits `factor`, seen as (outer, rest), along rest; or, if that is `(h r)`, a product of factors.
    - "linear": the operands of linear group number `group`, and all results, are terms of a sum.
    - "ring": it splits both factors of the rule's ring, `factor` (the query's) and the key's, in the same way.
    - "exchange": it splits both factors of the rule's exchange, `factor` in any way and the key's contiguously.

    zigzag: the stripes of the factor are dealt forwards and backwards in turn (`autopar.ir.sharding`).
    """

    kind: Kind = "none"
    factor: str | None = None
    outer: int = 1
    group: int | None = None
    zigzag: bool = False

    @property
    def splits(self) -> bool:
        """Whether it splits a factor, or two."""
        return self.factor is not None

    @property
    def splits_two(self) -> bool:
        """Whether it splits both factors of the rule's pair."""
        return self.kind in ("ring", "exchange")

    def __str__(self) -> str:
        if self.kind == "none":
            return "-"
        if self.kind == "linear":
            return f"+{self.group}"
        name = f"{self.kind} {self.factor}" if self.splits_two else f"{self.factor}"
        return name if self.outer == 1 else f"{self.outer}{'~' if self.zigzag else ':'}{name}"


NONE = Choice()


@dataclass(frozen=True, slots=True)
class Offset:
    """An int argument that differs from rank to rank: base + (the rank's index over `axes`, row-major) × local_size."""

    base: int
    axes: tuple[int, ...]
    axis_sizes: tuple[int, ...]
    local_size: int

    def value(self, coordinates: Sequence[int]) -> int:
        """The argument on the rank at these coordinates (one per mesh axis)."""
        index = 0
        for axis, size in zip(self.axes, self.axis_sizes):
            index = index * size + coordinates[axis]
        return self.base + index * self.local_size


@dataclass(frozen=True, slots=True)
class Positions:
    """A tensor argument: the global index of each local element of a dim of global `size`.

    `splits` are (axis, axis size, outer, zigzag); `autopar.operators.positions` computes it from a rank's coordinates.
    """

    size: int
    splits: tuple[tuple[int, int, int, bool], ...]


@dataclass(frozen=True, slots=True)
class Starts:
    """A list of ints: where the equal runs of local elements of a factor of global `size` begin.

    `splits` are (axis, axis size, outer, zigzag); `autopar.operators.starts` computes it from a rank's coordinates.
    """

    size: int
    splits: tuple[tuple[int, int, int, bool], ...]

    def value(self, coordinates: Sequence[int]) -> list[int]:
        """The argument on the rank at these coordinates (one per mesh axis)."""
        at = ((coordinates[axis], size, outer, zigzag) for axis, size, outer, zigzag in self.splits)
        return starts(self.size, *at)

    def sharding(self, num_axes: int) -> Sharding:
        """How the factor lies as a dim of its own: what `comm.starts` is told."""
        placements: list[Placement] = [REPLICATE] * num_axes
        for axis, _, outer, zigzag in self.splits:
            placements[axis] = Shard(0, outer, zigzag)
        return tuple(placements)


def axis_choices(
    rule: Rule,
    size: int,
    outers: Mapping[str, Collection[int]] = _NO_OUTERS,
    zigzags: Mapping[str, Collection[int]] = _NO_OUTERS,
) -> list[Choice]:
    """Everything that one axis of `size` ranks may do to a node of this rule.

    outers: the stripes in which a factor may also be split, beside being cut into contiguous pieces. zigzags: the
    (even) numbers of stripes in which it may be split zigzag.
    """
    choices = [NONE]
    if size == 1:
        return choices
    contiguous_only = {name for _, name in rule.offset_args}
    for factor in rule.factors:
        if not factor.size or factor.size % size or not rule.may_split(factor):
            continue
        choices.append(_splitting(factor.name))
        if factor.name in contiguous_only:
            continue
        ways = [(outer, False) for outer in sorted(set(outers.get(factor.name, ())) - {1})]
        ways += [(outer, True) for outer in sorted(zigzags.get(factor.name, ()))]
        for outer, zigzag in ways:
            if factor.size % (outer * size) == 0:
                choices.append(Choice("factor", factor.name, outer, zigzag=zigzag))
    for joint in rule.joints:
        if math.prod(rule.factor(name).size for name in joint) % size == 0:
            choices.append(Choice("factor", joint_name(joint)))
    choices += [Choice("linear", group=group) for group in range(len(rule.linear))]
    if rule.exchange is not None:
        choices += _exchanges(rule, size, outers.get(rule.exchange.query, ()))
    if rule.ring is not None and rule.can_split(rule.ring.query):
        both = [rule.sizes[name] for name in (rule.ring.query, rule.ring.key)]
        for outer in (1, *sorted(zigzags.get(rule.ring.query, ()))):
            if all(length and length % (outer * size) == 0 for length in both):
                choices.append(Choice("ring", rule.ring.query, outer, zigzag=outer > 1))
    return choices


@lru_cache(maxsize=1 << 10)
def _splitting(factor: str) -> Choice:
    """That an axis splits a factor in contiguous pieces."""
    return Choice("factor", factor)


def _exchanges(rule: Rule, size: int, outers: Collection[int]) -> list[Choice]:
    assert rule.exchange is not None
    rows, key = rule.sizes[rule.exchange.query], rule.sizes[rule.exchange.key]
    if not rule.can_split(rule.exchange.query) or not key or key % size:
        return []
    return [
        Choice("exchange", rule.exchange.query, outer)
        for outer in sorted({1, *outers})
        if rows and rows % (outer * size) == 0
    ]


Placed = tuple[tuple[Sharding, ...], tuple[Sharding | None, ...]]
"""Of operands and of results; None: no tensor."""
_Placements = tuple[tuple[Placement, ...], tuple[Placement, ...]]


class _Left(NamedTuple):
    """What axes leave of the factors: their local sizes, and how they were split last. A product of factors that is
    split keeps their sizes, and has the number of its pieces under its own name.
    """

    sizes: dict[str, int]
    splits: dict[str, Choice]


def shardings(rule: Rule, choices: Sequence[Choice], sizes: Sequence[int]) -> Placed | None:
    """The shardings of operands and results when each axis does what `choices` says (one per axis, in mesh order).

    None where they clash: a size that the axes do not divide, one factor split in unequal stripes (unless one of the
    two axes splits it contiguously, or the earlier one zigzag and the later one not), a product of factors split where
    one of them would do, two rings, or two axes that exchange, or one that does and another that splits the key's
    factor.
    """
    found = next(each_sharding(rule, [(choice,) for choice in choices], sizes), None)
    return None if found is None else found[1]


def each_sharding(
    rule: Rule, offered: Sequence[Sequence[Choice]], sizes: Sequence[int]
) -> Iterator[tuple[tuple[Choice, ...], Placed]]:
    """As `shardings`, of all that axes may do together, but for what clashes. offered: what each axis may do.

    What an axis's choice makes of operands and results hangs on what earlier axes left of the factors, not on how they
    did: it is worked out once for all that leave the same.
    """
    splittable = frozenset(factor.name for factor in rule.factors if rule.may_split(factor))
    joints = _joints(rule)
    known: dict[tuple[tuple[str, int], ...], dict[Choice, _Placements]] = {}
    found: list[tuple[tuple[Choice, ...], _Left, tuple[_Placements, ...]]] = [((), _Left(rule.sizes, {}), ())]
    for own, size in zip(offered, sizes, strict=True):
        longer: list[tuple[tuple[Choice, ...], _Left, tuple[_Placements, ...]]] = []
        for choices, left, placed in found:
            here = known.setdefault(tuple(left.sizes.items()), {})
            for choice in own:
                after = _after(rule, joints, splittable, left, choice, size)
                if after is None:
                    continue
                if choice not in here:
                    here[choice] = _placements(rule, choice, left.sizes)
                longer.append(((*choices, choice), after, (*placed, here[choice])))
        found = longer
    for choices, _, placed in found:
        if not _do_pairs_clash(rule, choices):
            operands = tuple(zip(*(axis[0] for axis in placed), strict=True)) if placed else ((),) * len(rule.operands)
            made = zip(*(axis[1] for axis in placed), strict=True) if placed else ((),) * len(rule.results)
            results = tuple(None if result is None else own for result, own in zip(rule.results, made, strict=True))
            yield choices, (operands, results)


def _placements(rule: Rule, choice: Choice, before: Mapping[str, int]) -> _Placements:
    """What an axis does to operands and results (of those that are no tensors, nothing); `before` has the local sizes
    until then.
    """
    return (
        tuple(_operand_placement(rule, i, dims, choice, before) for i, dims in enumerate(rule.operands)),
        tuple(REPLICATE if dims is None else _result_placement(rule, dims, choice, before) for dims in rule.results),
    )


def _operand_placement(rule: Rule, index: int, dims: Dims, choice: Choice, before: Mapping[str, int]) -> Placement:
    if choice.kind == "linear":
        assert choice.group is not None
        return PARTIAL if index in rule.linear[choice.group] else REPLICATE
    if choice.splits_two and rule.pair is not None and index in rule.pair.travelling:
        choice = key_of(rule, choice)
    if choice.splits:
        return _split(dims, choice, before) or REPLICATE
    return REPLICATE


def _result_placement(rule: Rule, dims: Dims, choice: Choice, before: Mapping[str, int]) -> Placement:
    if choice.kind == "linear":
        return PARTIAL
    if choice.splits_two and is_home(rule, dims):
        choice = key_of(rule, choice)
    if choice.splits:
        assert choice.factor is not None
        split = _split(dims, choice, before)
        if split is not None:
            return split
        reduce = "sum" if choice.factor in _joints(rule) else rule.factor(choice.factor).reduce
        return Partial(reduce or "sum")
    return REPLICATE


def key_of(rule: Rule, choice: Choice) -> Choice:
    """What an axis that splits two factors does to the second: of a ring the same, of an exchange contiguously."""
    assert rule.pair is not None
    if choice.kind == "exchange":
        return Choice("factor", rule.pair.key)
    return replace(choice, factor=rule.pair.key)


def is_home(rule: Rule, dims: Dims) -> bool:
    """Whether a result of these dims lies as an operand that travels (of an exchange: that is visited), and ends
    complete where that began.
    """
    return rule.pair is not None and any(rule.operands[index] == dims for index in rule.pair.travelling)


def _split(dims: Dims, choice: Choice, before: Mapping[str, int]) -> Shard | None:
    """The placement that splits the dim that walks the chosen factor; `before` has the local sizes until then."""
    factor = choice.factor
    assert factor is not None
    if not factor.startswith("("):
        for i, dim in enumerate(dims):
            if factor in dim:
                major = dim[: dim.index(factor)]
                return Shard(i, (_size_of(major, before) if major else 1) * choice.outer, choice.zigzag)
        return None
    names = factor.strip("()").split()
    for i, dim in enumerate(dims):
        for at in range(len(dim) - len(names) + 1):
            if list(dim[at : at + len(names)]) == names:
                return Shard(i, _size_of(dim[:at], before) * choice.outer, choice.zigzag)
    return None


def _joints(rule: Rule) -> dict[str, tuple[str, ...]]:
    return {joint_name(joint): joint for joint in rule.joints}


def _size_of(dim: Sequence[str], local: Mapping[str, int]) -> int:
    """The local size of a dim that walks these factors; `local` has, for a product that is split, its pieces."""
    size = math.prod(local[name] for name in dim)
    for name, pieces in local.items():
        if name.startswith("(") and set(name.strip("()").split()) <= set(dim):
            size //= pieces
    return size


def _after(
    rule: Rule,
    joints: Mapping[str, Sequence[str]],
    splittable: Collection[str],
    left: _Left,
    choice: Choice,
    size: int,
) -> _Left | None:
    """What an axis of this size leaves, too; None where it clashes with what earlier ones do. splittable: the factors
    that may be split at all.
    """
    name, current = choice.factor, left.sizes
    if name is None:
        return left
    if name in joints:
        if not _can_split_joint(joints[name], name, current, size):
            return None
        return _Left({**current, name: current.get(name, 1) * size}, left.splits)
    if any(name in joints[split] for split in joints if split in current):
        return None
    if name not in splittable or not _may_follow(left.splits.get(name, choice), choice):
        return None
    if not current[name] or current[name] % (choice.outer * size):
        return None
    after = {**current, name: current[name] // size}
    if choice.splits_two:
        key = key_of(rule, choice)
        assert key.factor is not None
        if after[key.factor] % (key.outer * size):
            return None
        after[key.factor] //= size
    return _Left(after, {**left.splits, name: choice})


def _do_pairs_clash(rule: Rule, choices: Sequence[Choice]) -> bool:
    """Whether two axes split both factors of the rule's pair, or one exchanges and another splits the key's factor."""
    if rule.pair is None:
        return False
    if rule.exchange is not None and any(choice.kind == "exchange" for choice in choices):
        if any(choice.kind == "factor" and choice.factor == rule.exchange.key for choice in choices):
            return True
    return sum(choice.splits_two for choice in choices) > 1


def _may_follow(before: Choice, choice: Choice) -> bool:
    """Whether an axis may split what an earlier one left of a factor: in the same way; contiguously; in any way after
    contiguously (of a product of batch and sequence the first took a part of the batch); after zigzag in any other.
    """
    is_same = (before.outer, before.zigzag) == (choice.outer, choice.zigzag)
    return is_same or 1 in (before.outer, choice.outer) or (before.zigzag and not choice.zigzag)


def _can_split_joint(names: Sequence[str], joint: str, current: Mapping[str, int], size: int) -> bool:
    """Whether an axis divides the product, and neither divides what is left of its first factor nor finds none."""
    first = current[names[0]]
    if joint in current:
        return _size_of(names, current) % size == 0
    return _size_of(names, current) % size == 0 and first != 1 and first % size != 0


def local_sizes(rule: Rule, choices: Sequence[Choice], sizes: Sequence[int]) -> dict[str, int]:
    """The local size of each factor under choices that do not clash."""
    splittable = frozenset(factor.name for factor in rule.factors if rule.may_split(factor))
    joints, left = _joints(rule), _Left(rule.sizes, {})
    for choice, size in zip(choices, sizes, strict=True):
        after = _after(rule, joints, splittable, left, choice, size)
        assert after is not None, f"{[str(each) for each in choices]} clash for {rule}"
        left = after
    assert not _do_pairs_clash(rule, choices), f"{[str(each) for each in choices]} clash for {rule}"
    return left.sizes


def local_shape_of(dims: Dims, local: Mapping[str, int]) -> tuple[int, ...]:
    """The local shape of an operand or result whose dims walk these factors."""
    return tuple(_size_of(dim, local) for dim in dims)


def localize(
    rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any], choices: Sequence[Choice], sizes: Sequence[int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments for one rank: local sizes and shapes; `Offset`, `Positions` and `Starts` where ranks differ.

    Tensor arguments (whatever stands for them) are passed through. Linear and unsplit axes change nothing.
    """
    if not (rule.shape_args or rule.size_args or rule.offset_args or rule.position_args or rule.starts_args):
        return tuple(args), dict(kwargs)
    local = local_sizes(rule, choices, sizes)
    joints = _joints(rule)
    split = {choice.factor for choice in choices if choice.factor is not None}
    if rule.pair is not None and any(choice.splits_two for choice in choices):
        split.add(rule.pair.key)
    replaced: dict[ArgPath, Any] = {}
    for path, index in rule.shape_args:
        result = rule.results[index]
        assert result is not None
        if split & {name for dim in result for name in dim}:
            replaced[path] = list(local_shape_of(result, local))
    for path, name in rule.size_args:
        if name in split:
            value = replaced.get(path, _get(args, kwargs, path))
            whole, part = (local[name], 1) if name in joints else (rule.sizes[name], local[name])
            replaced[path] = _scaled(value, whole, part)
    for path, name in rule.offset_args:
        axes = tuple(axis for axis, choice in enumerate(choices) if choice.factor == name)
        if axes:
            base = replaced.get(path, _get(args, kwargs, path))
            size = _size_of(joints[name], local) if name in joints else local[name]
            replaced[path] = Offset(base, axes, tuple(sizes[axis] for axis in axes), size)
    for path, index in rule.position_args:
        if split & {name for dim in rule.operands[index] for name in dim}:
            replaced[path] = _positions(rule, index, choices, sizes)
    for path, name in rule.starts_args:
        splits = tuple((axis, sizes[axis], c.outer, c.zigzag) for axis, c in enumerate(choices) if c.factor == name)
        if splits:
            replaced[path] = Starts(rule.sizes[name], splits)
    new_args = list(args)
    new_kwargs = dict(kwargs)
    for path, value in replaced.items():
        root, *rest = path
        if isinstance(root, int):
            new_args[root] = _put(new_args[root], rest, value)
        else:
            new_kwargs[root] = _put(new_kwargs.get(root), rest, value)
    return tuple(new_args), new_kwargs


def _positions(rule: Rule, index: int, choices: Sequence[Choice], sizes: Sequence[int]) -> list[Positions]:
    found = shardings(rule, choices, sizes)
    assert found is not None
    sharding = found[0][index]
    shape = rule.shape_of(rule.operands[index])
    return [
        Positions(size, tuple((axis, sizes[axis], outer, zigzag) for axis, outer, zigzag in splits_of(sharding, d)))
        for d, size in enumerate(shape)
    ]


def _scaled(value: Any, global_size: int, local_size: int) -> Any:
    if isinstance(value, list | tuple):
        return [_scaled(item, global_size, local_size) for item in value]
    return value * local_size // global_size


def _get(args: Sequence[Any], kwargs: Mapping[str, Any], path: ArgPath) -> Any:
    root, *rest = path
    value: Any = args[root] if isinstance(root, int) else kwargs.get(root, 0)
    for key in rest:
        value = value[key]
    return value


def _put(value: Any, path: Sequence[int | str], new: Any) -> Any:
    if not path:
        return new
    items = list(value)
    items[path[0]] = _put(items[path[0]], path[1:], new)  # type: ignore[index]
    return items
