"""The arguments of a call, and what of them tells one kind of call from another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from autopar.base.huggingface.caches import is_cache

Kind = tuple[Any, ...]
PLAIN = (bool, int, float, str, type(None))
"""Arguments that are compared as they are."""


@dataclass(frozen=True, slots=True)
class Given:
    """The arguments of a call. kind: what tells calls apart but for their values and how caches lie. leaves: tensors,
    caches and plain arguments by their path.
    """

    kind: Kind
    leaves: Mapping[str, Any]

    @staticmethod
    def of(kwargs: Mapping[str, Any]) -> Given | None:
        """None: a call with arguments of other kinds."""
        kind: list[Any] = []
        leaves: dict[str, Any] = {}
        return Given(tuple(kind), leaves) if _read(kwargs.items(), "", kind, leaves) else None


def _read(items: Iterable[tuple[Any, Any]], above: str, kind: list[Any], leaves: dict[str, Any]) -> bool:
    """Add to the kind and the leaves; whether all of them are of kinds that are known."""
    for name, value in items:
        path = f"{above}{name}"
        if type(value) is Tensor:
            kind.append((path, value.shape, value.dtype, value.device))
        elif type(value) in PLAIN:
            kind.append((path, type(value), value))
        elif is_cache(value):
            kind.append((path, type(value), tuple(value.layouts())))
        elif isinstance(value, dict | tuple | list):
            kind.append((path, type(value), len(value)))
            inside = value.items() if isinstance(value, dict) else enumerate(value)
            if not _read(inside, f"{path}.", kind, leaves):
                return False
            continue
        else:
            return False
        leaves[path] = value
    return True
