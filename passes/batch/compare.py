"""Two captures of a model compared: whether an operator is told, and gives, what splitting the rows says."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from autopar.ir.op_call import OpCall, TensorSpec
from autopar.ir.rule import ArgPath
from autopar.passes.batch.composites import law_of
from autopar.passes.batch.site import FILLED_WITH, PRODUCTS, QUOTIENTS, Site
from autopar.passes.batch.states import Coupled, Order, Rows, State

_MAX_POWER = 4


def compare_arguments(site: Site) -> tuple[int, str | None]:
    """The power of the number of rows by which the operator's number differs between the captures; or why it differs.

    Shapes of results are compared apart (`checked`).
    """
    if site.smaller is None:
        return 0, None
    rule = site.rule
    shapes = {path for path, _ in rule.shape_args}
    power = 0
    if len(site.call.results) != len(site.smaller.results):
        return 0, "has another number of results when the batch has another number of rows"
    ours, theirs = (dict(_leaves((*call.args, dict(call.kwargs)))) for call in (site.call, site.smaller))
    if ours.keys() != theirs.keys():
        return 0, "is called in another way when the batch has another number of rows"
    for path, value in ours.items():
        other = theirs[path]
        if isinstance(value, TensorSpec) or value == other or _prefixed(_argument_path(site.call, path), shapes):
            continue
        if all(call.name == "aten.slice.Tensor" and _keeps_shape(call) for call in (site.call, site.smaller)):
            continue
        if _is_size(site, _argument_path(site.call, path), value, other):
            continue
        found = power_of(value, other, site.ratio) if _scales(site.call, path) else None
        if found is None:
            return 0, f"is given {value!r} for one number of rows and {other!r} for another"
        power = found
    return power, None


def _keeps_shape(call: OpCall) -> bool:
    return call.results[0] is not None and call.operands[0].shape == call.results[0].shape


def _is_size(site: Site, path: ArgPath, value: Any, other: Any) -> bool:
    """Whether an argument is as much smaller in the smaller capture as the factors are that it is a size of."""
    assert site.smaller is not None
    names = [name for own, name in site.rule.size_args if _prefixed(path, {own})]
    sizes, less = site.rule.sizes, law_of(site.smaller).rule.sizes
    if not names or any(name not in less for name in names) or not isinstance(value, int) or not isinstance(other, int):
        return False
    return other * math.prod(sizes[name] for name in names) == value * math.prod(less[name] for name in names)


def _argument_path(call: OpCall, path: ArgPath) -> ArgPath:
    """Keyword arguments stand last in `_leaves`."""
    return path[1:] if path[0] == len(call.args) else path


def _prefixed(path: ArgPath, known: set[ArgPath]) -> bool:
    return any(path[: len(prefix)] == prefix for prefix in known)


def _leaves(value: Any, path: ArgPath = ()) -> Iterator[tuple[ArgPath, Any]]:
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    else:
        yield path, value


def _scales(call: OpCall, path: ArgPath) -> bool:
    """Whether the number at `path` multiplies or divides all that the operator gives."""
    if call.name in FILLED_WITH:
        return _argument_path(call, path) == call.path(FILLED_WITH[call.name])
    return call.name in PRODUCTS | QUOTIENTS and path == (1,)


def power_of(value: Any, other: Any, ratio: int) -> int | None:
    """k where value = other · ratio^k, to rounding."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not isinstance(other, int | float) or not other:
        return None
    powers = (k for k in range(-_MAX_POWER, _MAX_POWER + 1) if k)
    return next((k for k in powers if math.isclose(value / other, float(ratio) ** k, rel_tol=1e-14)), None)


def checked(site: Site, index: int, state: State) -> State:
    """The state, if the result's shape in the smaller capture is what the state says."""
    spec = site.call.results[index]
    if site.smaller is None or spec is None or isinstance(state, Coupled):
        return state
    less = site.smaller.results[index]
    wanted = list(spec.shape)
    if isinstance(state, Rows | Order):
        wanted[state.dim if isinstance(state, Rows) else 0] //= site.ratio
    if less is None or list(less.shape) != wanted:
        there = list(less.shape) if less is not None else None
        return site.coupled(f"gives {list(spec.shape)} for one number of rows and {there} for another")
    return state
