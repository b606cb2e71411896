"""Slices that begin where a buffer says that forward changes: queues with a pointer, whose length is known."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.base.errors import AutoparError
from autopar.passes.capture import capture
from tests.unit.runtime.saved_run import one_rank as one_rank

SIZE, WIDTH, ROWS = 12, 4, 4


class Queue(nn.Module):
    """Contrasts rows with those of the steps before, which `put` keeps."""

    def __init__(self, put: Callable[[Queue, Tensor], None], size: int = SIZE) -> None:
        super().__init__()
        self.put, self.linear, self.size = put, nn.Linear(WIDTH, WIDTH), size
        self.register_buffer("queue", F.normalize(torch.randn(WIDTH, size), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))
        self.queue: Tensor
        self.pointer: Tensor

    def forward(self, x: Tensor) -> Tensor:
        query, keys = self.linear(x), self.linear(x.flip(-1)).detach()
        loss = (query @ self.queue.clone()).logsumexp(-1).mean()
        with torch.no_grad():
            self.put(self, keys)
        return loss


def _by_int(model: Queue, keys: Tensor) -> None:
    """As MoCo's own code has it."""
    rows = keys.shape[0]
    at = int(model.pointer)
    assert isinstance(rows, int)
    model.queue[:, at : at + rows] = keys.T
    model.pointer[0] = (at + rows) % model.size


def _by_item(model: Queue, keys: Tensor) -> None:
    at, rows = model.pointer.item(), len(keys)
    model.queue[:, at : at + rows].copy_(keys.T)
    model.pointer.fill_((at + rows) % model.size)


def _read_and_written(model: Queue, keys: Tensor) -> None:
    """A moving average of what is there."""
    at = int(model.pointer)
    there = model.queue[:, at : at + ROWS]
    there.mul_(0.5)
    there += keys.T
    model.pointer += ROWS
    model.pointer %= model.size


def _counted(model: Queue, keys: Tensor) -> None:
    """By the places of its rows."""
    at = model.pointer[0]
    model.queue.index_copy_(1, torch.arange(at, at + ROWS, dtype=torch.long, device=keys.device), keys.T)
    model.pointer.add_(ROWS).remainder_(model.size)


def _compiled(model: Queue) -> Any:
    return autopar.compile(model, init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), strategy="ddp")


def _up_to_the_pointer(model: Queue, keys: Tensor) -> None:
    """The rows before the pointer, which has moved already."""
    model.pointer += ROWS
    end = int(model.pointer)
    model.queue[:, end - ROWS : end] = keys.T
    model.pointer %= model.size


@pytest.mark.moderate
@pytest.mark.parametrize("put", [_by_int, _by_item, _read_and_written, _up_to_the_pointer, _counted])
def test_each_step_writes_where_the_one_before_ended(put: Callable[[Queue, Tensor], None]) -> None:
    """Breaks if a program goes on with the pointer of the first step, or a slice is not written."""
    torch.manual_seed(0)
    model = Queue(put).double()
    eager = copy.deepcopy(model)
    batches = [torch.randn(ROWS, WIDTH, dtype=torch.float64) for _ in range(5)]
    compiled = _compiled(model)
    for x in batches:
        torch.testing.assert_close(compiled(x=x), eager(x=x))
    held = compiled.state_dict()
    for name, buffer in eager.named_buffers():
        torch.testing.assert_close(held[name], buffer)
    assert len(compiled.autopar._programs) == 1


@pytest.mark.moderate
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_every_rank_keeps_the_rows_of_all(strategy: str) -> None:
    """Breaks if a rank's queue has its own rows alone."""
    mesh = autopar.Mesh.parse("dp=2", hardware="cpu")
    x = torch.randn(ROWS, WIDTH)
    assert autopar.plan(Queue(_by_int), mesh, example_inputs={"x": x}, strategy=strategy).verify().ok


@pytest.mark.moderate
def test_a_slice_that_would_be_cut_off_is_refused() -> None:
    """Breaks if rows go on where a queue ends: eager has fewer there, and fails."""
    model = Queue(_by_int, size=ROWS + 2)
    compiled = _compiled(model)
    compiled(x=torch.randn(ROWS, WIDTH))
    with pytest.raises(AutoparError, match=r"a slice lies in what it is a slice of \(test_fixed_slices\.py:\d+"):
        compiled(x=torch.randn(ROWS, WIDTH))


def test_a_branch_on_the_pointer_is_refused() -> None:
    """Breaks if what is done is what the first step did; `int` is Python's again."""

    def branching(model: Queue, keys: Tensor) -> None:
        at = int(model.pointer)
        if at + ROWS > model.size:
            at = 0
        model.queue[:, at : at + ROWS] = keys.T
        model.pointer[0] = at + ROWS

    with pytest.raises(AutoparError, match=r"pointer, which forward\(\) changes.*test_fixed_slices\.py:\d+"):
        capture(Queue(branching), {"x": torch.randn(ROWS, WIDTH)})
    assert "int" not in globals() and type(int) is type
