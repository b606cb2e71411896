"""The rule of a call: registered by operator name, or known from its tags, or discovered by running it."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from autopar.rules.notation import ArgPath, Dims, Factor, Rule, parse_rule, volume, with_fields

_MODULES = (
    "attention",
    "creation",
    "fused",
    "indexing",
    "matmul",
    "nn",
    "convolution",
    "pointwise",
    "reductions",
    "views",
)
_RULES: dict[str, Callable[[OpCall], Rule]] = {}  # filled by `rule` when the modules above are imported, then only read


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor argument of a call: its global shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True, slots=True)
class OpCall:
    """One call of an operator. Tensors in `args` and `kwargs` are `TensorSpec`s.

    operands: the tensors of args, then of kwargs, in order, those in lists too; each occurrence is an operand of its
    own. results: one per result, None for what is not a tensor; a list of tensors counts as that many results.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    operands: tuple[TensorSpec, ...]
    results: tuple[TensorSpec | None, ...]

    @property
    def name(self) -> str:
        """As in `aten.mm.default`."""
        return str(self.target)

    def arg(self, name: str, default: Any = None) -> Any:
        """The argument of that name in the schema: as passed, else the schema's default, else `default`."""
        for position, parameter in enumerate(self.target._schema.arguments):
            if parameter.name == name:
                if not parameter.kwarg_only and position < len(self.args):
                    return self.args[position]
                if name in self.kwargs:
                    return self.kwargs[name]
                return parameter.default_value if parameter.has_default_value() else default
        return default

    def path(self, name: str) -> ArgPath:
        """Where the argument of that name stands, or would stand."""
        for position, parameter in enumerate(self.target._schema.arguments):
            if parameter.name == name and not parameter.kwarg_only and position < len(self.args):
                return (position,)
        return (name,)

    def operand_of(self, name: str) -> int | None:
        """The operand number of the tensor argument of that name; None where it is not given."""
        wanted = self.path(name)
        for index, (path, _) in enumerate(self.operand_paths()):
            if path == wanted:
                return index
        return None

    def operand_paths(self) -> Iterator[tuple[ArgPath, TensorSpec]]:
        """Each operand with the place where it stands."""
        for position, value in enumerate(self.args):
            yield from _tensors_in(value, (position,))
        for name, value in self.kwargs.items():
            yield from _tensors_in(value, (name,))


def _tensors_in(value: Any, path: ArgPath) -> Iterator[tuple[ArgPath, Any]]:
    if isinstance(value, TensorSpec | Tensor):
        yield path, value
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors_in(item, (*path, index))


def map_tensors(value: Any, function: Callable[[Any], Any]) -> Any:
    """`value` with each tensor or TensorSpec in it (lists and tuples too) replaced by `function` of it."""
    if isinstance(value, Tensor | TensorSpec):
        return function(value)
    if isinstance(value, list | tuple):
        items = [map_tensors(item, function) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def spec_of(value: Any) -> TensorSpec | None:
    """The spec of a tensor; None for anything else."""
    return TensorSpec(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None


def flatten_results(output: Any) -> list[Any]:
    """The results of a call in order: a tuple's or list's items, lists inside them too."""
    if isinstance(output, list | tuple):
        return [item for part in output for item in (flatten_results(part) if isinstance(part, list) else [part])]
    return [output]


def op_call(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> OpCall:
    """The call of `target` on these (fake, meta or real) tensors, which returned `output`."""
    specs = tuple(map_tensors(tuple(args), spec_of)), {k: map_tensors(v, spec_of) for k, v in kwargs.items()}
    operands = [spec for _, spec in _tensors_in(specs[0], ())]
    operands += [spec for value in specs[1].values() for _, spec in _tensors_in(value, ())]
    return OpCall(target, specs[0], specs[1], tuple(operands), tuple(spec_of(r) for r in flatten_results(output)))


def rule(*names: str) -> Callable[[Callable[[OpCall], Rule]], Callable[[OpCall], Rule]]:
    """Register a function from call to rule for the operators of these names (`aten.mm.default`)."""

    def register(function: Callable[[OpCall], Rule]) -> Callable[[OpCall], Rule]:
        for name in names:
            assert name not in _RULES, f"two rules for {name}"
            _RULES[name] = function
        return function

    return register


@lru_cache(maxsize=1)
def _load() -> None:
    for module in _MODULES:
        importlib.import_module(f"autopar.rules.{module}")


def registered() -> tuple[str, ...]:
    """The names of all operators that have a rule of their own, sorted."""
    _load()
    return tuple(sorted(_RULES))


def rule_for(call: OpCall) -> Rule:
    """The sharding rule of a call.

    Its operator's own; else, for operators tagged pointwise, the pointwise one; else one discovered by running the
    operator on small tensors; else `replicate`, with one warning that names the operator.
    """
    _load()
    if call.name in _RULES:
        return _without_bool_terms(call, _RULES[call.name](call))
    if all(result is None for result in call.results):
        return replicate(call)  # an assertion, or a number
    from autopar.rules.discover import discover
    from autopar.rules.pointwise import pointwise_rule

    if torch.Tag.pointwise in getattr(call.target, "tags", ()):
        return pointwise_rule(call)
    found = discover(call)
    if found is not None:
        return found
    _warn_replicated(call.name)
    return replicate(call)


def _without_bool_terms(call: OpCall, found: Rule) -> Rule:
    """A linear rule, but for operands in which there is no sum."""
    groups = tuple(g for g in found.linear if all(call.operands[i].dtype != torch.bool for i in g))
    return found if groups == found.linear else with_fields(found, linear=groups)


@lru_cache(maxsize=1024)
def _warn_replicated(name: str) -> None:
    warnings.warn(f"{name} has no sharding rule, and none was found by running it: it will be replicated", stacklevel=3)


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


def is_float(dtype: torch.dtype) -> bool:
    """Whether sums of terms in this dtype make sense: floating or complex."""
    return dtype.is_floating_point or dtype.is_complex
