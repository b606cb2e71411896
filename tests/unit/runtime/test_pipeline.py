from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.runtime.simulate import SimulationResult, simulate
from tests.unit.runtime.pipelines import (
    chain_batch,
    chain_interface,
    chain_source,
    make_chain,
    run_chain,
    schedule_of,
)

pytestmark = pytest.mark.unit

RUNS = [
    ("gpipe", 4, 4, 1, False),
    ("gpipe", 2, 8, 2, True),
    ("1f1b", 4, 4, 1, True),
    ("1f1b", 2, 8, 2, False),
    ("interleaved", 2, 4, 2, True),
    ("interleaved", 4, 8, 1, False),
    ("zero_bubble", 2, 4, 2, False),
    ("zero_bubble", 4, 8, 1, True),
    ("zbv", 2, 4, 2, True),
    ("zbv", 4, 8, 1, False),
    ("dualpipev", 2, 4, 2, False),
    ("dualpipev", 2, 8, 1, True),
]


def run(
    name: str, ranks: int, num: int, dp: int, zero: bool, batch: dict[str, Tensor] | None = None, **options: Any
) -> tuple[SimulationResult, Any, Any]:
    """The simulated step, the model with its gradients, and what it returned."""
    rows = 4 * num
    schedule = schedule_of(name, ranks, num)
    model = make_chain(schedule.num_stages + 1)
    batch = batch or chain_batch(rows)
    interface = chain_interface(schedule, rows, dp, zero)
    source = chain_source(schedule.num_stages, rows, num, zero)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    result = simulate(interface, source, state, batch, seed=3, timeout_s=20, **options)
    return result, model, run_chain(model, batch, num, dp, seed=3)


def check(result: SimulationResult, model: Any, expected: Any) -> None:
    for found, name in zip(result.outputs, ("loss", "logits", "first", "number"), strict=True):
        torch.testing.assert_close(found, expected[name].detach())
    torch.testing.assert_close(result.updates["seen"], model.seen)
    for name, parameter in model.named_parameters():
        if name != "unused":
            torch.testing.assert_close(result.gradients[name], parameter.grad)


@pytest.mark.parametrize(("name", "ranks", "num", "dp", "zero"), RUNS)
def test_a_pipelined_step_is_the_models(name: str, ranks: int, num: int, dp: int, zero: bool) -> None:
    """Breaks when a stage takes another microbatch's values, or a gradient is added twice or to the wrong one."""
    result, model, expected = run(name, ranks, num, dp, zero)
    expected["loss"].backward()
    check(result, model, expected)
