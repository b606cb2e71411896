"""From the states of an operator's operands to those of its results.

Microbatches split the batch as a mesh axis would, but in time: rows walk the factors of the sharding rules. Where two
captures of a model are compared, of different numbers of rows, what an operator is told (sizes, numbers) has to differ
between them exactly as splitting the rows says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from autopar.ir.op_call import is_float
from autopar.passes.batch.compare import checked, compare_arguments
from autopar.passes.batch.composites import CREATIONS
from autopar.passes.batch.ordered import ordered, parted
from autopar.passes.batch.site import FILLED_WITH, PRODUCTS, QUOTIENTS, Site
from autopar.passes.batch.states import Coupled, Rows, State, Terms, Whole, factor_of, place_of, scaled

_SUMS = frozenset({"aten.add.Tensor", "aten.sub.Tensor", "aten.rsub.Scalar", "aten.add.Scalar", "aten.sub.Scalar"})
_CASTS = frozenset({"aten._to_copy.default", "prims.convert_element_type.default", "aten.detach.default"})
_ROUNDINGS = frozenset(f"aten.{name}.default" for name in ("trunc", "floor", "ceil", "round"))
_EXACT_SUMS = frozenset(
    {"aten.sum.default", "aten.sum.dim_IntList", "aten.mul.Tensor", "aten.div.Tensor", "aten.neg.default"}
)


def transfer(site: Site, states: Sequence[State]) -> list[State]:
    """The states of an operator's results."""
    if site.call.name in CREATIONS:
        states = [Whole()] * len(states)
    if (found := ordered(site, states)) is not None:
        return [checked(site, index, state) for index, state in enumerate(found)]
    for state in states:
        if isinstance(state, Coupled):
            return site.all(state)
    if (wrong := parted(site, states)) is not None:
        return site.all(wrong)
    power, why = compare_arguments(site)
    if why is not None:
        return site.all(site.coupled(why))
    if any(isinstance(state, Rows) for state in states):
        results = _through_rows(site, states, power)
    elif any(isinstance(state, Terms) for state in states):
        results = _through_terms(site, states, power)
    else:
        results = _through_constants(site, states, power)
    return [checked(site, index, state) for index, state in enumerate(results)]


# ----------------------------------------------------------------------------------------------------------------- rows


def _through_rows(site: Site, states: Sequence[State], number: int) -> list[State]:
    rule = site.rule
    if terms := next((state for state in states if isinstance(state, Terms)), None):
        return site.all(site.coupled(f"lets each row meet {terms}"))
    found: set[tuple[str, int]] = set()
    for dims, state in zip(rule.operands, states, strict=True):
        if isinstance(state, Rows):
            factor = factor_of(rule, dims, state, site.rows)
            if factor is None:
                return site.all(site.coupled(f"regroups the rows of {_text(site, states)}"))
            found.add(factor)
    if len(found) > 1:
        return site.all(site.coupled(f"combines each row of the batch with every other: {_text(site, states)}"))
    ((name, stripes),) = found
    for index, (dims, state) in enumerate(zip(rule.operands, states, strict=True)):
        place = place_of(rule, dims, name, stripes)
        if isinstance(state, Whole) and place is not None and not site.as_rows(index, place):
            return site.all(
                site.coupled(f"sets rows of the batch against the dims of a constant: {_text(site, states)}")
            )
    if not rule.factor(name).split:
        return site.all(site.coupled(f"needs all rows of the batch at once: {_text(site, states)}"))
    power = _power(site, [state.power for state in states if isinstance(state, Rows | Whole)], number)
    if power is None:
        return site.all(site.coupled("does not scale with what is made of the number of rows"))
    results = [_row_result(site, dims, name, stripes, power) for dims in rule.results]
    order = next((state.order for state in states if isinstance(state, Rows)), None)
    return [replace(each, order=order) if isinstance(each, Rows) else each for each in results]


def _row_result(site: Site, dims: Any, name: str, stripes: int, power: int) -> State:
    place = None if dims is None else place_of(site.rule, dims, name, stripes)
    if dims is None or place is not None:
        return scaled(place or Whole(), power)
    if (count := site.node.meta.get("count")) is not None:
        return _averaged(site, power, count)
    if site.rule.factor(name).reduce != "sum":
        return site.coupled("takes its result from all rows of the batch")
    return Terms(power - site.law.mean)


def _averaged(site: Site, power: int, count: fx.Node) -> State:
    """An average over what `count` counts; one over as many in every microbatch is a mean."""
    kind = site.count_kind(count)
    if kind != "constant" and site.edits is not None and site.edits.averages_over(site.node, count):
        return Terms(power)
    if kind == "model":
        return site.coupled("averages over a number, or with weights, that the inputs alone do not tell")
    return Terms(power, count) if kind == "inputs" else Terms(power - 1)


def _text(site: Site, states: Sequence[State]) -> str:
    """`f32[4, 8] by rows along dim 0, f32[8] the same for every row`."""
    parts = [
        f"{str(spec.dtype).removeprefix('torch.')}{list(spec.shape)} {state}"
        for spec, state in zip(site.call.operands, states, strict=True)
    ]
    return ", ".join(parts)


# ---------------------------------------------------------------------------------------------------------------- terms


def _through_terms(site: Site, states: Sequence[State], number: int) -> list[State]:
    """Every operand is whole or made of terms."""
    name = site.call.name
    if name in QUOTIENTS and len(states) == 2 and isinstance(states[1], Terms):
        return site.all(_quotient(site, states[0], states[1]))
    if name == "aten.mul.Tensor" and len(states) == 2 and all(isinstance(state, Terms) for state in states):
        return site.all(_product(site, states))
    if name in _CASTS:
        source, result = site.call.operands[0].dtype, site.call.results[0]
        exact = result is not None and (is_float(result.dtype) or not is_float(source))
        return site.all(states[0] if exact else site.coupled(f"rounds {states[0]} to integers"))
    if name in _ROUNDINGS and not is_float(site.call.operands[0].dtype):  # int() of what is whole
        return site.all(states[0])
    if name in _SUMS:
        return site.all(_sum(site, states))
    if name in PRODUCTS | QUOTIENTS and len(site.rule.operands) == 1:  # by a number
        return site.all(scaled(states[0], number if name in PRODUCTS else -number))
    for group in _groups(site):
        inside = [state for index, state in enumerate(states) if index in group]
        outside = [state for index, state in enumerate(states) if index not in group]
        if not all(isinstance(state, Whole) for state in outside) or number:
            continue
        together = _together(site, inside, [index for index in range(len(states)) if index in group])
        if isinstance(together, Terms):
            power = sum(state.power for state in outside if isinstance(state, Whole))
            if not power or name in PRODUCTS | QUOTIENTS:
                return site.all(scaled(together, -power if name in QUOTIENTS else power))
    kinds = " and ".join(dict.fromkeys(str(state) for state in states if isinstance(state, Terms)))
    return site.all(site.coupled(f"is not linear in {kinds}"))


def _groups(site: Site) -> Sequence[frozenset[int]]:
    """The linear groups, those of sums and products of whole numbers too."""
    result = site.call.results[0]
    stays = result is not None and (is_float(result.dtype) or not is_float(site.call.operands[0].dtype))
    if site.call.name in _EXACT_SUMS and stays:
        return tuple(frozenset({index}) for index in range(len(site.call.operands)))[
            : 1 if "div" in site.call.name else 2
        ]
    return site.rule.linear


def _together(site: Site, states: Sequence[State], indices: Sequence[int]) -> State:
    """The state of a sum of these operands."""
    first = next((state for state in states if isinstance(state, Terms)), None)
    if first is None:
        return Whole()
    for state, index in zip(states, indices, strict=True):
        if isinstance(state, Terms):
            alike = state.power == first.power and site.same_count(state.count, first.count)
        else:
            constant = isinstance(state, Whole) and state.power == 0 and first.is_average
            alike = constant or site.is_zero(index)
        if not alike:
            if site.edits is not None and site.edits.as_means(site.node, states, indices):
                return Terms(-1)
            return site.coupled(f"mixes {first} with {_differing(first, state)}")
    return first


def _differing(first: Terms, other: State) -> str:
    if isinstance(other, Terms) and other.count is not None and first.count is not None:
        return "one weighted by another count"
    return f"what is {other}" if isinstance(other, Whole) else str(other)


def _sum(site: Site, states: Sequence[State]) -> State:
    if len(states) == 2:
        return _together(site, states, range(2))
    (state,) = states
    assert isinstance(state, Terms)
    added = next((value for value in site.call.args if isinstance(value, int | float)), 0)
    if added != 0 and not state.is_average and site.edits is not None and site.edits.as_means(site.node, states, [0]):
        return Terms(-1)
    return state if state.is_average or added == 0 else site.coupled(f"adds a number to {state}")


def _quotient(site: Site, above: State, below: Terms) -> State:
    if not isinstance(above, Terms) or above.count is not None or below.count is not None:
        return site.coupled(f"divides {above} by {below}")
    count = site.operand_nodes[1]
    result = site.call.operands[1]
    if math.prod(result.shape) != 1:
        return site.coupled(f"divides by {below} of more than one element")
    return _averaged(site, above.power - below.power, count)


def _product(site: Site, states: Sequence[State]) -> State:
    """An average weighted by a count, times that count, is a sum."""
    first, second = states
    for average, index in ((first, 1), (second, 0)):
        other = states[index]
        assert isinstance(average, Terms) and isinstance(other, Terms)
        if average.count is not None and other.count is None:
            if site.same_count(average.count, site.operand_nodes[index]):
                return Terms(average.power + other.power)
    return site.coupled(f"multiplies {first} by {second}: the gradient of either needs the other of the whole batch")


# ------------------------------------------------------------------------------------------------------------ constants


def _through_constants(site: Site, states: Sequence[State], number: int) -> list[State]:
    """Every operand is whole: so are the results, unless they have as many rows as the batch."""
    power = _power(site, [state.power for state in states if isinstance(state, Whole)], number)
    if power is None:
        return site.all(site.coupled("does not scale with what is made of the number of rows"))
    results: list[State] = []
    for index, spec in enumerate(site.call.results):
        grown = [] if spec is None else _grown_dims(site, index)
        if len(grown) > 1:
            results.append(site.coupled("makes a table of rows against rows"))
        elif grown:
            results.append(scaled(_made_rows(site, index, grown[0]), power))
        elif site.law.random:
            results.append(site.coupled("draws random numbers once for all rows of the batch"))
        else:
            results.append(Whole(power))
    return results


def _grown_dims(site: Site, index: int) -> list[int]:
    """The dims of a result that have more elements in the larger capture."""
    spec = site.call.results[index]
    less = site.smaller.results[index] if site.smaller is not None else None
    if spec is None or less is None or len(spec.shape) != len(less.shape):
        return []
    return [dim for dim, (a, b) in enumerate(zip(spec.shape, less.shape)) if a != b]


def _made_rows(site: Site, index: int, dim: int) -> State:
    """Rows that an operator makes: of the first factor that all of them may walk, and no operand does."""
    rule = site.rule
    dims = rule.results[index]
    assert dims is not None
    ignored = site.call.name in CREATIONS
    before = 1
    for name in dims[dim]:
        factor = rule.factor(name)
        if factor.size % site.rows == 0 and factor.split:
            walked = any(name in own for operand in rule.operands for own in operand)
            return Rows(dim, before) if ignored or not walked else site.coupled("numbers the rows")
        before *= factor.size
    return site.coupled("counts the rows of the batch")


# --------------------------------------------------------------------------------------------------- powers


def _power(site: Site, powers: Sequence[int], number: int) -> int | None:
    """The power of the results, when each operand's is known; None where the operator is not linear in them."""
    name = site.call.name
    if number:
        if name in FILLED_WITH:
            return number
        if name in PRODUCTS:
            return powers[0] + number
        return powers[0] - number if name in QUOTIENTS else None
    if not any(powers):
        return 0
    if name in PRODUCTS and len(powers) <= 2:
        return sum(powers)
    if name in QUOTIENTS:
        return powers[0] - sum(powers[1:])
    for group in site.rule.linear:
        inside = {power for index, power in enumerate(powers) if index in group}
        outside = {power for index, power in enumerate(powers) if index not in group}
        if len(inside) == 1 and outside <= {0}:
            return inside.pop()
    return None
