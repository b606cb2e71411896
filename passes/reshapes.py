"""Dims that are laid together, moved and taken apart again: said without the step in between.

x: [T, B, H·D]; x.view(T, B·H, D).transpose(0, 1).view(B, H, T, D)   →   x.reshape(T, B, H, D).permute(1, 2, 0, 3)

As written, B and H lie in one dim, which two axes of a mesh cannot split by one each (torch's own attention, and models
that were written for `bmm`). A B of 1 is said like any other, so that one row is traced as several are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autopar.ir.nodes import drop_dead
from autopar.passes.indices import Builder

_aten = torch.ops.aten
_RESHAPES = (
    _aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.unflatten.int,
    _aten.flatten.using_ints, _aten.squeeze.dim, _aten.squeeze.dims, _aten.squeeze.default, _aten.unsqueeze.default,
)  # fmt: skip
"""What keeps elements in their order."""
_PERMUTES = (_aten.transpose.int, _aten.permute.default, _aten.t.default, _aten.movedim.int)


def simplify_reshapes(graph: fx.Graph, origins: dict[str, str]) -> None:
    """What the views before it lay together and a view takes apart again is viewed from where they began."""
    for node in list(graph.nodes):
        if node.target not in _RESHAPES or node.args[0].target not in (*_RESHAPES, *_PERMUTES):
            continue
        chain = _chain(node)
        states = _followed(chain)
        if states is None or not _parts(states):
            states = _followed(chain, units=True)
            if states is None or not _parts(states):
                continue
        build, shape = Builder(graph, node, origins), list(node.meta["val"].shape)
        found, first, last = chain[0].args[0], *(list(itertools.chain(*states[at])) for at in (0, -1))
        sizes = [each.size for each in first]
        if first != last:
            if sizes != list(found.meta["val"].shape):
                found = build(_aten.reshape.default, found, sizes)
            found = build(_aten.permute.default, found, [first.index(each) for each in last])
        if list(found.meta["val"].shape) != shape:
            found = build(_aten.reshape.default, found, shape)
        node.replace_all_uses_with(found)
        graph.erase_node(node)
    drop_dead(graph)


class _Atom:
    """A factor of a dim that no view cuts."""

    def __init__(self, size: int) -> None:
        self.size = size


_State = list[list[_Atom]]
"""What each dim of a value is the product of, the outermost first."""


def _chain(node: Any) -> list[Any]:
    """The views that end with a node, the first one first."""
    chain = [node]
    while (before := chain[-1].args[0]).target in (*_RESHAPES, *_PERMUTES):
        chain.append(before)
    return chain[::-1]


def _followed(chain: Sequence[Any], *, units: bool = False) -> list[_State] | None:
    """The dims of what a chain begins with, and of each of its values; None where sizes do not meet. units: dims of
    size 1 are followed, too.
    """
    shape = chain[0].args[0].meta["val"].shape
    states: list[_State] = [[[_Atom(size)] if size != 1 or units else [] for size in shape]]
    if 0 in shape or (units and 1 not in shape):
        return None
    for node in chain:
        if node.target in _PERMUTES:
            states.append([states[-1][dim] for dim in _order(node, len(states[-1]))])
        elif not _reshaped(states, node.meta["val"].shape):
            return None
    return states


def _order(node: Any, rank: int) -> list[int]:
    """Which dim of its operand each dim of a permutation is."""
    sizes = range(2, rank + 2)
    moved = node.target(torch.empty(tuple(sizes), device="meta"), *node.args[1:], **node.kwargs)
    return [sizes.index(size) for size in moved.shape]


def _reshaped(states: list[_State], shape: Sequence[int]) -> bool:
    """Follow a view to a shape, cutting atoms in all states where it does; False where it cuts one unevenly."""
    atoms, found = list(itertools.chain(*states[-1])), _State()
    for size in shape:
        dim: list[_Atom] = []
        while (have := math.prod(each.size for each in dim)) < size:
            atom, wanted = atoms.pop(0), size // have
            if size % have or math.gcd(wanted, atom.size) not in (wanted, atom.size):
                return False
            if wanted < atom.size:
                outer, inner = _Atom(wanted), _Atom(atom.size // wanted)
                for each in itertools.chain(*states, found):
                    _cut(each, atom, (outer, inner))
                atom, atoms = outer, [inner, *atoms]
            dim.append(atom)
        if have != size:
            return False
        if size == 1 and atoms and atoms[0].size == 1:
            dim.append(atoms.pop(0))
        found.append(dim)
    if atoms and not found:
        return False
    if atoms:  # of size 1
        found[-1] += atoms
    states.append(found)
    return True


def _cut(dim: list[_Atom], atom: _Atom, parts: Sequence[_Atom]) -> None:
    if atom in dim:
        at = dim.index(atom)
        dim[at : at + 1] = parts


def _parts(states: Sequence[_State]) -> bool:
    """Whether dims of the first state lie in one dim in between, and no longer at the end."""
    first, last = ({atom: at for at, dim in enumerate(states[end]) for atom in dim} for end in (0, -1))
    between = (pair for state in states[1:-1] for dim in state for pair in itertools.pairwise(dim))
    return any(first[one] != first[other] and last[one] != last[other] for one, other in between)
