"""Work for test_media: scripts that train on images, sound, images beside text, and diffusion."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar

Wrap = Callable[[nn.Module], Any]
Numbers = list[float]
STEPS = 5


def seeded(seed: int) -> Generator:
    return Generator().manual_seed(seed)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def words(seed: int, *shape: int, low: int = 3, high: int = 59) -> Tensor:
    return torch.randint(low, high, shape, generator=seeded(seed))


def total(model: Any) -> float:
    return sum(float(p.detach().square().sum()) for p in model.parameters())


def loop(model: Any, batch: Callable[[int], dict[str, Any]]) -> Numbers:
    """Five steps with clipping: losses, norms of gradients, and the parameters at the end."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(STEPS):
        loss = model(**batch(step)).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found += [float(loss.detach()), float(norm)]
    return [*found, total(model)]


def swin(wrap: Wrap) -> Numbers:
    import transformers as hf

    config = hf.SwinConfig(
        image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, drop_path_rate=0.0,
        num_labels=5,
    )  # fmt: skip
    model = wrap(hf.SwinForImageClassification(config).double())
    return loop(model, lambda i: {"pixel_values": drawn(i, 4, 3, 32, 32), "labels": words(i, 4, low=0, high=5)})


def _sound(kind: Any) -> Any:
    return kind(
        vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        conv_dim=(16, 16), conv_kernel=(10, 3), conv_stride=(5, 2), num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4, hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        feat_proj_dropout=0.0, layerdrop=0.0, final_dropout=0.0, mask_time_prob=0.0, mask_feature_prob=0.0,
        ctc_loss_reduction="mean", pad_token_id=0,
    )  # fmt: skip


def _heard(step: int) -> dict[str, Tensor]:
    """The second of four recordings is shorter, and says less."""
    mask, labels = torch.ones(4, 400, dtype=torch.int64), words(step, 4, 6, low=1, high=32)
    mask[1, 300:], labels[1, 4:] = 0, -100
    return {"input_values": drawn(step, 4, 400), "attention_mask": mask, "labels": labels}


def wav2vec2(wrap: Wrap) -> Numbers:
    import transformers as hf

    model = hf.Wav2Vec2ForCTC(_sound(hf.Wav2Vec2Config)).double()
    model.freeze_feature_encoder()
    return loop(wrap(model), _heard)


def hubert(wrap: Wrap) -> Numbers:
    import transformers as hf

    return loop(wrap(hf.HubertForCTC(_sound(hf.HubertConfig)).double()), _heard)


def whisper(wrap: Wrap) -> Numbers:
    import transformers as hf

    config = hf.WhisperConfig(
        vocab_size=64, num_mel_bins=8, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=20,
        max_target_positions=16, dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        use_cache=False,
    )  # fmt: skip
    model = wrap(hf.WhisperForConditionalGeneration(config).double())
    return loop(model, lambda i: {"input_features": drawn(i, 4, 8, 40), "labels": words(i, 4, 10)})


_SEES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 8, "projection_dim": 32,
}  # fmt: skip
_READS: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "use_cache": False,
}  # fmt: skip


def _looked_at(step: int, at: int) -> dict[str, Tensor]:
    """Four words of a text stand for the pieces of an image."""
    ids = words(step, 4, 14)
    ids[:, at : at + 4] = 60
    labels = torch.where(ids == 60, -100, ids)
    mask = torch.ones_like(ids)
    return {"input_ids": ids, "pixel_values": drawn(step, 4, 3, 16, 16), "attention_mask": mask, "labels": labels}


def llava(wrap: Wrap) -> Numbers:
    import transformers as hf

    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**_SEES), text_config=hf.LlamaConfig(num_key_value_heads=2, **_READS),
        image_token_id=60, image_token_index=60, vision_feature_layer=-1,
    )  # fmt: skip
    return loop(wrap(hf.LlavaForConditionalGeneration(config).double()), lambda i: _looked_at(i, 1))


def paligemma(wrap: Wrap) -> Numbers:
    import transformers as hf

    config = hf.PaliGemmaConfig(
        vision_config=hf.SiglipVisionConfig(**_SEES), projection_dim=32, hidden_size=32, image_token_index=60,
        text_config=hf.GemmaConfig(num_key_value_heads=1, head_dim=8, **_READS),
    )  # fmt: skip

    def batch(step: int) -> dict[str, Tensor]:
        found = _looked_at(step, 0)
        kinds = torch.zeros_like(found["input_ids"])
        kinds[:, 8:] = 1
        return {**found, "token_type_ids": kinds}

    return loop(wrap(hf.PaliGemmaForConditionalGeneration(config).double()), batch)


class Residual(nn.Module):
    def __init__(self, taken: int, given: int, times: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, taken), nn.Conv2d(taken, given, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, given), nn.Conv2d(given, given, 3, padding=1)
        self.time = nn.Linear(times, given)
        self.skip = nn.Conv2d(taken, given, 1) if taken != given else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class UNet(nn.Module):
    """A denoiser with one step down, attention, and one up."""

    def __init__(self, c: int = 16, times: int = 32) -> None:
        super().__init__()
        self.times, self.embed = times, nn.Sequential(nn.Linear(times, times), nn.SiLU(), nn.Linear(times, times))
        self.first, self.enter = nn.Conv2d(3, c, 3, padding=1), Residual(c, c, times)
        self.down, self.middle = nn.Conv2d(c, 2 * c, 3, 2, 1), Residual(2 * c, 2 * c, times)
        self.norm, self.qkv, self.mix = nn.GroupNorm(4, 2 * c), nn.Conv2d(2 * c, 6 * c, 1), nn.Conv2d(2 * c, 2 * c, 1)
        self.up, self.leave = nn.ConvTranspose2d(2 * c, c, 4, 2, 1), Residual(2 * c, c, times)
        self.last = nn.Conv2d(c, 3, 3, padding=1)

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        half = self.times // 2
        rates = torch.exp(-math.log(10000) * torch.arange(half, dtype=sample.dtype, device=sample.device) / half)
        angles = timestep[:, None].to(sample.dtype) * rates
        time = self.embed(torch.cat([angles.sin(), angles.cos()], -1))
        above = self.enter(self.first(sample), time)
        x = self.middle(self.down(above), time)
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, 3, 4, c // 4, h * w).transpose(-1, -2).unbind(1)
        x = x + self.mix(F.scaled_dot_product_attention(q, k, v).transpose(-1, -2).reshape(b, c, h, w))
        return self.last(F.silu(self.leave(torch.cat([self.up(x), above], 1), time)))


def diffusion(wrap: Wrap) -> Numbers:
    """Noise predicted, weighted by signal and noise; a schedule, averaged weights, and samples drawn by these."""
    model = wrap(UNet().double())
    betas = torch.linspace(1e-4, 0.02, 100, dtype=torch.float64)
    kept = torch.cumprod(1 - betas, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    averaged, found = copy.deepcopy(model), []
    for step in range(STEPS):
        images, noise, t = drawn(step, 4, 3, 8, 8), drawn(50 + step, 4, 3, 8, 8), words(step, 4, low=0, high=100)
        signal = kept[t].view(-1, 1, 1, 1)
        predicted = model(signal.sqrt() * images + (1 - signal).sqrt() * noise, t)
        ratio = kept[t] / (1 - kept[t])
        weights = torch.minimum(ratio, torch.full_like(ratio, 5.0)) / ratio
        loss = (F.mse_loss(predicted, noise, reduction="none").mean(dim=[1, 2, 3]) * weights).mean()
        loss.backward()
        found += [float(loss.detach()), float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))]
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for average, p in zip(averaged.parameters(), model.parameters(), strict=True):
                average.lerp_(p, 0.1)
    x = drawn(99, 2, 3, 8, 8)
    with torch.no_grad():
        for at in (90, 50, 10):
            x = (x - betas[at] / (1 - kept[at]).sqrt() * averaged(x, torch.full((2,), at))) / (1 - betas[at]).sqrt()
    return [*found, total(model), float(x.abs().sum())]


class DiT(nn.Module):
    """Blocks whose norms are scaled and shifted by time and class, by nothing at first."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.patch, self.place = nn.Conv2d(3, dim, 2, 2), nn.Parameter(torch.randn(1, 16, dim) * 0.02)
        self.kind, self.time = nn.Embedding(11, dim), nn.Linear(1, dim)
        self.blocks = nn.ModuleList(DiTBlock(dim) for _ in range(3))
        self.last = nn.Linear(dim, 12)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        h, given = self.patch(x).flatten(2).transpose(1, 2) + self.place, self.time(t[:, None]) + self.kind(y)
        for block in self.blocks:
            h = block(h, given)
        return self.last(h).view(-1, 4, 4, 2, 2, 3).permute(0, 5, 1, 3, 2, 4).reshape(-1, 3, 8, 8)


class DiTBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(dim, elementwise_affine=False),
            nn.Linear(dim, 3 * dim),
            nn.Linear(dim, dim),
        )
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim))
        self.given = nn.Linear(dim, 6 * dim)
        nn.init.zeros_(self.given.weight)
        nn.init.zeros_(self.given.bias)

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.given(F.silu(given)).unsqueeze(1).chunk(6, -1)
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm(x) * (1 + scale1) + shift1).view(b, n, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        x = x + gate1 * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d))
        return x + gate2 * self.mlp(self.norm(x) * (1 + scale2) + shift2)


def flow(wrap: Wrap) -> Numbers:
    """A straight way from images to noise, some of whose classes are left out."""
    model = wrap(DiT().double())
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(STEPS):
        images, noise = drawn(step, 4, 3, 8, 8), drawn(50 + step, 4, 3, 8, 8)
        t, left_out = torch.rand(2, 4, generator=seeded(step), dtype=torch.float64)
        kinds = torch.where(left_out < 0.3, 10, words(step, 4, low=0, high=10))
        at = t.view(-1, 1, 1, 1)
        loss = F.mse_loss(model((1 - at) * images + at * noise, t, kinds), noise - images)
        loss.backward()
        found += [float(loss.detach()), float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, total(model)]


SCRIPTS = {each.__name__: each for each in (swin, wav2vec2, hubert, whisper, llava, paligemma, diffusion, flow)}


def pairs(
    names: list[str], axes: tuple[str, ...], sizes: tuple[int, ...], strategy: Any
) -> list[tuple[Numbers, Numbers]]:
    """Of each script its numbers in one process and on these ranks."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    found = []
    for name in names:
        torch.manual_seed(0)
        expected = SCRIPTS[name](lambda model: model)
        torch.manual_seed(0)
        found.append((expected, SCRIPTS[name](lambda model: autopar.compile(model, mesh, strategy=strategy))))
    return found
