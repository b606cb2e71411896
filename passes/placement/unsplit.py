"""Weight matrices that an axis is to split and cannot: which, why, and what the user is told.

A strategy that splits every weight matrix and moves nothing but sums of activations finds no placement where one matrix
has no split that the operators around it could do with (scores of experts that are sorted, a product of which a softmax
reads the result). Such a matrix stays whole on the axis: every rank of it computes its product. Which those are is a
placement problem of its own: the same choices and constraints, whole matrices among them, and no price but for the
elements of each that stays whole.

    up 64×16: rows, down 16×64: columns, gate 4×16: neither  →  price 64: gate stays whole
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.ir.classes import Key
from autopar.ir.program import Program
from autopar.ir.sharding import Shard
from autopar.passes.codes import part_of_weight
from autopar.passes.placement.gathers import WHOLE, Blocked, line_of, operator_text
from autopar.passes.placement.parts import Slot
from autopar.passes.placement.problem import PlacementProblem
from autopar.passes.placement.variants import Variants
from autopar.solver.presolve import consistent
from autopar.solver.problem import AssignmentProblem, Edge
from autopar.solver.solve import solve
from autopar.strategies.axis import AxisStrategy

SECONDS = 6.0
GAP = 1e-6
"""Of the elements that stay whole: small matrices count beside large ones."""


@dataclass(frozen=True, slots=True)
class Unsplit:
    """A weight matrix, and those of blocks like its own, that stays whole on an axis. name: of the first; axis: its
    number; module: `layers.*.gate`; line: where its product stands; blocking: operators that allow it no split, in the
    order in which they run, as far as simple reasoning finds them.
    """

    name: str
    axis: int
    module: str
    line: str
    blocking: tuple[str, ...] = ()
    small: bool = False
    """Scales of codes: nobody misses a split of them."""

    def why(self, over: str) -> str:
        """What stands in the way of splitting it. over: `tp=2`."""
        if not self.blocking:
            return f"a split of it over {over} does not go with those of others"
        first, last = self.blocking[0], self.blocking[-1]
        between = first if first == last else f"what lies from {first} to {last}"
        return f"{between} allows no split of it over {over}"


def unsplit_weights(
    variants: Variants, gathered: Sequence[Blocked] = (), reasons: bool = True, proven: bool = True
) -> tuple[Unsplit, ...]:
    """The matrices that must stay whole for any placement of an annotated program to be, memory aside: as few elements
    as can be. None where nothing is in the way, or more than this.

    gathered: as of `place`. reasons: work out what blocks each. proven: False where one axis splits matrices, for those
    that have to as far as what neighbours forbid each other tells: they are the same where there is a placement with
    no others whole, as there is none with fewer.
    """
    program, strategies = variants.program, variants.strategies
    if not tensor_axes(program, strategies):
        return ()
    built = variants.free([(each.region, each.node) for each in gathered])
    asked = {root: slot for root, slot in built.slots.items() if any(slot.unmet)}
    sizes = {root: _elements(program, root, built) for root in asked}
    most = sum(sizes.values()) or 1
    costs = {
        slot.node: np.array([len(unmet) * sizes[root] / most for unmet in slot.unmet]) for root, slot in asked.items()
    }
    if proven:
        choice = solve(_priced(built, costs), gap=GAP, time_limit_s=SECONDS, explain=False).choice
        unmet = [
            (root, axis) for root, slot in asked.items() if choice for axis in sorted(slot.unmet[choice[slot.node]])
        ]
    else:
        unmet = _forced(built, asked)
    return tuple(_described(program, built, root, axis, reasons) for root, axis in unmet)


def _forced(built: PlacementProblem, asked: Mapping[Key, Slot]) -> list[tuple[Key, int]]:
    """The matrices that what neighbours forbid each other leaves no split, and the axis; none where nothing is left."""
    domains = consistent([node.costs for node in built.problem.nodes], built.problem.edges)
    if domains.empty is not None:
        return []
    least = {
        root: min((slot.unmet[i] for i in np.flatnonzero(domains.alive[slot.node])), key=len)
        for root, slot in asked.items()
    }
    return [(root, axis) for root, unmet in least.items() for axis in sorted(unmet)]


def tensor_axes(program: Program, strategies: Sequence[AxisStrategy]) -> list[int]:
    """The axes that are to split every weight matrix."""
    sizes = program.on_mesh.sizes
    return [axis for axis, each in enumerate(strategies) if each.required == "shard_matrices" and sizes[axis] > 1]


def notes_of_unsplit(program: Program, unsplit: Sequence[Unsplit]) -> tuple[str, ...]:
    """What the user is told of each module whose weight stays whole."""
    notes = dict[str, None]()
    for each in unsplit:
        if each.small:
            continue
        axis, size = program.on_mesh.axes[each.axis]
        notes[f"{_at(each.module, each.line)} {WHOLE} of {axis}: {each.why(f'{axis}={size}')}"] = None
    return tuple(notes)


def notes_of_idle_axes(program: Program, strategies: Sequence[AxisStrategy]) -> tuple[str, ...]:
    """What the user is told of axes that are to split the weights of a placed program, and split none."""
    layouts = program.placed.parameters.values() if program.placement is not None else ()
    idle = [a for a in tensor_axes(program, strategies) if not any(isinstance(x.stored[a], Shard) for x in layouts)]
    names = [program.on_mesh.axis_names[axis] for axis in idle] if layouts else []
    return tuple(f"no weight of the model is split over {name}: all of it {WHOLE} of {name}" for name in names)


FEW = 8
"""Rows a rank below which nobody misses a split of a table."""


def notes_of_odd_tables(program: Program, strategies: Sequence[AxisStrategy]) -> tuple[str, ...]:
    """What the user is told of tables and heads outside of the blocks that an axis would split by rows, and whose rows
    it does not divide.
    """
    if program.placement is None:
        return ()
    outside = {name for call in program.calls if not program.region(call.region).module for name in call.slots}
    notes = []
    for axis in tensor_axes(program, strategies):
        over, size = program.on_mesh.axes[axis]
        for variable in program.variables:
            shape = variable.type.shape
            if variable.name not in outside or not variable.is_parameter or len(shape) != 2 or variable.padded:
                continue
            rows, layout = shape[0], program.placed.parameters.get(variable.name)
            if rows % size and rows >= FEW * size and layout and not isinstance(layout.stored[axis], Shard):
                notes.append(
                    f"{variable.name} {variable.type} is whole on every rank of {over}: its {rows} rows do not divide "
                    f"over {over}={size}, {rows + size - rows % size} would. Rows are added where a cross entropy of "
                    "labels is all that is computed of them; resize_token_embeddings(…, pad_to_multiple_of) adds any"
                )
    return tuple(notes)


def notes_of_whole_batches(program: Program) -> tuple[str, ...]:
    """What the user is told where no axis splits the batch's rows, because none of their sizes divides them."""
    batches = [
        (port.type.shape, sharding)
        for port in program.inputs
        if port.type.shape and (sharding := program.placed.inputs.get(port.name)) is not None
    ]
    rows = {shape[0] for shape, _ in batches}
    splits = [placement for _, sharding in batches for placement in sharding if isinstance(placement, Shard)]
    if len(rows) != 1 or any(placement.dim == 0 for placement in splits):
        return ()
    (size,) = rows
    uneven = [(axis, ranks) for axis, ranks in program.on_mesh.axes if size > ranks and size % ranks]
    return tuple(
        f"the batch's {size} rows do not divide over {axis}={ranks}, so no rank of {axis} has rows of its own: "
        f"{size - size % ranks} or {size - size % ranks + ranks} rows would"
        for axis, ranks in uneven
    )


def notes_of_whole_inputs(program: Program, strategies: Sequence[AxisStrategy]) -> tuple[str, ...]:
    """What the user is told of inputs that an axis should split by rows and does not, beside others that it does."""
    notes = []
    for axis, (name, size) in enumerate(program.on_mesh.axes):
        if strategies[axis].inputs != "batch" or size == 1:
            continue
        for port in program.inputs:
            sharding = program.placed.inputs.get(port.name)
            if port.type.shape and sharding is not None and not isinstance(sharding[axis], Shard):
                rows = f"its {port.type.shape[0]} rows do not divide over {name}={size}"
                notes.append(f"input {port.name} {port.type} is whole on every rank of {name}: {rows}")
    return tuple(notes)


def _at(module: str, line: str) -> str:
    return f"{module} at {line}" if line else module


def _described(program: Program, built: PlacementProblem, root: Key, axis: int, reasons: bool = True) -> Unsplit:
    members = built.value_classes.members[root]
    name = next(key[1] for key in members if key[0] == "var")
    _, owner, index = next(key for key in members if key[0] == "slot")
    region = program.region(owner)
    holder = [node for node in region.graph.nodes if node.op == "placeholder"][index]
    line = next((found for user in holder.users if (found := line_of(region.origins.get(user.name, "")))), "")
    module = region.slots[index].name.removesuffix(".weight")
    path = f"{region.module}.{module}" if region.module else module
    small = part_of_weight(region, index) == "scales"
    return Unsplit(name, axis, path, line, _blocking(program, built, root, axis) if reasons else (), small)


def _elements(program: Program, root: Key, built: PlacementProblem) -> int:
    variables = [program.variable(key[1]) for key in built.value_classes.members[root] if key[0] == "var"]
    return len(variables) * variables[0].seen.num_elements


def _blocking(program: Program, built: PlacementProblem, root: Key, axis: int) -> tuple[str, ...]:
    """The operators that allow a matrix no split on an axis, as far as simple reasoning finds them: all else may be as
    it likes.
    """
    slot = built.slots[root]
    forbidden = np.array([np.inf if axis in unmet else 0.0 for unmet in slot.unmet])
    problem = _priced(built, {slot.node: forbidden})
    conflict = solve(problem, gap=0.5, time_limit_s=SECONDS).conflict
    names = {index: key for key, (index, _) in reversed(built.operators.items())}  # of a loop the first round
    found = [names[index] for index in (conflict.nodes if conflict else ()) if index in names]
    return tuple(operator_text(program.region(region), node) for region, node in found)


def _priced(built: PlacementProblem, costs: dict[int, np.ndarray]) -> AssignmentProblem:
    """The problem's constraints, memory aside, with these costs alone."""

    def free(given: np.ndarray) -> np.ndarray:
        return np.where(np.isfinite(given), 0.0, np.inf)

    nodes = tuple(
        replace(node, costs=free(node.costs) + costs.get(index, 0.0), usages=())
        for index, node in enumerate(built.problem.nodes)
    )
    edges = (Edge(e.u, e.v, e.u_class, e.v_class, free(e.costs)) for e in built.problem.edges)
    return AssignmentProblem(nodes, tuple(edge for edge in edges if not np.isfinite(edge.costs).all()))
