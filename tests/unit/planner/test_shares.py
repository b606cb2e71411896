"""What a plan tells of those that could follow it: what is attention's, and what all ways to meet in it do alike."""

from __future__ import annotations

import pytest

import autopar
from autopar.cli.models import catalogue
from autopar.machine.mesh import Mesh
from autopar.planner.plan.record import PlanRecord
from autopar.planner.shares import outside_s, values_s, without_attention_s


def planned(strategy: str) -> PlanRecord:
    loaded = catalogue.load("llama-3.1-8b", tiny=True, batch=(4, 32))
    return autopar.plan(loaded.model, Mesh({"cp": 2}, hardware="cpu"), example_inputs=loaded.batch, strategy=strategy)


@pytest.mark.moderate
def test_outside_of_attention_all_ways_to_meet_in_it_do_the_same() -> None:
    """Breaks if what attention reads and gives counts as moved outside of it, by which other ways would be left out,
    or if its gathers are taken for the rest of the step.
    """
    plans = [planned(strategy) for strategy in ("allgather_kv", "ulysses")]
    one, other = plans
    assert values_s(one) != pytest.approx(values_s(other), rel=1e-3)
    assert outside_s(one) == pytest.approx(outside_s(other), rel=1e-3)
    for plan, way in ((one, other), (other, one)):
        in_attention_s = values_s(plan) - outside_s(plan)
        assert 0.0 < without_attention_s(plan) <= plan.cost.step_time_s - in_attention_s
        assert without_attention_s(plan) <= way.cost.step_time_s - (values_s(way) - outside_s(way))
