"""Small models with what those of the catalogue lack, each proven: whole programs in which one rare thing decides."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import pipeline
from autopar.api.plan import Plan
from autopar.ir.program import Program
from autopar.machine.mesh import Mesh
from autopar.passes.overlap import overlap
from autopar.strategies.request import Attempt


def plan_of(model: nn.Module, mesh: dict[str, int], strategy: Any, **options: Any) -> Plan:
    batch = {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(0))}
    return autopar.plan(model, Mesh(mesh, hardware="cpu"), example_inputs=batch, strategy=strategy, **options)


class Mixed(nn.Module):
    """Parameters of two precisions in one region."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8).double(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.double()).float()).square().mean()


def test_parameters_of_two_precisions() -> None:
    """Breaks if they travel in one bucket, which is of one dtype."""
    plan = plan_of(Mixed(), {"dp": 2}, "zero3")
    assert plan.program is not None
    for region in plan.program.regions:
        _, call = next(plan.program.calls_of(region.name))
        for bucket in (*region.transfers["gather"], *region.transfers["reduce"]):
            dtypes = {plan.program.variable(call.slots[move.slot]).type.dtype for move in bucket.moves}
            assert len(dtypes) == 1 and len(bucket.moves) == 2


class Terms(nn.Module):
    """A value that two products read, and, between them, something else."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.first, self.second = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return (self.first(y) + y.tanh() + self.second(y)).square().mean()


@pytest.mark.moderate
def test_a_term_between_products() -> None:
    """Breaks if a term of a gradient is lost, or counted twice, where products are added first."""
    plan = plan_of(Terms(), {"dp": 2}, "ddp")
    assert plan.verify().raise_on_failure().ok


class Twins(nn.Module):
    """Two parameters with one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.first, self.second, self.last = (nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return self.last(self.first(y) + self.second(y)).square().mean()


class OneViewed(nn.Module):
    """Two parameters with one gradient, of which one sees it in another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = (nn.Linear(8, 8, bias=False) for _ in range(2))
        self.first, self.second = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x) + self.first + self.second.view(8)).square().mean()


def _each_alone(program: Program, request: Attempt) -> Program:
    return overlap(program, strategies=request.strategies, bucket_bytes=1)


@pytest.mark.moderate
@pytest.mark.parametrize("model", [Twins, OneViewed])
def test_one_gradient_of_two_parameters(model: type[nn.Module]) -> None:
    """Breaks if a gradient is reduced where it lies for one parameter, and for the other again: twice; or for one that
    has a view of it. Or if statements read what is put away for a reduction.
    """
    passes = [pipeline.Pass("overlap", _each_alone) if each.name == "overlap" else each for each in pipeline.DEFAULT]
    plan = plan_of(model(), {"dp": 2}, "ddp", passes=passes)
    alone = [line for line in plan.source.splitlines() if "owned=True" in line]
    assert any("last.weight" in line for line in alone), "nothing travels alone"
    assert not any("first" in line or "second" in line for line in alone)
    assert not re.search(r'^ +\S.* = .*\bg\["', plan.source, re.MULTILINE), "a gradient that is read has a name"
    assert plan.verify().raise_on_failure().ok


class Block(nn.Module):
    """Takes, and gives, nothing but views."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(1)).unflatten(1, (2, 4))


class Blocks(nn.Module):
    """Blocks without a way around them. order: in which they run; tied: which have one weight; read: whose result is
    read again in the end.
    """

    def __init__(
        self, order: Sequence[int] = (0, 1, 2, 3), tied: Sequence[tuple[int, int]] = (), read: int | None = None
    ) -> None:
        super().__init__()
        self.layers, self.order, self.read = nn.ModuleList(Block() for _ in range(4)), order, read
        for one, other in tied:
            self.layers[one].linear.weight = self.layers[other].linear.weight

    def forward(self, x: Tensor) -> Tensor:
        found = {}
        for number in self.order:
            x = found[number] = self.layers[number](x)
        return (x if self.read is None else x * found[self.read]).square().mean()


@pytest.mark.moderate
def test_gradients_come_through_views_alone() -> None:
    """Breaks if a value between blocks is taken for one without a gradient, and the blocks before it never learn."""
    plan = plan_of(Blocks(), {"dp": 2}, "zero2")
    assert "for i in range(1, 4)" in plan.source
    proof = plan.verify().raise_on_failure()
    assert proof.ok and sum("gradient of layers" in row.name for row in proof.comparisons) == 8


@pytest.mark.moderate
@pytest.mark.parametrize("strategy", ["zero3"])
@pytest.mark.parametrize(
    "model",
    [
        Blocks((3, 2, 1, 0)), Blocks((0, 2, 1, 3)), Blocks((0, 1, 2, 2)), Blocks(tied=[(3, 0)]),
        Blocks(tied=[(1, 0), (2, 0), (3, 0)]), Blocks((0, 1, 0, 1)), Blocks(read=1), Blocks(read=2),
    ],
    ids=["backward", "crossed", "one twice", "two tied", "all tied", "round", "second read", "third read"],
)  # fmt: skip
def test_blocks_that_are_no_plain_loop(model: nn.Module, strategy: str) -> None:
    """Breaks if blocks run in the order of their numbers, or with parameters called after them, where they do not."""
    assert plan_of(model, {"dp": 2}, strategy).verify().raise_on_failure().ok


class Dropping(Blocks):
    """Blocks that run in another order than their numbers', each with a dropout."""

    def __init__(self) -> None:
        super().__init__((3, 2, 1, 0))
        for layer in self.layers:
            layer.linear = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))


@pytest.mark.moderate
def test_calls_outside_of_loops_draw_apart() -> None:
    """Breaks if blocks that are no loop draw as the first call does."""
    plan = plan_of(Dropping(), {"dp": 2}, "ddp")
    assert len(set(re.findall(r"_forward\(comm.*, (seed[^)]*)\)", plan.source.partition("def forward(")[2]))) == 4
    assert plan.verify().raise_on_failure().ok


@pytest.mark.moderate
def test_large_values_are_freed_behind_their_last_reader() -> None:
    """Breaks if large values that nobody reads any more live on until their function ends."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 64)) for _ in range(2)))
    mesh = autopar.Mesh({"dp": 2}, hardware="cpu")
    plan = autopar.plan(model, mesh, example_inputs={"input": torch.randn(4096, 64)}, strategy="ddp")
    freed = re.findall(r"^    del (.*)$", plan.source, re.MULTILINE)
    assert any(each.startswith(("linear", "sigmoid")) for each in freed), freed


class Carrying(nn.Module):
    """A block that hands on a second value, made of both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.carry = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x).tanh() + carried, self.carry(x * carried)


class Carried(nn.Module):
    """The last block's second value is given out, and nobody learns of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Carrying() for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        carried = x
        for layer in self.layers:
            x, carried = layer(x, carried)
        return {"loss": x.square().mean(), "carried": carried}


@pytest.mark.moderate
def test_a_value_that_no_gradient_reaches() -> None:
    """Breaks if a value that only leaves the model comes back with a gradient, as other blocks' do."""
    plan = plan_of(Carried(), {"dp": 2}, "ddp")
    assert "torch.zeros(" in plan.source.partition("def backward(")[2]
    assert plan.verify().raise_on_failure().ok


class Outputs(Blocks):
    """No loss: a value that is an output, and that later blocks read."""

    def forward(self, x: Tensor) -> Any:
        middle = self.layers[1](self.layers[0](x))
        return {"middle": middle, "last": self.layers[3](self.layers[2](middle))}


@pytest.mark.moderate
@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble"])
def test_an_output_that_is_sent_on(schedule: str) -> None:
    """Breaks if of a value that the next stage reads and the caller gets, only one gradient counts."""
    plan = plan_of(Outputs(), {"pp": 2}, {"pp": schedule}, microbatches=2)
    assert re.search(r"(\w+) = \1 \+ roots\[0\]", plan.source)
    assert plan.verify().raise_on_failure().ok
