"""A small model of what the catalogue's tiny ones lack: batch norm, differences, pieces from the middle.

Shape suffixes: B rows, C channels, Y height, X width, K classes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.cli.models.plain import Output


class Normed(nn.Module):
    """Two convolutions with batch norm; channels in the middle, less their means, are classified."""

    def __init__(self, channels: int = 8, num_classes: int = 5) -> None:
        super().__init__()
        self.channels = channels
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.second_norm = nn.BatchNorm2d(channels)
        self.classifier = nn.Linear(channels // 2, num_classes)

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        """x [B, 3, Y, X] floating, labels [B] int64."""
        x_BCYX = functional.relu(self.first_norm(self.first(x)))
        x_BCYX = functional.relu(self.second_norm(self.second(x_BCYX)) - x_BCYX.mean((2, 3), keepdim=True))
        quarter = self.channels // 4
        x_BC = x_BCYX[:, quarter : 3 * quarter].square().sum((2, 3))
        logits_BK = self.classifier(x_BC - functional.softmax(x_BC, 0))
        return Output(functional.cross_entropy(logits_BK, labels), logits_BK)


def normed() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and a batch of 8 images."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    x = torch.randn(8, 3, 6, 6, generator=generator)
    return Normed(), {"x": x, "labels": torch.randint(5, (8,), generator=generator)}
