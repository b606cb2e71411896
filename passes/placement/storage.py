"""How else the parameters of a placed program may be stored, for all that operators do to be the same.

    weight stored whole, each of its readers takes a slice of it for itself, S(0)   →   {whole, S(0)}

A forward alone costs the same either way, and the objective, which is of seconds, cannot tell them apart. Whether a
parameter is read by one program only is for the caller to know: prompt and token share theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.ir.classes import Key
from autopar.ir.graphs import operands_of, placeholders
from autopar.ir.program import Program
from autopar.ir.region import Region
from autopar.ir.sharding import Sharding, redistribution_steps
from autopar.passes.placement.parameters import Parameters
from autopar.strategies.axis import AxisStrategy
from autopar.strategies.names import Pin


def ways_to_store(
    program: Program, strategies: Sequence[AxisStrategy], pins: Sequence[Pin]
) -> Mapping[str, frozenset[Sharding]]:
    """For each parameter that operators see as it is stored, the shardings from which each of its readers gets what it
    reads without anything being sent, as strategies and pins allow; the one that was chosen is among them.

    program: placed, not differentiated. Parameters that are gathered for their readers are left out.

    Raises:
        AutoparError: as `placement.problem.build_problem`.
    """
    parameters, sizes = Parameters(program, program.on_mesh, strategies, pins, excused=None), program.on_mesh.sizes
    found: dict[str, frozenset[Sharding]] = {}
    for root, members in parameters.known.members.items():
        names = [key[1] for key in members if key[0] == "var" and program.variable(key[1]).is_parameter]
        if not names or any(not _is_in_place(program, name) for name in names):
            continue
        chosen = program.placed.parameters[names[0]].stored
        wanted = [each for key in members if key[0] == "slot" for each in _reads(program.region(key[1]), key, chosen)]
        ways = {way.stored for way in parameters.ways_to_keep(root)[0] if way.is_whole_in_place}
        kept = [way for way in ways if all(_is_slice(way, each, tuple(sizes)) for each in wanted)]
        found.update(dict.fromkeys(names, frozenset({chosen, *kept})))
    return found


def _is_in_place(program: Program, name: str) -> bool:
    layout = program.placed.parameters.get(name)
    return layout is not None and layout.stored == layout.held == layout.compute


def _reads(region: Region, slot: Key, stored: Sharding) -> list[Sharding]:
    """In which shardings a region's operators read one of its slots; as it is stored where anything else does."""
    holder, found = placeholders(region.graph, slot[2] + 1)[slot[2]], list[Sharding]()
    for user in holder.users:
        if user.name in region.ops:
            wanted = region.strategies[user.name].operands
            found += [each for source, each in zip(operands_of(user), wanted, strict=True) if source is holder]
        else:
            found.append(stored)
    return found


def _is_slice(stored: Sharding, read: Sharding, sizes: tuple[int, ...]) -> bool:
    """Whether a rank has of what is stored all that it reads."""
    steps = redistribution_steps(stored, read, sizes)
    return steps is not None and all(step.kind == "slice" for step in steps)
