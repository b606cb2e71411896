"""What ranks hold alike: which parameters, which of their elements a forward looks at, and what tells them apart."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.ir.interface import ProgramInterface
from autopar.planner.plan.json import from_text, to_text
from autopar.runtime.alike import ELEMENTS, PARAMETERS, Alike, axis_of, differing, digest, first_of
from autopar.runtime.edits import Edits
from autopar.runtime.pieces import coordinates

NAMES = ("first", "second", "third", "fourth", "fifth")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in NAMES:
            self.add_module(name, nn.Linear(8, 8, bias=name == "first"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in NAMES:
            x = self.get_submodule(name)(x).tanh()
        return x.pow(2).mean()


def interface(mesh: dict[str, int], strategy: str | dict[str, str]) -> ProgramInterface:
    plan = autopar.plan(
        Model(), autopar.Mesh(mesh, hardware="h100"), strategy=strategy, example_inputs={"x": torch.ones(8, 8)}
    )
    return from_text(to_text(plan)).interface


def alike(axis: str = "dp") -> tuple[nn.Module, Alike, ProgramInterface]:
    model, of = Model(), interface({axis: 2}, "ddp")
    return model, Alike(model, of, of.parameters), of


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("mesh", "strategy", "axes"),
    [
        ({"dp": 2}, "ddp", {"dp"}),
        ({"dp": 2}, "zero3", {""}),
        ({"dp": 2, "tp": 2}, {"dp": "ddp", "tp": "zero3"}, {"dp"}),
        ({"tp": 2}, "tensor", {""}),
    ],
)
def test_what_is_summed_last_over_an_axis_is_alike_there(
    mesh: dict[str, int], strategy: str | dict[str, str], axes: set[str]
) -> None:
    """Breaks if parameters are compared that ranks hold pieces of, or whose gradients each rank computes for itself."""
    assert {entry.summed_over for entry in interface(mesh, strategy).parameters} == axes


@pytest.mark.moderate
def test_every_element_has_its_turn() -> None:
    """Breaks if some parameter, or some of its elements, is never looked at."""
    model, found, of = alike()
    assert found.axes == ("dp",)
    before = [found.numbers(number) for number in range(16)]
    for entry in of.parameters:
        parameter = model.get_parameter(entry.name)
        for place in range(0, parameter.numel(), 3):
            with torch.no_grad():
                parameter.view(-1)[place] += 1
            after = [found.numbers(number) for number in range(16)]
            changed = [number for number in range(16) if before[number] != after[number]]
            assert changed, (entry.name, place)
            with torch.no_grad():
                parameter.view(-1)[place] -= 1
            before = [found.numbers(number) for number in range(16)]


def frozen(mesh: dict[str, int], strategy: str | dict[str, str]) -> tuple[nn.Module, ProgramInterface]:
    model = Model()
    model.get_submodule("first").requires_grad_(False)
    plan = autopar.plan(
        model, autopar.Mesh(mesh, hardware="h100"), strategy=strategy, example_inputs={"x": torch.ones(8, 8)}
    )
    return model, from_text(to_text(plan)).interface


@pytest.mark.moderate
def test_frozen_weights_are_looked_at_in_every_forward_though_nothing_is_summed() -> None:
    """Breaks if a rank that edits what nobody trains is not told, or the frozen ones take the turns of the others."""
    model, of = frozen({"dp": 2}, "ddp")
    found = Alike(model, of, of.parameters)
    before = [found.numbers(number) for number in range(4)]
    assert set(found.values("dp", 0)) == {entry.name for entry in of.parameters}
    model.get_parameter("first.weight").data.mul_(2)
    assert all(found.numbers(number) != before[number] for number in range(4))
    found.keep(interface({"dp": 2}, "ddp"))  # one that trains them, and sums them there
    assert "first.weight" not in found.values("dp", 0)
    assert axis_of(of.parameters[0], of) == "dp" and not of.parameters[0].differentiable


@pytest.mark.moderate
def test_writes_into_what_nobody_else_has_are_counted() -> None:
    """Breaks if a rank may edit its own piece unseen, or an optimizer's step is taken for an edit."""
    model = Model()
    of = interface({"dp": 2}, "zero3")
    found = Edits.of(model, of, of.parameters)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(8, 8)).backward()
    found.note()
    optimizer.step()
    found.accept()
    assert found.taken() == ()
    with torch.no_grad():
        model.get_parameter("second.weight").mul_(2)
    found.note()  # another step follows
    optimizer.step()
    found.accept()
    assert found.taken() == ("second.weight",) and found.taken() == ()
    torch.nn.init.zeros_(model.get_parameter("first.bias"))
    assert found.taken() == ("first.bias",)
    summed = interface({"dp": 2}, "ddp")
    whole = Edits.of(model, summed, summed.parameters)  # others have the same: what they hold tells
    torch.nn.init.zeros_(model.get_parameter("first.weight"))
    assert whole.taken() == ()


@pytest.mark.moderate
def test_a_forward_looks_at_few() -> None:
    """Breaks if the cost of a step grows with the number of parameters."""
    model, found, of = alike()
    assert len(of.parameters) > PARAMETERS
    values = found.values("dp", 0)
    assert len(values) == len(of.parameters) and all(len(own) <= ELEMENTS for own in values.values())
    with torch.no_grad():
        model.get_parameter(of.parameters[PARAMETERS].name).zero_()
    assert found.numbers(0) == alike_numbers(model, of, 0)
    assert found.numbers(0) != found.numbers(1)


def alike_numbers(model: nn.Module, of: ProgramInterface, number: int) -> list[torch.Tensor | int]:
    return Alike(model, of, of.parameters[:PARAMETERS]).numbers(number)


@pytest.mark.moderate
def test_what_another_program_sums_elsewhere_is_left_out() -> None:
    """Breaks if parameters are compared on for which a batch of another shape has another placement, or none is behind
    an evaluation, which sums nothing.
    """
    _, found, of = alike()
    before = found.numbers(0)
    without = autopar.plan(
        Model(), autopar.Mesh({"dp": 2}, hardware="h100"), strategy="ddp", inference=True,
        example_inputs={"x": torch.ones(8, 8)},
    )  # fmt: skip
    found.keep(without.interface)
    assert found.numbers(0) == before and before != [0] and found.axes == ("dp",) and of.parameters
    found.keep(interface({"dp": 2}, "zero3"))
    assert found.numbers(0) == [0] and found.values("dp", 0) == {}


@pytest.mark.moderate
def test_what_is_called_by_itself_is_left_out() -> None:
    """Breaks if a gradient that each rank computes for itself is taken for a sum that all got."""
    model, found, of = alike()
    found.leave_out(model.get_submodule("first"))
    assert set(found.values("dp", 0)) == {entry.name for entry in of.parameters if "first" not in entry.name}


def test_ranks_are_compared_along_one_axis() -> None:
    """Breaks if replicas of other pieces, or of other stages, are compared."""
    axes, sizes = ("pp", "dp", "tp"), (2, 3, 2)
    for rank in range(12):
        at = dict(zip(axes, coordinates(rank, sizes), strict=True))
        first = dict(zip(axes, coordinates(first_of(rank, "dp", axes, sizes), sizes), strict=True))
        assert first == at | {"dp": 0}


EPS = {"w": torch.finfo(torch.float32).eps}


@pytest.mark.parametrize(
    ("here", "is_rounding"),
    [
        ([1.0, 2.0, 3.0, 4.0], True),
        ([1.0, 2.0, 3.0, 4.0 + 2 * EPS["w"]], True),
        ([1.0, 2.0, 3.0, 4.1], False),
        ([1.0, 2.0, 3.0, float("nan")], False),
        ([1.0 + 1e-7, 2.0 + 1e-7, 3.0 + 1e-7, 4.0], False),
    ],
)
def test_rounding_is_told_from_another_step(here: list[float], is_rounding: bool) -> None:
    """Breaks if a last bit stops a run, or a step that a rank did not do is taken for one."""
    names, found = differing({"w": here}, {"w": [1.0, 2.0, 3.0, 4.0]}, EPS)
    assert (bool(names), found) == (here != [1.0, 2.0, 3.0, 4.0], is_rounding)


def test_digests_tell_places_and_what_is_no_number() -> None:
    """Breaks if exchanged elements have one digest, or two kinds of NaN have two."""
    values = torch.tensor([1.0, 2.0, float("nan")], dtype=torch.float64)
    assert digest(values) != digest(values[[1, 0, 2]])
    assert digest(values) != digest(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    assert digest(values) == digest(torch.tensor([1.0, 2.0, -float("nan")], dtype=torch.float64))
