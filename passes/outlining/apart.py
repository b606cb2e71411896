"""Calls of one region that differ in what else uses their parameters get regions of their own.

A parameter that several calls use is gathered once for all of them, and its gradients are added before they are
reduced; one that a single call uses comes and goes with the call. A region's functions do one or the other with a slot,
so its calls must agree. They do not where a model reaches into one of its blocks: DiT's last layer takes the embedding
of the first block.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from autopar.ir.program import Program

Pattern = tuple[str, ...]
"""For each slot the parameter's name if other calls use it, too, else nothing."""


def apart(program: Program) -> Program:
    """The program with regions whose calls agree, slot by slot, on which parameter is another call's, too."""
    uses = Counter(name for call in program.calls for name in call.slots)
    patterns = [tuple(name if uses[name] > 1 else "" for name in call.slots) for call in program.calls]
    found = Counter(zip((call.region for call in program.calls), patterns, strict=True))
    names: dict[tuple[str, Pattern], str] = {}
    taken = {region.name for region in program.regions}
    copies: dict[str, list[str]] = {name: [] for name in taken}
    for (region, pattern), _ in found.most_common():  # the commonest keeps the name
        number = len(copies[region]) + 1
        name = region
        while name in taken and copies[region]:
            number, name = number + 1, f"{region}_{number}"
        taken.add(name)
        copies[region].append(name)
        names[region, pattern] = name
    regions = [replace(each, name=name) for each in program.regions for name in copies[each.name]]
    calls = [replace(call, region=names[call.region, own]) for call, own in zip(program.calls, patterns, strict=True)]
    return replace(program, regions=tuple(regions), calls=tuple(calls))
