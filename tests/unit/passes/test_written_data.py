"""`.data` in forward, which traces do not see: buffers and what is not trained are written by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from autopar.api import interpret
from autopar.base.errors import AutoparError
from autopar.passes import rebound
from autopar.passes.capture import capture

WIDTH = 4


class Net(nn.Module):
    """`how` writes into it before it is used."""

    center: Tensor
    other: Tensor

    def __init__(self, how: Callable[[Net], object]) -> None:
        super().__init__()
        self.linear, self.slow = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("center", torch.ones(WIDTH, dtype=torch.float64))
        self.register_buffer("other", torch.ones(WIDTH, dtype=torch.float64))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.how(self)
            target = self.slow(x)
        return (self.linear(x) * target * self.center).sum()


def _buffer_is_assigned(net: Net) -> None:
    net.center.data = net.center.data * 0.9 + 0.1 * net.slow.bias.data


def _buffer_is_changed(net: Net) -> None:
    net.center.data.mul_(0.9).add_(net.slow.bias.data, alpha=0.1)


def _moving_average(net: Net) -> None:
    for slow, fast in zip(net.slow.parameters(), net.linear.parameters(), strict=True):
        slow.data = slow.data * 0.9 + fast.data * 0.1


def _moving_average_in_place(net: Net) -> None:
    for slow, fast in zip(net.slow.parameters(), net.linear.parameters(), strict=True):
        slow.data.mul_(0.9).add_(fast.data, alpha=0.1)


@pytest.mark.moderate
@pytest.mark.parametrize("how", [_buffer_is_assigned, _buffer_is_changed, _moving_average, _moving_average_in_place])
def test_what_is_not_trained_and_whose_data_is_written_has_it(how: Callable[[Net], object]) -> None:
    """Breaks if what forward assigns to a buffer's data is lost, or ends the process, or a momentum encoder that it
    moves (MoCo's) stays where it was.
    """
    torch.manual_seed(0)
    model, batch = Net(how).double(), {"x": torch.randn(3, WIDTH, dtype=torch.float64)}
    program = capture(model, batch)
    (found, *_), _, updates = interpret.run_with_updates(program, interpret.state_of(model, program), batch)
    torch.testing.assert_close(found, model(**batch))
    held = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    assert updates and updates.keys() == {name for name, _ in program.updates}
    for name, value in updates.items():
        torch.testing.assert_close(value, held[name].detach())


def _clipped(net: Net) -> None:
    net.linear.weight.data = net.linear.weight.data.clamp(-0.01, 0.01)


def _clipped_in_place(net: Net) -> None:
    net.linear.weight.data.clamp_(-0.01, 0.01)


REFUSED: Mapping[Callable[[Net], object], str] = {
    _clipped: r"assigns to the .data of a tensor that has a gradient.*test_written_data.py:.*between steps",
    _clipped_in_place: "changes its own parameter linear.weight.*buffer",
}


@pytest.mark.moderate
@pytest.mark.parametrize("how", REFUSED)
def test_a_parameter_that_is_trained_and_whose_data_is_written_is_refused(how: Callable[[Net], object]) -> None:
    """Breaks if what forward() does to it is lost without a word."""
    with pytest.raises(AutoparError, match=REFUSED[how]):
        capture(Net(how).double(), {"x": torch.randn(3, WIDTH, dtype=torch.float64)})


def _what_it_was(net: Net) -> None:
    was = net.center.data
    net.center.data = net.slow.bias * 2
    net.center.mul_(was)


def _written_elsewhere(net: Net) -> None:
    new = net.slow.bias * 2
    net.center.data = new
    new.add_(1)


def _written_here(net: Net) -> None:
    new = net.slow.bias * 2
    net.center.data = new
    net.center.add_(1)
    net.other.copy_(new)


def _of_another_buffer(net: Net) -> None:
    net.center.data = net.other


@pytest.mark.parametrize(
    ("how", "what"),
    [
        (_what_it_was, "what it was is used"),
        (_written_elsewhere, "what is written"),
        (_written_here, "used as it was"),
        (_of_another_buffer, "a buffer or a parameter"),
    ],
)
def test_memory_that_eager_shares_is_not_copied(how: Callable[[Net], object], what: str) -> None:
    """Breaks if a copy stands for memory that two names share, of which one is written."""
    words = rf"makes the \.data of a buffer.*{what}.*test_written_data\.py:.*\.clone\(\)"
    with pytest.raises(AutoparError, match=words):
        capture(Net(how).double(), {"x": torch.randn(3, WIDTH, dtype=torch.float64)})


def _written_and_used(net: Net) -> None:
    new = net.slow.bias * 2
    net.center.data = new
    net.other.data = net.center * new


def _written_on(net: Net) -> None:
    net.center.data = net.slow.bias * 2
    net.center.add_(1)


@pytest.mark.moderate
@pytest.mark.parametrize("how", [_written_and_used, _written_on])
def test_what_nobody_could_tell_is_allowed(how: Callable[[Net], object]) -> None:
    """Breaks if a value is not used, or a buffer not written, where only one of both is."""
    test_what_is_not_trained_and_whose_data_is_written_has_it(how)


def test_where_nothing_was_assigned_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if every function that a forward calls has its arguments taken apart for what no forward here does: that
    took a fifth of a trace.
    """
    monkeypatch.setattr(rebound.compat, "tree_flatten", lambda given: pytest.fail("arguments were taken apart"))
    x = torch.zeros(2)
    rebound.Rebound().look_at(torch.add, (x, x), {}, lambda: None)


def test_what_is_computed_with_in_another_dtype_is_not_changed() -> None:
    """Breaks if a momentum encoder moves by steps that bfloat16 rounds away."""
    with pytest.raises(AutoparError, match="changes its own parameter slow.weight.*as it is stored"):
        capture(Net(_moving_average_in_place), {"x": torch.randn(3, WIDTH)}, precision=torch.bfloat16)
