"""Attributes that forward sets on the modules of a block: what it is given and gives, beside arguments and results.

    block.attention.state = zeros        the model, before the block runs     an argument more of the block's call
    self.state = new                     the block's own forward              a result more, set where it repeats
    self.length = x.shape[1]             likewise, a number                   what it is called with; set likewise

What was not set since the model's forward began is compared as any attribute that is read (`alike.py`, `recording.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from autopar.base.watched import is_watched
from autopar.passes.blocks.alike import MISSING, OWN, PLAIN
from autopar.passes.blocks.hollow import NotRepeated
from autopar.passes.blocks.recording import Place, modules_of


def set_since(before: Mapping[tuple[str, ...], Any], now: Mapping[tuple[str, ...], Any], path: str) -> dict[Place, Any]:
    """What was set on the modules of the block at `path`, as `held` says what these hold.

    Raises:
        NotRepeated: a tensor or a module of it is another one, an attribute is gone, or what neither is a tensor nor
            plain.
    """
    if before.keys() == now.keys() and all(value is now[key] for key, value in before.items()):
        return {}
    found: dict[Place, Any] = {}
    for key in sorted(before.keys() | now.keys()):
        value = now.get(key, MISSING)
        if value is not before.get(key, MISSING):
            if len(key) != 2 or key[1] in OWN or not _may_be_handed_on(value):
                raise NotRepeated(f"forward changes {'.'.join(filter(None, key))} of {path}")
            found[key[0], key[1]] = value
    return found


def _may_be_handed_on(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_may_be_handed_on, value)) and not any(isinstance(each, Tensor) for each in value)
    return isinstance(value, (Tensor, *PLAIN)) and not is_watched(value)


def put(block: nn.Module, places: Sequence[Place], values: Sequence[Any]) -> None:
    """Set attributes, unseen by who notes what is read of modules."""
    modules = dict(modules_of(block, "")) if places else {}
    for (path, name), value in zip(places, values, strict=True):
        dict.__setitem__(vars(modules[path]), name, value)
