"""With dropout active, a program is compared with the model itself, which gets the program's draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import autopar
from autopar import operators
from autopar.api.draws import draws_of, handed
from autopar.cli.models import catalogue


def plan(name: str, **options: Any) -> autopar.Plan:
    loaded = catalogue.load(name, tiny=True, dropout=0.2)
    loaded.model.train()
    mesh = autopar.Mesh({"dp": 2}, hardware="cpu")
    return autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, strategy="zero2", **options)


class _Doubled(torch.autograd.Function):
    """The identity, whose gradient is twice what it should be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


def doubled(target: Any) -> Any:
    """An operator whose weight has twice its gradient."""
    right = operators.AUTOGRAD[target]

    def wrong(x: Tensor, w: Tensor, *rest: Any, **options: Any) -> Tensor:
        return right(x, _Doubled.apply(w), *rest, **options)

    return wrong


def flipped(target: Any) -> Any:
    right = operators.AUTOGRAD[target]
    return lambda *args, **options: -right(*args, **options)


aten = torch.ops.aten


@pytest.mark.moderate
@pytest.mark.parametrize("name", ["gpt2", "bert"])
@pytest.mark.parametrize(
    ("targets", "fault"),
    [((aten.linear.default, aten.addmm.default), doubled), ((aten.cross_entropy_loss.default,), flipped)],
    ids=["doubled weight gradients", "flipped loss"],
)
def test_faults_show_where_dropout_is_active(
    name: str, targets: tuple[Any, ...], fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks if the program is compared with its own trace, in which the fault is, too."""
    for target in targets:
        monkeypatch.setitem(operators.AUTOGRAD, target, fault(target))
    proof = plan(name).verify()
    assert proof.dropout and not proof.ok


@pytest.mark.moderate
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_microbatches_draw_as_the_model_does_of_each(name: str) -> None:
    """Breaks if the model's rows and the program's are of different microbatches, or their draws are."""
    proof = plan(name, microbatches=2).verify()
    assert proof.ok and proof.dropout


@pytest.mark.moderate
def test_a_draw_that_the_program_does_not_make_stays_torchs() -> None:
    """Breaks if a mask that nobody reads takes the draw of the next one."""
    program = plan("gpt2").program
    assert program is not None
    draws = draws_of(program, 0)
    assert len(draws) == 1 + 3 * program.num_calls("block") and len(set(draws)) == len(draws)
    torch.manual_seed(1)
    with handed(draws) as mode:
        functional.dropout(torch.ones(3, 5), 0.5)  # of a shape, and a probability, that the program does not know
        torch.rand(7)
    assert len(mode.draws) == len(draws)
    first = draws[0]
    assert first is not None and first.p is not None
    with handed(draws) as mode:
        kept = functional.dropout(torch.ones(first.shape), 0.2)
    assert len(mode.draws) == len(draws) - 1
    expected = operators.dropout(
        torch.ones(first.shape), first.p, torch.tensor(first.seed), first.salt, [], first.shape
    )
    torch.testing.assert_close(kept, expected)


class Twice(nn.Module):
    """A dropout whose result nobody reads, and one of the same numbers that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inside(x)
        y: torch.Tensor = self.inside(x)
        return y.square().mean()


@pytest.mark.moderate
def test_a_draw_that_nobody_reads_is_not_taken_for_the_next_one() -> None:
    """Breaks if the reference hands the draw that counts to an equal one that does not: the proof was not equal."""
    plan = autopar.plan(
        Twice(), autopar.Mesh({"dp": 2}, hardware="cpu"), example_inputs={"x": torch.randn(4, 8)}, strategy="ddp"
    )
    assert plan.verify().ok


class InItsOwnCall(nn.Module):
    """A layer that is called once for nothing: all that this call draws is read by nobody."""

    def __init__(self) -> None:
        super().__init__()
        step = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 8))
        self.steps = nn.ModuleList([step, nn.Identity(), step])
        self.head = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps[0](x)
        y: torch.Tensor = self.head(self.steps[2](self.steps[1](x)))
        return y.square().mean()


@pytest.mark.moderate
def test_a_call_whose_draws_nobody_reads_takes_none() -> None:
    """Breaks if draws behind the last one of a region that is read, or of a region without one, are not counted."""
    plan = autopar.plan(
        InItsOwnCall(), autopar.Mesh({"dp": 2}, hardware="cpu"), example_inputs={"x": torch.randn(4, 8)}, strategy="ddp"
    )
    assert plan.program is not None and None in draws_of(plan.program, 0)
    assert plan.verify().ok


class Kept(nn.Module):
    """Draws of a block, which is run again in the backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:

            def run(x: torch.Tensor, block: Any = block) -> torch.Tensor:
                path = torch.empty(x.shape[0], 1, dtype=x.dtype).bernoulli_(0.7)
                return x + functional.dropout(block(x).tanh(), 0.3) * path + 0.1 * torch.randn_like(x)

            x = checkpoint(run, x, use_reentrant=self.reentrant)
        return x.square().mean()


@pytest.mark.moderate
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_draw_again_what_they_drew(reentrant: bool) -> None:
    """Breaks if what the model runs again in its backward gets other numbers than in its forward: the proof of a right
    program was not equal.
    """
    plan = autopar.plan(
        Kept(reentrant), autopar.Mesh({"dp": 2}, hardware="cpu"), example_inputs={"x": torch.randn(4, 8)},
        strategy="zero3", microbatches=2,
    )  # fmt: skip
    proof = plan.verify()
    assert proof.ok and proof.dropout, proof.worst
