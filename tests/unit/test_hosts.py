"""What the host takes to launch a forward: by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar.cost.hosts import host_seconds, host_seconds_of_calls, waited_for_hosts
from autopar.machine import hardware_data, profiles
from autopar.machine.hardware import Hardware
from autopar.machine.mesh import Mesh
from autopar.planner.plan.record import PlanRecord
from autopar.views.text import step_terms

pytestmark = pytest.mark.unit
PLAIN = profiles.load("h100")
WIDE = 64


class Layers(nn.Module):
    """Columns, then rows: three kernels and a sum over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDE, 4 * WIDE, bias=False), nn.Linear(4 * WIDE, WIDE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Blocks(nn.Module):
    """What stages are cut of."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layers() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def planned(hardware: Hardware, ranks: int = 2, training: bool = False) -> PlanRecord:
    batch = {"x": torch.zeros(4, WIDE)}
    mesh = Mesh({"tp": ranks}, hardware=hardware)
    return autopar.plan(Layers(), mesh, example_inputs=batch, strategy="tensor", inference=not training)


def test_a_forward_takes_no_less_than_its_launches() -> None:
    """Breaks if kernels or collectives are queued for nothing, or beside what the device takes instead of meanwhile."""
    plan = planned(PLAIN)
    assert plan.program is not None
    sent = sum(row.times for row in plan.collectives)
    assert sent >= 1
    assert host_seconds(plan.program) == pytest.approx(3 * PLAIN.host_kernel_s + sent * PLAIN.host_collective_s)
    assert plan.cost.step_time_s == pytest.approx(host_seconds(plan.program))
    assert plan.cost.host_s > 0 and "waiting for the host" in step_terms(plan.cost)
    slow = planned(replace(PLAIN, launch_overhead_s=1e-3))
    assert slow.cost.host_s == 0.0 and slow.cost.step_time_s > 3e-3


def test_no_host_is_waited_for_by_graphs_training_and_profiles_that_do_not_say() -> None:
    """Breaks if a CUDA graph is launched operator by operator, or a step of training is priced by its launches."""
    assert planned(PLAIN, ranks=1).cost.host_s == 0.0
    assert planned(PLAIN.as_engine()).cost.host_s == 0.0
    assert planned(PLAIN, training=True).cost.host_s == 0.0
    assert planned(profiles.load("cpu")).cost.host_s == 0.0
    own = replace(PLAIN, host_kernel_s=3e-6)
    assert hardware_data.from_data(hardware_data.to_data(own)) == own


def test_stages_are_queued_while_those_before_compute() -> None:
    """Breaks if a pipeline's forward waits for the hosts of all stages one after the other, or for none; if a later
    stage's slow host is not waited for; or if stages of one rank are queued at once.
    """
    assert waited_for_hosts([3.0], [1.0], [0]) == 2.0 and waited_for_hosts([3.0], [4.0], [0]) == 0.0
    assert waited_for_hosts([3.0, 3.0, 3.0], [1.0, 2.0, 3.0], [0, 1, 2]) == 2.0
    assert waited_for_hosts([1.0, 9.0], [2.0, 4.0], [0, 1]) == 5.0
    assert waited_for_hosts([3.0, 3.0], [1.0, 2.0], [0, 0]) == 4.0


@pytest.mark.moderate
def test_a_pipeline_waits_for_its_first_host() -> None:
    """Breaks if a token over stages is priced as if its launches took nothing, or as if one host queued all of it."""
    model, batch = Blocks(), {"x": torch.zeros(4, WIDE)}

    def of(mesh: dict[str, int], strategy: dict[str, str]) -> PlanRecord:
        wanted = Mesh(mesh, hardware=PLAIN)
        return autopar.plan(model, wanted, example_inputs=batch, strategy=strategy, inference=True)

    one = of({"tp": 2}, {"tp": "tensor"})
    assert one.program is not None
    by_call = host_seconds_of_calls(one.program)
    assert sum(by_call) == pytest.approx(host_seconds(one.program)) and min(by_call) > 0
    two = of({"pp": 2, "tp": 2}, {"pp": "pipeline(gpipe)", "tp": "tensor"})
    assert 0 < two.cost.host_s < 0.6 * one.cost.host_s
