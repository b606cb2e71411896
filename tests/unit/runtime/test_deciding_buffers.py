"""Buffers whose values decide what forward does, of a model that was compiled."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.base.errors import AutoparError
from autopar.runtime import branches as branches_of_ranks
from autopar.runtime.branches import check_same_ways
from tests.unit.runtime.saved_run import one_rank as one_rank


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 7)
        self.mask: Tensor
        self.register_buffer("mask", torch.arange(7) < 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.mask.any():
            y = y.masked_fill(~self.mask, 3.0)
        return y.square().mean()


@pytest.mark.moderate
@pytest.mark.parametrize("has_example", [False, True])
def test_they_are_the_models_and_what_they_decide_is_looked_at_in_each_step(has_example: bool) -> None:
    """Breaks if such a model is refused because the copy that is traced has no values, if another model's are taken, or
    if a program goes on that stands for other values.
    """
    torch.manual_seed(0)
    mesh, x = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), torch.randn(4, 6)
    plain = Masked()
    compiled: Any = autopar.compile(
        copy.deepcopy(plain), mesh, strategy="ddp", **({"example_inputs": {"x": x}} if has_example else {})
    )
    assert torch.allclose(compiled(x), plain(x))
    for model in (plain, compiled):
        model.mask.logical_not_()
    assert torch.allclose(compiled(x), plain(x))  # another mask, by which the same is done
    for model in (plain, compiled):
        model.mask.zero_()
    assert torch.allclose(compiled(x), plain(x))  # another one
    compiled.mask.fill_(True)
    with torch.no_grad():
        compiled(x)
        compiled.mask.zero_()
        with pytest.raises(AutoparError, match="takes for granted that what is asked for is as here"):
            compiled(x)


def test_ranks_that_go_different_ways_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if one rank goes on while another plans for its own way."""
    branches = [(True, "model.py:3"), (False, "model.py:5")]
    others = torch.tensor([1, -1])  # went another way at the second branch
    monkeypatch.setattr(branches_of_ranks.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(branches_of_ranks.dist, "all_reduce", lambda x, _: x.copy_(torch.maximum(x, others)))
    check_same_ways((True, True), branches, torch.device("cpu"))
    for ways in (None, (False,)):
        with pytest.raises(AutoparError, match=r"different ways .*model\.py"):
            check_same_ways(ways, branches, torch.device("cpu"))


class Odd(nn.Module):
    """Counts its steps, halves in every third, rounds until little changes, leaves out what is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> dict[str, Tensor | float]:
        y, last, rounds = self.linear(x), torch.zeros_like(x), 0
        while rounds < 4 and (y - last).abs().max() > 0.4:
            last, y, rounds = y, 0.3 * torch.tanh(self.linear(y)), rounds + 1
        if self.steps % 3 == 0:
            y = y / 2
        self.steps += 1
        loss = nn.functional.dropout(y, 0.25).square().mean()
        if not loss.isfinite():
            loss = 0 * self.linear.bias.sum()
        return {"loss": loss, "rounds": torch.tensor(rounds), "top": y.max().item()}


@pytest.mark.moderate
def test_a_batch_that_goes_another_way_gets_a_program_and_leaves_no_trace_in_the_first(caplog: Any) -> None:
    """Breaks if a batch gets the program of another way, what is counted is counted twice, numbers are drawn anew, or
    a way that was met before is traced once more.
    """
    torch.manual_seed(0)
    plain, mesh = Odd(), init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    compiled: Any = autopar.compile(copy.deepcopy(plain), mesh, strategy="ddp")
    x = torch.randn(4, 6)
    seen, planned = [], []
    for scale in (1.0, 10.0, 0.01, 1.0, 10.0, 0.01, torch.inf):
        torch.manual_seed(1)
        found = compiled(scale * x)
        after = torch.get_rng_state()
        torch.manual_seed(1)
        torch.empty((), dtype=torch.int64).random_(2**62)  # a step takes one number, whatever programs it tries
        assert after.equal(torch.get_rng_state())
        wanted = plain(scale * x)
        assert found["rounds"] == wanted["rounds"] and compiled.steps == plain.steps
        assert found["top"] == pytest.approx(wanted["top"], nan_ok=True)
        seen.append((int(found["rounds"]), float(found["loss"].detach())))
        planned.append(len(compiled.autopar._programs))
    assert len({rounds for rounds, _ in seen}) > 1 and seen[-1] == (seen[-1][0], 0.0)
    assert planned[5] == planned[2], "ways that were met before"
    found["loss"].backward()
    assert compiled.linear.bias.grad is not None


class Counted(nn.Module):
    """Follows the mean of what it sees, and weighs every second step otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.steps: Tensor
        self.seen: Tensor
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x - self.seen)
        self.seen.mul_(0.5).add_(0.5 * x.mean(0))
        self.steps += 1
        if self.steps % 2 == 0:
            y = y.square()
        return y.square().mean()


@pytest.mark.moderate
def test_microbatches_go_one_way_and_change_buffers_as_the_whole_batch_does(one_rank: None) -> None:
    """Breaks if each microbatch counts, starts from another's buffers, or gradients of a run that is dropped stay."""
    torch.manual_seed(0)
    plain, mesh = Counted(), init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    compiled: Any = autopar.compile(copy.deepcopy(plain), mesh, strategy="ddp", microbatches=2)
    for _ in range(3):
        x = torch.randn(4, 6)
        plain(x).backward()
        compiled.train_step(x)
        assert compiled.steps == plain.steps and torch.allclose(compiled.seen, plain.seen)
        torch.testing.assert_close(compiled.linear.weight.grad.full_tensor(), plain.linear.weight.grad)
    assert compiled.plan.interface.microbatches == 2
