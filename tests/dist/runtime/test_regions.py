from __future__ import annotations

import logging
import shutil
from typing import Any

import pytest
import torch

from autopar.base.errors import AutoparError
from tests.dist.launch import launch
from tests.dist.runtime.work import compiled_mlp, full
from tests.unit.runtime.programs import make_batch

pytestmark = pytest.mark.dist


def steps(compile_regions: bool | str, plan: str = "zero3+tensor") -> dict[str, Any]:
    """Two training steps: what was computed, what was sent, how many graphs were compiled."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    compiled = compiled_mlp(plan, microbatches=2, compile_regions=compile_regions)
    compiled.autopar.comm.log = []
    losses = [float(compiled.train_step(**make_batch(number))["loss"]) for number in range(2)]
    loss = compiled(**make_batch(2))["loss"]
    loss.backward()
    return {
        "losses": [*losses, float(loss.detach())],
        "gradients": {name: full(p.grad).clone() for name, p in compiled.named_parameters()},
        "events": [str(event) for event in compiled.autopar.comm.log],
        "graphs": counters["stats"]["unique_graphs"],
    }


# Graphs: forward one before each collective (nothing comes after the last), backward one.
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("backend", "plan", "num_ranks", "num_graphs"),
    [pytest.param(True, "zero3", 2, 2, marks=pytest.mark.slow), ("aot_eager", "zero3+tensor", 4, 3)],
)
def test_compiled_regions_compute_and_send_the_same(
    backend: bool | str, plan: str, num_ranks: int, num_graphs: int
) -> None:
    """Breaks when a compiled region changes numbers, moves a collective, or is compiled for each microbatch."""
    if backend is True and shutil.which("g++") is None:
        pytest.skip("no C++ compiler for inductor")
    expected, found = launch(steps, num_ranks, False, plan), launch(steps, num_ranks, backend, plan, timeout_s=200)
    for plain, compiled in zip(expected, found, strict=True):
        assert compiled["losses"] == pytest.approx(plain["losses"], rel=1e-12)
        assert compiled["events"] == plain["events"] and len(plain["events"]) >= 10
        for name, value in plain["gradients"].items():
            torch.testing.assert_close(compiled["gradients"][name], value, rtol=1e-11, atol=1e-13)
        assert plain["graphs"] == 0 and compiled["graphs"] == num_graphs


def failing() -> list[str]:
    from torch._dynamo.backends.registry import register_backend

    def refuses(graph: Any, example_inputs: Any) -> Any:
        raise NotImplementedError("not this one")

    try:
        register_backend(refuses, name="refuses")
    except AssertionError:
        pass  # registered by an earlier test in this process
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("autopar").addHandler(handler)
    try:
        failed = steps("refuses", "ddp")
    finally:
        logging.getLogger("autopar").removeHandler(handler)
    plain = steps(False, "ddp")
    assert failed["losses"] == plain["losses"] and failed["events"] == plain["events"]
    with pytest.raises(AutoparError, match="torch.compile has no backend 'nothing'"):
        steps("nothing", "ddp")
    return messages


def test_a_region_that_cannot_be_compiled_runs_as_it_is() -> None:
    """Breaks when a failing compiler stops training, sends twice, or says nothing, or says it at every step."""
    for messages in launch(failing, 2):
        assert len(messages) == 2
        assert "region function mlp_forward (<mlp>); it runs uncompiled. not this one" in messages[0]
        assert "mlp_backward" in messages[1]
