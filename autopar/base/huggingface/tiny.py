"""A HuggingFace configuration with small sizes: the same architecture, with what is awkward about it kept."""

from __future__ import annotations

from typing import Any

# By the names that every configuration's attribute_map leads to its own, and those that only some have.
_SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 128,
    "d_ff": 128, "num_decoder_layers": 2, "decoder_layers": 2, "decoder_attention_heads": 8, "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128, "num_mel_bins": 16, "max_source_positions": 16, "pooler_output_size": 64,
    "image_size": 16, "patch_size": 4, "projection_dim": 32, "sliding_window": 6,
    "q_lora_rank": 48, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 128, "num_kv_shared_layers": 0,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_VOCABULARY = {"gpt2": 127, "whisper": 126}
"""What no axis divides stays so: GPT-2's by nothing, Whisper's (version 3) by 2 alone."""
_MAX_TOKENS = 64
_HEAD = 8
_LABELS = 16
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


def shrunk(config: Any, tokens: int) -> Any:
    """The same architecture with small sizes: KV heads stay grouped, layer types mixed, ids in the vocabulary, heads
    wider or narrower than the hidden size's share where they were. tokens: the longest sequence wanted.
    """
    fields = config.to_dict()
    fields.pop("per_layer_config", None)
    for name in getattr(config, "sub_configs", None) or {}:
        if getattr(config, name, None) is not None:
            fields[name] = shrunk(getattr(config, name), tokens).to_dict()
    _shrink(config, fields, tokens)
    return type(config).from_dict(trimmed(fields, _SIZES["num_hidden_layers"]))


def _shrink(config: Any, fields: dict[str, Any], tokens: int) -> None:
    """The sizes of one configuration, in place."""

    def replace(name: str, value: object) -> None:
        key = config.attribute_map.get(name, name)
        if fields.get(key) is not None:
            fields[key] = value

    for name, value in fields.items():
        if isinstance(value, list) and name != "layer_types" and len(value) == getattr(config, "num_hidden_layers", 0):
            fields[name] = value[: _SIZES["num_hidden_layers"]]
    for name, value in _SIZES.items():
        replace(name, [value] * _SIZES["num_hidden_layers"] if isinstance(fields.get(name), list) else value)
    if getattr(config, "num_attention_heads", None) is not None:
        heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
        if kv_heads is not None:
            replace("num_key_value_heads", 8 if kv_heads == heads else max(1, min(4, kv_heads)))
        share = config.hidden_size // heads
        wide = (getattr(config, "head_dim", None) or share) != share
        # With latent attention, head_dim is that of the rotary part.
        replace("head_dim", 2 * _HEAD if wide and "qk_rope_head_dim" not in fields else _HEAD)
    vocabulary = _VOCABULARY.get(config.model_type, 128)
    positions = max(_MAX_TOKENS, tokens)
    replace("vocab_size", vocabulary)
    replace("max_position_embeddings", positions)
    replace("original_max_position_embeddings", positions)
    replace("max_target_positions", positions)
    for name in _IDS:
        given = fields.get(name)
        if given is not None and not (isinstance(given, int) and given < vocabulary):
            fields[name] = vocabulary - 1
    if len(fields.get("id2label") or ()) > _LABELS:
        fields["id2label"] = {i: f"LABEL_{i}" for i in range(_LABELS)}
        fields["label2id"] = {label: i for i, label in fields["id2label"].items()}
    rope = fields.get("rope_parameters") or {}
    if "original_max_position_embeddings" in rope:
        shrink = config.max_position_embeddings // rope["original_max_position_embeddings"]
        fields["rope_parameters"] = rope | {"original_max_position_embeddings": max(1, positions // max(1, shrink))}


def trimmed(fields: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """Cut ``layer_types`` to the number of layers, keeping one of each kind where there is room."""
    types = fields.get("layer_types")
    if not types:
        return fields
    if len(types) < num_layers:
        return {key: value for key, value in fields.items() if key != "layer_types"}
    kinds = list(dict.fromkeys(types))
    kept = types[:num_layers] if set(types[:num_layers]) == set(kinds) else (kinds * num_layers)[:num_layers]
    return fields | {"layer_types": kept}
