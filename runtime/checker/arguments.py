"""Arguments of a call on one rank's tensors: whether they are what a rule says that a rank passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from autopar.ir.choices import Offset, Positions, Starts
from autopar.ir.rule import ArgPath
from autopar.ir.sharding import Shard, splits_of
from autopar.runtime.checker.ranks import Places, RankInt, Runs
from autopar.runtime.checker.types import Axes


def alike(wanted: Any, said: Any, axes: Axes) -> bool:
    """Whether an argument says on every rank what it must."""
    if isinstance(wanted, Offset):
        return isinstance(said, RankInt) and _form(wanted, axes) == (said.base, dict(said.terms))
    if isinstance(wanted, Starts):
        return isinstance(said, Runs) and (said.size, splits_of(said.sharding, 0)) == (
            wanted.size, tuple((axis, outer, zigzag) for axis, _, outer, zigzag in wanted.splits)
        )  # fmt: skip
    if isinstance(wanted, list) and wanted and isinstance(wanted[0], Positions):
        own = [tuple((axis, outer, zigzag) for axis, _, outer, zigzag in each.splits) for each in wanted]
        if not isinstance(said, Places):
            return not any(own) and not said
        return [splits_of(said.sharding, dim) for dim in range(len(said.shape))] == own
    if isinstance(said, RankInt):
        return not said.terms and int.__index__(said) == wanted
    if isinstance(said, Runs):
        return not splits_of(said.sharding, 0)
    if isinstance(said, Places):
        return not any(isinstance(each, Shard) for each in said.sharding)
    if isinstance(said, Tensor) or said is None or wanted is None:
        return True
    if isinstance(said, list | tuple):
        return len(said) == len(wanted) and all(alike(a, b, axes) for a, b in zip(wanted, said))
    return bool(wanted == said or (wanted != wanted and said != said))  # NaN


def _form(offset: Offset, axes: Axes) -> tuple[int, dict[str, int]]:
    terms: dict[str, int] = {}
    by = offset.local_size
    for axis, size in reversed(list(zip(offset.axes, offset.axis_sizes, strict=True))):
        terms[axes.names[axis]] = by
        by *= size
    return offset.base, {name: value for name, value in terms.items() if value}


def without_places(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments as the whole call has them, where nothing says where a rank's elements lie."""

    def plain(value: Any) -> Any:
        if isinstance(value, Places | Runs):
            return []
        if type(value) is list or type(value) is tuple:
            return type(value)(map(plain, value))
        return value.base if isinstance(value, RankInt) else value

    return tuple(map(plain, args)), {name: plain(value) for name, value in kwargs.items()}


def differs(value: Any) -> bool:
    """Whether some argument is another one on another rank."""
    if isinstance(value, Places | Runs | RankInt):
        return True
    return isinstance(value, list | tuple) and any(map(differs, value))


def at(args: Sequence[Any], kwargs: Mapping[str, Any], path: ArgPath) -> Any:
    """The argument of a path; None where there is none."""
    root, *rest = path
    value: Any = kwargs.get(root) if isinstance(root, str) else args[root] if root < len(args) else None
    for key in rest:
        value = value[key]
    return value


def put(
    args: tuple[Any, ...], kwargs: dict[str, Any], path: ArgPath, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with another one at a path."""
    root, *rest = path
    if rest:
        inner = list(at(args, kwargs, (root,)))
        assert isinstance(rest[0], int)
        inner[rest[0]] = value
        value = inner
    if isinstance(root, int):
        return (*args[:root], value, *args[root + 1 :]), kwargs
    return args, {**kwargs, root: value}
