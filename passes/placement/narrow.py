"""Options left to operators once another placement has been found: they do as they do there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.ir.program import Program
from autopar.ir.region import NodeStrategy, Options, Region


def narrowed(program: Program, model: Program) -> Program:
    """The annotated program with those options alone that do on the axes of `model` what was placed there; all of them
    where there is none.
    """
    axes = tuple(program.on_mesh.axis_names.index(name) for name in model.on_mesh.axis_names)
    placed = {region.name: region.strategies for region in model.regions}

    def of_region(region: Region) -> Region:
        chosen = placed.get(region.name, {})
        options = {
            name: _only(each, chosen[name], axes) if name in chosen else each for name, each in region.options.items()
        }
        return region.with_options(options)

    return replace(program, regions=tuple(map(of_region, program.regions)))


def alike(strategies: Sequence[NodeStrategy], chosen: NodeStrategy, axes: Sequence[int]) -> list[int]:
    """Which of an operator's strategies do as `chosen`. axes: which of theirs are those of `chosen`."""
    kept: Sequence[int] = range(len(strategies))
    for axis, wanted in zip(axes, chosen.choices, strict=True):
        kind, factor, group = wanted.kind, wanted.factor, wanted.group
        choices = [(number, strategies[number].choices[axis]) for number in kept]
        kept = [n for n, each in choices if each.kind == kind and each.factor == factor and each.group == group]
    return list(kept)


def _only(options: Options, chosen: NodeStrategy, axes: Sequence[int]) -> Options:
    kept = alike(options.strategies, chosen, axes)
    if not kept or len(kept) == len(options.strategies):
        return options
    return Options(tuple(options.strategies[i] for i in kept), tuple(options.seconds[i] for i in kept))
