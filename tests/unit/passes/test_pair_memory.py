"""What a program of two microbatches holds while it runs: never more than was planned, whatever the router does."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

import autopar
from autopar.api import interpret
from autopar.api.plan import Plan
from autopar.cost.memory.calls import CallCosts
from autopar.cost.memory.step import Step as StepMemory
from autopar.passes.emission import functions
from autopar.runtime import exchange
from autopar.runtime.loader import load_program
from autopar.runtime.microbatches import make_batch
from autopar.runtime.simulated_comm import SimulatedComm, SimulatedMesh
from autopar.runtime.simulation import shard_state
from autopar.runtime.step import Step
from tests.unit.passes.test_interleave import Alone, Deep, program_of
from tests.unit.passes.test_stage_costs import LiveBytes

pytestmark = pytest.mark.unit
TOKENS = (8, 64, 16)


def as_processes_do(patch: pytest.MonkeyPatch) -> None:
    """Rows that come lie in memory of the rank's own, what is sent until it has gone; experts' operators are seen."""
    module = importlib.import_module("autopar.operators.experts")
    plain = SimpleNamespace(experts=module.experts, experts_grad=module.experts_grad)
    patch.setattr(exchange, "_operators", plain)
    send = SimulatedComm._exchange_rows

    def begun(self: SimulatedComm, x: Tensor, event: Any, rows: list[list[int]]) -> Callable[[], Tensor]:
        with _disable_current_modes():
            found = send(self, x, event, rows)
        kept = [x, found.clone()]

        def wait() -> Tensor:
            here = kept.pop()
            kept.clear()
            return here

        return wait

    patch.setattr(functions, "FREE_AT_BYTES", 1)  # as of values that are large
    patch.setattr(SimulatedComm, "_begin_rows", begun)
    patch.setattr(SimulatedComm, "_exchange_rows", lambda *args: begun(*args)())


def held(plan: Plan, model: nn.Module, x: Tensor) -> list[int]:
    """The most that each rank holds in a step but for parameters and the batch, in bytes."""
    source, interface = str(plan.source), plan.interface
    state = interpret.state_of(model, program_of(plan))

    def run(comm: Any) -> int:
        with torch.no_grad():
            own = shard_state(comm, interface, state)
            batch = make_batch(load_program(source, "<held>"), interface, comm, {"x": x})
            step = Step(batch, 0)
            parts = [each for group in batch.together for each in batch.inputs_of(group).values()]
            with LiveBytes([x, *own.values(), *parts]) as live:
                step.in_turn(own, lambda _: 0)
        return live.peak

    return SimulatedMesh(interface.axes, interface.sizes, 60.0).run(run)


@pytest.mark.moderate
@pytest.mark.parametrize("model", [Deep, Alone])
@pytest.mark.parametrize("microbatches", [2, 4])
def test_no_more_than_planned(model: Any, microbatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if what one microbatch keeps while the other is computed is not in the plan's peak, or what is on its way
    of both. Every token goes to the same experts, of one rank, or where the router sends it.
    """
    as_processes_do(monkeypatch)
    torch.manual_seed(0)
    net, x = model(), torch.randn(TOKENS)
    plan = autopar.plan(
        net, autopar.Mesh.parse("dp=2", hardware="cpu"), strategy="expert", example_inputs={"x": x},
        microbatches=microbatches, halves=True,
    )  # fmt: skip
    memory = StepMemory(program_of(plan), CallCosts(program_of(plan)))
    bound = memory.sums() + max(memory.forwards(), memory.backwards())
    seen = held(plan, net, x)
    moe = net.one if isinstance(net, Deep) else net.layer
    torch.nn.init.zeros_(moe.gate.weight)  # experts of one rank are all tokens' best
    hot = held(plan, net, x)
    assert max(*seen, *hot) <= bound, (seen, hot, bound)
    assert max(hot) > 0.7 * bound, (hot, bound)  # a bound that says something
