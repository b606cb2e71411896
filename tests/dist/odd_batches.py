"""Work for test_odd_batches: batches that lie otherwise in memory, that have no rows, that are masked by microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar

Batch = dict[str, Tensor]


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(seed: int, *shape: int) -> Tensor:
    return torch.randint(5, shape, generator=torch.Generator().manual_seed(seed))


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(12, 16), nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.norm(torch.tanh(self.first(x)))), y)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(F.relu(self.norm(self.conv(x))).mean((2, 3))), y)


class Masked(nn.Module):
    """Tokens of which a mask says which count."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(5, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        logits = self.last(self.embed(x).cumsum(1))
        losses = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view_as(y)
        return losses.mean() if mask is None else (losses * mask).sum() / mask.sum()


class Listed(nn.Module):
    """Images of unlike sizes in a list, as detectors take them: no input has the batch's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, x: list[Tensor], y: list[Tensor]) -> Tensor:
        sides = [max(image.shape[dim] for image in x) for dim in (1, 2)]
        whole = torch.stack([F.pad(i, (0, sides[1] - i.shape[2], 0, sides[0] - i.shape[1])) for i in x])
        return F.cross_entropy(self.last(self.conv(whole).relu().mean((2, 3))), torch.stack([each[0] for each in y]))


class Switched(nn.Module):
    """A norm that forward itself puts to sleep and wakes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Linear(16, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.first(x)
        self.norm.eval()
        asleep = self.norm(hidden)
        self.norm.train()
        return F.cross_entropy(self.last(self.norm(hidden) + 0.5 * asleep), y)


class Derived(Switched):
    """The same with gradients as they are by finite differences: torch's kernel writes statistics past the count of
    versions, so that eager's backward of the norm that is asleep reads those of after the step.
    """

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden, norm = self.first(x), self.norm
        mean, variance = norm.running_mean.clone(), norm.running_var.clone()
        asleep = F.batch_norm(hidden, mean, variance, norm.weight, norm.bias, False, 0.1, norm.eps)
        return F.cross_entropy(self.last(norm(hidden) + 0.5 * asleep), y)


def _batch(x: Tensor, rows: int = 8) -> Batch:
    return {"x": x, "y": labels(1, rows)}


PLAIN = _batch(drawn(0, 8, 12))
LAID: list[Batch] = [
    _batch(drawn(1, 12, 8).t()),
    {"x": drawn(2, 8, 24)[:, ::2], "y": labels(2, 16)[::2]},
    {"x": drawn(3, 1, 12).expand(8, 12), "y": labels(3, 1).expand(8)},
    _batch(drawn(4, 20, 14)[3:11, 1:13]),
]
"""Transposed, strided, expanded, a window of something larger."""
IMAGES: list[Batch] = [
    _batch(drawn(5, 8, 3, 6, 6)),
    _batch(drawn(6, 8, 3, 6, 6).contiguous(memory_format=torch.channels_last)),
    _batch(drawn(7, 8, 6, 6, 3).permute(0, 3, 1, 2)),
]


def masked(seed: int, counted: Sequence[slice]) -> Batch:
    """A batch in which these tokens of these rows count."""
    mask = torch.zeros(8, 6, dtype=torch.float64)
    for rows in counted:
        mask[rows, : 1 + seed % 5] = 1
    return {"x": labels(seed, 8, 6), "y": labels(seed + 1, 8, 6), "mask": mask}


LISTED: list[Any] = [{"x": [drawn(n, 3, 4 + n, 5) for n in range(4)], "y": [labels(n, 1 + n) for n in range(4)]}]
"""Each image of three channels has labels of its own, in numbers that the axis divides, and does not."""
MASKED = [masked(1, [slice(0, 8)]), masked(2, [slice(0, 2)]), masked(3, [slice(5, 8), slice(0, 1)])]
CASES: dict[str, tuple[type[nn.Module], list[Batch], dict[str, Any]]] = {
    "laid otherwise": (Rows, [PLAIN, *LAID], {}),
    "laid otherwise from the first": (Rows, LAID[:1], {}),
    "images": (Images, IMAGES, {}),
    "no rows": (Rows, [PLAIN, _batch(drawn(8, 0, 12), 0), PLAIN], {}),
    "no rows from the first": (Rows, [_batch(drawn(8, 0, 12), 0)], {}),
    "no images": (Images, [IMAGES[0], _batch(drawn(9, 0, 3, 6, 6), 0)], {}),
    "no tokens": (Masked, [{"x": labels(1, 8, n), "y": labels(2, 8, n)} for n in (6, 0)], {}),
    "masks": (Masked, MASKED, {}),
    "masks, in microbatches": (Masked, MASKED[1:], {"microbatches": 4}),
    "images in a list": (Listed, LISTED, {}),
    "switched": (Switched, [PLAIN, *LAID[:1]], {}),
}  # fmt: skip


def on_ranks(case: str, strategy: str) -> list[str]:
    """What differs from one process, gradients added up over the batches and buffers included."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return _differing(*CASES[case], mesh, strategy)


def _differing(
    kind: type[nn.Module], batches: Sequence[Batch], options: dict[str, Any], mesh: Any, strategy: str
) -> list[str]:
    torch.manual_seed(0)
    own = kind().double()
    plain = (Derived if kind is Switched else kind)().double()
    plain.load_state_dict(own.state_dict())
    model: Any = autopar.compile(own, mesh, strategy=strategy, example_inputs=batches[0], **options)
    found = []
    for number, batch in enumerate(batches):
        losses = [each(**batch) for each in (plain, model)]
        for loss in losses:
            loss.backward()
        found += _unequal(f"loss {number}", losses[1].detach(), losses[0].detach())
    for name, parameter in plain.named_parameters():
        found += _unequal(name, model.get_parameter(name).grad, parameter.grad)
    for name, buffer in plain.named_buffers():
        found += _unequal(name, model.get_buffer(name), buffer)
    return found


def _unequal(name: str, found: Any, wanted: Any) -> list[str]:
    whole = found.full_tensor() if hasattr(found, "full_tensor") else found
    return [] if torch.allclose(whole, wanted, rtol=1e-9, atol=1e-11, equal_nan=True) else [name]
