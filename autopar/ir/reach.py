"""Which parameters the gradient of which output comes to, as autograd would say: of the graphs of a program.

A head that the loss does not go through has no gradient in eager (`grad is None`), and an optimizer leaves it alone;
a gradient of zeros would have its weights decay, and its averages with them.
"""

from __future__ import annotations

from torch import fx

from autopar.ir.program import Program
from autopar.ir.region import Region
from autopar.ir.values import ValueRef, gradient_key


def reached_by(program: Program) -> dict[str, frozenset[int]]:
    """The places of the outputs whose gradients come to a parameter, by its canonical name, or to an input whose
    gradient is wanted, by its `gradient_key`; of a program that is differentiated. Those to which none comes are left
    out.
    """
    if not program.training:
        return {}
    canonical = {name: v.name for v in program.variables for name in (v.name, *v.aliases)}
    through = {region.name: _through(region) for region in program.regions}
    due: dict[ValueRef, frozenset[int]] = {}
    for place, ref in enumerate(program.outputs):
        if ref in program.roots:
            due[ref] = due.get(ref, frozenset()) | {place}
    found: dict[str, frozenset[int]] = {}
    for index in reversed(range(len(program.calls))):
        call, region = program.calls[index], program.region(program.calls[index].region)
        tangents = [due.get(ValueRef(index, place), frozenset()) for place in region.tangents]
        places = [
            frozenset().union(*(own for bit, own in enumerate(tangents) if mask >> bit & 1))
            for mask in through[region.name]
        ]
        trainable = [name for name, slot in zip(call.slots, region.slots, strict=True) if slot.trainable]
        into = [ref for ref, port in zip(call.arguments, region.inputs, strict=True) if port.differentiable]
        for name, own in zip(trainable, places, strict=False):
            found[canonical[name]] = found.get(canonical[name], frozenset()) | own
        for ref, own in zip(into, places[len(trainable) :], strict=True):
            due[ref] = due.get(ref, frozenset()) | own
    found.update((gradient_key(name), due.get(ValueRef(name=name), frozenset())) for name in program.wanted)
    return {name: own for name, own in found.items() if own}


def _through(region: Region) -> list[int]:
    """Of each gradient that a region's backward returns, the tangents that it is made of: bit i for the i-th."""
    holders = [node for node in region.graph.nodes if node.op == "placeholder"]
    made: dict[fx.Node, int] = dict.fromkeys(holders, 0)
    if region.tangents:
        made |= {node: 1 << bit for bit, node in enumerate(holders[-len(region.tangents) :])}
    for node in region.graph.nodes:
        if node.op == "call_function":
            mask = 0
            for source in node.all_input_nodes:
                mask |= made[source]
            made[node] = mask
    output = next(node for node in region.graph.nodes if node.op == "output")
    return [made[node] for node in output.args[0][len(region.outputs) :]]
