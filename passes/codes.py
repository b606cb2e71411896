"""Weights that are stored as codes with scales, as the graph of a region reads them.

codes i8[64, 32] ─ to ─┐
scales   [64, 1] ──────┴ mul ─ reshape ─ linear: the weight
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from torch import fx

from autopar.ir.graphs import placeholders
from autopar.ir.nodes import type_of
from autopar.ir.program import Program
from autopar.ir.region import Region

_PRODUCTS = ("autopar.linear", "autopar.matmul", "aten.mm", "aten.bmm", "aten.addmm", "aten.convolution")

_SCALES = ("first_scales", "second_scales")
"""What layers of experts are told of parameters that are codes."""


def part_of_weight(region: Region, slot: int) -> Literal["", "codes", "scales"]:
    """What a parameter is of a weight that is stored as codes: codes are whole numbers of two dims and more, scales
    what is multiplied with nothing but what is made of them, or what experts are told so.
    """
    holders = _holders(region)
    holder = holders[slot]
    if _are_codes(holder):
        return "codes"
    users = [user for user in holder.users if user.name in region.forward_nodes]
    if users and all(holder in (user.kwargs.get(name) for name in _SCALES) for user in users):
        return "scales"
    others = [[x for x in user.all_input_nodes if x is not holder] for user in users]
    scales = users and all(str(user.target) == "aten.mul.Tensor" for user in users)
    return "scales" if scales and all(len(each) == 1 and _is_of_codes(each[0], holders) for each in others) else ""


def is_coded(program: Program, key: tuple[str, str, int]) -> bool:
    """Whether a parameter is codes, or scales of codes. key: ("slot", region, slot number)."""
    return bool(part_of_weight(program.region(key[1]), key[2]))


def readers_of(region: Region, slot: int) -> Iterator[fx.Node]:
    """What reads a parameter; of codes and scales what reads the weight that they are."""
    holder = _holders(region)[slot]
    if not part_of_weight(region, slot):
        yield from holder.users
        return
    seen: set[fx.Node] = set()
    stack = list(holder.users)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if str(node.target).startswith(_PRODUCTS):
            yield node
        else:
            stack += node.users


def _holders(region: Region) -> list[fx.Node]:
    return placeholders(region.graph, len(region.slots))


def _are_codes(holder: fx.Node) -> bool:
    found = type_of(holder)
    return found is not None and len(found.shape) > 1 and not found.dtype.is_floating_point


def _is_of_codes(node: fx.Node, holders: Sequence[fx.Node]) -> bool:
    """Whether it is made of codes alone."""
    if node.op == "placeholder":
        return node in holders and _are_codes(node)
    sources = node.all_input_nodes
    return bool(sources) and all(_is_of_codes(source, holders) for source in sources)
