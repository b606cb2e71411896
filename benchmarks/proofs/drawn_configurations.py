"""Configurations of the ten families that are used most, drawn at random: sizes, heads, biases, activations, rotary
embeddings, windows, dropout, tied or not.

A family is its small twin (`autopar.cli.models.catalogue`) and a table of fields; an entry lists what a field may be,
and what a draw picks by number. Fields that must fit each other are drawn together (heads with their key-value heads).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from autopar.cli.models import catalogue

ROWS, TOKENS = 4, 12
Options = Sequence[Mapping[str, Any]]
"""What a field, or fields together, may be."""

WIDTHS = (48, 96, 144)
"""Divided by every number of heads."""


def each(field: str, *values: Any) -> Options:
    """A field that goes with all others."""
    return [{field: value} for value in values]


ROPES: Options = [
    {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
    {"rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 2.0}},
    {
        "rope_parameters": {
            "rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
        }
    },
    {
        "rope_parameters": {
            "rope_theta": 10000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
        }
    },
]  # fmt: skip
ACTIVATIONS = ("silu", "gelu", "relu", "gelu_pytorch_tanh", "gelu_new")


def _decoder(*more: Options, wide: bool = True) -> list[Options]:
    """Of decoders like Llama. wide: whether heads may be wider than the width's share."""
    heads = [
        {"num_attention_heads": h, "num_key_value_heads": kv}
        for h in (2, 4, 6, 8) for kv in (1, 2, 3, 4, 6, 8) if h % kv == 0
    ]  # fmt: skip
    return [
        each("hidden_size", *WIDTHS), heads, each("intermediate_size", 64, 100, 128),
        each("num_hidden_layers", 1, 2, 3), each("tie_word_embeddings", False, True), each("vocab_size", 96, 101, 128),
        each("attention_dropout", 0.0, 0.1), each("rms_norm_eps", 1e-6, 1e-5),
        *([each("head_dim", 8, 16, 12)] if wide else []), *more,
    ]  # fmt: skip


FAMILIES: Mapping[str, Sequence[Options]] = {
    "llama": _decoder(
        ROPES, each("hidden_act", *ACTIVATIONS), each("attention_bias", False, True), each("mlp_bias", False, True)
    ),
    "mistral": _decoder(ROPES, each("hidden_act", *ACTIVATIONS), each("sliding_window", 4, 6, None, 32)),
    "qwen3": _decoder(
        ROPES, each("hidden_act", *ACTIVATIONS), each("attention_bias", False, True), each("sliding_window", 4, 6),
        [
            {"layer_types": ["full_attention"] * 3},
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            {"layer_types": ["sliding_attention"] * 3},
        ],
    ),
    "gemma2": _decoder(
        ROPES[:3], each("hidden_activation", *ACTIVATIONS), each("attention_bias", False, True),
        each("sliding_window", 4, 6, 32), each("final_logit_softcapping", 30.0, None, 5.0),
        each("attn_logit_softcapping", 50.0, None, 5.0), each("query_pre_attn_scalar", 256, 16),
    ),
    "phi3": _decoder(
        each("hidden_act", *ACTIVATIONS), each("sliding_window", 4, 6, None), each("resid_pdrop", 0.0, 0.1),
        each("embd_pdrop", 0.0, 0.1), each("pad_token_id", 0), wide=False,
    ),
    "gpt2": [
        each("n_embd", *WIDTHS), each("n_head", 2, 4, 6, 8), each("n_layer", 1, 2, 3), each("n_inner", None, 64, 100),
        each("activation_function", "gelu_new", "gelu", "relu", "silu"), each("tie_word_embeddings", True, False),
        each("scale_attn_by_inverse_layer_idx", False, True), each("reorder_and_upcast_attn", False, True),
        each("scale_attn_weights", True, False), each("attn_pdrop", 0.1, 0.0), each("resid_pdrop", 0.1, 0.0),
        each("embd_pdrop", 0.1, 0.0), each("vocab_size", 127, 96),
    ],
    "bert": [
        each("hidden_size", *WIDTHS), each("num_attention_heads", 2, 4, 6, 8), each("intermediate_size", 64, 100, 128),
        each("num_hidden_layers", 1, 2, 3), each("hidden_act", "gelu", "relu", "silu", "gelu_new"),
        each("hidden_dropout_prob", 0.1, 0.0), each("attention_probs_dropout_prob", 0.1, 0.0),
        each("tie_word_embeddings", True, False), each("type_vocab_size", 2, 1), each("vocab_size", 128, 101),
        each("is_decoder", False, True),
    ],
    "t5": [
        each("d_model", *WIDTHS), each("num_heads", 2, 4, 6, 8), each("d_kv", 8, 12, 16), each("d_ff", 64, 100, 128),
        each("num_layers", 1, 2), each("num_decoder_layers", 2, 1, 3),
        each("feed_forward_proj", "relu", "gated-gelu", "gated-silu"), each("tie_word_embeddings", True, False),
        each("dropout_rate", 0.1, 0.0), each("relative_attention_num_buckets", 32, 8),
        each("scale_decoder_outputs", True, False),
    ],
    "vit": [
        each("hidden_size", *WIDTHS), each("num_attention_heads", 2, 4, 6, 8), each("intermediate_size", 64, 100, 128),
        each("num_hidden_layers", 1, 2, 3), each("hidden_act", "gelu", "relu", "quick_gelu"),
        each("qkv_bias", True, False), each("hidden_dropout_prob", 0.0, 0.1),
        each("attention_probs_dropout_prob", 0.0, 0.1), each("patch_size", 4, 8, 2),
    ],
    "whisper": [
        each("d_model", *WIDTHS), each("encoder_attention_heads", 2, 4, 6, 8), each("decoder_attention_heads", 2, 4, 6),
        each("encoder_layers", 1, 2), each("decoder_layers", 2, 1, 3), each("encoder_ffn_dim", 64, 100),
        each("decoder_ffn_dim", 128, 100), each("activation_function", "gelu", "relu", "silu"),
        each("dropout", 0.0, 0.1), each("attention_dropout", 0.0, 0.1), each("activation_dropout", 0.0, 0.1),
        each("scale_embedding", False, True), each("tie_word_embeddings", True, False),
    ],
}  # fmt: skip

Drawn = tuple[str, Mapping[str, Any]]
"""A family, and its fields."""


def drawn(seed: int) -> Drawn:
    """The configuration of a seed: families in turn."""
    chosen = random.Random(seed)
    family = sorted(FAMILIES)[seed % len(FAMILIES)]
    return family, _fields([chosen.choice(options) for options in FAMILIES[family]])


def configurations() -> st.SearchStrategy[Drawn]:
    """The same for hypothesis."""

    def of(family: str) -> st.SearchStrategy[Drawn]:
        picks = st.tuples(*(st.sampled_from(options) for options in FAMILIES[family]))
        return picks.map(lambda found: (family, _fields(found)))

    return st.sampled_from(sorted(FAMILIES)).flatmap(of)


def _fields(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    fields = {name: value for each in found for name, value in each.items()}
    if "layer_types" in fields:
        fields["layer_types"] = fields["layer_types"][: fields["num_hidden_layers"]]
        fields["use_sliding_window"] = "sliding_attention" in fields["layer_types"]
    return fields


def made(family: str, fields: Mapping[str, Any]) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The model, on the CPU, and its batch."""
    loaded = catalogue.load(family, tiny=True, batch=(ROWS, TOKENS), device="cpu", overrides=fields)
    return loaded.model, loaded.batch
