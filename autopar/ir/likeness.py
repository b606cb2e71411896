"""Regions that are alike up to sizes: the same operators, read in the same way, whatever the numbers in them.

A small twin of a model proves what a large one does where every region of the large one has its like in the twin.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autopar.ir.program import Program
from autopar.ir.region import Region


def likeness(region: Region) -> str:
    """A hash of a region's graph: its operators and who reads whom, without sizes, offsets and factors."""
    numbers: dict[fx.Node, int] = {}
    lines = []
    for node in region.graph.nodes:
        numbers[node] = len(numbers)
        target = "" if node.op in ("placeholder", "output") else str(node.target)
        lines.append(f"{node.op} {target} {_written(node.args, numbers)} {_written(node.kwargs, numbers)}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def without_like(program: Program, other: Program) -> tuple[Region, ...]:
    """The regions of a program that have no like in the other, one for each kind."""
    known = {likeness(region) for region in other.regions}
    found: dict[str, Region] = {}
    for region in program.regions:
        if (kind := likeness(region)) not in known:
            found.setdefault(kind, region)
    return tuple(found.values())


def _written(value: Any, numbers: Mapping[fx.Node, int]) -> str:
    if isinstance(value, fx.Node):
        return f"%{numbers[value]}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_written(each, numbers) for each in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_written(each, numbers)}' for key, each in sorted(value.items()))}}}"
    if isinstance(value, bool | str | torch.dtype) or value is None:
        return repr(value)
    return "#" if isinstance(value, int | float) else type(value).__name__
