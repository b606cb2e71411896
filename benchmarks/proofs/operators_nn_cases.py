"""What a row of docs/operators.md is: a layer, function or loss of torch.nn in a tiny model, in one of its settings.

A model is a linear layer, so that gradients pass through what it is for, and that layer, function or loss. Of a layer
the loss is the mean of the squares of what it gives. Nothing here is written for autopar.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 8
"""Of every batch."""

CLASSES = 5
REDUCTIONS = ("mean", "sum", "none")
ANY: Any = F  # of which torch's own types lack arguments
Inputs = Callable[[torch.Generator], Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """One row: `of` is the layer, function or loss, `setting` how it is called."""

    of: str
    setting: str
    model: Callable[[], nn.Module]
    inputs: Mapping[str, Inputs]

    @property
    def name(self) -> str:
        return f"{self.of} ({self.setting})" if self.setting else self.of

    def batch(self) -> dict[str, Tensor]:
        """The inputs, seeded."""
        generator = torch.Generator().manual_seed(0)
        return {name: make(generator) for name, make in self.inputs.items()}


class Layer(nn.Module):
    """The mean of the squares of what a layer gives for a linear layer's result."""

    def __init__(self, width: int, layer: Callable[..., Any]) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layer = layer

    def forward(self, x: Tensor, a: Tensor | None = None, b: Tensor | None = None) -> dict[str, Tensor]:
        """The loss, and what the layer gives."""
        given = [each for each in (a, b) if each is not None]
        y = self.layer(self.first(x), *given)
        y = y[0] if isinstance(y, tuple) else y
        return {"loss": (y * y).mean(), "y": y}


class Loss(nn.Module):
    """A loss of a linear layer's result; of a loss for each row, the mean."""

    def __init__(self, width: int, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.loss = loss

    def forward(
        self, x: Tensor, a: Tensor | None = None, b: Tensor | None = None, c: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The loss alone, or with the rows'."""
        given = [each for each in (a, b, c) if each is not None]
        loss = self.loss(self.first(x), *given)
        return {"loss": loss} if not loss.dim() else {"loss": loss.mean(), "rows": loss}


# ------------------------------------------------------------------------------------------------------------- inputs


def floats(*shape: int, scale: float = 1.0) -> Inputs:
    """Normal numbers, a row for each of the batch."""
    return lambda generator: torch.randn(ROWS, *shape, generator=generator) * scale


def unit(*shape: int) -> Inputs:
    """Numbers between 0 and 1."""
    return lambda generator: torch.rand(ROWS, *shape, generator=generator) * 0.9 + 0.05


def labels(*shape: int, high: int = CLASSES, ignored: int | None = None) -> Inputs:
    """Numbers of classes; two of them `ignored`."""

    def make(generator: torch.Generator) -> Tensor:
        found = torch.randint(0, high, (ROWS, *shape), generator=generator)
        if ignored is not None:
            found.view(-1)[[1, 2]] = ignored
        return found

    return make


def signs(*shape: int) -> Inputs:
    """1 and -1."""
    return lambda generator: torch.randint(0, 2, (ROWS, *shape), generator=generator).float() * 2 - 1


def shares(*shape: int) -> Inputs:
    """Probabilities of the classes, which are dim 1."""
    return lambda generator: torch.randn(ROWS, *shape, generator=generator).softmax(1)


def lengths(low: int, high: int) -> Inputs:
    """Lengths of sequences."""
    return lambda generator: torch.randint(low, high + 1, (ROWS,), generator=generator)


# -------------------------------------------------------------------------------------------------------- short forms


def layer(of: str, setting: str, make: Callable[[], Callable[..., Any]], *shape: int, **extra: Inputs) -> Case:
    """A case of `Layer`, for rows of this shape."""
    return Case(of, setting, lambda: Layer(shape[-1], make()), {"x": floats(*shape), **extra})


def function(of: str, setting: str, call: Callable[..., Any], *shape: int, **extra: Inputs) -> Case:
    """A case of `Layer` for a function."""
    return layer(of, setting, lambda: call, *shape, **extra)


def loss(of: str, setting: str, make: Callable[[], Callable[..., Any]], *shape: int, **extra: Inputs) -> Case:
    """A case of `Loss`, for rows of this shape."""
    return Case(of, setting, lambda: Loss(shape[-1], make()), {"x": floats(*shape), **extra})
