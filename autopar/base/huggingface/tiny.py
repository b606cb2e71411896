"""A HuggingFace configuration with small sizes: the same architecture, with what is awkward about it kept.

Layers are as few as have one of each kind. Which kinds there are is read off the model itself: blocks of one kind hold
modules of the same classes under the same names, with the same flags, whatever their sizes (`kinds`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

# By the names that every configuration's attribute_map leads to its own, and those that only some have.
_SIZES = {
    "hidden_size": 64, "num_attention_heads": 8, "intermediate_size": 128,
    "d_ff": 128, "decoder_attention_heads": 8, "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128, "num_mel_bins": 16, "max_source_positions": 16, "pooler_output_size": 64,
    "image_size": 16, "patch_size": 4, "projection_dim": 32, "sliding_window": 6,
    "q_lora_rank": 48, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 128, "num_kv_shared_layers": 0,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_VOCABULARY = {"gpt2": 127, "whisper": 126}
"""What no axis divides stays so: GPT-2's by nothing, Whisper's (version 3) by 2 alone."""
_LAYERS = ("num_hidden_layers", "num_decoder_layers", "decoder_layers")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
_LEAST_LAYERS, _MOST_LAYERS = 2, 16
_MOST_EXPERTS, _MOST_CHOSEN = 8, 4
_MAX_TOKENS = 64
_HEAD = 8
_LABELS = 16
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


def twin(config: Any, tokens: int, build: Callable[[Any], nn.Module]) -> Any:
    """The same architecture with small sizes, and as few layers as have a block of each kind that there is. tokens: the
    longest sequence wanted. build: a model without values of a configuration.
    """
    small = shrunk(config, tokens)
    wanted = {kind for found in kinds(build(shrunk(config, tokens, layers=None))).values() for kind in found}
    for layers in range(_LEAST_LAYERS, _MOST_LAYERS + 1):
        more = shrunk(config, tokens, layers)
        if {kind for found in kinds(build(more)).values() for kind in found} >= wanted:
            return more
    return small


def kinds(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """For each outermost list of blocks, by its name, what kind each block is of."""
    found: dict[str, tuple[str, ...]] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in found)
        if isinstance(module, nn.ModuleList) and len(module) > 1 and not inside:
            found[name] = tuple(f"{name}: {_kind(block)}" for block in module)
    return found


def _kind(block: nn.Module) -> str:
    """The classes of a block's modules and their flags, without sizes: of lists inside, one for each kind."""
    return "; ".join(dict.fromkeys(_parts(block)))


def _parts(block: nn.Module) -> Iterator[str]:
    for name, module in block.named_modules():
        flags = (f"{key}={value}" for key, value in sorted(vars(module).items()) if _is_flag(key, value))
        weights = (key for key, value in module.named_parameters(recurse=False) if value is not None)
        yield f"{re.sub(r'[0-9]+', '*', name)}: {type(module).__name__}({', '.join([*flags, *weights])})"


def _is_flag(name: str, value: object) -> bool:
    return (value is None or isinstance(value, bool | str)) and not name.startswith("_") and name != "training"


def shrunk(config: Any, tokens: int, layers: int | None = _LEAST_LAYERS) -> Any:
    """The same architecture with small sizes: KV heads stay grouped, layer types mixed, ids in the vocabulary, heads
    wider or narrower than the hidden size's share where they were. tokens: the longest sequence wanted. layers: at
    most so many; None: as many as there are.
    """
    fields = config.to_dict()
    fields.pop("per_layer_config", None)
    for name in getattr(config, "sub_configs", None) or {}:
        if getattr(config, name, None) is not None:
            fields[name] = shrunk(getattr(config, name), tokens, layers).to_dict()
    _shrink(config, fields, tokens, layers)
    return type(config).from_dict(fields if layers is None else trimmed(fields, layers))


def _shrink(config: Any, fields: dict[str, Any], tokens: int, layers: int | None) -> None:
    """The sizes of one configuration, in place."""

    def replace(name: str, value: object) -> None:
        key = config.attribute_map.get(name, name)
        if fields.get(key) is not None:
            fields[key] = value

    all_layers = getattr(config, "num_hidden_layers", 0)
    for name, value in fields.items():
        if isinstance(value, list) and name != "layer_types" and len(value) == all_layers and layers is not None:
            fields[name] = value[:layers]
    for name in _LAYERS if layers is not None else ():
        replace(name, layers)
    for name, value in _SIZES.items():
        given = fields.get(name)
        replace(name, [value] * len(given) if isinstance(given, list) else value)
    _fewer_experts(fields, config.attribute_map)
    if getattr(config, "num_attention_heads", None) is not None:
        heads = config.num_attention_heads
        for name in ("num_key_value_heads", "num_kv_heads"):
            if (kv_heads := getattr(config, name, None)) is not None:
                replace(name, 8 if kv_heads == heads else max(1, min(4, kv_heads)))
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


def _fewer_experts(fields: dict[str, Any], names: dict[str, str]) -> None:
    """As many experts as have two in each group, divided by 8, by 4, by 2 or by nothing as the large number is."""
    groups = max(1, fields.get("n_group") or 1)
    least = max(_MOST_EXPERTS, 2 * groups)
    for key in {names.get(name, name) for name in _EXPERTS}:
        given = fields.get(key)
        if isinstance(given, int) and given > least:
            fields[key] = least + math.gcd(given, 8) % 8
    for key in {names.get(name, name) for name in _CHOSEN}:
        given = fields.get(key)
        if isinstance(given, int):
            fields[key] = min(given, _MOST_CHOSEN)


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
