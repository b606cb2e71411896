"""Gradients of inputs: what the program says of them, who checks it, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import pipeline
from autopar.api import interpret
from autopar.base.errors import AutoparError
from autopar.planner.inputs import wanted_in
from autopar.runtime.checker.program import check_types
from autopar.strategies.names import resolve
from autopar.strategies.request import Attempt

MESH = autopar.Mesh({"dp": 2})


class Shifted(nn.Module):
    """An input that one call reads, one that several do, and one that nothing of the output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(3)])

    def forward(self, x: Tensor, shift: Tensor, unread: Tensor) -> Mapping[str, Tensor]:
        h = self.first(x)
        for layer in self.layers:
            h = layer(h) + shift
        return {"h": h, "unread": unread.detach() * 2}


def batch(*wanted: str) -> dict[str, Tensor]:
    made = {"x": torch.randn(8, 8), "shift": torch.randn(8, 16), "unread": torch.randn(8)}
    return {name: x.double().requires_grad_(name in wanted) for name, x in made.items()}


def planned(*wanted: str, **options: Any) -> autopar.Plan:
    options = {"strategy": "ddp", **options}
    return autopar.plan(Shifted().double(), options.pop("mesh", MESH), example_inputs=batch(*wanted), **options)


@pytest.mark.moderate
def test_the_backward_returns_those_that_are_wanted() -> None:
    """Breaks if a gradient that nobody wants is made, one that several calls give a part of is the last call's, or one
    is promised that no output's gradient comes to.
    """
    plan = planned("x", "shift", "unread")
    assert plan.wanted == {"x", "shift"}
    assert 'gradients[".x"] = grad_x  # of an input' in plan.source
    assert plan.source.count("grad_shift = grad_shift + ") == 2 and '".unread"' not in plan.source
    assert [each.reached_by for each in plan.interface.wanted] == [(0,), (0,)]
    assert '".x"' not in planned("shift").source and planned().wanted == frozenset()
    with torch.no_grad():
        assert not planned("x", inference=True).wanted


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"dp": 2}, {"strategy": "zero3", "microbatches": 2}),
        ({"tp": 2}, {"strategy": "tensor"}),
        ({"dp": 2, "tp": 2}, {"strategy": "auto"}),
        ({"dp": 4}, {"strategy": "auto", "microbatches": 2}),
    ],
    ids=str,
)
def test_the_proof_compares_them(mesh: dict[str, int], options: dict[str, Any]) -> None:
    """Breaks if ranks' pieces of an input's gradient are no parts of eager's."""
    proof = planned("x", "shift", mesh=autopar.Mesh(mesh), **options).verify()
    assert proof.ok and {"gradient of input x", "gradient of input shift"} <= {each.name for each in proof.comparisons}


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('gradients[".x"] = grad_x', 'gradients[".x"] = grad_x * 2', "another gradient"),
        ('gradients[".shift"] = grad_shift', 'gradients[".shift"] = grad_shift_1', "another gradient"),
        ('gradients[".x"] = grad_x', 'gradients[".x"] = comm.all_gather(grad_x, "dp", 0)', "not as its interface"),
        ('gradients[".x"] = grad_x', "pass", "no gradient of an input"),
    ],
)
def test_the_checker_reads_them(old: str, new: str, said: str) -> None:
    """Breaks if an edited program may return another gradient of an input, one that lies otherwise, or none."""
    plan = planned("x", "shift")
    check_types(plan.source, plan.interface)
    with pytest.raises(AutoparError, match=said):
        check_types(plan.source.replace(old, new, 1), plan.interface)


@pytest.mark.moderate
def test_an_interface_that_loses_one_is_told() -> None:
    """Breaks if a saved plan whose interface no longer says that a gradient comes back runs without it."""
    plan = planned("x")
    inputs = tuple(replace(each, differentiable=False) for each in plan.interface.inputs)
    with pytest.raises(AutoparError, match="input of its interface is another"):
        check_types(plan.source, replace(plan.interface, inputs=inputs))


@pytest.mark.moderate
def test_files_and_the_interpreter_have_them() -> None:
    """Breaks if a plan that is saved forgets them, or a pass changes their numbers."""
    plan = planned("x", "shift", microbatches=2)
    again = autopar.Plan.from_json(plan.to_json())
    assert again.interface.wanted == plan.interface.wanted and again.wanted == {"x", "shift"}
    model, inputs = Shifted().double(), batch("x", "shift")
    request = Attempt(model, inputs, MESH, resolve("ddp", MESH), wanted=wanted_in(inputs))
    program, values = None, {name: x.detach() for name, x in inputs.items()}
    model(**inputs)["h"].sum().backward()
    for step in pipeline.TRACE:
        program, _ = pipeline.run(request, [step], program=program)
        if program.folded:
            continue
        _, found = interpret.run(program, interpret.state_of(model, program), values)
        for name in ("x", "shift"):
            torch.testing.assert_close(found[f".{name}"], inputs[name].grad)


@pytest.mark.moderate
def test_they_take_memory() -> None:
    """Breaks if a plan forgets the gradient that the user gets, whole, of every microbatch."""
    plain, wanted = (planned(*names, microbatches=2).cost.memory.peak for names in ((), ("x",)))
    assert wanted - plain >= 8 * 8 * 8


@pytest.mark.moderate
@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_stages_of_a_pipeline_add_what_each_has_of_them(schedule: str) -> None:
    """Breaks if the gradient of an input that several stages read is one stage's, a rank has none, or half a backward
    makes it twice.
    """
    mesh = autopar.Mesh({"pp": 2}, hardware="cpu")
    plan = planned("x", "shift", mesh=mesh, strategy=f"pipeline({schedule})", microbatches=4)
    assert plan.interface.pipeline is not None
    stages = [stage.wanted for stage in plan.interface.pipeline.stages]
    assert stages[0] == ("x",) and sum(stage == ("shift",) for stage in stages) > 1
    proof = plan.verify()
    assert proof.ok and {"gradient of input x", "gradient of input shift"} <= {each.name for each in proof.comparisons}
