"""What a block is handed on while a model is traced: its values are those of what was handed in.

    mask = torch.ones(8, 16, dtype=torch.bool)       made of Python's own numbers, before the blocks
    enter = autopar_capture.enter([hidden, mask])    a block that is traced once begins here
    mask_1 = getitem(enter, 1)                       holds what `mask` does

A block whose trace went by such values stands only for others that are handed the same ones, so it is noted whose
values were asked for.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

_ENTER = "autopar_capture::enter"
_ASKED = "autopar_asked"


def handed_in(node: fx.Node) -> fx.Node | None:
    """What a block was given as what this node is inside of it; None of other nodes."""
    enter: Any = node.args[0] if node.target is operator.getitem else None
    if not isinstance(enter, fx.Node) or not isinstance(enter.target, torch._ops.OpOverload):
        return None
    given: Any = enter.args[0]
    source = given[node.args[1]] if enter.target._schema.name == _ENTER else None
    return source if isinstance(source, fx.Node) else None


def note_asked(nodes: Iterable[fx.Node]) -> None:
    """Somebody has the values of these; of those that a block is handed on it is noted."""
    for node in nodes:
        if handed_in(node) is not None:
            node.meta[_ASKED] = True


def was_asked(node: fx.Node | None) -> bool:
    """Whether somebody has the values of what a block is handed on."""
    return node is not None and _ASKED in node.meta
