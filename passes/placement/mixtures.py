"""What strategies ask of the experts of mixtures: some experts a rank, to which tokens may be sent, or a part of each
expert's width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from autopar.base.errors import AutoparError
from autopar.cost.exchanges import exchange_axis
from autopar.ir.choices import Choice
from autopar.ir.classes import Key, value_name
from autopar.ir.graphs import operands_of, placeholders
from autopar.ir.op_call import name_of
from autopar.ir.program import Program
from autopar.ir.region import NodeStrategy, Region
from autopar.machine.mesh import Mesh
from autopar.passes.placement.gathers import WHOLE
from autopar.strategies.axis import AxisStrategy, ParameterMode

_FACTORS = {"whole": "e", "widths": "f"}
_SOME = ("whole", "exchange")
"""What strategies ask by which each rank has some experts."""

_LAID: frozenset[ParameterMode] = frozenset({"shard", "replicate"})
"""What an axis may do to parameters that are laid together for experts: whole where none of their dims divides."""
_aten = torch.ops.aten
_LAYING = (
    _aten.stack.default, _aten.cat.default, _aten.view.default, _aten.reshape.default, _aten._unsafe_view.default,
    _aten.permute.default, _aten.transpose.int, _aten.t.default, _aten.unsqueeze.default, _aten.squeeze.dim,
    _aten.clone.default, _aten.alias.default, _aten._to_copy.default, _aten.to.dtype,
)  # fmt: skip
"""What lays parameters together for experts, and leaves what they say."""


def is_experts(node: fx.Node) -> bool:
    """Whether a node is a layer of experts, or its gradient."""
    return name_of(node.target).startswith("autopar.experts")


def has_experts(program: Program) -> bool:
    """Whether the program has layers of experts."""
    return any(is_experts(node) for region in program.regions for node in region.graph.nodes)


def allowed(region: Region, node: fx.Node, strategies: Sequence[AxisStrategy], mesh: Mesh) -> list[int] | None:
    """Which of the node's options do with each axis what its strategy asks; None where all do. Widths that an axis does
    not divide are left to the solver. An exchange is asked for, or left to the solver.

    Raises:
        AutoparError: an axis does not divide the experts that it is to split.
    """
    if not is_experts(node):
        return None
    options: Sequence[NodeStrategy] = region.options[node.name].strategies
    kept = [i for i, option in enumerate(options) if not _is_unasked_exchange(option, strategies)]
    for axis, each in enumerate(strategies):
        if each.experts == "free" or mesh.sizes[axis] == 1:
            continue
        found = [i for i in kept if _does(options[i].choices[axis], each.experts)]
        if not found and each.experts in _SOME:
            raise _cannot(region, node, each, axis, mesh)
        kept = found or kept
    return kept if len(kept) < len(options) else None


def _does(choice: Choice, asked: str) -> bool:
    if asked == "exchange":
        return choice.kind == "exchange"
    return choice.kind == "factor" and choice.factor == _FACTORS[asked]


def _is_unasked_exchange(option: NodeStrategy, strategies: Sequence[AxisStrategy]) -> bool:
    axis = exchange_axis(option.choices)
    if axis is None:
        return False
    strategy = strategies[axis]
    return strategy.experts != "exchange" and not (strategy.experts == "free" and strategy.leaves_storage)


class OfExperts:
    """What of a program's parameters experts are given, as they are or laid together: stacked, viewed, turned. Such a
    value, and its gradient, may go from pieces of every expert to some experts whole, over an axis of which each rank
    has some experts: those that are modules of their own are stored so.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._found: dict[str, tuple[frozenset[fx.Node], frozenset[str]]] = {}

    def are_exchanged(self, strategy: AxisStrategy, uses: Sequence[Key]) -> bool:
        """Whether a parameter, of which these are the slots, is of experts that an axis of this strategy exchanges."""
        return strategy.experts == "exchange" and any(self._is_read(name, at) for _, name, at in uses)

    def modes(self, strategy: AxisStrategy, uses: Sequence[Key]) -> frozenset[ParameterMode]:
        """What an axis may do to a parameter, of which these are the slots."""
        if not self.are_exchanged(strategy, uses):
            return strategy.parameters
        return _LAID if self.may_stay_whole(uses) else frozenset({"shard"})

    def may_stay_whole(self, uses: Sequence[Key]) -> bool:
        """Whether a parameter of experts is laid together with others, so that it need not lie by experts."""
        return not all(self._is_direct(name, at) for _, name, at in uses)

    def are_moved(self, region: Region, name: str) -> bool:
        """Whether a value is what experts are given of parameters, or a gradient of that."""
        return name in self._of(region)[1]

    def _is_read(self, name: str, slot: int) -> bool:
        region = self._program.region(name)
        return _holder(region, slot) in self._of(region)[0]

    def _is_direct(self, name: str, slot: int) -> bool:
        holder = _holder(self._program.region(name), slot)
        return any(is_experts(user) and holder in operands_of(user)[3:] for user in holder.users)

    def _of(self, region: Region) -> tuple[frozenset[fx.Node], frozenset[str]]:
        if region.name not in self._found:
            self._found[region.name] = _laid(region)
        return self._found[region.name]


def _holder(region: Region, slot: int) -> fx.Node:
    return placeholders(region.graph, slot + 1)[slot]


def _laid(region: Region) -> tuple[frozenset[fx.Node], frozenset[str]]:
    """The parameters that experts are given, and what is made of them for that, or of their gradients."""
    slots = frozenset(placeholders(region.graph, len(region.slots)))
    holders, values = set[fx.Node](), set[fx.Node]()
    for node in filter(is_experts, region.graph.nodes):
        is_grad = name_of(node.target).startswith("autopar.experts_grad")
        for place, operand in enumerate(operands_of(node)[4 if is_grad else 3 :]):
            made = _made_of(operand)
            if not made & slots or any(each.op == "placeholder" and each not in slots for each in made):
                continue
            if all(each in slots or each.target in _LAYING for each in made):
                holders |= made & slots
            values |= made - slots
            if is_grad and made - slots:
                values |= _made_with([user for user in node.users if user.args[1] == 2 + place])
    return frozenset(holders), frozenset(map(value_name, values))


def _made_of(node: fx.Node) -> set[fx.Node]:
    """A node, and all that it is made of."""
    found, waiting = {node}, [node]
    while waiting:
        more = [each for each in waiting.pop().all_input_nodes if each not in found]
        found.update(more)
        waiting += more
    return found


def _made_with(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Nodes, and all that is made of them."""
    found, waiting = set(nodes), list(nodes)
    while waiting:
        more = [each for each in waiting.pop().users if each not in found and each.op == "call_function"]
        found.update(more)
        waiting += more
    return found


def _cannot(region: Region, node: fx.Node, strategy: AxisStrategy, axis: int, mesh: Mesh) -> AutoparError:
    _, rule = region.ops[node.name]
    name, size = mesh.axis_names[axis], mesh.sizes[axis]
    if rule.sizes["e"] % size == 0:
        return AutoparError(
            f"{strategy.name}: tokens that are sent to their experts have to be split over {name}={size}, which does "
            "not divide these",
            where=region.origins.get(node.name, "") or region.module,
            values=f"mesh: {mesh}",
            remedy=f"a number of rows that {size} divides; compile, and plans for generate(), take any",
        )
    return AutoparError(
        f"{strategy.name}: {rule.sizes['e']} experts do not divide over {name}={size}",
        where=region.origins.get(node.name, "") or region.module,
        values=f"mesh: {mesh}",
        remedy=f"give {name} a size that divides {rule.sizes['e']}, or strategy tensor, which splits experts' widths",
    )


def notes_of_whole_experts(program: Program, strategies: Sequence[AxisStrategy]) -> tuple[str, ...]:
    """What the user is told of strategies that give each rank some experts, where the model has none, or none that is
    an operator: the axis does what they say of all else.
    """
    axes = zip(program.on_mesh.axes, strategies, strict=True)
    asked = [(axis, each) for (axis, size), each in axes if each.experts in _SOME and size > 1]
    if not asked or has_experts(program):
        return ()
    return tuple(
        f"{each.name} finds no experts that are recognized (layers as transformers has them, ALL_EXPERTS_FUNCTIONS): "
        f"what the model has of them {WHOLE} of {axis}, "
        + ("for its rows of the batch" if each.experts == "exchange" else "but for what tensor would split")
        for axis, each in asked
    )
