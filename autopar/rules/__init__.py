"""Sharding rules: one per operator, as factors (docs/architecture.md)."""

from autopar.rules.notation import Factor, Rule, format_rule, parse_rule
from autopar.rules.registry import OpCall, TensorSpec, op_call, registered, rule, rule_for
from autopar.rules.strategies import Choice, Offset, Positions, Starts, axis_choices, local_sizes, localize, shardings

__all__ = [
    "Choice",
    "Factor",
    "Offset",
    "OpCall",
    "Positions",
    "Rule",
    "Starts",
    "TensorSpec",
    "axis_choices",
    "format_rule",
    "local_sizes",
    "localize",
    "op_call",
    "parse_rule",
    "registered",
    "rule",
    "rule_for",
    "shardings",
]
