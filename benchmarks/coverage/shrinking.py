"""Tiny configurations: the same architecture, with the sizes of sizes.toml and one block of each kind.

Whatever of it a model does not bear is found by making all widths smaller alike, then by leaving groups of fields as
they were, one after the other.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.coverage.discovery import Pair

FOLDER = Path(__file__).parent
LARGEST = 20_000_000
"""Parameters of a model that is tiny enough."""
VOCABULARY = 128
BLOCKS = 2
MOST_KINDS = 4
CHANNELS = 4
"""Of an image: a list of channels may begin with them."""
_ID = re.compile(r".*(token_id|token_index|_id|_index|_token_ids)$|.*token_id")
_DROPS = re.compile(r".*(drop|dropout|pdrop|mask_time_prob|mask_feature_prob).*")

TOGETHER = ("stages channels", "stages channels hidden", "stages channels hidden feed-forward heads head-width")
"""Groups of which what one says, another has to follow."""
RATIOS = ("1/8", "1/4", "1/2")
"""Every width a part of what it was, so that those that have to be equal, or sums of others, stay so."""
WIDTHS = ("stages", "channels", "hidden", "feed-forward", "codec")
_WIDE = re.compile(r".*(channels|channel_list|_width|feat_dim|pos_feats|hidden_dimension)")
_NARROW = 8
"""A width that stays: channels of an image, features of a box."""

Fields = dict[str, Any]


@lru_cache(maxsize=1)
def _rules() -> tuple[Mapping[str, Any], ...]:
    return tuple(tomllib.loads((FOLDER / "sizes.toml").read_text())["fields"])


@lru_cache(maxsize=1)
def _overrides() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads((FOLDER / "overrides.toml").read_text())


def groups() -> tuple[str, ...]:
    return tuple(dict.fromkeys(rule["group"] for rule in _rules()))


def models(pair: Pair, dropout: bool = False) -> Iterator[tuple[nn.Module, str]]:
    """Tiny models of a pair, the smallest first, each with the group of fields that it keeps as they are.

    dropout: whether the configuration's own is kept.
    Raises what transformers raises where it can make none.
    """
    import transformers

    model_class = getattr(transformers, pair.architecture)
    default = _default(pair.model_type, model_class.config_class)
    failure: Exception | None = None
    for kept in ("", *RATIOS, *groups(), *TOGETHER):
        try:
            config = shrunk(default, pair.model_type, kept, dropout)
            with torch.device("meta"):
                size = sum(p.numel() for p in model_class(config).parameters())
            if size > LARGEST:
                raise ValueError(f"{size} parameters are not tiny")
            torch.manual_seed(0)
            yield model_class(shrunk(default, pair.model_type, kept, dropout)).train(), kept
        except Exception as error:
            failure = failure or error
    raise failure or ValueError("none of the tiny models serves")


def _default(model_type: str, wanted: type | None) -> Any:
    """The configuration of a kind by default, or the one inside it that the model's class takes."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type]()
    if wanted is None or isinstance(config, wanted):
        return config
    inner = [value for value in vars(config).values() if isinstance(value, wanted)]
    return inner[0] if inner else wanted()


def shrunk(config: Any, model_type: str, kept: str = "", dropout: bool = False) -> Any:
    """The configuration with small sizes; `kept`: the group of fields that stays, or what part of each width does."""
    fields = _fields(config)
    ids: dict[int, int] = {}
    small = _small(fields, kept, dropout, ids)
    if fields.get("model_type") != model_type:
        _override(small, model_type)
    return type(config).from_dict(small)


def _override(fields: Fields, model_type: str) -> None:
    for path, value in _overrides().get(model_type, {}).items():
        if path != "reason":
            _put(fields, path.split("."), value)


def _put(fields: Fields, path: list[str], value: Any) -> None:
    for name in path[:-1]:
        fields = fields.setdefault(name, {})
    fields[path[-1]] = value


def _fields(config: Any) -> Fields:
    """As data; without what is worked out from the rest."""
    fields = config.to_dict()
    return _without({name: _fields(value) if hasattr(value, "to_dict") else value for name, value in fields.items()})


def _without(fields: Fields) -> Fields:
    left = {name: value for name, value in fields.items() if name not in ("per_layer_config", "transformers_version")}
    return {name: _without(value) if isinstance(value, dict) else value for name, value in left.items()}


def _small(fields: Fields, kept: str, dropout: bool, ids: dict[int, int]) -> Fields:
    found = {}
    for name, value in fields.items():
        if isinstance(value, dict) and ("model_type" in value or name.endswith("_config")):
            found[name] = _small(value, kept, dropout, ids)
        else:
            found[name] = _field(name, value, fields, kept, dropout)
    _cut_layers(fields, found)
    if "qk_rope_head_dim" in found and isinstance(found.get("head_dim"), int):
        found["head_dim"] = found["qk_rope_head_dim"]  # with latent attention it is the rotary part's
    if found.get("head_dim", 1) is None and found.get("hidden_size") and found.get("num_attention_heads"):
        found["head_dim"] = found["hidden_size"] // found["num_attention_heads"]
    rope = found.get("rope_parameters", True)
    if not rope or (rope is not True and "rope_theta" in rope and rope["rope_theta"] is None):
        found["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0}
    vocabulary = found.get("vocab_size")
    for name, value in fields.items():
        if _ID.fullmatch(name):
            found[name] = _token(value, VOCABULARY if not isinstance(vocabulary, int) else vocabulary, ids)
    if "pad_token_id" in found and found["pad_token_id"] is None and "vocab_size" in found:
        found["pad_token_id"] = 0  # a classifier of sequences asks for one
    if len(fields.get("id2label") or ()) > 16:
        found["id2label"] = {i: f"LABEL_{i}" for i in range(16)}
        found["label2id"] = {label: i for i, label in found["id2label"].items()}
    if isinstance(rope := found.get("rope_parameters"), dict):
        found["rope_parameters"] = _rope(rope, found)
    if isinstance(kind := fields.get("model_type"), str):
        _override(found, kind)
    return found


def _rope(rope: Fields, fields: Fields) -> Fields:
    """Sections of the rotary dims, in the proportion that they had."""
    if any(isinstance(value, dict) for value in rope.values()):
        return {name: _rope(value, fields) if isinstance(value, dict) else value for name, value in rope.items()}
    if "mrope_section" in rope:
        heads = fields.get("num_attention_heads") or 1
        width = fields.get("head_dim") or (fields.get("hidden_size") or 64) // heads
        half = int(width * rope.get("partial_rotary_factor", 1.0)) // 2
        count = len(rope["mrope_section"])
        rest = half // count
        rope = rope | {"mrope_section": [half - rest * (count - 1), *[rest] * (count - 1)]}
    if "original_max_position_embeddings" in rope:
        rope = rope | {"original_max_position_embeddings": 32}
    return rope


def _token(value: Any, vocabulary: int, ids: dict[int, int]) -> Any:
    """Ids beyond the vocabulary become its last ones, each another."""
    if isinstance(value, list):
        return [_token(each, vocabulary, ids) for each in value]
    if isinstance(value, bool) or not isinstance(value, int) or value < min(vocabulary, VOCABULARY):
        return value
    return min(vocabulary, VOCABULARY) - 1 - ids.setdefault(value, len(ids))


def _field(name: str, value: Any, fields: Fields, kept: str, dropout: bool) -> Any:
    if _DROPS.fullmatch(name) and isinstance(value, float | int) and not isinstance(value, bool):
        return value if dropout and "layerdrop" not in name else type(value)(0)
    rule = next((rule for rule in _rules() if _matches(rule, name)), None)
    if kept in RATIOS and (_WIDE.fullmatch(name) or (rule is not None and rule["group"] in WIDTHS)):
        return _part(value, int(kept.partition("/")[2]))
    if kept in RATIOS and isinstance(value, list | tuple) and rule is not None and rule["group"] == "heads":
        return value
    if name.endswith("feature_sizes") and isinstance(value, list | tuple):
        return [[max(1, side // 32) for side in sides] for sides in value]  # of an image that is made 32 pixels wide
    if name == "prediction_length" and value is None:
        return 8
    if rule is None or rule["group"] in kept.split(" ") or isinstance(value, bool | str):
        return value
    if value is None:
        return VOCABULARY if name == "vocab_size" else None
    like = rule.get("like")
    if like == "key heads" and isinstance(value, int):
        heads = fields.get("num_attention_heads")
        return 4 if value == heads else 1 if value == 1 else 2
    if isinstance(value, list | tuple):
        return _list(value, rule)
    return min(value, rule["value"]) if isinstance(value, int) and "value" in rule else value


def _part(value: Any, of: int) -> Any:
    if isinstance(value, list | tuple):
        return [_part(each, of) for each in value]
    is_wide = isinstance(value, int) and not isinstance(value, bool) and value > _NARROW
    return max(1, value // of) if is_wide else value


def _list(values: Any, rule: Mapping[str, Any]) -> Any:
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        return values
    if rule.get("like") == "ratios":
        least = min((value for value in values if value > CHANNELS), default=0)
        return [max(1, value * rule["value"] // least) if value > CHANNELS else value for value in values]
    small = rule.get("each", rule.get("value"))
    return [value if small is None else min(value, small) for value in values]


def _matches(rule: Mapping[str, Any], name: str) -> bool:
    return bool(re.fullmatch(rule["match"], name)) and not re.fullmatch(rule.get("but", ""), name)


def _cut_layers(fields: Fields, found: Fields) -> None:
    """As many blocks as there are kinds, two at least; lists with an entry a block are cut with them."""
    depth_name = next((n for n in ("num_hidden_layers", "num_layers", "n_layer", "n_layers") if n in fields), None)
    depth = fields.get(depth_name) if depth_name else None
    if depth_name is None or not isinstance(depth, int):
        return
    lists = {n: v for n, v in fields.items() if isinstance(v, list) and len(v) == depth and depth > 1}
    kinds = {n: v for n, v in lists.items() if all(isinstance(each, str) for each in v)}
    chosen = list(range(min(depth, found[depth_name])))
    if kinds:
        rows = list(zip(*kinds.values(), strict=True))
        first = [rows.index(row) for row in dict.fromkeys(rows)][:MOST_KINDS]
        rest = [i for i in range(depth) if i not in first]
        chosen = sorted(first + rest[: max(0, BLOCKS - len(first))])
    taken = fields.get("out_indices")
    if taken and len(taken) > len(chosen) - 1:
        chosen = list(range(min(depth, len(taken) + 1)))
    for name, value in lists.items():
        found[name] = [value[i] for i in chosen]
    found[depth_name] = len(chosen)
    if taken and fields.get("stage_names") and len(fields["stage_names"]) == depth + 1:
        last = len(chosen) + 1
        found["out_indices"] = list(range(last - len(taken), last))
        found.pop("out_features", None)
        found.pop("stage_names", None)
