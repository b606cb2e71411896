"""Variables of a placement problem for parameters and their gradients: choices, gathers, reductions, memory."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from autopar.cost.estimate import OPTIMIZER_STATES
from autopar.cost.roofline import optimizer_time_s
from autopar.ir.classes import Key
from autopar.ir.graphs import placeholders
from autopar.ir.program import Program
from autopar.ir.reads import reads_in_backward
from autopar.ir.sharding import PARTIAL, REPLICATE, Shard, Sharding, num_pieces, replicated
from autopar.ir.uneven import block_shape, may_split_padded
from autopar.ir.values import Variable
from autopar.passes.codes import is_coded
from autopar.passes.heads import may_stay_whole
from autopar.passes.placement.columns import Column
from autopar.passes.placement.layouts import ParameterChoice, layouts_of, parameter_choices
from autopar.passes.placement.parts import Link, Parts, Slot
from autopar.solver.problem import AssignmentProblem, Usage
from autopar.strategies.axis import AxisStrategy


class Parameters(Parts):
    """Adds a node for every parameter, and for the gradient of each that is trained."""

    def _add_parameters(self) -> None:
        for root, members in sorted(self.known.members.items()):
            names = [key[1] for key in members if key[0] == "var"]
            if names:
                self._add_parameter(root, members, names)

    def _add_parameter(self, root: Key, members: Sequence[Key], names: list[str]) -> None:
        variables = [self.program.variable(name) for name in names]
        first = variables[0]
        uses = [key for key in members if key[0] == "slot"]
        choices, unmet = self.ways_to_keep(root)
        costs = self._keeping_seconds(first, choices, len(names), uses)
        held = self.program.held_of(len(names))
        usages = self._parameter_usages(first, choices, held, uses)
        description = f"{first.name}" + (f" (and {len(names) - 1} more)" if len(names) > 1 else "") + f" {first.type}"
        index = self._node(f"parameter:{first.name}", costs, usages, description)
        slot = Slot(choices, index, unmet=unmet)
        self.slots[root] = slot
        if first.trainable and self.program.training:
            layouts = layouts_of(first.seen, self.sizes, self._stripes(uses), partial=True)
            slot.gradient_layouts = [
                each for each in layouts if may_split_padded(first.type.shape, first.seen.shape, each, self.sizes)
            ]
            axes = [
                axis for axis, strategy in enumerate(self.strategies)
                if strategy.reduces_whole and self.sizes[axis] > 1
                and not self.of_experts.are_exchanged(strategy, uses)
            ]  # fmt: skip
            prices = {axis: self._early_reduction_price(first, axis) for axis in axes}
            early = [sum(prices[a] for a in axes if layout[a] != PARTIAL) for layout in slot.gradient_layouts]
            kept = self._gradient_usages(first, slot.gradient_layouts, held)
            slot.gradient = self._node(
                f"gradient:{first.name}", [len(names) * each for each in early], kept, f"gradient of {description}"
            )
            stored = [choice.stored for choice in choices]
            gradient = self.columns["gradient", root] = Column(slot.gradient_layouts)
            slot.link, before = len(self.links), len(self.edges)
            price = self._reduction_price(first)
            self._edge(slot.gradient, gradient, index, Column(stored), first.seen, len(names), price=price)
            slot.edge = before if len(self.edges) > before else -1

    def _reduction_price(self, variable: Variable) -> float:
        return 1.0 if variable.name in self.first_parameters else self.once_price

    def _keeping_seconds(
        self, variable: Variable, choices: Sequence[ParameterChoice], count: int, uses: Sequence[Key]
    ) -> list[float]:
        """Of gathers and of the update, for so many parameters that are kept alike."""
        reads = self._reads_again(uses)
        return [
            self._gather_seconds(variable, choice, count, reads) + count * self._update_seconds(variable, choice)
            for choice in choices
        ]

    def _reads_again(self, uses: Sequence[Key]) -> bool:
        """Whether the backward of some region reads a parameter."""
        return any(reads_in_backward(self.program.region(name), index) for _, name, index in uses)

    def at_this_price(self, slots: Mapping[Key, Slot], problem: AssignmentProblem, links: Sequence[Link]) -> None:
        """Take over the nodes and edges of the same problem at another price, but for what parameters cost."""
        self.nodes, self.edges = list(problem.nodes), list(problem.edges)
        for root, slot in slots.items():
            members = self.known.members[root]
            names = [key[1] for key in members if key[0] == "var"]
            uses, first = [key for key in members if key[0] == "slot"], self.program.variable(names[0])
            costs = np.array(self._keeping_seconds(first, slot.choices, len(names), uses), dtype=float)
            self.nodes[slot.node] = replace(self.nodes[slot.node], costs=costs)
            if slot.edge >= 0:
                link, price = links[slot.link], self._reduction_price(first)
                self.edges[slot.edge] = self.edges[slot.edge]._replace(costs=self.reduction_seconds(link, price))

    def transfers_s(self, slots: Mapping[Key, Slot], links: Sequence[Link], choice: Sequence[int]) -> float:
        """Of a choice: what gathers of parameters and reductions of gradients count in the objective."""
        found = 0.0
        for root, slot in slots.items():
            members = self.known.members[root]
            names = [key[1] for key in members if key[0] == "var"]
            uses, first = [key for key in members if key[0] == "slot"], self.program.variable(names[0])
            kept = slot.choices[choice[slot.node]]
            found += self._gather_seconds(first, kept, len(names), self._reads_again(uses))
            if slot.gradient >= 0:
                link, layout = links[slot.link], slot.gradient_layouts[choice[slot.gradient]]
                seconds = self.bucketed.seconds(link.type_, layout, kept.stored, free=True)
                found += self._reduction_price(first) * link.times * seconds
        return found

    def ways_to_keep(self, root: Key) -> tuple[list[ParameterChoice], list[frozenset[int]]]:
        """The ways to keep a class's parameters; for each, the axes whose strategy asks for more than it gives."""
        members = self.known.members[root]
        names = [key[1] for key in members if key[0] == "var"]
        uses = [key for key in members if key[0] == "slot"]
        return self._parameter_choices(self.program.variable(names[0]), uses, names)

    def _parameter_choices(
        self, variable: Variable, uses: Sequence[Key], names: list[str]
    ) -> tuple[list[ParameterChoice], list[frozenset[int]]]:
        if not variable.is_parameter:
            whole = replicated(len(self.sizes))
            return [ParameterChoice(whole, whole, whole, ("replicate",) * len(self.sizes))], [frozenset()]
        allowed = [self.of_experts.modes(strategy, uses) for strategy in self.strategies]
        choices = parameter_choices(variable, self.sizes, self._stripes(uses), allowed)
        pinned_axes = set()
        for name in names:
            for pinned in self.pins.of(name, *self.program.variable(name).aliases):
                choices = self._apply_pin(pinned, name, variable.type, choices, lambda choice: choice.stored)
                pinned_axes |= {self.mesh.axis_names.index(axis) for axis, _ in pinned.placements}
        asked: dict[int, set[ParameterChoice]] = {}
        for axis, strategy in enumerate(self.strategies):
            if axis in pinned_axes:
                continue
            kept = self._required(choices, axis, strategy, variable, uses)
            if self._is_excused(variable, axis) and all(choice.modes[axis] == "shard" for choice in kept):
                asked[axis] = set(kept)
            else:
                choices = kept
        choices = self._on_a_grid(choices, asked)
        return choices, [frozenset(axis for axis in asked if choice not in asked[axis]) for choice in choices]

    def _is_excused(self, variable: Variable, axis: int) -> bool:
        """Whether a weight matrix that an axis is to split may stay whole on it."""
        splits = self.strategies[axis].required == "shard_matrices"
        return splits and (self.excused is None or (variable.name, axis) in self.excused)

    def _on_a_grid(self, choices: list[ParameterChoice], excused: Collection[int]) -> list[ParameterChoice]:
        """Where two axes form a grid, those choices in which they split different dims. excused: axes that need not
        split it.
        """
        axes = [axis for axis, strategy in enumerate(self.strategies) if strategy.grid]
        dims = [[p.dim for a in axes if isinstance(p := c.stored[a], Shard)] for c in choices]
        least = sum(axis not in excused for axis in axes)
        kept = [c for c, own in zip(choices, dims, strict=True) if len({*own}) == len(own) >= least]
        return kept or choices

    def _required(
        self, choices: list[ParameterChoice], axis: int, strategy: AxisStrategy, variable: Variable, uses: Sequence[Key]
    ) -> list[ParameterChoice]:
        if self.of_experts.are_exchanged(strategy, uses):
            if self.of_experts.may_stay_whole(uses) and len(variable.type.shape) == 1:
                return choices  # its one dim may be another axis's, and it is small
            return [choice for choice in choices if choice.modes[axis] == "shard"] or choices
        if strategy.required in ("gather", "keep"):
            mode = strategy.required
            gathered = {_elsewhere(choice.stored, axis) for choice in choices if choice.modes[axis] == mode}
            # A bias that another axis splits has no dim left for this one: it stays whole here.
            kept = [c for c in choices if c.modes[axis] == mode or _elsewhere(c.stored, axis) not in gathered]
            return kept or choices
        if strategy.required != "shard_matrices":
            return choices
        if self._is_matrix(variable, uses) or any(is_coded(self.program, key) for key in uses):
            kept = [choice for choice in choices if choice.modes[axis] == "shard"]
            if any(self.program.region(name).module for _, name, _ in uses):
                if any(self._may_stay_whole(key) for key in uses):
                    return choices
                return kept or choices
            if any(is_vocabulary(self.program, key) for key in uses):
                # Outside the repeated blocks the vocabulary is split; a table that the axis does not divide stays
                # whole.
                kept = [choice for choice in kept if choice.stored[axis] == Shard(0)]
                return kept or [choice for choice in choices if choice.modes[axis] == "replicate"]
        return choices

    def _may_stay_whole(self, key: Key) -> bool:
        """As `heads.may_stay_whole`: a walk of the region for each, which all strategies ask for."""
        ranks = self._tensor_ranks()
        name = ("may stay whole", str(ranks), *map(str, key))
        return bool(self._fact(name, lambda: may_stay_whole(self.program, key, ranks)))

    def _is_matrix(self, variable: Variable, uses: Sequence[Key]) -> bool:
        """Whether a parameter is a weight matrix, or one of each expert in one tensor."""
        dims = len(variable.type.shape)
        return dims == 2 or (dims == 3 and bool(uses) and not self.of_experts.may_stay_whole(uses))

    def _tensor_ranks(self) -> int:
        """How many ranks share each weight matrix."""
        named = zip(self.strategies, self.sizes, strict=True)
        return math.prod(size for strategy, size in named if strategy.required == "shard_matrices")

    def _early_reduction_price(self, variable: Variable, axis: int) -> float:
        """What keeps a strategy that reduces whole gradients from summing earlier over an axis: more than any reduction
        costs.
        """
        whole = replicated(len(self.sizes))
        term = tuple(PARTIAL if a == axis else REPLICATE for a in range(len(self.sizes)))
        piece = tuple(Shard(0) if a == axis else REPLICATE for a in range(len(self.sizes)))
        ways = [whole, piece] if variable.type.shape else [whole]
        return 4 * sum(self.costs.seconds(variable.type, term, way, free=True) for way in ways)

    def _gather_seconds(self, variable: Variable, choice: ParameterChoice, count: int, reads: bool) -> float:
        """reads: whether the backward reads it."""
        if choice.is_whole_in_place:
            return 0.0
        again = self.program.training and self._gathers_again(reads, choice)
        once = self.bucketed.seconds(variable.type, choice.stored, choice.held, free=True)
        each = self.bucketed.seconds(variable.type, choice.held, choice.compute, free=True)
        waits = variable.name in self.first_parameters
        once_price, first_price = (1.0, 1.0) if waits else (self.once_price, self.each_price)
        every = each * (first_price + self.each_price * again) * self.program.microbatches
        return count * (once_price * once + every)

    def _update_seconds(self, variable: Variable, choice: ParameterChoice) -> float:
        """What the optimizer takes for its part of a parameter; one launch serves many."""
        if not (variable.trainable and self.program.training):
            return 0.0
        elements = math.prod(block_shape(variable, choice.layout, self.sizes))
        hardware = self.mesh.hardware
        seconds = optimizer_time_s(elements, elements * variable.stored_dtype.itemsize, hardware)
        return max(0.0, seconds - hardware.launch_overhead_s)

    def _gathers_again(self, reads: bool, choice: ParameterChoice) -> bool:
        """Whether the backward needs the parameter, or the strategy gathers it as the literature does."""
        axes = [axis for axis, mode in enumerate(choice.modes) if mode == "gather"]
        return reads or any(self.strategies[axis].regather == "all" for axis in axes)

    def _parameter_usages(
        self, variable: Variable, choices: Sequence[ParameterChoice], count: float, uses: Sequence[Key]
    ) -> list[Usage]:
        per_element = variable.stored_dtype.itemsize
        if variable.trainable and self.program.training:
            # Where gradients wait for other microbatches, `_gradient_usages` counts them: they become the reduced ones.
            per_element *= 1 + OPTIMIZER_STATES + (self.program.microbatches == 1)
        elements = [math.prod(block_shape(variable, c.layout, self.sizes)) for c in choices]
        stored = np.array([count * per_element * each for each in elements], dtype=float)
        usages = [Usage(0, self.timeline.length, stored)]
        casts = variable.stored_dtype != variable.type.dtype
        copies = [variable.seen.num_bytes / num_pieces(c.compute, self.sizes) for c in choices]
        held = [variable.seen.num_bytes / num_pieces(c.held, self.sizes) if "keep" in c.modes else 0.0 for c in choices]
        whole = np.array(
            [b if c.held != c.compute or (casts and c.stored == c.compute) else 0.0 for b, c in zip(copies, choices)]
        )
        trained = variable.trainable and self.program.training
        regions = sorted({name for _, name, _ in uses})
        first = 0 if self.program.microbatches > 1 else min(self.timeline.forward[name][0] for name in regions)
        usages.append(Usage(first, self.timeline.length, np.array(held) * count))
        for name in regions:
            usages.append(Usage(*self.timeline.forward[name], whole))
            if trained and name in self.timeline.backward:
                usages.append(Usage(*self.timeline.backward[name], whole + np.array(copies)))
        return [usage for usage in usages if usage.bytes.any()]

    def _gradient_usages(self, variable: Variable, layouts: Sequence[Sharding], count: float) -> list[Usage]:
        """Gradients that wait unreduced: over microbatches, or for the end of the backward."""
        waits = self.program.microbatches > 1 or any(strategy.reduces == "at_end" for strategy in self.strategies)
        if not waits:
            return []
        itemsize = (variable.stored_dtype if self.program.microbatches > 1 else variable.type.dtype).itemsize
        size = [variable.seen.num_elements * itemsize * count / num_pieces(layout, self.sizes) for layout in layouts]
        start = 0 if self.program.microbatches > 1 else max(end for _, end in self.timeline.forward.values())
        return [Usage(start, self.timeline.length, np.array(size))]


def _elsewhere(sharding: Sharding, axis: int) -> Sharding:
    """What the other axes do."""
    return (*sharding[:axis], *sharding[axis + 1 :])


def is_vocabulary(program: Program, key: Key) -> bool:
    """Whether a slot is an embedding table, or the head whose product is an output of the model."""
    region = program.region(key[1])
    holders = placeholders(region.graph, key[2] + 1)
    outputs = {ref.index for ref in program.outputs if ref.call >= 0 and program.calls[ref.call].region == region.name}
    results = next(node for node in region.graph.nodes if node.op == "output").args[0]
    returned = {results[i] for i in outputs}
    for user in holders[key[2]].users:
        name = str(user.target)
        if name.startswith("autopar.embedding"):
            return True
        after = [user, *user.users, *(n for follower in user.users for n in follower.users)]  # a bias, a cast
        if name.startswith("autopar.linear.") and any(n in returned for n in after):
            return True
    return False
