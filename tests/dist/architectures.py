"""Small models of many architectures, as transformers builds them, and a prompt: their caches hold different things."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WORDS: dict[str, Any] = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2}
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "max_position_embeddings": 64, **WORDS,
}  # fmt: skip
HEADS: dict[str, Any] = {**SIZES, "num_key_value_heads": 2}
LAYERS: dict[str, Any] = {"num_hidden_layers": 2}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
ENCODER: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 96,
    "bos_token_id": 0, "decoder_start_token_id": 2, "eos_token_id": 2,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {**HEADS, "num_hidden_layers": 3}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **WORDS}),
    # Windows of convolutions and recurrent states, no keys.
    "mamba": (
        "Mamba",
        {**LAYERS, **WORDS, "hidden_size": 32, "state_size": 4, "time_step_rank": 4, "use_mambapy": False},
    ),
    # A layer of each kind.
    "lfm2": ("Lfm2", {**HEADS, **LAYERS, "layer_types": ["conv", "full_attention"]}),
    # Keys and values of what an encoder gave, too.
    "t5": (
        "T5",
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 96,
         "decoder_start_token_id": 0, "eos_token_id": 2},
    ),
    "bart": ("Bart", {**ENCODER, "max_position_embeddings": 64, "pad_token_id": 1, "forced_eos_token_id": 2}),
    "mixtral": ("Mixtral", {**HEADS, **LAYERS, **EXPERTS}),
    # A window that is shorter than what is read, norms of queries and keys.
    "gemma3": (
        "Gemma3",
        {**HEADS, **LAYERS, "head_dim": 8, "sliding_window": 5,
         "layer_types": ["sliding_attention", "full_attention"]},
    ),
    # Latent attention, experts in groups, one that is shared.
    "deepseek_v3": ("DeepseekV3", {**SIZES, **LAYERS, **LATENT, "num_key_value_heads": 4}),
    # Sinks, windows, experts with biases.
    "gpt_oss": ("GptOss", {**HEADS, **LAYERS, **EXPERTS, "head_dim": 8, "sliding_window": 5}),
    "whisper": (
        "Whisper",
        {**ENCODER, "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 64, "pad_token_id": 1,
         "decoder_start_token_id": 4,
         "suppress_tokens": None, "begin_suppress_tokens": None},
    ),
    # A mask of what is left of sounds, by the encoder.
    "moonshine": (
        "Moonshine",
        {"hidden_size": 32, "intermediate_size": 48, "encoder_num_hidden_layers": 1,
         "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4,
         "max_position_embeddings": 64, "decoder_start_token_id": 1, "pad_token_id": 0, **WORDS},
    ),
    # Rotated otherwise behind as many positions, where it begins anew without a cache.
    "phi3": (
        "Phi3",
        {**HEADS, **LAYERS, "original_max_position_embeddings": 12, "pad_token_id": 0,
         "rope_parameters": {
             "rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": 12,
             "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}},
    ),
    # Positions as a bias of the scores.
    "bloom": ("Bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4, **WORDS}),
    # A part of each head is rotated, attention and products side by side.
    "gpt_neox": ("GPTNeoX", {**SIZES, **LAYERS}),
    # Attention and a state-space layer side by side in each layer.
    "falcon_h1": (
        "FalconH1",
        {**HEADS, **LAYERS, "head_dim": 8, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8,
         "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 4},
    ),
    # One head of keys for all.
    "falcon": ("Falcon", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **WORDS}),
    "opt": (
        "OPT",
        {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "max_position_embeddings": 64, "word_embed_proj_dim": 32, **WORDS},
    ),
    # Loops over the experts that are hit.
    "dbrx": (
        "Dbrx",
        {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, **WORDS,
         "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
         "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 3, "moe_top_k": 2}},
    ),
    # Queries of experts, too, in parts of sizes that values say.
    "jetmoe": ("JetMoe", {**HEADS, **LAYERS, **EXPERTS, "kv_channels": 8}),
}  # fmt: skip
CLASSES: dict[str, tuple[str, str]] = {
    "GPT2": ("GPT2Config", "GPT2LMHeadModel"),
    "T5": ("T5Config", "T5ForConditionalGeneration"),
    "Bart": ("BartConfig", "BartForConditionalGeneration"),
    "Whisper": ("WhisperConfig", "WhisperForConditionalGeneration"),
    "Moonshine": ("MoonshineConfig", "MoonshineForConditionalGeneration"),
    "Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
}


GAIN = 8.0
"""Of matrices as transformers draws them, with which 32 features stay as large as they are."""
Cell = tuple[dict[str, int], Any]
"""Sizes of a mesh by axis, and a strategy."""
PIPELINE = "pipeline(1f1b)"
CELLS: dict[str, Cell] = {
    "tensor-2": ({"tp": 2}, "tensor"),
    "zero3-2": ({"dp": 2}, "zero3"),
    "split_kv-2": ({"cp": 2}, "split_kv"),
    "pipeline-2": ({"pp": 2}, PIPELINE),
    "auto-2": ({"x": 2}, "auto"),
    "tensor-4": ({"tp": 4}, "tensor"),
    "zero3+tensor-4": ({"dp": 2, "tp": 2}, {"dp": "zero3", "tp": "tensor"}),
    "split_kv+tensor-4": ({"cp": 2, "tp": 2}, {"cp": "split_kv", "tp": "tensor"}),
    "pipeline+tensor-4": ({"pp": 2, "tp": 2}, {"pp": PIPELINE, "tp": "tensor"}),
    "auto-4": ({"dp": 2, "tp": 2}, "auto"),
    "ddp+zbv-4": ({"dp": 2, "pp": 2}, {"dp": "ddp", "pp": "pipeline(zbv)"}),
}
TWO_STAGES_A_RANK = "ddp+zbv-4"
NO_KEYS = ("mamba",)
"""Have no keys and values for `split_kv`, which says so."""


def pairs(*, stages: bool) -> list[tuple[str, str]]:
    """Each architecture under each strategy that takes it. stages: those with a pipeline, or those without."""
    return [
        (name, cell)
        for name in KINDS
        for cell, (sizes, _) in CELLS.items()
        if ("pp" in sizes) == stages
        and not ("cp" in sizes and name in NO_KEYS)
        and (cell != TWO_STAGES_A_RANK or name == "qwen2")
    ]


def model_and_prompt(name: str, gain: float = 1.0) -> tuple[Any, dict[str, Tensor]]:
    """A model with random weights, and prompts of different lengths, padded on the left (of Whisper and Moonshine:
    sounds). gain: of the matrices; GAIN has tokens depend on all positions before them, and not on the last alone.
    """
    import transformers
    from transformers.pytorch_utils import Conv1D

    kind, options = KINDS[name]
    torch.manual_seed(0)
    config_name, model_name = CLASSES.get(kind, (f"{kind}Config", f"{kind}ForCausalLM"))
    config = getattr(transformers, config_name)(**options)
    build: Callable[[Any], Any] = getattr(transformers, model_name)
    model = build(config).eval()
    with torch.no_grad():
        for part in model.modules():
            if isinstance(part, torch.nn.Linear | Conv1D) and part is not model.get_output_embeddings():
                part.weight.mul_(gain)
    if name == "whisper":
        loud = gain * gain * torch.randn(4, 8, 24, generator=torch.Generator().manual_seed(1))
        return model, {"input_features": loud}
    if name == "moonshine":
        sounds = torch.randn(4, 1600, generator=torch.Generator().manual_seed(1))
        mask = torch.ones(4, 1600, dtype=torch.long)
        mask[1, 1000:] = 0
        return model, {"input_values": sounds, "attention_mask": mask}
    ids = torch.randint(5, 96, (4, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return model, {"input_ids": ids, "attention_mask": mask}
