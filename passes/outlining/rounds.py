"""The rounds of a loop over a module, each a run of its own: equal ones share a region, as blocks do.

    zeros, cell, head, argmax, one_hot, cell, head, argmax, one_hot, ... cell, head, softmax
    ->   gap,  round × 64,  epilogue

A recurrent decoder calls the same modules at every step. Traced, its loop lies unrolled between two blocks, and all
that is expensive would be done for every step of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import fx

FEWEST = 8
"""Fewer rounds stay in one region: the calls of a region lie as they do in the mean."""


def rounds(nodes: Sequence[fx.Node], parameters: Mapping[fx.Node, object]) -> list[list[fx.Node]]:
    """The nodes of a run, cut before each call of the outermost module with parameters that is called most often; whole
    where none is called `FEWEST` times, or less than half of the rounds are alike.

    Whole numbers and truth values that no later call needs (whether the loop may end, of all rounds so far) are left to
    what follows the last call: they make unequal what is equal without them.
    """
    calls = _calls(nodes, parameters)
    if not calls:
        return [list(nodes)]
    place = {node: index for index, node in enumerate(nodes)}
    cuts, end = [place[call[0]] for call in calls], place[calls[-1][-1]] + 1
    late = _late(nodes[:end], set(nodes[:end]))
    spans = zip([0, *cuts], [*cuts, end], strict=True)
    found = [[node for node in nodes[start:stop] if node not in late] for start, stop in spans]
    if 2 * max(Counter(map(_likeness, found[1:])).values()) < len(found):
        return [list(nodes)]
    found[-1] += [*(node for node in nodes if node in late), *nodes[end:]]
    return [each for each in found if each]


def _calls(nodes: Sequence[fx.Node], parameters: Mapping[fx.Node, object]) -> list[list[fx.Node]]:
    """The nodes of each call of the module; of two modules that are called as often, of the one called first.

    A call begins where the node before is not of the module, or of another call of it, where the trace numbers them.
    """
    found: dict[str, list[list[fx.Node]]] = {}
    owns: set[str] = set()
    before: set[str] = set()
    for node in nodes:
        around = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
        reads = any(source in parameters for source in node.all_input_nodes)
        for path in dict.fromkeys(around):
            module = path.split("@")[0]
            calls = found.setdefault(module, [])
            if path not in before:
                calls.append([])
            calls[-1].append(node)
            if reads:
                owns.add(module)
        before = set(around)
    often = {module: calls for module, calls in found.items() if module in owns and len(calls) >= FEWEST}
    outermost = [calls for module, calls in often.items() if not any(module.startswith(f"{o}.") for o in often)]
    return max(outermost, key=len, default=[])


def _likeness(nodes: Sequence[fx.Node]) -> tuple[str, ...]:
    """What equal rounds have in common: operators, and the types of what they make."""
    return tuple(f"{node.target} {getattr(node.meta.get('val'), 'shape', '')}" for node in nodes)


def _late(nodes: Sequence[fx.Node], inside: set[fx.Node]) -> set[fx.Node]:
    """Nodes without a gradient that, of those inside, only such nodes read."""
    late = set[fx.Node]()
    for node in reversed(nodes):
        value = node.meta.get("val")
        is_whole = isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())
        if is_whole and all(user in late or user not in inside for user in node.users):
            late.add(node)
    return late
