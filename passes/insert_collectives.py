"""insert_collectives: from global tensors with shardings to local tensors with collectives.

Requires: phase `placed`.
Ensures: phase `lowered`; `Region.lowered` holds a forward and a backward on local shapes; where a consumer wants
    another sharding than the producer made, the moves between them are calls on `comm`; nothing is moved twice in one
    phase. Where a pipeline wants them, `backward_input` and `backward_weight` beside them, the backward in two halves
    (autopar/passes/halves.py): together they move what the whole one moves, once.

    linear: +tp  →  add wants R      h = linear(x, w)        # f32[8, 64] +tp
                                     h_1 = comm.all_reduce(h, "tp")   # f32[8, 64]
"""

from __future__ import annotations

import operator
from dataclasses import replace

from torch import fx

from autopar.ir.classes import Key, port_shardings, result_keys
from autopar.ir.halves import INPUT_HALF, WEIGHT_HALF, operators_of_half
from autopar.ir.program import Program
from autopar.ir.region import LoweredFunction, Region
from autopar.passes.halves import kept_for_weights
from autopar.passes.lowering import Form, Layouts, PhaseBuilder, canonical


def insert_collectives(program: Program, *, halves: bool = False) -> Program:
    """Lower every region's forward and backward to local shapes. halves: the two halves of the backward as well."""
    regions = {}
    for region in program.regions:
        regions[region.name] = replace(region, lowered=_Lowering(program, region).run(halves))
    return program.with_regions(regions, phase="lowered")


class _Lowering:
    """All phases of one region."""

    def __init__(self, program: Program, region: Region) -> None:
        self.program, self.region = program, region
        self.layouts = Layouts(region, program.on_mesh, port_shardings(program, region))
        output = next(node for node in region.graph.nodes if node.op == "output")
        self.results: list[tuple[fx.Node, Key]] = list(zip(output.args[0], result_keys(region), strict=False))
        nodes = [n for n in region.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
        self.forward = [node for node in nodes if node.name in region.forward_nodes]
        self.backward = [node for node in nodes if node.name not in region.forward_nodes]

    def run(self, halves: bool) -> dict[str, LoweredFunction]:
        cut = len(self.region.outputs)
        lowered = {"forward": self._forward(self.results[:cut])}
        if self.program.training and len(self.results) > cut:
            phase = PhaseBuilder(self.layouts, "backward", self._given())
            phase.lower(self.backward)
            lowered["backward"] = phase.finish(phase.results(self.results[cut:]))
            if halves:
                lowered |= self._halves(self.results[cut:])
        return lowered

    def _forward(self, results: list[tuple[fx.Node, Key]]) -> LoweredFunction:
        layouts = self.layouts
        inputs = [node for node in layouts.holders if layouts.keys[node][0] in ("in", "seed")]
        phase = PhaseBuilder(layouts, "forward", [((node, layouts.sharding_of(node)), node.name) for node in inputs])
        phase.lower(self.forward)
        returned = phase.results(results)
        for node in self._saved():
            layouts.saved_as[node] = layouts.relay_of(node) or layouts.sharding_of(node)
        kept = [phase.value(node, sharding) for node, sharding in layouts.saved_as.items()]
        return phase.finish(returned, kept, [node.name for node in layouts.saved_as])

    def _given(self) -> list[tuple[Form, str]]:
        """What a backward gets: what the forward saved, and the gradients of the region's outputs."""
        layouts = self.layouts
        tangents = [(node, layouts.sharding_of(node)) for node in layouts.holders if layouts.keys[node][0] == "gout"]
        return [(form, form[0].name) for form in [*layouts.saved_as.items(), *tangents]]

    def _halves(self, results: list[tuple[fx.Node, Key]]) -> dict[str, LoweredFunction]:
        of_inputs, of_weights = operators_of_half(self.region, "input"), operators_of_half(self.region, "weight")
        phase = PhaseBuilder(self.layouts, INPUT_HALF, self._given())
        phase.lower(of_inputs)
        returned = phase.results((node, key) for node, key in results if key[0] == "gin")
        wanted = [(node, self.layouts.wanted(key)) for node, key in results if key[0] == "slot"]
        crossing = kept_for_weights(phase, returned, of_weights, wanted)
        kept = [phase.base(node, sharding) for node, sharding in crossing.kept]
        names = [value.name for value in kept]
        first = phase.finish(returned, kept, names)
        last = PhaseBuilder(self.layouts, WEIGHT_HALF, zip(crossing.kept, names, strict=True))
        last.lower(crossing.operators)
        return {INPUT_HALF: first, WEIGHT_HALF: last.finish([last.value(node, sharding) for node, sharding in wanted])}

    def _saved(self) -> list[fx.Node]:
        """What the backward reads and the forward made or was given, slots apart, in graph order."""
        read: set[fx.Node] = set()
        for node in self.region.graph.nodes:
            if node.op == "call_function" and not self.layouts.is_forward(node):
                read.update(node.all_input_nodes)
        if self.program.training:
            read.update(value for value, _ in self.results[len(self.region.outputs) :])
        made = {canonical(node) for node in read if self._crosses(node)}
        return [node for node in self.region.graph.nodes if node in made]

    def _crosses(self, node: fx.Node) -> bool:
        if node.op == "placeholder":
            return self.layouts.keys[node][0] in ("in", "seed")
        return self.layouts.is_forward(node)
