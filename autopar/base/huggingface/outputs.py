"""What a model's forward returns, made again of other values: transformers' structures, without what their class asks
of its fields each time.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

Make = Callable[[Mapping[str, Any]], Any]
"""Values by field, in the fields' order and none of them None -> a structure of them."""


def maker_like(output: Any) -> Make:
    """What makes structures as a dataclass is, with values in the fields in which it has some."""
    kind: Any = type(output)
    fields = {each.name: getattr(output, each.name) for each in dataclasses.fields(output)}
    empty = {name: x for name, x in fields.items() if x is None}
    values = {name: x for name, x in fields.items() if x is not None}

    def usual(values: Mapping[str, Any]) -> Any:
        return kind(**values)

    if not isinstance(output, OrderedDict):
        return usual

    def short(values: Mapping[str, Any]) -> Any:
        found = kind.__new__(kind)
        vars(found).update(empty, **values)
        for name, x in values.items():
            OrderedDict.__setitem__(found, name, x)
        return found

    return short if _is_same(short(values), usual(values)) else usual


def _is_same(one: Any, other: Any) -> bool:
    """Whether two structures are of the same values, in the same places."""
    return _values(vars(one)) == _values(vars(other)) and [*_values(one).items()] == [*_values(other).items()]


def _values(held: Any) -> dict[str, int]:
    return {name: id(x) for name, x in dict.items(held)}
