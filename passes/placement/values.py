"""Variables of a placement problem for what flows between calls: one sharding for a class of values or gradients."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from autopar.base.errors import AutoparError
from autopar.ir.classes import Key
from autopar.ir.sharding import Replicate, Shard, Sharding, num_pieces
from autopar.ir.tensor_type import TensorType
from autopar.ir.uneven import may_split_padded
from autopar.ir.values import ValueRef
from autopar.passes.placement.context import longer
from autopar.passes.placement.layouts import layouts_of
from autopar.passes.placement.parts import Parts
from autopar.passes.placement.pieces import lengths_in_pieces
from autopar.solver.problem import Usage
from autopar.strategies.context import SequenceDoesNotDivide, splits_sequence


class ValueClasses(Parts):
    """Adds a node for every class of values between calls."""

    def _add_classes(self) -> None:
        states = self.program.states
        in_pieces = lengths_in_pieces(self.program, self.known)
        for root, members in sorted(self.known.members.items()):
            ports = [key for key in members if key[0] in ("in", "out", "gin", "gout")]
            if not ports:
                continue
            type_ = self._port_type(ports[0])[1]
            layouts = layouts_of(
                type_, self.sizes, self._stripes(ports), zigzags=self._zigzags(ports), again=self._again()
            )
            layouts = self._allowed_layouts(members, type_, layouts, states)
            if root in in_pieces:
                layouts = self._along_the_cache(in_pieces[root], layouts)
            usages = self._class_usages(ports, type_, layouts)
            name = f"value:{':'.join(map(str, root))}"
            index = self._node(name, [0.0] * len(layouts), usages, self._describe_class(members, type_))
            self.classes[root] = (index, layouts)

    def layouts_within(self, root: Key, layouts: list[Sharding]) -> list[Sharding]:
        """Those of a class's layouts that strategies allow."""
        members = self.known.members[root]
        port = next(key for key in members if key[0] in ("in", "out", "gin", "gout"))
        return self._allowed_layouts(members, self._port_type(port)[1], layouts, self.program.states)

    def _again(self) -> list[int]:
        """The axes that may cut again what earlier ones have cut, as `annotate` has them do within operators."""
        is_zigzag = [name in self.program.zigzag for name in self.mesh.axis_names]
        return [axis for axis, each in enumerate(self.strategies) if is_zigzag[axis] or splits_sequence(each)]

    def _describe_class(self, members: Sequence[Key], type_: TensorType) -> str:
        inputs = [name for kind, name, _ in members if kind == "program"]
        if inputs:
            return f"input {inputs[0]} {type_}"
        kind, name, index = members[0]
        prefix = "gradient of " if kind in ("gin", "gout") else ""
        port = self._port_type(members[0])[0]
        ports = port.inputs if kind in ("in", "gin") else port.outputs
        place = self.program.region(name).module or "around the blocks"
        return f"{prefix}{ports[index].name} {type_} ({place})"

    def _allowed_layouts(
        self, members: Sequence[Key], type_: TensorType, layouts: list[Sharding], states: Collection[str]
    ) -> list[Sharding]:
        inputs = [name for kind, name, _ in members if kind == "program"]
        names = inputs + self._output_names(members)
        layouts = self._as_users_see(members, layouts)  # first, so that what a strategy prefers is among them
        is_state = all(name in states for name in inputs)
        for axis, strategy in enumerate(self.strategies):
            if inputs and strategy.inputs == "sequence":
                layouts = [layout for layout in layouts if not isinstance(p := layout[axis], Shard) or p.dim]
            if strategy.hidden == "split" and self.sizes[axis] > 1 and self._is_hidden(members, type_):
                layouts = self._along_the_sequence(members, type_, layouts, axis)
            elif (
                inputs and strategy.inputs == "replicate" and not is_state
            ):  # what blocks read as it comes lies as they do
                layouts = [layout for layout in layouts if isinstance(layout[axis], Replicate)]
            if inputs and strategy.inputs == "batch" and self.sizes[axis] > 1:
                layouts = self._along_the_batch(inputs[0], type_, layouts, axis)
        for name in names:
            for pinned in self.pins.of(name):
                layouts = self._apply_pin(pinned, name, type_, layouts, lambda layout: layout)
        return layouts

    def _as_users_see(self, members: Sequence[Key], layouts: list[Sharding]) -> list[Sharding]:
        """Layouts in which a result may leave the program: in pieces that DTensor knows, also where a dim has padding,
        which are never zigzag.
        """
        for ref in self.program.outputs:
            port = self.program.port(ref)
            key = ("program", ref.name, 0) if ref.call < 0 else ("out", self._region_of(ref), ref.index)
            if key in members:
                layouts = [each for each in layouts if not any(isinstance(p, Shard) and p.zigzag for p in each)]
            if ref.call >= 0 and port.logical and key in members:
                shape = port.type.shape
                layouts = [each for each in layouts if may_split_padded(port.logical, shape, each, self.sizes)]
        return layouts

    def _region_of(self, ref: ValueRef) -> str:
        return self.program.calls[ref.call].region

    def _is_hidden(self, members: Sequence[Key], type_: TensorType) -> bool:
        """Whether a class, or the gradient of one, flows between repeated blocks."""
        repeated = any(kind in ("out", "gout") and self.program.region(name).module for kind, name, _ in members)
        return repeated and type_.is_float and len(type_.shape) > 2

    def _along_the_sequence(
        self, members: Sequence[Key], type_: TensorType, layouts: list[Sharding], axis: int
    ) -> list[Sharding]:
        """Layouts that split a dim which is neither the batch nor the last; zigzag where the axis may and that serves
        an operator. Of a strategy that says what attention does, the solver decides.
        """
        inner = range(1, len(type_.shape) - 1)
        split = [each for each in layouts if isinstance(p := each[axis], Shard) and p.dim in inner]
        zigzag = [each for each in split if isinstance(p := each[axis], Shard) and p.zigzag]
        plain = [each for each in split if isinstance(p := each[axis], Shard) and p.outer == 1]
        kept = [*zigzag, *plain] if splits_sequence(self.strategies[axis]) else zigzag or plain
        if kept:
            return kept
        name, size = self.mesh.axis_names[axis], self.sizes[axis]
        raise SequenceDoesNotDivide(
            f"the sequence cannot split over {name}={size}",
            where=self._describe_class(members, type_),
            values=f"no dim between the batch and the last of {type_} is a multiple of {size}",
            remedy=self._shorter_remedy(type_, axis),
        )

    def _along_the_cache(self, dim: int, layouts: list[Sharding]) -> list[Sharding]:
        """Layouts of a cache in pieces along its length, on the axes that share it. Pins may say otherwise, and are
        told so by what reads it.
        """
        axes = [axis for axis, each in enumerate(self.strategies) if each.attention == "keys" and self.sizes[axis] > 1]
        return [each for each in layouts if all(each[axis] == Shard(dim) for axis in axes)] or layouts

    def _along_the_batch(self, name: str, type_: TensorType, layouts: list[Sharding], axis: int) -> list[Sharding]:
        """Layouts of an input that split its rows. One whose first dim is something else (position ids of three kinds,
        weights of classes) is split along the dim that has as many rows as an input that divides, or stays whole.
        """
        if self._is_taken_whole(name, axis):
            return [layout for layout in layouts if isinstance(layout[axis], Replicate)]
        batched = [layout for layout in layouts if layout[axis] == Shard(0)]
        if batched or not type_.shape:
            return batched or layouts
        shapes = [port.type.shape for port in self.program.inputs]
        rows = {shape[0] for shape in shapes if shape and shape[0] and not shape[0] % self._ways_of_the_batch()}
        if not rows:
            if not self._may_be_whole(name, axis):
                raise self._batch_error(name, type_, axis)
            return [layout for layout in layouts if isinstance(layout[axis], Replicate)]
        dims = [dim for dim, size in enumerate(type_.shape) if size in rows]
        along = [layout for layout in layouts if any(layout[axis] == Shard(dim) for dim in dims)]
        return along or [layout for layout in layouts if isinstance(layout[axis], Replicate)]

    def _may_be_whole(self, name: str, axis: int) -> bool:
        """Whether an input's rows, which an axis does not divide, are taken whole: of what only infers (one prompt on
        many ranks), and where a pin says so.
        """
        pinned = dict(pair for pin in self.pins.of(name) for pair in pin.placements)
        return not self.program.training or isinstance(pinned.get(self.mesh.axis_names[axis]), Replicate)

    def _is_taken_whole(self, name: str, axis: int) -> bool:
        """Whether a batch is whole on an axis because not all of its inputs have rows that it divides."""
        name_of_axis = self.mesh.axis_names[axis]
        return any(
            pin.taken and isinstance(dict(pin.placements).get(name_of_axis), Replicate) for pin in self.pins.of(name)
        )

    def _ways_of_the_batch(self) -> int:
        """In how many pieces strategies cut it."""
        return math.prod(size for s, size in zip(self.strategies, self.sizes, strict=True) if s.inputs == "batch")

    def _shorter_remedy(self, type_: TensorType, axis: int) -> str:
        if not splits_sequence(self.strategies[axis]):
            size = self.sizes[axis]
            return f"use a sequence length that is a multiple of {size}, or strategy tensor, which keeps it whole"
        length = longer(max(type_.shape[1:-1]), self.strategies, self.mesh)
        shorter = length - longer(1, self.strategies, self.mesh)
        cut = f", or cut it to {shorter}" if shorter else ""
        return f"pad the sequence to {length} tokens (labels of padding: -100){cut}"

    def _output_names(self, members: Sequence[Key]) -> list[str]:
        found = []
        for name, ref in zip(self.program.output_names, self.program.outputs, strict=True):
            if ref.call >= 0 and ("out", self.program.calls[ref.call].region, ref.index) in members:
                found.append(name)
        return found

    def _batch_error(self, name: str, type_: TensorType, axis: int) -> AutoparError:
        axes = [a for a, s in enumerate(self.strategies) if s.inputs == "batch" and self.sizes[a] > 1]
        ways = self._ways_of_the_batch()
        label = " × ".join(f"{self.mesh.axis_names[a]}={self.sizes[a]}" for a in axes)
        return AutoparError(
            f"{name}: a batch of {type_.shape[0]} cannot split over {label}",
            where=f"input {name} {type_}, strategy {self.strategies[axis].name}",
            values=f"{type_.shape[0]} is not a multiple of {ways}",
            remedy=f"use a global batch that is a multiple of {ways}, or smaller axes",
        )

    def _class_usages(self, ports: Sequence[Key], type_: TensorType, layouts: Sequence[Sharding]) -> list[Usage]:
        """Inputs that the backward reads stay alive once per distinct value; results belong to the operators that make
        them.
        """
        size = np.array([type_.num_bytes / num_pieces(layout, self.sizes) for layout in layouts])
        usages = []
        for kind, name, index in ports:
            region = self.program.region(name)
            if kind != "in":
                continue
            users = self._users_through_views(self.holders_of(region)[len(region.slots) + index])
            saved = any(u.op == "call_function" and u.name not in region.forward_nodes for u in users)
            if saved and name in self.timeline.backward:
                values = {call.arguments[index] for _, call in self.program.calls_of(name)}
                each = self.program.saved_copies(name) / self.program.num_calls(name)
                copies = max(len(values) * each, self.program.share.in_flight if self.program.share else 0)
                usages.append(Usage(self.timeline.forward[name][0], self.timeline.backward[name][1], size * copies))
        return usages
