"""Models of the diffusion kind: an embedding of the time feeds every block, early values come back, towers meet."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.base.errors import AutoparError
from tests.unit.tiers import mostly_slow

WIDTH, ROWS = 16, 8


class Time(nn.Module):
    """Sines of a step of the diffusion, embedded. (batch,) to (batch, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, step: Tensor) -> Tensor:
        rates = torch.exp(-math.log(100.0) * torch.arange(WIDTH // 2, device=step.device) / (WIDTH // 2))
        angles = step[:, None].to(self.linear_1.weight.dtype) * rates.to(self.linear_1.weight.dtype)
        return self.linear_2(functional.silu(self.linear_1(torch.cat([angles.sin(), angles.cos()], -1))))


class Residual(nn.Module):
    """A residual block of convolutions that is told the time."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.norm_1, self.conv_1 = nn.GroupNorm(2, inside), nn.Conv2d(inside, outside, 3, padding=1)
        self.time = nn.Linear(WIDTH, outside)
        self.norm_2, self.conv_2 = nn.GroupNorm(2, outside), nn.Conv2d(outside, outside, 3, padding=1)
        self.skip = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv_1(functional.silu(self.norm_1(x))) + self.time(functional.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv_2(functional.silu(self.norm_2(h)))


class UNet(nn.Module):
    """Down and up again; what each level made on the way down comes in on the way up. side: a branch adds to it."""

    def __init__(self, side: bool = False) -> None:
        super().__init__()
        self.time, self.first = Time(), nn.Conv2d(2, 8, 3, padding=1)
        self.down = nn.ModuleList([Residual(8, 8), Residual(8, 16)])
        self.middle = Residual(16, 16)
        self.up = nn.ModuleList([Residual(32, 8), Residual(16, 8)])
        self.last = nn.Conv2d(8, 2, 3, padding=1)
        self.side = Side() if side else None

    def forward(self, x: Tensor, step: Tensor, hint: Tensor, noise: Tensor) -> dict[str, Tensor]:
        time = self.time(step)
        h = self.first(x)
        kept = []
        for block in self.down:
            h = block(h, time)
            kept.append(h)
            h = functional.avg_pool2d(h, 2)
        h = self.middle(h, time)
        if self.side is not None:
            *beside, inner = self.side(x, hint, time)
            kept = [each + other for each, other in zip(kept, beside, strict=True)]
            h = h + inner
        for block in self.up:
            h = functional.interpolate(h, scale_factor=2.0, mode="nearest")
            h = block(torch.cat([h, kept.pop()], 1), time)
        out = self.last(functional.silu(h))
        return {"loss": functional.mse_loss(out, noise), "out": out}


class Side(nn.Module):
    """As ControlNet: another way down that sees a hint, and convolutions of all that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.hint, self.first = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(2, 8, 3, padding=1)
        self.down, self.middle = nn.ModuleList([Residual(8, 8), Residual(8, 16)]), Residual(16, 16)
        self.out = nn.ModuleList([nn.Conv2d(8, 8, 1), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)])

    def forward(self, x: Tensor, hint: Tensor, time: Tensor) -> list[Tensor]:
        h, made = self.first(x) + self.hint(hint), []
        for block, out in zip(self.down, self.out, strict=False):
            h = block(h, time)
            made.append(out(h))
            h = functional.avg_pool2d(h, 2)
        return [*made, self.out[-1](self.middle(h, time))]


class Modulated(nn.Module):
    """A block of a diffusion transformer: scales, shifts and gates of both halves follow from the time."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)
        self.norm_1 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.norm_2 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc_1, self.fc_2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        parts = self.modulation(functional.silu(time))[:, None, :].chunk(6, -1)
        h = self.norm_1(x) * (1 + parts[0]) + parts[1]
        q, k, v = self.qkv(h).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + parts[2] * self.proj(mixed)
        h = self.norm_2(x) * (1 + parts[3]) + parts[4]
        return x + parts[5] * self.fc_2(functional.gelu(self.fc_1(h)))


class DiT(nn.Module):
    """A diffusion transformer on patches."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.patches = Time(), nn.Conv2d(2, WIDTH, 2, stride=2)
        self.blocks = nn.ModuleList(Modulated() for _ in range(4))
        self.last_time, self.last = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, step: Tensor, hint: Tensor, noise: Tensor) -> dict[str, Tensor]:
        time = self.time(step)
        h = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            h = block(h, time)
        scale, shift = self.last_time(functional.silu(time))[:, None, :].chunk(2, -1)
        out = self.last(functional.layer_norm(h, (WIDTH,)) * (1 + scale) + shift)
        out = out.unflatten(1, (4, 4)).unflatten(-1, (2, 2, 2)).permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)
        return {"loss": functional.mse_loss(out, noise), "out": out}


class Towers(nn.Module):
    """Two towers of blocks, of the image and of its hint, that are compared with each other, as CLIP's are."""

    def __init__(self) -> None:
        super().__init__()
        self.time = Time()
        self.of_image, self.of_hint = nn.Conv2d(2, WIDTH, 2, stride=2), nn.Conv2d(1, WIDTH, 2, stride=2)
        self.image_blocks = nn.ModuleList(Modulated() for _ in range(2))
        self.hint_blocks = nn.ModuleList(Modulated() for _ in range(2))
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, step: Tensor, hint: Tensor, noise: Tensor) -> dict[str, Tensor]:
        time = self.time(step)
        image, other = (conv(of).flatten(2).transpose(1, 2) for conv, of in
                        ((self.of_image, x + noise), (self.of_hint, hint)))  # fmt: skip
        for block in self.image_blocks:
            image = block(image, time)
        for block in self.hint_blocks:
            other = block(other, time)
        both = [functional.normalize(each.mean(1), dim=-1) for each in (image, other)]
        scores = both[0] @ both[1].T * self.temperature.exp()
        which = torch.arange(len(scores), device=scores.device)
        loss = functional.cross_entropy(scores, which) + functional.cross_entropy(scores.T, which)
        return {"loss": loss / 2, "scores": scores}


MODELS: dict[str, Callable[[], nn.Module]] = {
    "unet": UNet,
    "control": lambda: UNet(side=True),
    "dit": DiT,
    "towers": Towers,
}
CASES = [(model, mesh, strategy) for model in MODELS for mesh, strategy in (
    ("dp=2", "ddp"), ("dp=2", "zero3"), ("tp=2", "tensor"), ("dp=2,tp=2", "auto"), ("pp=2", "pipeline"),
)]  # fmt: skip


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    image, noise, hint = torch.randn(ROWS, 2, 8, 8), torch.randn(ROWS, 2, 8, 8), torch.randn(ROWS, 1, 8, 8)
    return {"x": image, "step": torch.randint(0, 1000, (ROWS,)), "hint": hint, "noise": noise}


@pytest.mark.moderate
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("model", "mesh", "strategy"),
    mostly_slow(CASES, ("dit", "dp=2", "zero3"), ("control", "tp=2", "tensor"), ("dit", "pp=2", "pipeline")),
)
def test_every_gradient_is_eagers(model: str, mesh: str, strategy: str) -> None:
    """Breaks if what feeds every block loses the gradients of some, or what comes back late is taken for another."""
    torch.manual_seed(0)
    made = MODELS[model]()
    # Towers are compared over all rows of a batch: that is no sum over microbatches (below).
    options: dict[str, Any] = {"microbatches": 1 if model == "towers" else 2} if strategy == "pipeline" else {}
    plan = autopar.plan(
        made, autopar.Mesh.parse(mesh, hardware="cpu"), strategy=strategy, example_inputs=batch(), **options
    )
    proof = plan.verify(rtol=1e-9)
    assert proof.ok, str(proof)
    compared = {each.name for each in proof.comparisons}
    assert {f"gradient of {name}" for name, _ in made.named_parameters()} <= compared


@pytest.mark.moderate
def test_rows_that_are_compared_are_no_microbatches() -> None:
    """Breaks if a loss over all pairs of rows is taken for a mean over those of each microbatch."""
    mesh = autopar.Mesh.parse("pp=2", hardware="cpu")
    with pytest.raises(AutoparError, match=r"matmul combines each row of the batch with every other.*microbatches=1"):
        autopar.plan(Towers(), mesh, strategy="pipeline", example_inputs=batch(), microbatches=2)
