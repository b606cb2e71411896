"""The rule of an operator: from the files of rules, found by running it, or none."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from autopar.base.errors import AutoparError
from autopar.base.recent import Recent
from autopar.ir.op_call import OpCall, TensorSpec
from autopar.ir.rule import Rule, with_fields
from autopar.operators.rules.discover import discover, discover_all
from autopar.operators.rules.pointwise import pointwise_rule
from autopar.operators.rules.registry import _RULES, replicate

_MODULES = (
    "attention", "creation", "experts", "fused", "indexing", "iterated", "matmul", "nn", "convolution", "pointwise",
    "reductions", "views",
)  # fmt: skip


@lru_cache(maxsize=1)
def _load() -> None:
    for module in _MODULES:
        importlib.import_module(f"autopar.operators.rules.{module}")


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
    own = _RULES.get(call.name)
    if own is None:
        return _without_empty_dims(_found(call))
    try:
        return _KNOWN.get((own, call.content, call.results), lambda: _without_empty_dims(_found(call)))
    except TypeError:  # an argument that cannot be looked up
        return _without_empty_dims(_found(call))


_KNOWN: Recent[Hashable, Rule] = Recent(8192)
"""Rules by who wrote them and the call: models repeat operators, and who reads a program asks for its rules again."""


def rules_for(calls: Sequence[OpCall]) -> list[Rule]:
    """The rule of each; those that have to be discovered are, all at once. `calls_on` knows the calls then."""
    _load()
    discover_all([call for call in calls if not is_written(call)])
    found = [rule_for(call) for call in calls]
    for call, rule in zip(calls, found):
        _note(call, rule)
    return found


_SEEN: Recent[Hashable, dict[Hashable, tuple[OpCall, Rule]]] = Recent(4096)
_MOST_CALLS = 16
"""Calls of one operator on the same operands that are remembered."""


def _note(call: OpCall, rule: Rule) -> None:
    key, content = (call.target, call.operands), call.content
    try:
        on = _SEEN.peek(key) or {}
        if content not in on or on[content][0] is not call:
            kept = list(on.items())[1 - _MOST_CALLS :]
            _SEEN.put(key, {**dict(kept), content: (call, rule)})
    except TypeError:  # an argument that cannot be looked up
        return


def calls_on(target: Any, operands: Sequence[TensorSpec]) -> Sequence[tuple[OpCall, Rule]]:
    """Calls of an operator on such operands whose rules were asked for, with these: what else may be meant is worth a
    try first.
    """
    found = _SEEN.peek((target, tuple(operands)))
    return () if found is None else tuple(found.values())


def is_written(call: OpCall) -> bool:
    """Whether a call's rule need not be discovered."""
    _load()
    if call.name in _RULES or all(result is None for result in call.results):
        return True
    return torch.Tag.pointwise in getattr(call.target, "tags", ())


def _found(call: OpCall) -> Rule:
    _load()
    if call.name in _RULES:
        return _without_bool_terms(call, _registered(call))
    if all(result is None for result in call.results):
        return replicate(call)  # an assertion, or a number
    if torch.Tag.pointwise in getattr(call.target, "tags", ()):
        return pointwise_rule(call)
    found = discover(call)
    if found is not None:
        return found
    _warn_replicated(call.name)
    return replicate(call)


def _registered(call: OpCall) -> Rule:
    """Its operator's own rule; none for empty tensors of sizes that the rule contradicts: torch takes almost any."""
    try:
        return _RULES[call.name](call)
    except (AssertionError, AutoparError):
        if all(spec is None or spec.numel for spec in (*call.operands, *call.results)):
            raise
        return replicate(call)


def _without_empty_dims(found: Rule) -> Rule:
    """A rule that splits no dim of size 0: of none of its factors would a rank have a part."""
    if all(factor.size for factor in found.factors):
        return found
    sizes = found.sizes
    dims = [dim for tensor in (*found.operands, *found.results) if tensor is not None for dim in tensor]
    whole = {name for dim in dims for name in dim if any(not sizes[each] for each in dim)}
    factors = tuple(replace(factor, split=factor.split and factor.name not in whole) for factor in found.factors)
    joints = tuple(joint for joint in found.joints if whole.isdisjoint(joint))
    return with_fields(found, factors=factors, joints=joints)


def _without_bool_terms(call: OpCall, found: Rule) -> Rule:
    """A linear rule, but for operands in which there is no sum."""
    groups = tuple(g for g in found.linear if all(call.operands[i].dtype != torch.bool for i in g))
    return found if groups == found.linear else with_fields(found, linear=groups)


@lru_cache(maxsize=1024)
def _warn_replicated(name: str) -> None:
    warnings.warn(f"{name} has no sharding rule, and none was found by running it: it will be replicated", stacklevel=3)
