"""Models of diffusers: what a step of training calls."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.coverage.others.entry import ROWS, Entry, Made, images, numbered


def _noise(*shape: int) -> Tensor:
    return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(4))


STEPS = torch.tensor([3, 500, 20, 999])
BLOCKS = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4}


def _made(name: str, kwargs: dict[str, Any], batch: Any) -> Made:
    import diffusers

    return getattr(diffusers, name)(**kwargs), batch


MODELS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "UNet2DModel": (
        "UNet2DModel",
        BLOCKS | {"sample_size": 16, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
                  "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 8},
        {"sample": images(16), "timestep": STEPS},
    ),
    "UNet2DConditionModel": (
        "UNet2DConditionModel",
        BLOCKS | {"sample_size": 16, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 16,
                  "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
                  "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 2},
        {"sample": images(16, 4), "timestep": STEPS, "encoder_hidden_states": _noise(8, 16)},
    ),
    "UNet1DModel": (
        "UNet1DModel",
        {"block_out_channels": (32, 32, 64), "sample_size": 64, "in_channels": 4, "out_channels": 4,
         "time_embedding_type": "fourier", "use_timestep_embedding": False, "extra_in_channels": 64,
         "down_block_types": ("DownBlock1DNoSkip", "DownBlock1D", "AttnDownBlock1D"),
         "up_block_types": ("AttnUpBlock1D", "UpBlock1D", "UpBlock1DNoSkip")},
        {"sample": _noise(4, 64), "timestep": STEPS},
    ),
    "UNet3DConditionModel": (
        "UNet3DConditionModel",
        BLOCKS | {"sample_size": 8, "cross_attention_dim": 16, "attention_head_dim": 8,
                  "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
                  "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D")},
        {"sample": _noise(4, 2, 8, 8), "timestep": STEPS, "encoder_hidden_states": _noise(8, 16)},
    ),
    "AutoencoderKL": (
        "AutoencoderKL",
        BLOCKS | {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
                  "latent_channels": 4},
        {"sample": images(16)},
    ),
    "AutoencoderKL, sampled": (
        "AutoencoderKL",
        BLOCKS | {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
                  "latent_channels": 4},
        {"sample": images(16), "sample_posterior": True},
    ),
    "AutoencoderTiny": (
        "AutoencoderTiny",
        {"encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8), "num_encoder_blocks": (1, 1),
         "num_decoder_blocks": (1, 1), "latent_channels": 4},
        {"sample": images(16)},
    ),
    "AutoencoderDC": (
        "AutoencoderDC",
        {"in_channels": 3, "latent_channels": 4, "attention_head_dim": 2, "encoder_block_types": ("ResBlock",
            "EfficientViTBlock"),
         "decoder_block_types": ("ResBlock", "EfficientViTBlock"), "encoder_block_out_channels": (8, 8),
         "decoder_block_out_channels": (8, 8), "encoder_qkv_multiscales": ((), (5,)),
         "decoder_qkv_multiscales": ((), (5,)), "encoder_layers_per_block": (1, 1), "decoder_layers_per_block": [1, 1],
         "downsample_block_type": "conv", "upsample_block_type": "interpolate", "decoder_norm_types": "rms_norm",
         "decoder_act_fns": "silu"},
        {"sample": images(32)},
    ),
    "VQModel": (
        "VQModel",
        BLOCKS | {"in_channels": 3, "out_channels": 3, "latent_channels": 4, "num_vq_embeddings": 16,
                  "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2},
        {"sample": images(16)},
    ),
    "DiTTransformer2DModel": (
        "DiTTransformer2DModel",
        {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8, "norm_num_groups": 4,
         "num_embeds_ada_norm": 1000, "in_channels": 4},
        {"hidden_states": images(8, 4), "timestep": STEPS, "class_labels": torch.tensor([0, 5, 7, 9])},
    ),
    "PixArtTransformer2DModel": (
        "PixArtTransformer2DModel",
        {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8,
            "cross_attention_dim": 16,
         "caption_channels": 12, "use_additional_conditions": False, "norm_num_groups": 4},
        {"hidden_states": images(8, 4), "timestep": STEPS, "encoder_hidden_states": _noise(6, 12),
         "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
    ),
    "SD3Transformer2DModel": (
        "SD3Transformer2DModel",
        {"sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 2, "attention_head_dim": 8,
         "num_attention_heads": 2, "joint_attention_dim": 16, "caption_projection_dim": 16,
             "pooled_projection_dim": 16,
         "out_channels": 4, "pos_embed_max_size": 8},
        {"hidden_states": images(8, 4), "encoder_hidden_states": _noise(6, 16), "pooled_projections": _noise(16),
         "timestep": STEPS},
    ),
    "FluxTransformer2DModel": (
        "FluxTransformer2DModel",
        {"patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 2, "attention_head_dim": 16,
         "num_attention_heads": 2, "joint_attention_dim": 16, "pooled_projection_dim": 16, "axes_dims_rope": (4, 4,
             8)},
        {"hidden_states": _noise(16, 4), "encoder_hidden_states": _noise(6, 16), "pooled_projections": _noise(16),
         "timestep": STEPS / 1000, "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(6, 3)},
    ),
    "WanTransformer3DModel": (
        "WanTransformer3DModel",
        {"patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4,
         "out_channels": 4, "text_dim": 16, "freq_dim": 32, "ffn_dim": 32, "num_layers": 2, "cross_attn_norm": True,
         "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 32},
        {"hidden_states": _noise(4, 2, 8, 8), "timestep": STEPS, "encoder_hidden_states": _noise(6, 16)},
    ),
    "LTXVideoTransformer3DModel": (
        "LTXVideoTransformer3DModel",
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8,
         "cross_attention_dim": 16, "num_layers": 2, "caption_channels": 16},
        {"hidden_states": _noise(16, 4), "encoder_hidden_states": _noise(6, 16), "timestep": STEPS,
         "encoder_attention_mask": torch.ones(ROWS, 6, dtype=torch.bool), "num_frames": 1, "height": 4, "width": 4},
    ),
    "SanaTransformer2DModel": (
        "SanaTransformer2DModel",
        {"patch_size": 1, "in_channels": 4, "out_channels": 4, "num_layers": 2, "attention_head_dim": 8,
         "num_attention_heads": 2, "num_cross_attention_heads": 2, "cross_attention_head_dim": 8,
         "cross_attention_dim": 16, "caption_channels": 16, "sample_size": 8},
        {"hidden_states": images(8, 4), "encoder_hidden_states": _noise(6, 16), "timestep": STEPS},
    ),
    "PriorTransformer": (
        "PriorTransformer",
        {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "embedding_dim": 16, "num_embeddings": 6,
         "additional_embeddings": 4},
        {"hidden_states": _noise(16), "timestep": STEPS, "proj_embedding": _noise(16),
         "encoder_hidden_states": _noise(6, 16), "attention_mask": torch.ones(ROWS, 6, dtype=torch.bool)},
    ),
    "ControlNetModel": (
        "ControlNetModel",
        BLOCKS | {"in_channels": 4, "cross_attention_dim": 16, "conditioning_embedding_out_channels": (8, 8),
                  "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "attention_head_dim": 2},
        {"sample": images(16, 4), "timestep": STEPS, "encoder_hidden_states": _noise(8, 16),
         "controlnet_cond": images(32)},
    ),
    "UVit2DModel": (
        "UVit2DModel",
        {"hidden_size": 32, "cond_embed_dim": 16, "micro_cond_encode_dim": 4, "micro_cond_embed_dim": 20,
         "encoder_hidden_size": 16, "vocab_size": 20, "codebook_size": 16, "num_hidden_layers": 1,
         "num_attention_heads": 2, "in_channels": 16, "block_out_channels": 16, "block_num_heads": 2,
         "num_res_blocks": 1, "intermediate_size": 32},
        {"input_ids": torch.arange(ROWS * 16).reshape(ROWS, 4, 4) % 16, "encoder_hidden_states": _noise(6, 16),
         "pooled_text_emb": _noise(16), "micro_conds": torch.ones(ROWS, 5)},
    ),
}  # fmt: skip
"""The class, what it is made with, and its batch."""


def entries() -> list[Entry]:
    """All of them."""
    return numbered("diffusers", "diffusion", {name: partial(_made, *values) for name, values in MODELS.items()})
