"""The rule of a call: registered by operator name, or known from its tags, or discovered by running it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar.ir.op_call import OpCall, TensorSpec
from autopar.ir.rule import Dims, Factor, Rule, parse_rule, volume, with_fields

_RULES: dict[str, Callable[[OpCall], Rule]] = {}  # filled by `rule` when the modules above are imported, then only read


def rule(*names: str) -> Callable[[Callable[[OpCall], Rule]], Callable[[OpCall], Rule]]:
    """Register a function from call to rule for the operators of these names (`aten.mm.default`)."""

    def register(function: Callable[[OpCall], Rule]) -> Callable[[OpCall], Rule]:
        for name in names:
            assert name not in _RULES, f"two rules for {name}"
            _RULES[name] = function
        return function

    return register


# ------------------------------------------------------------------------------------------------- for writers of rules


def bind(call: OpCall, text: str, *, flops_per_point: float = 0.0, **fields: Any) -> Rule:
    """The rule of a text for this call's shapes; `flops_per_point` counts for each point of the loop nest."""
    shapes = [operand.shape for operand in call.operands]
    parsed = parse_rule(text, shapes, [None if result is None else result.shape for result in call.results])
    if flops_per_point:
        fields.setdefault("flops", flops_per_point * volume(parsed))
    return with_fields(parsed, **fields)


def make_rule(
    call: OpCall,
    operands: Sequence[Sequence[Sequence[str] | str]],
    results: Sequence[Sequence[Sequence[str] | str] | None],
    sizes: Mapping[str, int],
    *,
    blocked: frozenset[str] | set[str] = frozenset(),
    reduce: Mapping[str, str] | None = None,
    **fields: Any,
) -> Rule:
    """A rule from dims given as factor names; a dim may be one name, a sequence of names, or "" for none."""
    operand_dims = tuple(_dims(dims) for dims in operands)
    result_dims = tuple(None if dims is None else _dims(dims) for dims in results)
    names = dict.fromkeys(n for dims in (*operand_dims, *result_dims) if dims is not None for d in dims for n in d)
    factors = tuple(Factor(n, sizes[n], n not in blocked, (reduce or {}).get(n)) for n in names)
    made = Rule(factors, operand_dims, result_dims, **fields)
    for dims, spec in zip((*made.operands, *made.results), (*call.operands, *call.results), strict=True):
        assert dims is None or spec is None or made.shape_of(dims) == spec.shape, (
            f"{call.name}: {made} for {spec.shape}"
        )
    return made


def _dims(dims: Sequence[Sequence[str] | str]) -> Dims:
    return tuple(((dim,) if dim else ()) if isinstance(dim, str) else tuple(dim) for dim in dims)


def replicate(call: OpCall) -> Rule:
    """The rule that splits nothing."""
    sizes: dict[str, int] = {}

    def name_dims(spec: TensorSpec | None) -> list[str] | None:
        if spec is None:
            return None
        names = [f"x{len(sizes) + i}" for i in range(spec.ndim)]
        sizes.update(zip(names, spec.shape))
        return names

    operands = [name_dims(spec) or [] for spec in call.operands]
    results = [name_dims(spec) for spec in call.results]
    return make_rule(call, operands, results, sizes, blocked=set(sizes))


def normal_dim(dim: int, ndim: int) -> int:
    """`dim` counted from the front."""
    return dim + ndim if dim < 0 else dim
