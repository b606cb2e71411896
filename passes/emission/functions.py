"""The functions of one region: gather, forward, backward, reduce."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from autopar.estimate import reads_in_backward
from autopar.ir import DTYPE_NAMES, Call, LoweredFunction, ParameterLayout, Program, Region, Slot, Variable
from autopar.passes.emission.statements import comment, identifier, local_bytes, statement
from autopar.sharding import Step, format_shape, redistribution_steps
from autopar.strategies import AxisStrategy

FREE_AT_BYTES = 1 << 20
"""Local values of at least this size are deleted after their last use; smaller ones are not worth a line."""

WIDTH = 88


@dataclass(frozen=True, slots=True)
class Names:
    """What the emitter knows of the whole program.

    shared: parameters that several calls use and that need a gather: gathered once a phase. accumulated: trainable
    parameters that several calls use: their gradients are added before the reduction.
    """

    program: Program
    strategies: tuple[AxisStrategy, ...]
    shared: tuple[str, ...]
    accumulated: tuple[str, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        assert self.program.mesh is not None
        return self.program.mesh.axis_names

    @property
    def sizes(self) -> tuple[int, ...]:
        assert self.program.mesh is not None
        return tuple(self.program.mesh.sizes)

    def layout(self, name: str) -> ParameterLayout:
        assert self.program.placement is not None
        return self.program.placement.parameters[name]

    def needs_gather(self, variable: Variable) -> bool:
        layout = self.layout(variable.name)
        return layout.stored != layout.compute or variable.stored_dtype != variable.type.dtype


def find_names(program: Program, strategies: Sequence[AxisStrategy]) -> Names:
    """Which parameters several calls share."""
    uses: dict[str, int] = {}
    for call in program.calls:
        for name in call.slots:
            uses[name] = uses.get(name, 0) + 1
    plain = Names(program, tuple(strategies), (), ())
    many = [variable for variable in program.variables if uses.get(variable.name, 0) > 1]
    shared = tuple(v.name for v in many if v.is_parameter and plain.needs_gather(v))
    accumulated = tuple(v.name for v in many if v.trainable)
    return Names(program, tuple(strategies), shared, accumulated)


def region_functions(names: Names, region: Region) -> list[str]:
    """All functions of a region, each a block of text."""
    _, call = next(names.program.calls_of(region.name))
    blocks = [_gather(names, region, call, backward=False)]
    if "backward" in region.lowered and has_own_backward_gather(names, region, call):
        blocks.append(_gather(names, region, call, backward=True))
    blocks.append(_phase(names, region, "forward"))
    if "backward" in region.lowered:
        blocks.append(_phase(names, region, "backward"))
        if reduced_slots(names, region, call):
            blocks.append(_reduce(names, region, call))
    return blocks


# -- gather and reduce
# -------------------------------------------------------------------------------------------------------


def _slots(names: Names, region: Region, call: Call) -> list[tuple[int, Slot, Variable]]:
    """Slots that the region gathers itself: all but the shared ones."""
    found = zip(range(len(region.slots)), region.slots, call.slots, strict=True)
    return [(i, slot, names.program.variable(name)) for i, slot, name in found if name not in names.shared]


def _backward_slots(names: Names, region: Region, call: Call) -> list[int]:
    """Slots whose value the backward gets: those it reads, and those gathered again because the strategy says so."""
    return [i for i, _, v in _slots(names, region, call) if reads_in_backward(region, i) or gathers_all(names, v)]


def gathers_all(names: Names, variable: Variable) -> bool:
    """Whether an axis gathers this parameter for the backward whether or not it is read there."""
    layout = names.layout(variable.name)
    return any(
        strategy.regather == "all" and stored != compute
        for strategy, stored, compute in zip(names.strategies, layout.stored, layout.compute, strict=True)
    )


def has_own_backward_gather(names: Names, region: Region, call: Call) -> bool:
    """Whether the backward gathers fewer parameters than the forward."""
    slots = _slots(names, region, call)
    kept = set(_backward_slots(names, region, call))
    return any(i not in kept and names.needs_gather(variable) for i, _, variable in slots)


def _gather(names: Names, region: Region, call: Call, *, backward: bool) -> str:
    kept = set(_backward_slots(names, region, call)) if backward else None
    lines = [f"def {region.name}_gather{'_for_backward' if backward else ''}(comm, state, at):"]
    lines += ["    p = {}"]
    for i, slot, variable in _slots(names, region, call):
        if kept is None or i in kept:
            lines.append(_gather_line(names, region, slot, variable))
    return "\n".join([*lines, "    return p"])


def state_key(region: Region, slot: Slot, variable: Variable) -> str:
    """`at + "mlp.up_proj.weight"` in a repeated block, the full name elsewhere."""
    return f'at + "{slot.name}"' if region.module and slot.name != variable.name else f'"{variable.name}"'


def _gather_line(names: Names, region: Region, slot: Slot, variable: Variable) -> str:
    source = f"state[{state_key(region, slot, variable)}]"
    return f'    p["{slot.name}"] = {gathered(names, variable, source)}'


def gathered(names: Names, variable: Variable, source: str) -> str:
    """The expression that turns a stored parameter into what operators see, with its shape in a comment."""
    layout = names.layout(variable.name)
    if variable.stored_dtype != variable.type.dtype:
        source = f"{source}.to({variable.type.dtype})"
    steps = redistribution_steps(layout.stored, layout.compute)
    assert steps is not None
    text = _moves(source, steps, names.axes)
    dtype = DTYPE_NAMES.get(variable.type.dtype, str(variable.type.dtype))
    return f"{text}  # {format_shape(dtype, variable.type.shape, layout.compute, names.axes)}"


def reduced(names: Names, variable: Variable, source: str) -> str:
    """The expression that turns a gradient as the operators made it into the parameter's stored layout."""
    layout = names.layout(variable.name)
    steps = redistribution_steps(layout.gradient, layout.stored)
    assert steps is not None
    text = _moves(source, steps, names.axes)
    if variable.stored_dtype != variable.type.dtype:
        text = f"{text}.to({variable.stored_dtype})"
    dtype = DTYPE_NAMES.get(variable.stored_dtype, str(variable.stored_dtype))
    return f"{text}  # {format_shape(dtype, variable.type.shape, layout.stored, names.axes)}"


def _moves(text: str, steps: Sequence[Step], axes: Sequence[str]) -> str:
    for step in steps:
        axis = f'"{axes[step.axis]}"'
        outer = f", {step.outer}" if step.outer != 1 else ""
        if step.kind == "all_reduce":
            text = f"comm.all_reduce({text}, {axis})"
        elif step.kind == "all_to_all":
            text = f"comm.all_to_all({text}, {axis}, {step.dim}, {step.outer}, {step.from_dim}, {step.from_outer})"
        else:
            text = f"comm.{step.kind}({text}, {axis}, {step.dim}{outer})"
    return text


def reduced_slots(names: Names, region: Region, call: Call) -> list[tuple[Slot, Variable]]:
    """Trainable slots whose gradient the region reduces itself."""
    pairs = [(slot, names.program.variable(name)) for slot, name in zip(region.slots, call.slots, strict=True)]
    return [(slot, v) for slot, v in pairs if slot.trainable and v.name not in names.accumulated]


def _reduce(names: Names, region: Region, call: Call) -> str:
    lines = [f"def {region.name}_reduce(comm, gradients, g, at):"]
    for slot, variable in reduced_slots(names, region, call):
        lines.append(
            f"    gradients[{state_key(region, slot, variable)}] = " + reduced(names, variable, f'g["{slot.name}"]')
        )
    return "\n".join(lines)


# -- forward and backward
# ----------------------------------------------------------------------------------------------------


def _phase(names: Names, region: Region, phase: str) -> str:
    lowered = region.lowered[phase]
    inputs = [identifier(name) for name in lowered.inputs]
    lines: list[str] = []
    if phase == "forward":
        lines.append(f"def {region.name}_forward(comm, p, {', '.join(inputs)}):".replace(", )", ")"))
    else:
        saved = list(region.lowered["forward"].saved)
        tangents = [identifier(name) for name in lowered.inputs if name not in saved]
        lines.append(f"def {region.name}_backward(comm, p, saved, {', '.join(tangents)}):".replace(", )", ")"))
        if saved:
            lines.append(f"    {parenthesized([identifier(name) for name in saved])} = saved")
    lines += _body(names, lowered)
    return "\n".join(lines + _returns(region, lowered, phase))


def parenthesized(items: Sequence[str]) -> str:
    """A tuple display: `()`, `(a,)`, `(a, b)`."""
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def _body(names: Names, lowered: LoweredFunction) -> list[str]:
    lines: list[str] = []
    origin = ""
    output = next(node for node in lowered.graph.nodes if node.op == "output")
    last_use = _last_uses(lowered, output, names.sizes)
    for node in lowered.graph.nodes:
        if node.op in ("placeholder", "output") or _is_inline(node):
            continue
        own = node.meta.get("origin", "")
        if own and own != origin:
            origin = own
            lines.append(f"    # {own}")
        lines.append(_line(node, names.axes))
        if dead := last_use.get(node):
            lines.append(f"    del {', '.join(dead)}")
    return lines


def _is_inline(node: fx.Node) -> bool:
    """Parameters read from `p`, picks of an operator with several results: written where they are used, or made."""
    return node.target is operator.getitem


def _name(node: fx.Node) -> str:
    if node.target is operator.getitem:
        key = node.args[1]
        if isinstance(key, str):
            return f'p["{key}"]'
    return identifier(node.name)


def _line(node: fx.Node, axes: Sequence[str]) -> str:
    picks = {pick_index(user): user for user in node.users if user.target is operator.getitem}
    if picks:
        targets = [identifier(picks[i].name) if i in picks else "_" for i in range(max(picks) + 1)]
        left = ", ".join(targets)
        several = _num_results(node)
        left += "," if len(targets) == 1 else ""
        if several and len(targets) < several:
            left += ", *_" if len(targets) > 1 else " *_"
        note = ", ".join(comment(picks[i], axes) for i in sorted(picks))
    else:
        left, note = identifier(node.name), comment(node, axes)
    text = f"    {left} = {statement(node, _name)}"
    return f"{text.ljust(WIDTH if len(text) < WIDTH else 0)}  # {note}" if note else text


def pick_index(node: fx.Node) -> int:
    """Which result a getitem picks."""
    index = node.args[1]
    assert isinstance(index, int)
    return index


def _num_results(node: fx.Node) -> int:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return 0
    return 1 << 16 if len(schema.returns) == 1 else len(schema.returns)


def _last_uses(lowered: LoweredFunction, output: fx.Node, sizes: Sequence[int]) -> dict[fx.Node, list[str]]:
    """node -> large values that nothing after it reads."""
    kept = set(output.all_input_nodes)
    order = {node: i for i, node in enumerate(lowered.graph.nodes)}
    found: dict[fx.Node, list[str]] = {}
    for node in lowered.graph.nodes:
        is_value = node.op in ("call_function", "call_method") and not _name(node).startswith("p[")
        if not is_value or node in kept or not node.users or local_bytes(node, sizes) < FREE_AT_BYTES:
            continue
        last = max((user for user in node.users), key=lambda user: order[user])
        if last.op != "output":
            found.setdefault(last, []).append(identifier(node.name))
    return found


def _returns(region: Region, lowered: LoweredFunction, phase: str) -> list[str]:
    output = next(node for node in lowered.graph.nodes if node.op == "output")
    values = [_name(node) for node in output.args[0]]  # type: ignore[union-attr, arg-type]
    if phase == "forward":
        results, saved = values[: lowered.num_results], values[lowered.num_results :]
        return [f"    return {parenthesized(results)}, {parenthesized(saved)}"]
    slots = region.trainable_slots
    lines = ["    g = {"] + [f'        "{s.name}": {v},' for s, v in zip(slots, values, strict=False)] + ["    }"]
    rest = values[len(slots) :]
    return [*(lines if slots else ["    g = {}"]), f"    return {', '.join([*rest, 'g'])}"]
