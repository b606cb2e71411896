"""What a lowered program says of itself, as plain data: operators with what they are predicted to take, collectives
with their bytes, parameters with the buckets in which they travel.

    Program (lowered) ─ views_of ─► Views

Every number is what `autopar.estimate` sums up: over all regions, calls and microbatches `OpView.seconds` and
`MoveView.seconds` are the plan's compute and collectives, gradients' accumulation and sends between stages aside.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from autopar.cost.collectives import Collective, bucket_rows, phase_collectives
from autopar.cost.operator_time import operator_work, region_seconds
from autopar.ir.nodes import format_target
from autopar.ir.program import Program
from autopar.ir.region import Bucket, Region
from autopar.ir.rings import SEND, TAKE, sends_inside
from autopar.ir.sharding import format_sharding
from autopar.ir.tensor_type import dtype_name
from autopar.ir.values import ValueRef
from autopar.planner.plan.drawn import (
    CallView,
    Kind,
    MoveView,
    OpView,
    PortView,
    RegionView,
    SlotView,
    ValueView,
    Views,
)
from autopar.views.experts import experts_of
from autopar.views.origins import with_origins

HIDDEN = ("index", "positions", "starts", SEND)
"""Methods of `comm` that say where a rank's elements lie."""

_ORIGIN = re.compile(r"(.*?)\s*(?:\(([^()]*)\))?\Z", re.DOTALL)
_TWO = 2
_HEAVY = ("matmul", "attention", "conv")


def views_of(program: Program) -> Views:
    """Regions and calls of a lowered program. Spans and memory are left empty."""
    shared = _shared_moves(program)
    stage_of = {}
    for stage, each in enumerate(program.pipeline.stages if program.pipeline is not None else ()):
        stage_of.update({number: stage for number in each.calls if number not in each.recomputed})
    calls = tuple(
        CallView(call.region, call.path, stage_of.get(number, 0), tuple(map(_ref_text, call.arguments)))
        for number, call in enumerate(program.calls)
    )
    outputs = zip(program.output_names, map(_ref_text, program.outputs), strict=True)
    return Views(
        tuple(_region(program, region, shared.get(region.name, [])) for region in program.regions),
        calls,
        tuple(outputs),
        forward_flops=sum(_forward_flops(region) * program.num_calls(region.name) for region in program.regions),
    )


def with_places(views: Views, places: Mapping[str, Mapping[str, tuple[str, int]]]) -> Views:
    """The views with the line of the generated program that makes each value (`emit_with_places`)."""

    def placed(region: RegionView) -> RegionView:
        known = {phase: places.get(f"{region.name}_{phase}", {}) for phase in ("forward", "backward")}
        ops = (replace(op, line=known[op.phase].get(op.name.removesuffix("@backward"))) for op in region.ops)
        return replace(region, ops=tuple(ops))

    return replace(views, regions=tuple(map(placed, views.regions)))


def _forward_flops(region: Region) -> float:
    """Of what counts as the model's own work, on all ranks together."""
    rules = (region.ops[name][1] for name in region.ops if name in region.forward_nodes)
    return sum(rule.flops for rule in rules if rule.op_class in _HEAVY)


def _ref_text(ref: ValueRef) -> str:
    return f"in:{ref.name}" if ref.call < 0 else f"{ref.call}.{ref.index}"


def _region(program: Program, region: Region, shared: Sequence[MoveView]) -> RegionView:
    seconds = region_seconds(region, program.on_mesh)
    given = [f"in:{name}" for name in region.lowered["forward"].inputs]
    forward = _Phase(program, region, "forward", seconds, given)
    results = forward.results
    ops = forward.ops
    gradients: tuple[tuple[str, str], ...] = ()
    if "backward" in region.lowered:
        count = region.lowered["forward"].num_results
        given = [each if each.startswith(("in:", "p:")) else f"saved:{each}" for each in results[count:]]
        given += [f"grad:{results[output]}" for output in region.tangents]
        backward = _Phase(program, region, "backward", seconds, given)
        # What is moved in both phases may have one name.
        backward.rename({op.name: f"{op.name}@backward" for op in ops})
        ops = [*ops, *with_origins(ops, backward.ops, region.module)]
        gradients = tuple(zip(_differentiated(region), backward.results, strict=True))
    inputs = tuple(
        PortView(port.name, forward.value_of(f"in:{port.name}"), port.differentiable) for port in region.inputs
    )
    outputs = tuple(
        PortView(name, forward.value_of(name), output in region.tangents)
        for output, name in enumerate(results[: len(region.outputs)])
    )
    return RegionView(
        region.name,
        region.module,
        program.num_calls(region.name),
        inputs,
        outputs,
        tuple(_slots(program, region)),
        (*_moves(program, region), *shared),
        tuple(ops),
        gradients,
        experts_of(program, region, seconds),
    )


def _differentiated(region: Region) -> list[str]:
    """What the backward returns gradients of, in order: trainable slots, then differentiable inputs."""
    return [f"p:{slot.name}" for slot in region.trainable_slots] + [
        f"in:{port.name}" for port in region.differentiable_inputs
    ]


class _Phase:
    """One lowered graph, read in order. given: references of its inputs. ops: its lines. results: the references of all
    that it returns.
    """

    def __init__(
        self, program: Program, region: Region, phase: str, seconds: Mapping[str, float], given: Sequence[str]
    ) -> None:
        self.region, self.phase, self.mesh, self.seconds = region, phase, program.on_mesh, seconds
        self.rows = phase_collectives(program, region, phase, 1)
        self.ref: dict[fx.Node, str] = {}
        self.ops: list[OpView] = []
        self.results: list[str] = []
        graph = region.lowered[phase].graph
        holders = [node for node in graph.nodes if node.op == "placeholder"]
        self.ref.update(zip(holders[2:], given, strict=True))  # after `comm` and `p`
        for node in graph.nodes:
            if node.op in ("call_function", "call_method"):
                self._node(node)
            elif node.op == "output":
                self.results = [self.ref[each] for each in node.args[0]]

    def value_of(self, ref: str) -> ValueView:
        """How a value of the graph lies."""
        found = next(self._value(node) for node, each in self.ref.items() if each == ref)
        assert found is not None
        return found

    def rename(self, names: Mapping[str, str]) -> None:
        """Give ops other names."""
        self.ops = [
            replace(op, name=names.get(op.name, op.name), reads=tuple(names.get(each, each) for each in op.reads))
            for op in self.ops
        ]
        self.results = [names.get(each, each) for each in self.results]

    def _node(self, node: fx.Node) -> None:
        holder = node.args[0] if node.args else None
        if node.op == "call_method" and node.target in HIDDEN:
            return
        if node.target == TAKE or ("holds" in node.meta and node.target is operator.getitem):
            self.ref[node] = self.ref[node.all_input_nodes[-1]]  # the exchange's
            return
        if node.target is operator.getitem and isinstance(holder, fx.Node) and holder.op == "placeholder":
            self.ref[node] = f"p:{node.args[1]}"
            return
        name = node.meta.get("operator", "")
        reads = tuple(dict.fromkeys(self.ref[each] for each in node.all_input_nodes if each in self.ref))
        if not name and not reads:
            return  # arithmetic of where elements lie
        self.ref[node] = node.name
        module, source = self._origin(node)
        op = OpView(node.name, _short(node), "view", self.phase, module, source, reads, self._value(node))
        if sends_inside(node):
            op = replace(self._computed(op, name), compute_seconds=self.seconds[name])
            op = self._moved(op, next(self.rows))
        elif node.op == "call_method" and node.target != "slice":
            op = self._moved(op, next(self.rows))
        elif name:
            op = self._computed(op, name)
        self.ops.append(op)

    def _computed(self, op: OpView, name: str) -> OpView:
        call, rule = self.region.ops[name]
        if rule.alias:
            return replace(op, seconds=self.seconds[name], op_class="view")
        work = operator_work(call, rule, self.region.strategies[name], self.mesh)
        kind: Kind = "compute"
        return replace(
            op, kind=kind, seconds=self.seconds[name], op_class=work.op_class, flops=work.flops,
            moved_bytes=work.moved_bytes,
        )  # fmt: skip

    def _moved(self, op: OpView, row: Collective) -> OpView:
        return replace(
            op, kind="collective", axis=row.axis, bytes_sent=row.bytes_sent, seconds=row.seconds, why=row.why
        )

    def _origin(self, node: fx.Node) -> tuple[str, str]:
        found = _ORIGIN.match(str(node.meta.get("origin") or ""))
        assert found is not None
        return found[1], found[2] or ""

    def _value(self, node: fx.Node) -> ValueView | None:
        if "type" not in node.meta:
            return None
        type_ = node.meta["type"]
        return ValueView(
            dtype_name(type_.dtype), type_.shape, format_sharding(node.meta["sharding"], self.mesh.axis_names)
        )


def _short(node: fx.Node) -> str:
    """`aten.add.Tensor` to `add`."""
    parts = format_target(node).split(".")
    return parts[1] if len(parts) > 1 else parts[0]


# -- parameters
# ---------------------------------------------------------------------------------------------------------------


def _slots(program: Program, region: Region) -> Iterator[SlotView]:
    _, call = next(program.calls_of(region.name))
    for slot, name in zip(region.slots, call.slots, strict=True):
        variable, layout = program.variable(name), program.placed.parameters[name]
        stored = format_sharding(layout.stored, program.on_mesh.axis_names)
        used = format_sharding(layout.compute, program.on_mesh.axis_names)
        yield SlotView(
            slot.name,
            name,
            slot.is_parameter,
            slot.trainable,
            ValueView(dtype_name(variable.stored_dtype), variable.type.shape, stored),
            ValueView(dtype_name(variable.seen.dtype), variable.seen.shape, used),
        )


def _moves(program: Program, region: Region) -> Iterator[MoveView]:
    _, call = next(program.calls_of(region.name))
    for which, buckets in region.transfers.items():
        for bucket in buckets:
            yield from _bucket(program, region, call.slots, which, bucket)


def _bucket(
    program: Program, region: Region, names: Sequence[str], which: str, bucket: Bucket, tensor: str = ""
) -> Iterator[MoveView]:
    """A row for each step of a bucket that sends anything; its numbers are of one use. tensor: of what is shared."""
    slots = [names.index(tensor)] if tensor else [move.slot for move in bucket.moves]
    # With two uses, what is kept for the step is sent once.
    for row in bucket_rows(program, which, bucket, [names[slot] for slot in slots], 1, "", _TWO):
        yield MoveView(
            which,
            row.kind,
            row.axis,
            tuple(region.slots[slot].name for slot in slots),
            row.bytes_sent / row.times,
            row.seconds / row.times,
            once=row.times == 1,
            shared=bool(tensor),
        )


def _shared_moves(program: Program) -> dict[str, list[MoveView]]:
    """Collectives of parameters that several calls use, by the region of the call that starts them: the first one in
    the forward, the last one in the backward; a gradient is whole when the first call is through backward.
    """
    found: dict[str, list[MoveView]] = {}
    for shared in program.shared:
        users = [call for call in program.calls if shared.name in call.slots]
        ways: list[tuple[str, Bucket | None, Any]] = [("gather", shared.gather, users[0])]
        if program.training:
            ways += [("gather_for_backward", shared.gather, users[-1]), ("reduce", shared.reduce, users[0])]
        for which, bucket, call in ways:
            if bucket is not None:
                region = program.region(call.region)
                rows = _bucket(program, region, call.slots, which, bucket, shared.name)
                found.setdefault(region.name, []).extend(rows)
    return found
