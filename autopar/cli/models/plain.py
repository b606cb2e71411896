"""Two small models in plain torch.nn, with their losses: a residual MLP and a CNN.

Shape suffixes: B rows, F features, H hidden, C channels, Y height, X width, K classes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


class Output(NamedTuple):
    """What both models return: the mean cross entropy, and one row of logits for each row of the batch."""

    loss: Tensor
    logits: Tensor


class Block(nn.Module):
    """``x + down(gelu(up(norm(x))))``"""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.up = nn.Linear(features, hidden)
        self.down = nn.Linear(hidden, features)

    def forward(self, x_BF: Tensor) -> Tensor:
        """Keeps the shape."""
        return x_BF + self.down(functional.gelu(self.up(self.norm(x_BF))))


class MLP(nn.Module):
    """Residual blocks and a classifier."""

    def __init__(self, features: int, hidden: int, num_layers: int, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(features, hidden) for _ in range(num_layers))
        self.classifier = nn.Linear(features, num_classes)

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        """x [B, F] floating, labels [B] int64."""
        for layer in self.layers:
            x = layer(x)
        logits_BK = self.classifier(x)
        return Output(functional.cross_entropy(logits_BK, labels), logits_BK)


class CNN(nn.Module):
    """Two convolutions, each with ReLU and max pooling, and a classifier."""

    def __init__(self, image_size: int, channels: int, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, channels, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(channels, 2 * channels, kernel_size=3, padding=1)
        self.classifier = nn.Linear(2 * channels * (image_size // 4) ** 2, num_classes)

    def forward(self, images: Tensor, labels: Tensor) -> Output:
        """images [B, 3, Y, X] floating, labels [B] int64."""
        x_BCYX = functional.max_pool2d(functional.relu(self.conv1(images)), 2)
        x_BCYX = functional.max_pool2d(functional.relu(self.conv2(x_BCYX)), 2)
        logits_BK = self.classifier(x_BCYX.flatten(1))
        return Output(functional.cross_entropy(logits_BK, labels), logits_BK)


def make_mlp(
    *, tiny: bool, rows: int, features: int = 0, hidden: int = 0, num_layers: int = 0, num_classes: int = 0
) -> tuple[MLP, dict[str, Tensor]]:
    """The MLP and a batch, on torch's default device; sizes of 0 are chosen by `tiny`."""
    features, hidden = features or (32 if tiny else 1024), hidden or (64 if tiny else 4096)
    num_layers, num_classes = num_layers or (2 if tiny else 8), num_classes or 16
    batch = {"x": torch.randn(rows, features), "labels": torch.randint(num_classes, (rows,))}
    return MLP(features, hidden, num_layers, num_classes), batch


def make_cnn(
    *, tiny: bool, rows: int, image_size: int = 0, channels: int = 0, num_classes: int = 0
) -> tuple[CNN, dict[str, Tensor]]:
    """The CNN and a batch, on torch's default device; sizes of 0 are chosen by `tiny`."""
    image_size, channels = image_size or (8 if tiny else 32), channels or (8 if tiny else 64)
    num_classes = num_classes or 16
    batch = {"images": torch.randn(rows, 3, image_size, image_size), "labels": torch.randint(num_classes, (rows,))}
    return CNN(image_size, channels, num_classes), batch
