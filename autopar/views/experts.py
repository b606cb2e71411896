"""Layers of experts, as planned: how many tokens an expert and a rank get, and what bringing them there takes.

How many rows go where is known only when they go: numbers are of choices that are as likely each, and the busiest
rank's are as many times them as the machine says (`Hardware.expert_imbalance`).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from autopar.base.errors import AutoparError
from autopar.cost.exchanges import exchange_axis, exchange_of, guest_bytes
from autopar.cost.local_work import expert_dims
from autopar.cost.operator_time import exposed_seconds
from autopar.cost.under_way import exchanges_hidden
from autopar.ir.choices import Choice, local_sizes
from autopar.ir.program import Program
from autopar.ir.region import Region
from autopar.machine.imbalance import summed_loads
from autopar.machine.mesh import Mesh
from autopar.machine.packing import busiest, packed, replicated
from autopar.operators.rules.exchange_cost import rows_at_once
from autopar.planner.plan.drawn import ExpertsView
from autopar.planner.plan.record import PlanRecord

FORWARD = "autopar.experts.default"
BACKWARD = ("autopar.experts_grad.default", "autopar.experts_grad_bias.default")
_WHAT = {"t": "tokens", "e": "experts", "f": "widths"}


def experts_of(program: Program, region: Region, seconds: Mapping[str, float]) -> tuple[ExpertsView, ...]:
    """The layers of a lowered region, in order. seconds: that its operators compute."""
    mesh = program.on_mesh
    forward = [name for name, (call, _) in region.ops.items() if call.name == FORWARD and name in region.forward_nodes]
    backward = [name for name, (call, _) in region.ops.items() if call.name in BACKWARD][::-1]
    lines = {
        node.meta["operator"]: node.name
        for node in region.lowered["forward"].graph.nodes
        if node.meta.get("operator") in forward
    }
    hidden = {
        name: each for phase in region.phases
        for name, each in exchanges_hidden(program, region, phase, seconds).items()
    }  # fmt: skip
    grads = backward if len(backward) == len(forward) else [""] * len(forward)
    return tuple(
        _layer(region, mesh, seconds, hidden, name, grad, lines[name])
        for name, grad in zip(forward, grads, strict=True)
    )


def _layer(
    region: Region,
    mesh: Mesh,
    seconds: Mapping[str, float],
    hidden: Mapping[str, float],
    name: str,
    grad: str,
    line: str,
) -> ExpertsView:
    call, rule = region.ops[name]
    strategy = region.strategies[name]
    axis = exchange_axis(strategy.choices)
    ranks = 1 if axis is None else mesh.sizes[axis]
    assert rule.exchange is not None
    of_expert, _, _, num_chosen = expert_dims(call, rule, strategy.choices, mesh.sizes)
    experts, chosen = rule.sizes[rule.exchange.key], call.operands[2].shape[-1]
    local = local_sizes(rule, strategy.choices, mesh.sizes)
    tokens, here = local[rule.exchange.query], local[rule.exchange.key]
    expert_rows = of_expert * num_chosen / here  # a plan counts the experts that any token chooses
    busiest = 1.0 if axis is None else mesh.hardware.expert_imbalance
    sent = [_sent(region, mesh, each) for each in (name, grad)]
    return ExpertsView(
        line,
        _split(strategy.choices, mesh),
        "" if axis is None else mesh.axis_names[axis],
        ranks,
        experts,
        chosen,
        here,
        tokens,
        expert_rows,
        expert_rows * here,
        busiest * expert_rows * here,
        0 if axis is None else rows_at_once(tokens, experts, chosen, ranks),
        *sent[0],
        seconds[name],
        *sent[1],
        seconds[grad] if grad else 0.0,
        hidden.get(name, 0.0),
        hidden.get(grad, 0.0),
        max(guest_bytes(*region.ops[each], region.strategies[each], mesh.sizes) for each in (name, grad) if each),
    )


def _sent(region: Region, mesh: Mesh, name: str) -> tuple[float, float]:
    """Bytes that a rank sends in an exchange, and its seconds."""
    if not name:
        return 0.0, 0.0
    found = exchange_of(*region.ops[name], region.strategies[name], mesh.sizes)
    if found is None:
        return 0.0, 0.0
    return found.bytes_sent, exposed_seconds(*region.ops[name], region.strategies[name], mesh)


def _split(choices: Sequence[Choice], mesh: Mesh) -> str:
    """`tokens and experts over ep; widths over tp`"""
    words = []
    for choice, axis, size in zip(choices, mesh.axis_names, mesh.sizes, strict=True):
        if size > 1 and choice.kind == "exchange":
            words.append(f"tokens and experts over {axis}")
        elif size > 1 and choice.kind == "factor" and choice.factor is not None:
            factor = choice.factor.strip("()").split()
            words.append(f"{next((_WHAT[each] for each in factor if each in _WHAT), choice.factor)} over {axis}")
    return "; ".join(words)


def expert_rows(plan: PlanRecord, loads: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Of the report's tab: each layer with its module, how often a step calls it, and the item of its operator; of
    measured loads (layer -> [experts] or [steps, experts]), what they come to. `*` in a module stands for numbers.

    Raises:
        AutoparError: loads of a layer that sends no tokens in this plan, or of other sizes.
    """
    rows, given, used = [], loads or {}, set[str]()
    for region in plan.drawn.regions:
        modules = {op.name: op.module for op in region.ops}
        seen = Counter[str]()
        for each in region.experts:
            module = modules[each.op]
            seen[module] += 1
            own = re.compile(re.escape(module).replace(r"\*", r"\d+"))
            found = {name: load for name, load in given.items() if each.axis and own.fullmatch(name)}
            used |= found.keys()
            turn = f"; microbatch {seen[module]} of two at a time" if plan.interface.together > 1 else ""
            rows.append(
                {
                    **asdict(each),
                    "split": f"{each.split}{turn}",
                    "module": module,
                    "item": f"op:{region.name}.{each.op}",
                    "calls": region.calls,
                    "times": region.calls * plan.interface.runs,
                    **_measured(found, each.experts, each.ranks),
                }
            )
    if left := [name for name in given if name not in used]:
        raise AutoparError(
            f"loads of {left[0]}, which is no layer of experts that this plan sends tokens to",
            values=f"layers are {', '.join(row['module'] for row in rows if row['axis']) or 'none'}",
            remedy="name layers as compiled.expert_loads() does",
        )
    return rows


def _measured(loads: Mapping[str, Any], experts: int, ranks: int) -> dict[str, float]:
    """The busiest rank's tokens for each of the mean rank's, the mean over layers: as experts lie (`measured`), after
    `place_experts` (`placed`), and with a guest a rank (`visited`). Layers without tokens count for nothing.
    """
    found: list[tuple[float, float, float]] = []
    for name, given in loads.items():
        own = summed_loads(name, given, experts)
        if not (mean := sum(own) / ranks):
            continue
        slots = packed(own, ranks, range(experts))
        most = (busiest(own, ranks, range(experts)), busiest(own, ranks, slots),
                busiest(own, ranks, slots, replicated(own, ranks, slots, 1)))  # fmt: skip
        found.append((most[0] / mean, most[1] / mean, most[2] / mean))
    means = (math.fsum(column) / len(found) for column in zip(*found, strict=True))
    return dict(zip(("measured", "placed", "visited"), means, strict=False))
