"""Where parameters lie, from where `ddp` leaves them: what named data strategies do to them is one rule each.

`zero1`, `zero2`, `zero3` store a parameter in pieces along a dim that no other axis splits; operators do as they do
under `ddp`. So one placement serves all data axes and strategies (tests/unit/searching hold them against what the
solver places).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autopar.ir.placement import ParameterLayout
from autopar.ir.program import Program
from autopar.ir.sharding import REPLICATE, Placement, Shard, Sharding, is_valid
from autopar.ir.values import Variable
from autopar.machine.mesh import Mesh
from autopar.strategies.axis import AxisStrategy


def with_data_axes(
    program: Program, mesh: Mesh, strategies: Sequence[AxisStrategy], *, exchanges: bool = False
) -> Program:
    """A program that was placed with `ddp` on its first axis, with the data axes of `mesh`, and its parameters as
    `strategies` store them. What it moves of parameters may be asked of it, nothing else: operators know one data axis.

    mesh: data axes, then the program's others, of any sizes. strategies: of the data axes. exchanges: the program was
    placed with `expert` on its second axis, and the second of the data axes is that one.
    """
    variables = {variable.name: variable for variable in program.variables}
    parameters = dict(program.placed.parameters)
    known: dict[tuple[str, int], ParameterLayout] = {}
    for call in program.calls:
        for slot, name in enumerate(call.slots):
            if (layout := program.placed.parameters.get(name)) is not None:
                # What calls of a region have in one slot is alike, and lies alike.
                key = (call.region, slot)
                if key not in known:
                    known[key] = (_stored_beside_experts if exchanges else stored)(
                        variables[name], layout, mesh.sizes, strategies
                    )
                parameters[name] = known[key]
    return replace(program, mesh=mesh, placement=replace(program.placed, parameters=parameters))


def _stored_beside_experts(
    variable: Variable, layout: ParameterLayout, sizes: Sequence[int], strategies: Sequence[AxisStrategy]
) -> ParameterLayout:
    """Experts stay where they are, in pieces over the first axis; for all else the second is another data axis."""
    if isinstance(layout.stored[1], Shard):
        return stored(variable, layout, sizes, strategies[:1])

    def without(sharding: Sharding) -> Sharding:
        return (sharding[0], *sharding[2:])

    own = (layout.stored, layout.held, layout.compute, layout.gradient)
    return stored(variable, ParameterLayout(*map(without, own)), sizes, strategies)


def stored(
    variable: Variable, layout: ParameterLayout, sizes: Sequence[int], strategies: Sequence[AxisStrategy]
) -> ParameterLayout:
    """The layout of one parameter under these data strategies. layout: under `ddp`, whose axis is the first."""
    others = layout.stored[1:]
    cutting = [place for place, each in enumerate(strategies) if each.required in ("gather", "keep")]
    pieces: list[Placement] = [REPLICATE] * len(strategies)
    while cutting:
        dim = _dim(variable, others, sizes, cutting, len(strategies))
        if dim is not None:
            pieces = _pieces(dim, sizes, cutting, len(strategies))
            break
        cutting = cutting[1:]  # not enough of any dim for all: the inner ones cut
    held = [p if s.required == "gather" else REPLICATE for p, s in zip(pieces, strategies, strict=True)]
    whole = [REPLICATE] * len(strategies)
    return ParameterLayout(
        (*pieces, *others),
        (*held, *layout.held[1:]),
        (*whole, *layout.compute[1:]),
        (*[layout.gradient[0]] * len(strategies), *layout.gradient[1:]),
    )


def _dim(
    variable: Variable, others: Sequence[Placement], sizes: Sequence[int], cutting: Sequence[int], num: int
) -> int | None:
    """The dim that the axes `cutting` cut: the first that no other does, else of a matrix any; None: none divides."""
    if not variable.is_parameter:
        return None
    shape, ways = variable.seen.shape, math.prod(sizes[axis] for axis in cutting)
    split = [math.prod(sizes[num + a] for a, p in enumerate(others) if isinstance(p, Shard) and p.dim == d)
             for d in range(len(shape))]  # fmt: skip
    cut = {p.dim for p in others if isinstance(p, Shard)}
    dims = [d for d in range(len(shape)) if d not in cut] + (sorted(cut) if len(shape) > 1 else [])
    return next(
        (
            d for d in dims
            if shape[d] % (split[d] * ways) == 0
            and is_valid(shape, (*_pieces(d, sizes, cutting, num), *others), sizes)  # stripes inside pieces
        ),
        None,
    )  # fmt: skip


def _pieces(dim: int, sizes: Sequence[int], cutting: Sequence[int], num: int) -> list[Placement]:
    """What `num` data axes do where those in `cutting` cut a dim; in stripes: a rank's own piece goes between nodes."""
    pieces: list[Placement] = [REPLICATE] * num
    for number, place in enumerate(cutting):
        pieces[place] = Shard(dim, math.prod(sizes[inner] for inner in cutting[number + 1 :]))
    return pieces
