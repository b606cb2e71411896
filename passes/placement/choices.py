"""A placed program as a choice of a placement problem: what another's decisions cost in the problem's own measure."""

from __future__ import annotations

from autopar.ir.program import Program
from autopar.passes.placement.problem import PlacementProblem


def objective_of(placed: Program, built: PlacementProblem) -> float | None:
    """Seconds a step that a problem charges for the decisions of a placed program, memory aside; None where it has not
    got them among its choices.

    built: of the same annotated program, under any strategies.
    """
    choice = choice_of(placed, built)
    return None if choice is None else built.problem.evaluate(choice)


def choice_of(placed: Program, built: PlacementProblem) -> tuple[int, ...] | None:
    """One index per node of the problem; None where one of the decisions is not among its choices."""
    found: dict[int, int] = {}
    try:
        for (region, name), (index, strategies) in built.operators.items():
            found[index] = strategies.index(placed.region(region).strategies[name])
        for (region, name), (index, layouts) in built.relays.items():
            found[index] = layouts.index(placed.region(region).relays[name])
        for variable in placed.variables:
            root = built.value_classes.of.get(("var", variable.name, 0))
            if root is None:
                continue
            slot, layout = built.slots[root], placed.placed.parameters[variable.name]
            ways = [(each.stored, each.held, each.compute) for each in slot.choices]
            found[slot.node] = ways.index((layout.stored, layout.held, layout.compute))
            if slot.gradient >= 0:
                found[slot.gradient] = slot.gradient_layouts.index(layout.gradient)
        _add_values(placed, built, found)
    except (KeyError, ValueError):
        return None
    count = len(built.problem.nodes)
    return tuple(found[index] for index in range(count)) if len(found) == count else None


def _add_values(placed: Program, built: PlacementProblem, found: dict[int, int]) -> None:
    """The layouts of values between calls, and of their gradients."""
    known = built.value_classes.of

    def add(key: tuple[str, str, int], layout: object) -> None:
        index, layouts = built.classes[known[key]]
        found[index] = layouts.index(layout)  # type: ignore[arg-type]

    for name, layout in placed.placed.inputs.items():
        add(("program", name, 0), layout)
    updated = {(ref.call, ref.index) for _, ref in placed.updates}
    for (call, position), layout in placed.placed.values.items():
        if (call, position) not in updated:
            add(("out", placed.calls[call].region, position), layout)
    for (call, position), layout in placed.placed.gradients.items():
        add(("gout", placed.calls[call].region, position), layout)
