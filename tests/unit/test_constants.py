"""What a model makes of Python's own numbers in `forward` keeps its values."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.base.errors import AutoparError

WIDTH = 8
WEIGHTS = [0.5, 2.0, 3.0, 1.0, 1.0, 1.0, 2.0, 2.0]
ORDER = [1, 0, 3, 2, 5, 4, 7, 6]
TABLE = [torch.arange(float(WIDTH)) + 1]


class Block(nn.Module):
    """A layer, and what is made of numbers beside it."""

    def __init__(self, number: int, make: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.linear, self.number, self.make = nn.Linear(WIDTH, WIDTH), number, make

    def forward(self, x: Tensor) -> Tensor:
        return x + self.make(self.linear(x), self.number)


class Model(nn.Module):
    def __init__(self, make: Callable[[Tensor, int], Tensor], blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(number, make) for number in range(blocks))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x)
        return {"loss": x.pow(2).mean()}


def tensor_on_device(y: Tensor, number: int) -> Tensor:
    return y * torch.tensor(WEIGHTS, device=y.device)


def tensor_anywhere(y: Tensor, number: int) -> Tensor:
    return y * torch.tensor(WEIGHTS)


def of_the_block(y: Tensor, number: int) -> Tensor:
    return y * torch.tensor([1.0 + number] * WIDTH, device=y.device)


def by_a_list(y: Tensor, number: int) -> Tensor:
    return y[:, ORDER]


def by_a_short_list(y: Tensor, number: int) -> Tensor:
    """As multi-query attention takes its one key."""
    return y.view(-1, 4, 2)[..., [-2], :].expand(-1, 4, 2).reshape(-1, WIDTH)


def by_a_tensor(y: Tensor, number: int) -> Tensor:
    return y[:, torch.as_tensor(ORDER, device=y.device)]


def from_numpy(y: Tensor, number: int) -> Tensor:
    return y * torch.from_numpy(np.linspace(0, 1, WIDTH).astype("float32"))


def from_a_plain_list(y: Tensor, number: int) -> Tensor:
    return y * TABLE[0]


def read_back(y: Tensor, number: int) -> Tensor:
    return y * int(torch.tensor(3))


def written(y: Tensor, number: int) -> Tensor:
    mask = torch.ones(WIDTH, WIDTH, device=y.device)
    mask[2:4] = 0
    mask[:, [1, 2]] = 0.5
    return y @ mask


MAKERS = (
    tensor_on_device, tensor_anywhere, of_the_block, by_a_list, by_a_short_list, by_a_tensor, from_numpy,
    from_a_plain_list, read_back, written,
)  # fmt: skip


@pytest.mark.sampled(10)
@pytest.mark.moderate
@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_numbers_of_python_keep_their_values(make: Callable[[Tensor, int], Tensor], blocks: int) -> None:
    """Breaks if a table, an index or a scalar that `forward` makes arrives without its values, or with another block's:
    the program then reads memory that nobody wrote.
    """
    torch.manual_seed(0)
    mesh = autopar.Mesh({"dp": 2}, hardware="cpu")
    plan = autopar.plan(Model(make, blocks), mesh, example_inputs={"x": torch.randn(8, WIDTH)}, strategy="zero3")
    assert plan.program is not None and not any(value.is_meta for value in plan.program.constants.values())
    plan.verify().raise_on_failure()


@pytest.mark.moderate
def test_a_program_does_not_depend_on_the_default_dtype() -> None:
    """Breaks if what `forward` makes has the default dtype of the process that runs the program, not of the trace."""
    mesh = autopar.Mesh({"dp": 2}, hardware="cpu")
    plan = autopar.plan(Model(written, 1), mesh, example_inputs={"x": torch.randn(8, WIDTH)}, strategy="ddp")
    (line,) = [line for line in plan.source.splitlines() if "ones(" in line]
    assert "float32" in line


class Held(nn.Module):
    """A table in a plain list, which no one moves or loads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.tables = nn.Linear(WIDTH, WIDTH), [torch.ones(WIDTH)]

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.linear(x) * self.tables[0]).pow(2).mean()}


def test_a_tensor_without_values_is_refused() -> None:
    """Breaks if a table that is on meta is planned with: there is nothing to run with."""
    with torch.device("meta"):
        model = Held()
    with pytest.raises(AutoparError, match="register the tensor as a buffer") as caught:
        autopar.plan(model, autopar.Mesh({"dp": 2}, hardware="cpu"), example_inputs={"x": torch.randn(8, WIDTH)})
    assert "test_constants.py" in str(caught.value)
